"""Batch normalisation whose statistics are those of all GPUs, and that trains on a CPU too."""
import torch.nn.functional as F
from torch import Tensor, nn

from beit_mm.registry import MODELS


@MODELS.register_module()
class SyncBN(nn.SyncBatchNorm):
    """torch's SyncBatchNorm; on a CPU each process takes the statistics of its own batch.

    Written `norm_cfg=dict(type='beit_mm.SyncBN')`, one config trains on many GPUs, on one, and on a CPU.

    Args: as torch's.

    Raises:
        ValueError: in training, one value a channel: a batch of one image on one device meets a map pooled to 1 x 1.

    Differs from it in: that one refuses a CPU as soon as there are several processes. Names and values of parameters
    are the same, so checkpoints go from one to the other.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Normalises (B, C, ...) by channel."""
        if not self.training or x.device.type != 'cpu':
            return super().forward(x)
        self.num_batches_tracked.add_(1)
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, True, self.momentum,
                            self.eps)

"""Batch normalisation whose statistics are those of all GPUs, and that trains on a CPU too."""
from mmengine.device import get_device
from torch import nn

from beit_mm.registry import MODELS


@MODELS.register_module()
class SyncBN(nn.SyncBatchNorm):
    """torch's SyncBatchNorm; on a machine without accelerator what is built is a BatchNorm2d.

    Written `norm_cfg=dict(type='beit_mm.SyncBN')`, one config trains on many GPUs, on one, and on a CPU, where each
    process has the statistics of its own batches, and process 0's are saved.

    Args: as torch's.

    Raises:
        ValueError: in training, one value a channel: a batch of one image on one device meets a map pooled to 1 x 1.

    Differs from it in: with several processes that one refuses a CPU, and DistributedDataParallel refuses any instance
    of it there. Names and values of parameters are the same, so checkpoints go from one to the other.
    """

    def __new__(cls, *args, **kwargs) -> nn.Module:
        """A module of another class is not initialised again."""
        return nn.BatchNorm2d(*args, **kwargs) if get_device() == 'cpu' else super().__new__(cls)

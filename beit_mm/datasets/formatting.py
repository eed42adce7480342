"""The last step of the pretraining pipeline: arrays become the tensors of a batch."""
import numpy as np
import torch
from mmcv.transforms import BaseTransform

from beit_mm.registry import TRANSFORMS


@TRANSFORMS.register_module()
class PackViews(BaseTransform):
    """Keeps what the model takes, as `dict(inputs=dict(...))` of tensors that a collate function
    can stack.

    Returns:
        images: uint8 (H, W, 3), RGB; tokenizer_images: uint8 (h, w, 3), RGB; mask: bool (rows, columns),
            True = masked;
        jitter: float32 (7,), parameters for the device. Each is there only if a transform before
            made it.
        unreadable: int64, dataset index of an image that was replaced because it cannot be read,
            else -1.
    """

    def transform(self, results: dict) -> dict:
        inputs = {key: torch.from_numpy(np.ascontiguousarray(results[key]))
                  for key in ('images', 'tokenizer_images', 'mask', 'jitter') if key in results}
        inputs['unreadable'] = torch.tensor(results.get('unreadable', -1))
        return dict(inputs=inputs)

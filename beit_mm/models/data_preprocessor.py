"""From a collated uint8 batch to what the pretrainer takes, on the device."""
from collections.abc import Sequence

import torch
from mmengine.model import BaseDataPreprocessor
from torch import Tensor

from beit_mm.functional.color_jitter import jitter_images
from beit_mm.functional.tokens import masked_positions
from beit_mm.registry import MODELS


@MODELS.register_module()
class TwoViewDataPreprocessor(BaseDataPreprocessor):
    """Moves a batch of two views to the device and scales each view for its network.

    Args:
        mean, std: of the first view, RGB, 0-255.

    Source: microsoft/unilm `beit/datasets.py`.
    Differs from it in: views arrive as uint8 (a quarter of the bytes), colour jitter can be done here,
    and the second view stays in [0, 1]: each tokenizer maps pixels as it was trained.
    """

    def __init__(self, mean: Sequence[float], std: Sequence[float]):
        super().__init__(non_blocking=True)  # pinned memory is copied while the host goes on
        self.register_buffer('mean', torch.tensor(mean).view(-1, 1, 1), persistent=False)
        self.register_buffer('std', torch.tensor(std).view(-1, 1, 1), persistent=False)

    def forward(self, data: dict, training: bool = False) -> dict:
        """Prepares one batch.

        Args:
            data: `inputs` holds images uint8 (B, H, W, 3) and, where the pipeline makes them, tokenizer_images
                uint8 (B, h, w, 3), mask bool (B, gh, gw) and jitter float (B, 7).
            training: unused; both modes are the same.

        Returns:
            dict(inputs=dict(images=float (B, 3, H, W) normalised, tokenizer_images=float (B, 3, h, w) in [0, 1],
            mask, positions=int64 (B, K))); absent inputs are None.
        """
        inputs = data['inputs']
        # On the CPU, where counting the masked patches makes nobody wait.
        positions = masked_positions(inputs['mask']) if 'mask' in inputs else None
        inputs = self.cast_data(dict(inputs, positions=positions))
        jitter = inputs.get('jitter')
        images = _planar(inputs['images'], jitter)
        tokenizer_images = inputs.get('tokenizer_images')
        return dict(
            inputs=dict(
                images=(images - self.mean) / self.std,
                tokenizer_images=None if tokenizer_images is None else _planar(tokenizer_images, jitter) / 255,
                mask=inputs.get('mask'),
                positions=inputs['positions']))

    def denormalize(self, images: Tensor) -> Tensor:
        """First-view images back to [0, 1], for drawing."""
        return ((images * self.std + self.mean) / 255).clamp(0, 1)


def _planar(images: Tensor, jitter: Tensor | None) -> Tensor:
    """uint8 (B, H, W, 3) to float (B, 3, H, W) in 0-255, jittered where that is left to the device."""
    images = images.permute(0, 3, 1, 2).float()
    return images if jitter is None else jitter_images(images, jitter)

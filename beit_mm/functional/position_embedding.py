"""Absolute position embedding, resampled to another patch grid."""
import math

import torch
import torch.nn.functional as F
from torch import Tensor

from .relative_position import Grid


def square_token_grid(num_rows: int) -> Grid:
    """The square patch grid whose position embedding has `num_rows` rows: 14 x 14 for 197.

    Raises:
        ValueError: there is none, as for the position embedding of a rectangle.
    """
    side = math.isqrt(max(num_rows - 1, 0))
    if side**2 != num_rows - 1:
        raise ValueError(f'a position embedding of {num_rows} rows belongs to no square patch grid')
    return side, side


def resize_position_embedding(pos_embed: Tensor, source: Grid, target: Grid, mode: str = 'bicubic') -> Tensor:
    """Resamples a learned position embedding; the class token's row is kept.

    Args:
        pos_embed: (1, 1 + h*w, channels) of the source grid.
        source, target: patch grids (h, w).
        mode: 'bicubic', or 'bilinear' as the paper's ADE20K table says.

    Returns:
        (1, 1 + h'*w', channels) of the target grid.

    Source: microsoft/unilm `beit/run_class_finetuning.py` (bicubic, align_corners=False); paper appendix,
    hyper-parameters of ADE20K (bilinear).
    """
    if source == target:
        return pos_embed
    cls_row, patch_rows = pos_embed[:, :1], pos_embed[:, 1:]
    patch_rows = patch_rows.unflatten(1, source).permute(0, 3, 1, 2)
    # Interpolated in float32: bfloat16 weights would round the kernel itself.
    patch_rows = F.interpolate(patch_rows.float(), target, mode=mode, align_corners=False)
    patch_rows = patch_rows.flatten(2).transpose(1, 2).to(pos_embed.dtype)
    return torch.cat([cls_row, patch_rows], dim=1)

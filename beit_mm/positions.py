"""Looks up and resizes relative position bias tables and position embeddings for any patch grid.

A bias table has one row for each offset between two patches of an h x w grid, (2h-1)(2w-1) of them, and three rows for
the class token: cls -> patch, patch -> cls, cls -> cls. A position embedding has a row for the class token and each
patch. Other tokens before the patches, such as registers, share the class token's rows of a table and have no position.
Rotary positions are computed for the grid at hand.
"""

import math
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

Grid = tuple[int, int]  # rows and columns of patches
NUM_CLS_ROWS = 3
POSITION_MODES = ('bicubic', 'bilinear', 'bicubic_antialias', 'bicubic_offset')
ALIGNMENT = 8  # elements, 16 bytes of bfloat16: fused attention needs each row of a bias to start at a multiple of it


def num_relative_positions(grid: Grid) -> int:
    """Rows of the bias table of an (h, w) patch grid: 732 for 14 x 14, 2212 for 24 x 24."""
    height, width = grid
    return (2 * height - 1) * (2 * width - 1) + NUM_CLS_ROWS


def _constant(cached: Any, *args: object) -> Tensor:
    """Calls a function that has a cache, such that any later call can compute with the result."""
    with torch.inference_mode(False):  # so that later training can save it for backward
        tensor = cached(*args)
    if type(tensor) is not Tensor:  # torch.export's stand-in, which later calls cannot compute with
        cached.cache_clear()
    return tensor


def relative_position_index(grid: Grid, num_prefix: int = 1) -> Tensor:
    """Row of the bias table for every (query, key) pair, int64 (N, N), where N = num_prefix + h*w, patches last.

    Source: microsoft/unilm `beit/modeling_finetune.py`, generalised to rectangles.
    """
    height, width = grid
    rows, columns = np.divmod(np.arange(height * width), width)
    row_offset = rows[:, None] - rows[None, :] + height - 1
    column_offset = columns[:, None] - columns[None, :] + width - 1
    total = num_relative_positions(grid)
    index = np.empty([num_prefix + height * width] * 2, dtype=np.int64)
    index[num_prefix:, num_prefix:] = row_offset * (2 * width - 1) + column_offset
    index[:num_prefix, :] = total - 3  # cls looks at a patch
    index[:, :num_prefix] = total - 2  # a patch looks at cls
    index[:num_prefix, :num_prefix] = total - 1  # cls looks at itself
    return torch.from_numpy(index)


# Compiled code has the results of these two as constants, named after the functions: of two constants with one name
# aot_autograd makes no graph. So each is a function in full, not the inner one of a common decorator.
@torch.compiler.assume_constant_result
def _padded_index(grid: Grid, num_prefix: int, device: torch.device) -> Tensor:
    return _constant(_compute_padded_index, grid, num_prefix, device)


@torch.compiler.assume_constant_result
def _offset_splines(source: Grid, target: Grid, device: torch.device) -> Tensor:
    return _constant(_compute_offset_splines, source, target, device)


@torch.compiler.assume_constant_result
def rotary_table(grid: Grid, num_prefix: int, dims: int, base: float, device: torch.device) -> Tensor:
    """`compute_rotary_table`, once for each grid and device."""
    return _constant(_cached_rotary_table, grid, num_prefix, dims, base, device)


@lru_cache(maxsize=8)  # 20 MB each at 640 x 640 pixels
def _compute_padded_index(grid: Grid, num_prefix: int, device: torch.device) -> Tensor:
    """The relative position index, each row padded to a multiple of ALIGNMENT: int64 (N * P,), on the device."""
    index = relative_position_index(grid, num_prefix)
    return F.pad(index, (0, -len(index) % ALIGNMENT)).flatten().to(device)


@lru_cache(maxsize=64)
def _compute_offset_splines(source: Grid, target: Grid, device: torch.device) -> Tensor:
    """`offset_spline` of both axes, flat, because aot_autograd takes only one constant of a function."""
    return torch.cat([offset_spline(*sides, device).flatten() for sides in zip(source, target, strict=True)])


def bias_from_table(table: Tensor, table_grid: Grid, grid: Grid, dtype: torch.dtype, num_prefix: int) -> Tensor:
    """Additive attention bias of a patch grid, in rows that CUDA's fused attention can read.

    Args:
        table: (num_relative_positions(table_grid), heads).
        table_grid, grid: patch grids (h, w) of the table and of the input.
        dtype: type of the bias.
        num_prefix: tokens before the patches.

    Returns (1, heads, N, P), where N = num_prefix + h*w and P is N rounded up to a multiple of ALIGNMENT, with padding
    after N.
    """
    table = resize_bias_table(table, table_grid, grid)
    if not (torch.is_grad_enabled() and table.requires_grad):
        table = table.to(dtype)  # less to read; gradients, however, are summed in float32
    index = _padded_index(grid, num_prefix, table.device)
    bias = table.t().contiguous().index_select(1, index)  # heads, N * P: a third of the time that table[index] takes
    return bias.to(dtype).view(1, table.shape[1], num_prefix + grid[0] * grid[1], -1)


def compute_rotary_table(grid: Grid, num_prefix: int, dims: int, base: float, device: torch.device) -> Tensor:
    """Cosines and sines that rotate the queries and keys of a patch grid, float32 (2, N, dims), N = num_prefix + h*w.

    The rows and columns of patches have coordinates in [-1, 1]. Channel k of the first quarter turns by 2 pi times the
    row's coordinate over base**(4k / dims), the second quarter likewise by the column's; the other half repeats this.
    Tokens before the patches are not rotated. Source: facebookresearch/dinov3 `layers/rope_position_encoding.py`.
    """
    periods = base ** (torch.arange(dims // 4, device=device) / (dims // 4))
    centres = (2 * ((torch.arange(side, device=device) + 0.5) / side) - 1 for side in grid)
    rows, columns = (2 * math.pi * centre[:, None] / periods for centre in centres)  # h, dims/4 and w, dims/4
    by_row, by_column = rows[:, None].expand(*grid, -1), columns[None].expand(*grid, -1)
    angles = torch.cat([by_row, by_column], dim=-1).flatten(0, 1).repeat(1, 2)  # h*w, dims
    angles = F.pad(angles, (0, 0, num_prefix, 0))
    return torch.stack([angles.cos(), angles.sin()])


_cached_rotary_table = lru_cache(maxsize=8)(compute_rotary_table)


def resize_bias_table(table: Tensor, source: Grid, target: Grid) -> Tensor:
    """Resamples a bias table (num_relative_positions(source), heads) to another patch grid, each axis on its own.

    A cubic spline through the trained offsets, at `geometric_offsets`, is read at the target's integer offsets. Linear
    interpolation clearly hurts ADE20K (unilm issue 376). Source: microsoft/unilm `beit/run_class_finetuning.py`.
    """
    if source == target:
        return table
    heads = table.shape[1]
    patch_rows, cls_rows = table[:-NUM_CLS_ROWS], table[-NUM_CLS_ROWS:]
    patch_rows = patch_rows.view(2 * source[0] - 1, 2 * source[1] - 1, heads)
    both = _offset_splines(source, target, table.device).float()
    end = (2 * target[0] - 1) * (2 * source[0] - 1)
    along_height, along_width = both[:end].view(-1, 2 * source[0] - 1), both[end:].view(-1, 2 * source[1] - 1)
    with torch.autocast(table.device.type, enabled=False):  # bfloat16 would change the bias by 2 %
        resized = torch.einsum('ys,xt,sth->yxh', along_height, along_width, patch_rows.float())
    return torch.cat([resized.reshape(-1, heads).to(table.dtype), cls_rows])


def offset_spline(source: int, target: int, device: torch.device) -> Tensor:
    """Matrix (2*target-1, 2*source-1) that resamples offsets along an axis of `source` patches."""
    num_source = 2 * source - 1
    if source == target:
        matrix = np.eye(num_source)
    else:
        from scipy.interpolate import make_interp_spline  # takes a third of a second

        positions = geometric_offsets(source, target)
        spline = make_interp_spline(positions, np.eye(num_source), k=min(3, num_source - 1))
        # The bisection can leave the outermost position some 1e-4 short of the target's last offset.
        matrix = spline(np.clip(np.arange(1 - target, target), positions[0], positions[-1]))
    return torch.from_numpy(matrix).to(device)


def geometric_offsets(source: int, target: int) -> np.ndarray:
    """Positions of the 2*source-1 trained offsets on the target's axis: 0, +-1, +-(1+q), ...

    q is bisected in [1.01, 1.5] until 1 + q + ... + q^(source-2) reaches target - 1. A smaller target leaves it at
    1.01, which crops the table around zero and keeps absolute distances.
    """
    low, high = 1.01, 1.5
    while high - low > 1e-6:
        ratio = (low + high) / 2
        if (1 - ratio ** (source - 1)) / (1 - ratio) > target - 1:
            high = ratio
        else:
            low = ratio
    positive = np.cumsum(ratio ** np.arange(source - 1))
    return np.concatenate([-positive[::-1], [0.0], positive])


def resize_position_embedding(pos_embed: Tensor, source: Grid, target: Grid, mode: str = 'bicubic') -> Tensor:
    """Resamples a position embedding (1, 1 + h*w, channels) to another grid; the class token's row is kept.

    Source: microsoft/unilm `beit/run_class_finetuning.py` (bicubic); paper appendix, ADE20K (bilinear); timm and DINOv2
    with registers (bicubic_antialias); DINO, and DINOv2 without (bicubic_offset: by (target + 0.1) / source).
    """
    if source == target:
        return pos_embed
    cls_row, patch_rows = pos_embed[:, :1], pos_embed[:, 1:]
    patch_rows = patch_rows.unflatten(1, source).permute(0, 3, 1, 2)  # 1, channels, h, w
    kind, _, detail = mode.partition('_')
    options: dict[str, Any] = dict(size=target)
    if detail == 'offset':
        options = dict(scale_factor=[(after + 0.1) / before for before, after in zip(source, target, strict=True)])
    options |= dict(mode=kind, align_corners=False, antialias=detail == 'antialias')
    patch_rows = F.interpolate(patch_rows.float(), **options)  # bfloat16 weights would round the kernel itself
    patch_rows = patch_rows.flatten(2).transpose(1, 2).to(pos_embed.dtype)  # 1, h'*w', channels
    return torch.cat([cls_row, patch_rows], dim=1)


def resize_patch_embedding(weight: Tensor, side: int) -> Tensor:
    """Patch embedding (C, channels, p, p) for patches of `side` x `side` pixels.

    An upsampled patch gives the token of the patch itself: the pseudo-inverse of bicubic resizing is applied.
    Source: FlexiViT, arXiv 2212.08013, section 3.4.
    """
    before = weight.shape[-1]
    pixels = torch.eye(before**2).view(-1, 1, before, before)  # each a patch with one white pixel
    resized = F.interpolate(pixels, (side, side), mode='bicubic', antialias=True).flatten(1)  # p * p, side * side
    inverse = torch.linalg.pinv(resized).to(weight)  # side * side, p * p
    return (weight.flatten(2) @ inverse.t()).unflatten(2, (side, side))


def take_tokens(x: Tensor, index: Tensor) -> Tensor:
    """Entries of a sequence x (B, N, C) or (B, N) at an int64 index (B, K): (B, K, C) or (B, K)."""
    return x.take_along_dim(index.unsqueeze(-1) if x.dim() == 3 else index, dim=1)

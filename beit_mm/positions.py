"""The relative position bias and the position embedding, at any patch grid.

A relative position bias is read from a table. It has a row for each offset between two patches of an h x w grid,
(2h-1)(2w-1) rows, and three rows for the class token: cls -> patch, patch -> cls, cls -> cls. A position embedding has
one row for the class token and one for each patch. Both can be resized to another grid.
"""

from collections.abc import Callable
from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

Grid = tuple[int, int]  # rows and columns of patches
NUM_CLS_ROWS = 3
ALIGNMENT = 8  # elements, 16 bytes in bfloat16: fused attention needs the rows of a bias to begin at multiples of it


def num_relative_positions(grid: Grid) -> int:
    """Rows of the bias table for a patch grid (h, w): 732 for 14 x 14, 2212 for 24 x 24."""
    height, width = grid
    return (2 * height - 1) * (2 * width - 1) + NUM_CLS_ROWS


def _cache_constant(maxsize: int) -> Callable:
    """Decorator: caches the tensor for each set of arguments, and makes it a constant of compiled code."""

    def decorate(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        cached = lru_cache(maxsize)(function)

        @torch.compiler.assume_constant_result
        def call(*args: object) -> Tensor:
            tensor = cached(*args)
            if type(tensor) is not Tensor:  # a fake tensor of torch.export, which later calls must not get
                cached.cache_clear()
            return tensor

        return call

    return decorate


def _tensor_to_cache(array: np.ndarray, device: torch.device | str) -> Tensor:
    """Makes a tensor outside inference mode, so that training can use it when it comes from the cache."""
    with torch.inference_mode(False):
        return torch.from_numpy(array).to(device)


def relative_position_index(grid: Grid) -> Tensor:
    """Row of the bias table for each (query, key) pair, int64 (1 + h*w, 1 + h*w), class token first.

    Source: microsoft/unilm `beit/modeling_finetune.py`, generalised to rectangles.
    """
    return torch.from_numpy(_relative_positions(grid))


def _relative_positions(grid: Grid) -> np.ndarray:
    height, width = grid
    rows, columns = np.divmod(np.arange(height * width), width)
    row_offset = rows[:, None] - rows[None, :] + height - 1
    column_offset = columns[:, None] - columns[None, :] + width - 1
    total = num_relative_positions(grid)
    index = np.empty((1 + height * width, 1 + height * width), dtype=np.int64)
    index[1:, 1:] = row_offset * (2 * width - 1) + column_offset
    index[0, :] = total - 3  # cls -> patch
    index[:, 0] = total - 2  # patch -> cls
    index[0, 0] = total - 1  # cls -> cls
    return index


@_cache_constant(maxsize=8)  # 20 MB each at 640 x 640 pixels
def _padded_index(grid: Grid, device: torch.device) -> Tensor:
    """The relative position index, with rows padded to a multiple of ALIGNMENT: int64 (N * P,)."""
    index = _relative_positions(grid)
    return _tensor_to_cache(np.pad(index, ((0, 0), (0, -len(index) % ALIGNMENT))).ravel(), device)


def bias_from_table(table: Tensor, table_grid: Grid, grid: Grid, dtype: torch.dtype | None = None) -> Tensor:
    """Additive attention bias for a patch grid, with rows that CUDA's fused attention can read.

    Args:
        table: (num_relative_positions(table_grid), heads).
        table_grid: patch grid (h, w) of the table.
        grid: patch grid (h, w) of the input.
        dtype: type of the bias; None: that of the table.

    Returns:
        (1, heads, N, P), where N = 1 + h*w and P is N rounded up to a multiple of ALIGNMENT: P = 200 for N = 197. The
        bias is `[..., :N]`; the other columns are padding.
    """
    table = resize_bias_table(table, table_grid, grid)
    if not (torch.is_grad_enabled() and table.requires_grad):
        table = table.to(dtype or table.dtype)  # less to read; with gradients not, because they are summed in float32
    index = _padded_index(grid, table.device)
    bias = table.t().contiguous().index_select(1, index)  # heads, N * P; three times as fast as table[index]
    return bias.to(dtype or table.dtype).view(1, table.shape[1], 1 + grid[0] * grid[1], -1)


def resize_bias_table(table: Tensor, source: Grid, target: Grid) -> Tensor:
    """Resizes a bias table (num_relative_positions(source), heads) to another patch grid, each axis separately.

    The trained offsets are placed at a geometric sequence, dense near zero, which ends at the largest offset of the
    target. A cubic spline through them is evaluated at the integer offsets of the target. Linear interpolation lowers
    mIoU on ADE20K clearly (unilm issue 376). Source: microsoft/unilm `beit/run_class_finetuning.py`.
    """
    if source == target:
        return table
    heads = table.shape[1]
    patch_rows, cls_rows = table[:-NUM_CLS_ROWS], table[-NUM_CLS_ROWS:]
    patch_rows = patch_rows.view(2 * source[0] - 1, 2 * source[1] - 1, heads)
    exact = torch.promote_types(table.dtype, torch.float32)
    along_height = offset_spline(source[0], target[0], table.device).to(exact)
    along_width = offset_spline(source[1], target[1], table.device).to(exact)
    with torch.autocast(table.device.type, enabled=False):  # bfloat16 would change the bias by 2 %
        resized = torch.einsum('ys,xt,sth->yxh', along_height, along_width, patch_rows.to(exact))
    return torch.cat([resized.reshape(-1, heads).to(table.dtype), cls_rows])


@_cache_constant(maxsize=64)
def offset_spline(source: int, target: int, device: torch.device) -> Tensor:
    """Matrix (2*target-1, 2*source-1) that resizes offsets from `source` to `target` patches along an axis."""
    num_source, num_target = 2 * source - 1, 2 * target - 1
    if source == target:
        return _tensor_to_cache(np.eye(num_source), device)
    if source == 1:  # a single offset leaves nothing to interpolate
        return _tensor_to_cache(np.ones((num_target, 1)), device)
    from scipy.interpolate import make_interp_spline  # here, because this import takes a third of a second

    positions = geometric_offsets(source, target)
    spline = make_interp_spline(positions, np.eye(num_source), k=min(3, num_source - 1))
    # The bisection can end with an outermost position about 1e-4 short of the last offset of the target.
    offsets = np.clip(np.arange(1 - target, target), positions[0], positions[-1])
    return _tensor_to_cache(spline(offsets), device)


def geometric_offsets(source: int, target: int) -> np.ndarray:
    """Positions of the 2*source-1 trained offsets on the axis of the target: 0, +-1, +-(1+q), ...

    q is found by bisection in [1.01, 1.5], so that 1 + q + ... + q^(source-2) reaches target - 1. For a smaller target
    q is 1.01, which crops the table around zero and keeps absolute distances.
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
    """Resizes a position embedding (1, 1 + h*w, channels) to another grid; the row of the class token is kept.

    Source: microsoft/unilm `beit/run_class_finetuning.py` (bicubic, align_corners=False); paper appendix,
    hyper-parameters of ADE20K (bilinear).
    """
    if source == target:
        return pos_embed
    cls_row, patch_rows = pos_embed[:, :1], pos_embed[:, 1:]
    patch_rows = patch_rows.unflatten(1, source).permute(0, 3, 1, 2)  # 1, channels, h, w
    # Interpolated in float32: bfloat16 weights would round the kernel itself.
    patch_rows = F.interpolate(patch_rows.float(), target, mode=mode, align_corners=False)  # 1, channels, h', w'
    patch_rows = patch_rows.flatten(2).transpose(1, 2).to(pos_embed.dtype)  # 1, h'*w', channels
    return torch.cat([cls_row, patch_rows], dim=1)


def take_tokens(x: Tensor, index: Tensor) -> Tensor:
    """Selects from a sequence x, (B, N, C) or (B, N), by an index, int64 (B, K): (B, K, C) or (B, K)."""
    if x.dim() == 3:
        index = index.unsqueeze(-1).expand(-1, -1, x.shape[-1])
    return x.gather(1, index)

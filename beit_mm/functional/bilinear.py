"""Bilinear resizing along one axis, as numbers: which two pixels each new pixel reads, and how much of each."""
import torch
from torch import Tensor


def bilinear_taps(source: int, target: int, align_corners: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """What each of `target` pixels reads of `source` pixels.

    Args:
        source, target: lengths of the axis in pixels.
        align_corners: as torch's F.interpolate has it.

    Returns:
        int64 `low` and `high`, the two pixels, and float32 `share`, the weight of `high` (`low` has the rest);
        (target, ) each. The numbers are F.interpolate's, in its own precision.
    """
    place = torch.arange(target, dtype=torch.float32)
    if align_corners:
        place = place * ((source - 1) / max(target - 1, 1))
    else:
        place = ((place + 0.5) * (source / target) - 0.5).clamp(min=0)
    low = place.long().clamp(max=source - 1)
    return low, (low + 1).clamp(max=source - 1), place - low


def bilinear_matrix(source: int, target: int, align_corners: bool = False) -> Tensor:
    """The same as a matrix: float32 (target, source). F.interpolate of an image x is rows @ x @ columns.T."""
    low, high, share = bilinear_taps(source, target, align_corners)
    every = torch.arange(target)
    matrix = torch.zeros(target, source)
    matrix[every, low] = 1 - share
    matrix[every, high] += share
    return matrix

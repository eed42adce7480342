"""Where tensors were read from.

mmengine picks tensors out of a file by prefix and hands them on without the rest of the file. What the backbone has to
know of that rest is remembered here for each tensor, as long as the tensor lives.
"""
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary


class Origin(NamedTuple):
    """A checkpoint file.

    Attributes:
        path: the file.
        format: whose names it has, one of `formats.READ`; None where it holds no BEiT.
        preprocessing: what the images were that the weights were trained on: `mean` and `std` of each channel, pixels
            0-255, and `size` (height, width) in pixels; empty where the file does not say.
        architecture: what shapes do not show, `num_heads` and `out_indices`, where the file says it.
        names: of its tensors, the first few.
    """
    path: str
    format: str | None
    preprocessing: Mapping
    architecture: Mapping
    names: str


_ORIGINS = WeakTensorKeyDictionary()
_LAST: list[Origin] = []


def mark_origin(weights: Mapping[str, Tensor], origin: Origin) -> None:
    """Remembers the file of tensors."""
    _LAST[:] = [origin]
    for tensor in weights.values():
        _ORIGINS[tensor] = origin


def origin_of(tensors: Iterable[Tensor]) -> Origin | None:
    """The file of the first tensor that came from one."""
    return next((_ORIGINS[tensor] for tensor in tensors if tensor in _ORIGINS), None)


def last_origin() -> Origin | None:
    """The file that was read last, for messages about tensors that are not there."""
    return _LAST[0] if _LAST else None

"""Where tensors were read from, carried by the tensors themselves.

mmengine picks tensors out of a file by prefix and hands them on without the rest of the file. What the backbone has to
know of that rest travels as an attribute of the tensors.
"""
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from torch import Tensor


class Origin(NamedTuple):
    """A checkpoint file.

    Attributes:
        path: the file.
        format: whose names it has, one of `formats.READ`; None where it holds no BEiT.
        preprocessing: what the images were that the weights were trained on: `mean` and `std` of each channel, pixels
            0-255, and `size` (height, width) in pixels; empty where the file does not say.
    """
    path: str
    format: str | None
    preprocessing: Mapping


def mark_origin(weights: Mapping[str, object], origin: Origin) -> None:
    """Makes all tensors remember their file."""
    for tensor in weights.values():
        if isinstance(tensor, Tensor):
            tensor.beit_mm_origin = origin


def origin_of(tensors: Iterable[Tensor]) -> Origin | None:
    """The file of the first tensor that remembers one."""
    return next((tensor.beit_mm_origin for tensor in tensors if hasattr(tensor, 'beit_mm_origin')), None)

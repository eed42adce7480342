"""Antialiased resizing on the CPU with Pillow's filters, four times (bicubic) and twice (Lanczos) as fast.

Both filter every row, round to whole levels, then every column, as Pillow does. Newer Pillow filters columns first
where that is less work: single pixels beside hard edges then differ by several levels, others by at most 1. Images of
float32 are not rounded. Images have any number of channels.
"""

import math
from collections.abc import Sequence
from functools import lru_cache

import cv2
import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image

LOBES = 3  # of the Lanczos filter
BLOCK = 16  # output pixels that share one matrix
MAX_CACHED_LENGTH = 1000  # pixels; weights of longer crops are computed anew, 8% of the resizing at 2000


def resize_bicubic(image: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Resizes (H, W, C), uint8 or float32, 0-255, to `size` (height, width); contiguous.

    By torch's kernel, which is vectorised for uint8 of at most 4 channels.
    """
    # the new axis first: then torch sees channels_last, and the result needs no reordering
    channels_first = torch.from_numpy(image)[None].permute(0, 3, 1, 2)
    resized = F.interpolate(channels_first, size=size, mode='bicubic', antialias=True)
    if image.dtype != np.uint8:
        resized.clamp_(0, 255)  # the filter goes beyond beside edges
    return np.ascontiguousarray(resized[0].permute(1, 2, 0).numpy())


def resize_lanczos(image: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Resizes (H, W, C), uint8 or float32, 0-255, to `size` (height, width) by a Lanczos filter of 3 lobes, widened by
    the scale when shrinking; contiguous."""
    resized = _filter_columns(_transpose(_filter_columns(_transpose(image), size[1])), size[0])
    return resized if image.dtype == np.uint8 else resized.clip(0, 255, out=resized)


def resize_box(image: np.ndarray, box: Sequence[float], size: tuple[int, int], resample: int) -> np.ndarray:
    """Resizes a box (top, left, height, width) with fractions of pixels, of uint8 RGB (H, W, 3), by Pillow itself."""
    top, left, height, width = box
    y, x = int(top), int(left)
    crop = Image.fromarray(np.ascontiguousarray(image[y : math.ceil(top + height), x : math.ceil(left + width)]))
    return np.array(crop.resize(size[::-1], resample, (left - x, top - y, left - x + width, top - y + height)))


def _transpose(image: np.ndarray) -> np.ndarray:
    """(H, W, C) to (W, H, C); contiguous."""
    if image.shape[2] == 3:
        return cv2.transpose(image)
    return np.ascontiguousarray(image.transpose(1, 0, 2))


def _filter_columns(image: np.ndarray, new_height: int) -> np.ndarray:
    """Lanczos along the first axis, by a product with a banded matrix.

    In blocks of 16 output pixels the band is nearly dense, so that matrix products beat a loop over pixels.
    """
    height, width, channels = image.shape
    pixels = torch.from_numpy(image).float().view(height, width * channels)
    weights = cached_bands if height <= MAX_CACHED_LENGTH else lanczos_bands
    filtered = torch.cat([band @ pixels[i:j] for i, j, band in weights(height, new_height)])
    if image.dtype == np.uint8:
        filtered = filtered.round_().clamp_(0, 255).byte()
    return filtered.view(new_height, width, channels).numpy()


def lanczos_bands(length: int, new_length: int) -> list[tuple[int, int, torch.Tensor]]:
    """For each block of output pixels: its first and last + 1 input, weights (outputs, inputs)."""
    scale = length / new_length
    stretch = max(scale, 1.0)
    center = (np.arange(new_length) + 0.5) * scale
    first = np.maximum((center - LOBES * stretch + 0.5).astype(int), 0)
    last = np.minimum((center + LOBES * stretch + 0.5).astype(int), length)
    bands = []
    for start in range(0, new_length, BLOCK):
        block = slice(start, start + BLOCK)
        inputs = np.arange(first[block][0], last[block][-1])
        x = (inputs + 0.5 - center[block, None]) / stretch
        weights = np.sinc(x) * np.sinc(x / LOBES)
        weights *= (inputs >= first[block, None]) & (inputs < last[block, None])
        weights /= weights.sum(axis=1, keepdims=True)
        bands.append((int(inputs[0]), int(inputs[-1]) + 1, torch.from_numpy(weights).float()))
    return bands


# At most 41 MB in each process that resizes, once all lengths up to 1000 have come by.
cached_bands = lru_cache(maxsize=1024)(lanczos_bands)

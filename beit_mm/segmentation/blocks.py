"""Segments a large image by blocks of whole windows, with the labels of the whole image in little memory."""

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from mmseg.structures import SegDataSample
from torch import Tensor

from beit_mm.datasets.reading import MAX_BANDS
from beit_mm.segmentation.segmentor import (
    MAX_LOGITS,
    SlidingSegmentor,
    confidence_of,
    probabilities_of,
    strip_height,
    window_intervals,
)


class Span(NamedTuple):
    """One axis of a block."""

    length: int  # pixels of the whole image
    seen: int  # pixels of the whole image as the network sees it, resized
    kept: slice  # pixels that get their labels from the block
    read: slice  # seen pixels: all windows that reach `kept`


def spans(length: int, seen: int, crop: int, stride: int, most: int) -> list[Span]:
    """Cuts an axis into spans of about `most` seen pixels, whose windows are those of the whole axis."""
    windows = window_intervals(seen, crop, stride)
    margin = 0 if seen == length else 2  # neighbours that resizing needs
    parts = math.ceil(len(windows) / max(1, (most - crop) // stride))
    starts = range(0, len(windows) * stride, math.ceil(len(windows) / parts) * stride)
    found = []
    for start, stop in zip(starts, [*starts[1:], seen], strict=True):
        reaching = [window for window in windows if window[1] > start - margin and window[0] < stop + margin]
        kept = slice(round(start * length / seen), round(stop * length / seen))
        found.append(Span(length, seen, kept, slice(reaching[0][0], reaching[-1][1])))
    return found


@torch.no_grad()
def segment_blocks(
    model: SlidingSegmentor,
    read: Callable[[slice, slice], Tensor | None],
    size: tuple[int, int],
    seen: tuple[int, int],
    classes: int,
    bar: Callable[[list], Iterable],
) -> dict[str, np.ndarray]:
    """Segments an image of `size` (height, width) that the network sees resized to `seen`.

    Args:
        read: returns rows and columns of the resized image (C, h, w), 0-255; None if the image has no data there.
        bar: passes on the list of blocks, and may show how many are done.

    Returns:
        dict(labels=(H, W) as of a SegmentationInferencer; confidence=float16 (H, W)), both 0 where `read` gives None;
        for a model `with_probabilities` also probabilities=float16 (classes, H, W).
    """
    result = dict(labels=np.zeros(size, np.min_scalar_type(classes - 1)), confidence=np.zeros(size, np.float16))
    if model.with_probabilities:
        result['probabilities'] = np.zeros((classes, *size), np.float16)
    cfg, most = model.test_cfg, math.isqrt(MAX_LOGITS // max(classes, MAX_BANDS))
    rows, columns = map(spans, size, seen, cfg['crop_size'], cfg['stride'], (most, most))
    model.with_confidence = True
    for row, column in bar([(row, column) for row in rows for column in columns]):
        image = read(row.read, column.read)
        if image is None:
            continue
        logits = model.inference(model.data_preprocessor(dict(inputs=[image]))['inputs'])  # 1, C, h, w
        height = strip_height(classes, column.kept.stop - column.kept.start)
        for top in range(row.kept.start, row.kept.stop, height):
            strip = Span(row.length, row.seen, slice(top, min(top + height, row.kept.stop)), row.read)
            scores = at_kept_pixels(logits, strip, column)
            (sample,) = model.postprocess_result(scores, [SegDataSample(metainfo=dict(ori_shape=scores.shape[2:]))])
            result['labels'][strip.kept, column.kept] = sample.pred_sem_seg.data[0].cpu().numpy()
            result['confidence'][strip.kept, column.kept] = confidence_of(sample).float().cpu().numpy()
            if model.with_probabilities:
                result['probabilities'][:, strip.kept, column.kept] = probabilities_of(sample).half().cpu().numpy()
    return result


def at_kept_pixels(logits: Tensor, row: Span, column: Span) -> Tensor:
    """Resizes the logits of a block (1, C, h, w) as F.interpolate resizes those of the whole image."""
    if (row.length, column.length) == (row.seen, column.seen):
        top, left = (span.kept.start - span.read.start for span in (row, column))
        return logits[:, :, top:, left:][:, :, : row.kept.stop - row.kept.start, : column.kept.stop - column.kept.start]
    axes = []
    for span in (row, column):
        position = torch.arange(span.kept.start, span.kept.stop, dtype=torch.float64) + 0.5
        position = (position * span.seen / span.length).clamp(0.5, span.seen - 0.5) - span.read.start
        axes.append(2 * position / (span.read.stop - span.read.start) - 1)  # grid_sample counts from -1 to 1
    y, x = torch.meshgrid(*axes, indexing='ij')
    grid = torch.stack([x, y], dim=-1)[None].to(logits)  # 1, H, W, 2
    return F.grid_sample(logits, grid, padding_mode='border', align_corners=False)

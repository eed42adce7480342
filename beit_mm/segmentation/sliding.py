"""Windows over images of many sizes, run in common batches, their logits gathered at the size that is wanted."""
from collections.abc import Callable, Iterator
from itertools import groupby
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from beit_mm.functional.bilinear import bilinear_matrix, bilinear_taps

Size = tuple[int, int]


class View(NamedTuple):
    """An image as the network is to see it, and what is wanted of it.

    Args:
        image: (3, h, w) normalised.
        size: (H, W) in pixels of the logits that are wanted.
        flip: run the mirror image, and mirror its logits back.
    """
    image: Tensor
    size: Size
    flip: bool = False


class Grid(NamedTuple):
    """How windows lie on an image; a `crop` of None is one window, the whole image."""
    crop: Size | None = None
    stride: Size | None = None


def slide(network: Callable[[Tensor], Tensor], views: list[View], grid: Grid, windows_per_batch: int,
          align_corners: bool = False, divisor: int = 1) -> Iterator[Tensor]:
    """Logits of each view, in turn: the mean over the windows that see a pixel, resized bilinearly.

    Resizing is linear, and windows lie in rows and columns. So what one window adds to the logits wanted is
    rows @ logits @ columns.T, with two small matrices that hold the way from the network's resolution to the
    window's, the share of this window in the mean, and the way to the wanted size. Neither a window's logits at its
    own size nor the image's ever exist.

    Args:
        network: images (B, 3, h, w) -> logits (B, C, h', w') of any resolution.
        views: any sizes; one smaller than the window is run as it is.
        grid: size of a window and distance between two, in pixels.
        windows_per_batch: windows of one size that go through the network together, of all views.
        align_corners: as the head resizes its logits.
        divisor: sides of a window that are no multiple of it are filled up with zeros, at the bottom and on the
            right, and what the network makes of these is cut off.

    Yields:
        float32 (C, H, W), `size` of the view. Only the views of the batch at hand are in memory.

    Source: mmseg `EncoderDecoder.slide_inference` and `postprocess_result`.
    Differs from it in: all sizes in common batches; one buffer of the wanted size instead of one of the image's and
    one more for each window. The same to rounding, but for windows whose sides are no multiple of a patch, as of an
    image smaller than the window: there the backbone fills up by itself, and the logits of the filling are squeezed
    into the image.
    """
    windows = (window for number, view in enumerate(views) for window in _windows(number, view, grid))
    buffer: Tensor | None = None
    for batch in _batches(windows, windows_per_batch):
        images = torch.stack([window.image for window in batch])
        filling = [-side % divisor for side in images.shape[2:]]
        logits = network(F.pad(images, (0, filling[1], 0, filling[0]))).float()
        for window, found in zip(batch, logits, strict=True):
            height, width = views[window.view].size
            if buffer is None:
                buffer = found.new_zeros(len(found), height, width)
            rows, row_matrix = window.rows.place(found.shape[1], filling[0], align_corners)
            columns, column_matrix = window.columns.place(found.shape[2], filling[1], align_corners)
            part = row_matrix.to(found) @ found @ column_matrix.to(found).T
            buffer[:, rows, columns] += part
            del part
            if window.last:
                yield buffer
                buffer = None


class Span(NamedTuple):
    """A window along one axis of an image of `length` pixels, of which `size` pixels are wanted in the end."""
    length: int
    size: int
    start: int
    stop: int
    windows_over: Tensor
    flip: bool

    def place(self, resolution: int, filling: int, align_corners: bool) -> tuple[slice, Tensor]:
        """Which of the wanted pixels read this window, and (pixels, resolution) how much of which of its logits, where
        these are of `filling` more pixels."""
        upsample = bilinear_matrix(resolution, self.stop - self.start + filling, align_corners)
        low, high, share = bilinear_taps(self.length, self.size, align_corners)
        matrix = torch.zeros(self.size, resolution)
        for pixel, weight in ((low, 1 - share), (high, share)):
            inside = (pixel >= self.start) & (pixel < self.stop) & (weight > 0)
            pixel = pixel[inside]
            weight = weight[inside] / self.windows_over[pixel]
            matrix[inside] += weight.unsqueeze(1) * upsample[pixel - self.start]
        if self.flip:
            matrix = matrix.flip(0)
        reading = matrix.any(dim=1).nonzero().flatten().tolist() or [0]
        rows = slice(reading[0], reading[-1] + 1)
        return rows, matrix[rows]


class _Window(NamedTuple):
    view: int
    image: Tensor
    rows: Span
    columns: Span
    last: bool


def _windows(number: int, view: View, grid: Grid) -> list[_Window]:
    image = view.image.flip(2) if view.flip else view.image
    crop = grid.crop or image.shape[1:]
    stride = grid.stride or crop
    rows = spans(image.shape[1], view.size[0], crop[0], stride[0])
    columns = spans(image.shape[2], view.size[1], crop[1], stride[1], view.flip)
    return [_Window(number, image[:, row.start:row.stop, column.start:column.stop], row, column,
                    last=row is rows[-1] and column is columns[-1])
            for row in rows for column in columns]


def spans(length: int, size: int, crop: int, stride: int, flip: bool = False) -> list[Span]:
    """Windows along an axis: every `stride` pixels, the last one moved back to end with the image."""
    count = max(length - crop + stride - 1, 0) // stride + 1
    stops = [min(index * stride + crop, length) for index in range(count)]
    over = torch.zeros(length)
    for stop in stops:
        over[max(stop - crop, 0):stop] += 1
    return [Span(length, size, max(stop - crop, 0), stop, over, flip) for stop in stops]


def _batches(windows: Iterator[_Window], size: int) -> Iterator[list[_Window]]:
    """Consecutive windows of one size, at most `size` together."""
    for _, alike in groupby(windows, key=lambda window: window.image.shape):
        batch = []
        for window in alike:
            batch.append(window)
            if len(batch) == size:
                yield batch
                batch = []
        if batch:
            yield batch

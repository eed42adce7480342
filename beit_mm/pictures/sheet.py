"""A sheet of titled pictures, for everything that this package draws beside images."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import Tensor

SIDE = 160  # pixels of a tile's longer side
MARGIN = 4  # pixels between tiles
TITLE_HEIGHT = 16  # pixels above a row with titles
DPI = 100
FONT_SIZE = 8  # points, of a font whose characters are all as wide
CHARACTER = 0.63 * FONT_SIZE * DPI / 72  # pixels


def sheet(rows: Sequence[Sequence[tuple[str, Tensor | None]]], side: int = SIDE) -> Figure:
    """Rows of titled pictures on white, to be saved by `savefig`.

    Args:
        rows: of each tile its title and its picture, float (3, H, W) in [0, 1] of any size, drawn in its own shape;
            None leaves the place empty. A title that is too long loses its beginning, the folders of a path.
        side: pixels of a tile's longer side.

    Returns:
        A figure with one `axes` for each picture, row after row.
    """
    shapes = [image.shape[1:] for row in rows for _, image in row if image is not None]
    height = max(1, round(side * max(min(1, h / w) for h, w in shapes)))
    width = max(1, round(side * max(min(1, w / h) for h, w in shapes)))
    tops = [MARGIN]  # of the rows' pictures, and of what would follow
    for row in rows:
        tops[-1] += TITLE_HEIGHT * any(title for title, _ in row)
        tops.append(tops[-1] + height + MARGIN)
    size = MARGIN + max(map(len, rows)) * (width + MARGIN), tops[-1]
    figure = Figure(figsize=(size[0] / DPI, size[1] / DPI), dpi=DPI)
    for row, top in zip(rows, tops, strict=False):
        for column, (title, image) in enumerate(row):
            if image is None:
                continue
            left = MARGIN + column * (width + MARGIN)
            bottom = 1 - (top + height) / size[1]
            axes = figure.add_axes((left / size[0], bottom, width / size[0], height / size[1]), anchor='NW')
            axes.axis('off')
            axes.imshow(image.detach().float().cpu().clamp(0, 1).permute(1, 2, 0).numpy())
            font: dict[str, Any] = dict(size=FONT_SIZE, family='monospace', parse_math=False)  # a name may hold dollars
            axes.set_title(shortened(title, int(width / CHARACTER)), loc='left', pad=2, **font)
    return figure


def shortened(title: str, length: int) -> str:
    """A title in characters that the font has, of at most `length` of them."""
    latin = title.encode('latin-1', 'replace').decode('latin-1')
    title = ''.join(char if char.isprintable() else '?' for char in latin)
    return title if len(title) <= length else f'..{title[len(title) - length + 2 :]}'


def sheet_of_columns(columns: Mapping[str, Tensor], channels: Sequence[int] = (0, 1, 2)) -> Figure:
    """A sheet of `columns`, title -> float (B, C, H, W) in [0, 1], with a row for each image of the batch.

    `channels` are drawn as red, green and blue; of fewer than three the first is drawn in gray.
    """
    drawn = [images[:, list(channels) if images.shape[1] > 2 else [0, 0, 0]] for images in columns.values()]
    first, *others = ([('', image) for image in row] for row in zip(*drawn, strict=True))
    titled = [(title, image) for title, (_, image) in zip(columns, first, strict=True)]
    return sheet([titled, *others])


def pixels_of(figure: Figure) -> np.ndarray:
    """What `savefig` writes, uint8 (H, W, 3)."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3]

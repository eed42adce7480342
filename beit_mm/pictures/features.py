"""Pictures of features: principal components of patches as colours, nearest neighbours, points in a plane."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from PIL import Image, ImageDraw
from torch import Tensor
from torchvision.transforms.functional import to_pil_image

from beit_mm.datasets.reading import read_image
from beit_mm.datasets.segmentation_folder import distinct_colours
from beit_mm.features.evaluation import neighbours
from beit_mm.pictures.pictures import MARGIN, SIDE, TITLE_HEIGHT
from beit_mm.terminal import UserError

NEIGHBOURS = 5
SPREAD = 0.01  # part of the patches beyond either end of the colours
BORDER = 1  # patches at an image's edge that are more often background than its middle


def pca_colours(maps: Sequence[np.ndarray], foreground: float | None = None) -> list[Tensor]:
    """The first three principal components of patches as red, green and blue, jointly for all images.

    Args:
        maps: float (h, w, C) of each image.
        foreground: None, or a level between 0 and 1 of the first component's range: what lies below it is taken for
            background and black, and the components of the rest alone are drawn. Of the component's two signs that one
            is taken that is lower at the images' edges.

    Returns:
        float (3, h, w) in [0, 1] of each image. The sign of a component is that which makes its larger values the rarer
        ones.

    Raises:
        ValueError: features of fewer than three channels, or a level that leaves fewer than three patches.
    """
    flat = torch.cat([torch.from_numpy(np.ascontiguousarray(values)).flatten(0, 1).float() for values in maps])
    if flat.shape[1] < 3:
        raise UserError(f'features of {flat.shape[1]} channels; three components need at least 3')
    inside = torch.ones(len(flat), dtype=torch.bool)
    if foreground is not None:
        first = _scaled(principal_components(flat, 1)[:, 0])
        edge = torch.cat([_edge(*values.shape[:2]).flatten() for values in maps])
        if first[edge].mean() > first[~edge].mean():
            first = 1 - first
        inside = first > foreground
        if inside.sum() < 3:
            raise UserError(f'foreground level {foreground} leaves {int(inside.sum())} patches; expected a lower one')
    colours = torch.zeros(len(flat), 3)
    colours[inside] = torch.stack([_scaled(part) for part in principal_components(flat[inside], 3).unbind(1)], dim=1)
    sizes = [values.shape[0] * values.shape[1] for values in maps]
    return [
        part.T.unflatten(1, values.shape[:2]).contiguous()
        for part, values in zip(colours.split(sizes), maps, strict=True)
    ]


def principal_components(rows: Tensor, number: int) -> Tensor:
    """Coordinates (N, number) of rows (N, C) along the directions of largest variance, each skewed to the right."""
    centred = (rows - rows.mean(dim=0)).double()
    _, directions = torch.linalg.eigh(centred.T @ centred)  # rising order
    parts = centred @ directions.flip(1)[:, :number]
    return (parts * parts.pow(3).sum(dim=0).sign().where(parts.pow(3).sum(dim=0) != 0, 1)).float()


def _scaled(values: Tensor) -> Tensor:
    """Values (N,) to [0, 1], the outermost hundredths cut off."""
    low, high = (np.quantile(values.numpy(), part) for part in (SPREAD, 1 - SPREAD))
    return ((values - low) / max(high - low, 1e-12)).clamp(0, 1)


def _edge(height: int, width: int) -> Tensor:
    """bool (height, width), True within BORDER patches of the edge."""
    edge = torch.ones(height, width, dtype=torch.bool)
    edge[BORDER : height - BORDER, BORDER : width - BORDER] = False
    return edge


def draw_pca(
    paths: Sequence[str], images: Sequence[Tensor], maps: Sequence[np.ndarray], foreground: float | None = None
) -> Image.Image:
    """Each image (3, H, W) in [0, 1] beside the colours of its patches; `maps` and `foreground` as `pca_colours`."""
    pairs = [
        [(Path(path).name, image), ('components', part)]
        for path, image, part in zip(paths, images, pca_colours(maps, foreground), strict=True)
    ]
    rows = -(-len(pairs) // (2 if len(pairs) > 4 else 1))  # many images stand in two columns
    return sheet([[tile for pair in pairs[row::rows] for tile in pair] for row in range(rows)])


def draw_neighbours(queries: dict, bank: dict, number: int = NEIGHBOURS) -> Image.Image:
    """A contact sheet: on the left each query, then the images nearest to it with the cosine of the features.

    Args:
        queries, bank: dict(features=(N, C), paths=list of files), as `embed` returns them. A query that is in the
            bank is no neighbour of itself.
        number: of neighbours.
    """
    known = torch.from_numpy(bank['features'])
    files = [Path(path).resolve() for path in bank['paths']]
    rows = []
    for path, feature in zip(queries['paths'], queries['features'], strict=True):
        others = torch.tensor([row for row, file in enumerate(files) if file != Path(path).resolve()], dtype=torch.long)
        tiles: list[tuple[str, Tensor | None]] = [(f'{Path(path).parent.name}/{Path(path).name}', _read(path))]
        if len(others):
            ((cosines, nearest),) = neighbours(torch.from_numpy(feature)[None], known[others], number)
            for cosine, row in zip(cosines[0].tolist(), others[nearest[0]].tolist(), strict=True):
                tiles.append((f'{files[row].parent.name} {cosine:.3f}', _read(bank['paths'][row])))
        rows.append(tiles)
    return sheet(rows)


def _read(path: str) -> Tensor:
    """An image file as float (3, H, W) in [0, 1]."""
    return torch.from_numpy(read_image(path)).permute(2, 0, 1).float() / 255


def sheet(rows: Sequence[Sequence[tuple[str, Tensor | None]]]) -> Image.Image:
    """Rows of titled tiles on white.

    Args:
        rows: of each tile its title and its image, float (3, H, W) in [0, 1] of any size, fitted into a square of SIDE
            pixels without changing its shape; None leaves the place empty.
    """
    cell, high = SIDE + MARGIN, SIDE + TITLE_HEIGHT + MARGIN
    picture = Image.new('RGB', (MARGIN + cell * max(map(len, rows)), MARGIN + high * len(rows)), 'white')
    draw = ImageDraw.Draw(picture)
    for row, tiles in enumerate(rows):
        for column, (title, image) in enumerate(tiles):
            left, top = MARGIN + cell * column, MARGIN + high * row
            draw.text((left, top), _shortened(title, draw), fill='black')
            if image is not None:
                picture.paste(to_pil_image(_fitted(image)), (left, top + TITLE_HEIGHT))
    return picture


def _fitted(image: Tensor) -> Tensor:
    """An image (3, H, W) with its longer side SIDE; patches stay squares, larger images are smoothed."""
    scale = SIDE / max(image.shape[1:])
    size = [max(1, round(side * scale)) for side in image.shape[1:]]
    if scale > 1:
        return F.interpolate(image[None].float(), size, mode='nearest-exact')[0].clamp(0, 1)
    return F.interpolate(image[None].float(), size, mode='bicubic', antialias=True)[0].clamp(0, 1)


def _shortened(title: str, draw: ImageDraw.ImageDraw) -> str:
    """A title that is no wider than a tile; what is lost is its beginning, the folders of a path."""
    title = title.encode('ascii', 'replace').decode()  # Pillow's font has no more
    while draw.textlength(title) > SIDE:
        title = '..' + title[3:]
    return title


def draw_points(points: np.ndarray, labels: Sequence[str]) -> Figure:
    """Points in a plane (N, 2), coloured by their labels; save it by `savefig`."""
    names = sorted(set(labels))
    colours = np.array(distinct_colours(len(names))) / 255
    figure = Figure(figsize=(9, 7), layout='constrained')
    axes = figure.add_subplot()
    for name, colour in zip(names, colours, strict=True):
        of_name = np.array([label == name for label in labels])
        axes.scatter(*points[of_name].T, s=12, color=colour, label=name)
    axes.set(xticks=[], yticks=[])
    if len(names) <= 20:  # more fill the picture
        axes.legend(loc='center left', bbox_to_anchor=(1, 0.5), frameon=False)
    return figure

"""What single patches of an image attend to: attention maps of chosen points, and pictures of them.

Shapes: P points, h x w the patch grid.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor

from beit_mm.features.extractor import FeatureExtractor
from beit_mm.models.vit import BEiTBackbone
from beit_mm.pictures.sheet import sheet
from beit_mm.positions import Grid
from beit_mm.terminal import UserError

MASS = 0.6  # of the attention, inside the contour
FINE = 8  # cells of the contour's grid along a patch: a contour cuts the corners of its cells


class ImageAttention(NamedTuple):
    """What points of an image attend to."""

    image: Tensor  # float (3, H, W) in [0, 1], as the model saw it before normalising
    points: list[tuple[float, float]]  # (x, y) of each, in pixels of the image as a viewer shows it
    patches: list[tuple[int, int]]  # (row, column) of each
    maps: Tensor  # (P, heads, h, w), of `attention_of_patches`


def attention_of_image(
    extractor: FeatureExtractor,
    image: str | Path,
    points: Sequence[str] = ('0.5,0.5',),
    layer: int = -1,
    softmax: bool = True,
) -> ImageAttention:
    """What points of an image file attend to.

    Args:
        extractor: of any BEiT or plain ViT, with `whole=True`.
        points: see `parse_point`.
        layer, softmax: see `attention_of_patches`.
    """
    extractor.check_whole()
    sample = extractor.reader.load(image)
    sides = sample['img'].shape[:2]
    places = [parse_point(text, sides) for text in points]
    pixels = extractor.reader.prepare(sample)['inputs']  # 3, H, W
    patch = extractor.backbone.patch_size
    patches = patches_at(places, sides, (pixels.shape[1] // patch, pixels.shape[2] // patch))
    normalised = (pixels.to(extractor.device).float() - extractor.mean) / extractor.std
    maps = attention_of_patches(extractor.backbone, normalised, patches, layer, softmax)
    return ImageAttention(pixels.float() / 255, places, patches, maps)


def parse_point(text: str, size: tuple[int, int]) -> tuple[float, float]:
    """'210,140' (pixels) or '0.5,0.25' (shares) as (x, y) in pixels of an image of (height, width)."""
    try:
        x, y = text.split(',')
        return float(x) * (size[1] if '.' in x else 1), float(y) * (size[0] if '.' in y else 1)
    except ValueError:
        expected = 'expected X,Y in pixels (210,140) or shares (0.5,0.25)'
        raise UserError(f'--points: {text!r} is no point; {expected}') from None


def patches_at(points: Sequence[tuple[float, float]], size: tuple[int, int], grid: Grid) -> list[tuple[int, int]]:
    """The patches (row, column) of a grid (h, w) in which points (x, y) of an image of (height, width) pixels lie."""
    height, width = size
    for x, y in points:
        if not (0 <= x < width and 0 <= y < height):
            sides = f'{width} x {height} pixels (width x height)'
            raise UserError(f'point {x:g},{y:g} lies outside of the image of {sides}')
    return [(int(y * grid[0] / height), int(x * grid[1] / width)) for x, y in points]


@torch.no_grad()
def attention_of_patches(
    backbone: BEiTBackbone, image: Tensor, patches: Sequence[tuple[int, int]], layer: int = -1, softmax: bool = True
) -> Tensor:
    """What patches of one image attend to, in every head of a layer.

    Args:
        backbone: in evaluation mode.
        image: (3, H, W) normalised.
        patches: (row, column) of each.
        layer: block, 0-based, negative from the end.
        softmax: False for the scores before the softmax, relative position bias included.

    Returns:
        float32 (P, heads, h, w) on the CPU. The class token's column is left out, so that after the softmax a map adds
        up to less than 1.

    Source: paper section 4.4; microsoft/unilm `beit2/visualize_attention.py`.
    """
    width = -(-image.shape[2] // backbone.patch_size)  # rounded up, as the input is padded
    queries = torch.tensor([[1 + row * width + column for row, column in patches]], device=image.device)  # 1, P
    attention, grid = backbone.attention_maps(image.unsqueeze(0), layer, queries, softmax)  # 1, heads, P, N
    return attention[0, :, :, 1:].transpose(0, 1).unflatten(-1, grid).float().cpu()  # P, heads, h, w


def largest_mass_mask(attention: Tensor, mass: float = MASS) -> Tensor:
    """The smallest set of patches, bool (..., h, w), that holds a share `mass` of the attention (..., h, w).

    Source: microsoft/unilm `beit2/visualize_attention.py`.
    """
    values, order = attention.double().flatten(-2).sort(dim=-1, descending=True, stable=True)  # ..., h*w
    before = values.cumsum(dim=-1) - values
    needed = before < mass * values.sum(dim=-1, keepdim=True)
    return torch.zeros_like(needed).scatter(-1, order, needed).view(attention.shape)


def draw_attention(
    image: Tensor, patches: Sequence[tuple[int, int]], maps: Tensor, mass: float | None = MASS
) -> Figure:
    """A sheet; for each point the image with its patch marked, the mean over the heads, and each head.

    Dark to red, yellow and white is the least to the most attention of the tile.

    Args:
        image: float (3, H, W) in [0, 1].
        patches: (row, column) of the patches that attend.
        maps: (P, heads, h, w), of `attention_of_patches`.
        mass: share of the attention that the contour encloses; None for no contour, as for scores.
    """
    titles = ['mean of heads', *(f'head {head}' for head in range(maps.shape[1]))]
    gray = image.mean(dim=0, keepdim=True).expand(3, -1, -1)
    tiles = [('image', image), *((title, gray) for title in titles)]
    columns = math.ceil(math.sqrt(len(tiles) * image.shape[1] / image.shape[2]))
    rows = [tiles[first : first + columns] for first in range(0, len(tiles), columns)]
    figure = sheet(rows * len(patches), side=240)
    panels = iter(figure.axes)
    height, width = (side / cells for side, cells in zip(image.shape[1:], maps.shape[2:], strict=True))  # of a patch
    for (row, column), attention in zip(patches, maps, strict=True):
        corner = column * width - 0.5, row * height - 0.5
        next(panels).add_patch(Rectangle(corner, width, height, fill=False, edgecolor='red', linewidth=2))
        for values in (attention.mean(dim=0), *attention):
            axes = next(panels)
            extent = axes.images[0].get_extent()
            axes.imshow(values.numpy(), cmap='hot', alpha=0.65, interpolation='nearest', extent=extent)
            if mass is not None:
                inside = np.pad(np.kron(largest_mass_mask(values, mass).numpy(), np.ones((FINE, FINE))), 1)
                ys, xs = (
                    (np.arange(cells) - 0.5) * side / (cells - 2) - 0.5
                    for cells, side in zip(inside.shape, image.shape[1:], strict=True)
                )
                axes.autoscale(False)
                axes.contour(xs, ys, inside, [0.5], colors='cyan', linewidths=1)
    return figure

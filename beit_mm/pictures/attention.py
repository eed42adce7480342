"""What single patches of an image attend to: attention maps of chosen points, and pictures of them.

Shapes: P points, h x w the patch grid.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from mmengine.device import get_device
from PIL import Image, ImageDraw
from torch import Tensor
from torchvision.transforms.functional import to_pil_image
from torchvision.utils import make_grid

from beit_mm.checkpoint.checkpoint import CheckpointInput
from beit_mm.checkpoint.names import IMAGENET
from beit_mm.datasets.reading import read_image
from beit_mm.datasets.transforms import MAX_LONG_SIDE, resize_bicubic, whole_grid
from beit_mm.models.vit import BEiTBackbone
from beit_mm.positions import Grid
from beit_mm.terminal import UserError

MASS = 0.6  # of the attention, inside the contour
TILE = 240  # pixels of a tile's longer side
MARGIN = 4  # pixels between tiles
TITLE_HEIGHT = 14  # pixels above each tile
OPACITY = 0.65  # of the colours over the image
CONTOUR = (0.0, 1.0, 1.0)
MARK = (1.0, 0.0, 0.0)


class ImageAttention(NamedTuple):
    """What points of an image attend to.

    Attributes:
        image: float (3, H, W) in [0, 1], as the model saw it before normalising.
        points: (x, y) of each, in pixels of the image as a viewer shows it.
        patches: (row, column) of each.
        maps: (P, heads, h, w), of `attention_of_patches`.
        layer: block, 0-based.
        mean, std: by which the image was normalised, pixels 0-255.
    """

    image: Tensor
    points: list[tuple[float, float]]
    patches: list[tuple[int, int]]
    maps: Tensor
    layer: int
    mean: Sequence[float]
    std: Sequence[float]


def attention_of_image(
    checkpoint: CheckpointInput,
    image: str | Path,
    points: Sequence[str] = ('0.5,0.5',),
    layer: int = -1,
    softmax: bool = True,
    short_side: int | None = None,
    long_side: int | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    device: str | None = None,
) -> ImageAttention:
    """What points of an image file attend to, with a checkpoint and nothing else.

    Args:
        checkpoint: of any BEiT or plain ViT, see `Checkpoint.open`.
        image: path.
        points: see `parse_point`.
        layer, softmax: see `attention_of_patches`.
        short_side, long_side: pixels of the resized image; None: the short side is the checkpoint's.
        mean, std: of pixels 0-255; None: the checkpoint's, or ImageNet's.
        device: such as 'cpu'; None for what there is.

    Raises:
        CheckpointError: no BEiT.
        ValueError: no point, one outside of the image, or a model of other than RGB images.
        UnreadableImageError: no image.
    """
    pixels = read_image(str(image))
    sides = pixels.shape[:2]
    places = [parse_point(text, sides) for text in points]
    backbone = BEiTBackbone.from_checkpoint(checkpoint).to(device or get_device())
    if (channels := backbone.patch_embed.proj.in_channels) != 3:
        raise UserError(f'{checkpoint}: a model of images with {channels} bands; expected RGB images, 3 bands')
    patch = backbone.patch_size
    short_side = short_side or min(backbone.grid) * patch
    wanted, most = (math.inf, long_side) if long_side else (short_side, MAX_LONG_SIDE * short_side)
    grid = whole_grid(sides, wanted, most, patch)
    patches = patches_at(places, sides, grid)
    resized = torch.from_numpy(resize_bicubic(pixels, (grid[0] * patch, grid[1] * patch))).permute(2, 0, 1).float()
    known = {**IMAGENET, **backbone.load_report.preprocessing}
    mean, std = mean or known['mean'], std or known['std']
    normalised = (resized - torch.tensor(mean).view(-1, 1, 1)) / torch.tensor(std).view(-1, 1, 1)
    normalised = normalised.to(next(backbone.parameters()).device)
    maps = attention_of_patches(backbone, normalised, patches, layer, softmax)
    return ImageAttention(resized / 255, places, patches, maps, layer % backbone.num_layers, mean, std)


def parse_point(text: str, size: tuple[int, int]) -> tuple[float, float]:
    """'210,140' or '0.5,0.25' as (x, y) in pixels of an image of (height, width).

    Raises:
        ValueError: it is neither.
    """
    try:
        x, y = (
            float(number) * (side if '.' in number else 1)
            for number, side in zip(text.split(','), size[::-1], strict=True)
        )
    except ValueError:
        raise UserError(
            f'--points: {text!r} is no point; expected X,Y in pixels (210,140) or shares (0.5,0.25)'
        ) from None
    return x, y


def patches_at(points: Sequence[tuple[float, float]], size: tuple[int, int], grid: Grid) -> list[tuple[int, int]]:
    """The patches (row, column) in which points lie.

    Args:
        points: (x, y) in pixels of the image.
        size: height and width of the image.
        grid: patch grid (h, w) that the whole image is cut into.

    Raises:
        ValueError: a point outside of the image.
    """
    patches = []
    for x, y in points:
        if not (0 <= x < size[1] and 0 <= y < size[0]):
            raise UserError(
                f'point {x:g},{y:g} lies outside of the image of {size[1]} x {size[0]} pixels (width x height)'
            )
        patches.append((int(y * grid[0] / size[0]), int(x * grid[1] / size[1])))
    return patches


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
    """The smallest set of patches that holds a share of the attention.

    Args:
        attention: (..., h, w), not negative; need not add up to 1.
        mass: the share, between 0 and 1.

    Returns:
        bool (..., h, w), True in the set.

    Source: microsoft/unilm `beit2/visualize_attention.py`.
    """
    values, order = attention.double().flatten(-2).sort(dim=-1, descending=True, stable=True)  # ..., h*w
    before = values.cumsum(dim=-1) - values
    needed = before < mass * values.sum(dim=-1, keepdim=True)
    return torch.zeros_like(needed).scatter(-1, order, needed).view(attention.shape)


def draw_attention(image: Tensor, patch: tuple[int, int], attention: Tensor, mass: float | None = MASS) -> Image.Image:
    """One picture: the image with the patch marked, the mean over the heads, and each head.

    Dark to red, yellow and white is the least to the most attention of the tile.

    Args:
        image: float (3, H, W) in [0, 1].
        patch: (row, column) of the patch that attends.
        attention: (heads, h, w), of `attention_of_patches`.
        mass: share of the attention that the contour encloses; None for no contour, as for scores.
    """
    maps = torch.cat([attention.mean(dim=0, keepdim=True), attention])  # 1 + heads, h, w
    scale = TILE / max(image.shape[1:])
    size = (max(1, round(image.shape[1] * scale)), max(1, round(image.shape[2] * scale)))
    image = F.interpolate(image[None].float().cpu(), size, mode='bicubic', antialias=True)[0].clamp(0, 1)
    marked = torch.zeros(maps.shape[1:], dtype=torch.bool)
    marked[patch] = True
    tiles = [_outline(image, marked, MARK, thickness=2)]
    for values, inside in zip(maps, largest_mass_mask(maps, mass or 0), strict=True):
        tile = _overlay(image, values)
        tiles.append(tile if mass is None else _outline(tile, inside, CONTOUR))
    titles = ['image', 'mean of heads', *(f'head {head}' for head in range(len(attention)))]
    columns = math.ceil(math.sqrt(len(tiles) * size[0] / size[1]))
    return _titled(tiles, titles, columns)


def _overlay(image: Tensor, values: Tensor) -> Tensor:
    """An image (3, H, W) under the colours of a map (h, w), from its lowest to its highest value."""
    low, high = values.min(), values.max()
    heat = (values - low) / (high - low).clamp(min=torch.finfo(values.dtype).tiny)
    heat = _enlarge(heat, image.shape[1:])
    colours = torch.stack([3 * heat, 3 * heat - 1, 3 * heat - 2]).clamp(0, 1)  # black, red, yellow, white
    gray = image.mean(dim=0)
    return torch.lerp(gray, colours, OPACITY)


def _outline(image: Tensor, inside: Tensor, colour: tuple[float, float, float], thickness: int = 1) -> Tensor:
    """An image (3, H, W) with a line along the inner border of a set of patches, bool (h, w)."""
    inside = _enlarge(inside.float(), image.shape[1:])
    outside = F.pad(1 - inside, [thickness] * 4, value=1)  # beyond the image too
    core = 1 - F.max_pool2d(outside[None], 1 + 2 * thickness, stride=1)[0]
    return torch.where(inside > core, torch.tensor(colour)[:, None, None], image)


def _enlarge(values: Tensor, size: Sequence[int]) -> Tensor:
    """(h, w) to (H, W), each value a rectangle."""
    return F.interpolate(values[None, None], tuple(size), mode='nearest-exact')[0, 0]


def _titled(tiles: list[Tensor], titles: list[str], columns: int) -> Image.Image:
    """Tiles (3, H, W) in rows of `columns`, each with a title above it."""
    raised = [F.pad(tile, (0, 0, TITLE_HEIGHT, 0), value=1.0) for tile in tiles]
    picture = to_pil_image(make_grid(raised, nrow=columns, padding=MARGIN, pad_value=1.0))
    draw = ImageDraw.Draw(picture)
    height, width = (side + MARGIN for side in raised[0].shape[1:])
    for index, title in enumerate(titles):
        draw.text((MARGIN + index % columns * width, MARGIN + index // columns * height), title, fill='black')
    return picture

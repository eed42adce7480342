"""Sheets of titled pictures, reconstructions, attention maps and curves.

Shapes: P points, h x w the patch grid.
"""

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib import colormaps, get_data_path
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from mmengine.dist import master_only
from mmengine.hooks import Hook
from mmengine.runner import Runner
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from beit_mm.datasets.reading import read_image
from beit_mm.datasets.transforms import TwoViewCenterCrop
from beit_mm.engine.logs import written_if_possible
from beit_mm.engine.steps import unwrap
from beit_mm.errors import UserError, log
from beit_mm.features.evaluation import neighbours
from beit_mm.features.extractor import FeatureExtractor
from beit_mm.models.beit import BEiTPretrainer
from beit_mm.models.tokenizers.base import TrainableTokenizer
from beit_mm.positions import Grid
from beit_mm.registry import HOOKS

SIDE = 160  # pixels of a tile's longer side
MARGIN = 4  # pixels between tiles
TITLE_HEIGHT = 16  # pixels above a row with titles
FONT = get_data_path() + '/fonts/ttf/DejaVuSans{}.ttf'  # the font of matplotlib's figures
FONT_SIZE = 11  # pixels, of titles in the monospaced font
CHARACTER = 0.61 * FONT_SIZE  # its width in pixels
NUM_NEIGHBOURS = 5  # drawn beside each query
MASS = 0.6  # share of the attention inside the contour
ATTENTION_SIDE = 240  # pixels of a tile's longer side
HEAT = 0.65  # opacity of the attention's colours over the image
POINT, CONTOUR = (255, 0, 0), (0, 255, 255)
ATTENTION_LEGEND = [  # colours of `draw_attention`
    ('the point, whose patch attends', POINT),
    (f'encloses {MASS:.0%} of the attention', CONTOUR),
    ('the most attention', (255, 255, 200)),
    ('no attention', (40, 20, 20)),
]

Scalars = dict[int, dict[str, float]]  # step -> name -> number


def sheet(rows: Sequence[Sequence[tuple[str, Tensor]]], side: int = SIDE) -> Image.Image:
    """Rows of titled pictures on white.

    Args:
        rows: title and picture of each tile; a picture is float (3, H, W) in [0, 1], of any size, and keeps its aspect.
            A title may have several lines. A line that is too long loses its middle.
        side: pixels of a tile's longer side.
    """
    shapes = [image.shape[1:] for row in rows for _, image in row]
    height = max(1, round(side * max(min(1, h / w) for h, w in shapes)))
    width = max(1, round(side * max(min(1, w / h) for h, w in shapes)))
    tops = [MARGIN]  # of each row's pictures, and of the row that would follow
    for row in rows:
        tops[-1] += TITLE_HEIGHT * max(title.count('\n') + bool(title) for title, _ in row)
        tops.append(tops[-1] + height + MARGIN)
    drawn = Image.new('RGB', (MARGIN + max(map(len, rows)) * (width + MARGIN), tops[-1]), 'white')
    pen, font = ImageDraw.Draw(drawn), ImageFont.truetype(FONT.format('Mono'), FONT_SIZE)
    for row, top in zip(rows, tops, strict=False):
        for column, (title, image) in enumerate(row):
            left = MARGIN + column * (width + MARGIN)
            drawn.paste(fitted(image, height, width), (left, top))
            for line, text in enumerate(reversed(title.split('\n'))):
                text, baseline = shortened(text, int(width / CHARACTER)), top - 4 - line * TITLE_HEIGHT
                pen.text((left, baseline), text, fill='black', font=font, anchor='ls')
    return drawn


def fitted(image: Tensor, height: int, width: int) -> Image.Image:
    """A picture, float (3, h, w) in [0, 1], as large as fits into this size in pixels."""
    levels = image.detach().float().cpu().clamp(0, 1).permute(1, 2, 0) * 255
    tile = Image.fromarray(levels.round().to(torch.uint8).numpy())
    scale = min(width / tile.width, height / tile.height)
    size = max(1, round(scale * tile.width)), max(1, round(scale * tile.height))
    sharp = scale >= 3 or scale == round(scale)  # pixels of small pictures, which are patches, keep their edges
    return tile.resize(size, Image.Resampling.NEAREST if sharp else Image.Resampling.BICUBIC)


def shortened(title: str, length: int) -> str:
    """A title of at most `length` characters, all of which Pillow can draw, without its middle if it is longer."""
    title = ''.join(char if char.isprintable() else '?' for char in title)
    kept = max(0, length - 2)
    return title if len(title) <= length else f'{title[: kept // 2]}..{title[len(title) - kept + kept // 2 :]}'


def sheet_of_columns(columns: Mapping[str, Tensor], channels: Sequence[int] = (0, 1, 2)) -> Image.Image:
    """A sheet of `columns`, title -> float (B, C, H, W) in [0, 1], with a row for each image of the batch.

    `channels` are drawn as red, green and blue; of images with one or two, the first is drawn in gray.
    """
    drawn = [images[:, list(channels) if images.shape[1] > 2 else [0, 0, 0]] for images in columns.values()]
    first, *others = ([('', image) for image in row] for row in zip(*drawn, strict=True))
    titled = [(title, image) for title, (_, image) in zip(columns, first, strict=True)]
    return sheet([titled, *others])


def draw_neighbours(queries: Mapping[str, Any], bank: Mapping[str, Any], names: Mapping[str, str]) -> Image.Image:
    """Draws each query beside the images of a bank with the closest features, titled with their cosine.

    `queries` and `bank` are dict(paths=files, features=(N, C)), as `embed` returns them. `names` are the classes of the
    files that have one.
    """
    rows = []
    features, known = torch.as_tensor(queries['features']), torch.as_tensor(bank['features'])
    cosines, nearest = map(torch.cat, zip(*neighbours(features, known, NUM_NEIGHBOURS + 1), strict=True))
    for query, values, numbers in zip(queries['paths'], cosines, nearest, strict=True):
        files = [(bank['paths'][number], f' {cosine:.3f}') for cosine, number in zip(values, numbers, strict=True)]
        others = [(path, cosine) for path, cosine in files if Path(path).resolve() != Path(query).resolve()]
        shown = [(query, ''), *others[:NUM_NEIGHBOURS]]
        rows.append([(names.get(path, '') + cosine, center_tile(path)) for path, cosine in shown])
    return sheet(rows)


def center_tile(file: str, side: int = SIDE) -> Tensor:
    """The middle of an image, as the model sees it, float (3, side, side) in [0, 1]."""
    middle = TwoViewCenterCrop(side, None)(dict(img=read_image(file)))['images']
    return torch.from_numpy(middle).permute(2, 0, 1) / 255


def with_legend(image: Image.Image, entries: Sequence[tuple[str, Sequence[int]]]) -> Image.Image:
    """An image above a white strip with a square of each colour (red, green, blue) and its name, in columns."""
    size = max(14, image.width // 40)  # pixels
    font = ImageFont.truetype(FONT.format(''), size)
    names = [shortened(name, 40) for name, _ in entries]
    cell = round(max(map(font.getlength, names), default=0) + 3 * size)
    columns = max(1, image.width // cell)
    height = image.height + round((1.5 * math.ceil(len(entries) / columns) + 0.5) * size)
    drawn = Image.new('RGB', (max(image.width, cell), height), 'white')  # a name may be wider than the image
    drawn.paste(image)
    pen = ImageDraw.Draw(drawn)
    for number, (name, (_, colour)) in enumerate(zip(names, entries, strict=True)):
        left = number % columns * cell + size // 2
        top = image.height + round((1.5 * (number // columns) + 0.5) * size)
        pen.rectangle((left, top, left + size, top + size), fill=tuple(colour), outline='black')
        pen.text((left + 1.5 * size, top + size / 2), name, fill='black', font=font, anchor='lm')
    return drawn


@torch.no_grad()
def reconstructed(model: BEiTPretrainer | TrainableTokenizer, inputs: dict) -> dict[str, Tensor]:
    """What a model saw, predicted and should have predicted, as columns of a sheet.

    The inputs are a batch of the model's data preprocessor. Returns title -> float (B, C, H, W) in [0, 1].
    """
    if isinstance(model, TrainableTokenizer):
        return {'image': inputs['images'], 'tokens, decoded': model.decode(model.encode(inputs['images']))}
    mask, targets, side = inputs['mask'], model.target_generator, model.backbone.patch_size
    image = model.data_preprocessor.denormalize(inputs['images'])  # B, C, H, W, without the backbone's padding
    columns = dict(image=image)
    if mask is not None:
        columns['masked'] = torch.where(masked_pixels(mask, side, image), 0.5, image)
    if mask is not None and targets.gives == 'features':
        columns['nearest masked patch'] = nearest_patches(model, inputs, image)
    if targets.can_decode:
        tokens = targets.encode(inputs['tokenizer_images'])  # B, h, w
        columns['prediction'] = decoded_prediction(model, inputs, image, tokens)
        columns['tokens, decoded'] = targets.decode(tokens)
    return columns


def masked_pixels(mask: Tensor, side: int, image: Tensor) -> Tensor:
    """Which pixels of the images (B, C, H, W) lie in masked patches of `side` pixels, bool (B, 1, H, W)."""
    height, width = image.shape[2:]
    return F.interpolate(mask[:, None].float(), scale_factor=side)[:, :, :height, :width] > 0


def decoded_prediction(model: BEiTPretrainer, inputs: dict, image: Tensor, tokens: Tensor) -> Tensor:
    """The images (B, C, H, W) with what is predicted for the masked patches, given the true tokens (B, h, w).

    It is decoded from the probabilities of all tokens, as the likeliest of an uncertain patch is often black or white.
    """
    mask, tokenizer, side = inputs['mask'], model.target_generator, model.backbone.patch_size
    weights = model.head(model.hidden_states(inputs, None)).float().softmax(dim=-1)  # B, h*w, vocab_size
    weights = weights.unflatten(1, tokens.shape[1:])
    if mask is None:
        return tokenizer.decode(weights.permute(0, 3, 1, 2))
    weights[~mask] = F.one_hot(tokens[~mask], tokenizer.vocab_size).float()
    predicted = tokenizer.decode(weights.permute(0, 3, 1, 2))
    size = [side * number for number in mask.shape[1:]]
    predicted = F.interpolate(predicted, size, mode='bilinear')[:, :, : image.shape[2], : image.shape[3]]
    return torch.where(masked_pixels(mask, side, image), predicted, image)


def nearest_patches(model: BEiTPretrainer, inputs: dict, image: Tensor) -> Tensor:
    """The images (B, C, H, W), each masked patch replaced by the masked patch with the nearest features.

    The model saw none of these patches, and a right prediction restores the image. Nearness is the cosine with the
    predicted features, after subtracting the teacher's mean, which all patches have in common.
    """
    side, (height, width), chosen = model.backbone.patch_size, image.shape[2:], inputs['mask'].flatten(1)
    known = model.target_generator.targets(inputs, None)[chosen]  # M, T
    predicted = model.head(model.hidden_states(inputs, None))[chosen].float()
    mean = known.mean(dim=0)
    bank = F.normalize(known - mean, dim=-1)
    nearest = torch.cat([((some - mean) @ bank.T).argmax(dim=1) for some in predicted.split(1024)])
    pixels = F.pixel_unshuffle(F.pad(image, (0, -width % side, 0, -height % side)), side)  # B, C*side*side, h, w
    patches = pixels.flatten(2).mT.contiguous()
    patches[chosen] = patches[chosen][nearest]
    return F.pixel_shuffle(patches.mT.reshape(pixels.shape), side)[:, :, :height, :width]


@HOOKS.register_module()
class ReconstructionHook(Hook):
    """Shows what a pretraining or a tokenizer makes of eight held-out images, at each validation and test.

    The pictures go to the run's visualizer, and as `iter_<step>.png` and `test.png` to `pictures/` in its folder.

    Args:
        channels: the three bands that are drawn as red, green and blue, counted from 0; of images with one or two
            bands, the first is drawn in gray.
    """

    def __init__(self, channels: Sequence[int] = (0, 1, 2)):
        self.channels = list(channels)

    @master_only
    def _after_iter(
        self, runner: Runner, batch_idx: int, data_batch: dict, outputs: list | None = None, mode: str = 'train'
    ) -> None:
        model = unwrap(runner)
        if mode == 'train' or batch_idx > 0 or not isinstance(model, (BEiTPretrainer, TrainableTokenizer)):
            return
        if not getattr(model, 'can_decode', True):  # VQKD without a pixel decoder
            return
        loader = runner.test_dataloader if mode == 'test' else runner.val_dataloader
        number = min(8, len(loader.dataset))  # spread evenly, so that images sorted by class are of different classes
        samples = [loader.dataset[i * len(loader.dataset) // number] for i in range(number)]
        columns = reconstructed(model, model.data_preprocessor(loader.collate_fn(samples))['inputs'])
        drawn = sheet_of_columns(columns, self.channels)
        path = Path(runner.work_dir, 'pictures', 'test.png' if mode == 'test' else f'iter_{runner.iter}.png')
        with written_if_possible(runner.work_dir):
            # MLflow's backend fails without the extension
            runner.visualizer.add_image(f'{mode}_reconstruction.png', np.asarray(drawn), step=runner.iter)
            path.parent.mkdir(parents=True, exist_ok=True)
            drawn.save(path)
            log(f'Pictures: {path}')


@HOOKS.register_module()
class DrawingHook(Hook):
    """Draws what a classifier predicts of each tested image into `folder`; numbered, as images may share a name."""

    def __init__(self, folder: str):
        self.folder = folder

    def after_test_iter(self, runner: Runner, batch_idx: int, data_batch: dict, outputs: Sequence) -> None:
        first = batch_idx * runner.test_dataloader.batch_size + 1
        for number, (image, sample) in enumerate(zip(data_batch['inputs'], outputs, strict=True), start=first):
            name = Path(sample.get('img_path', 'image')).name  # CIFAR's images are not files
            path = f'{self.folder}/{name}_{number}.png'
            runner.visualizer.visualize_cls(image.permute(1, 2, 0).numpy().astype('uint8'), sample, out_file=path)


class ImageAttention(NamedTuple):
    """What points of an image attend to."""

    image: Tensor  # float (3, H, W) in [0, 1], as the model saw it before normalising
    patches: list[tuple[int, int]]  # (row, column) that each point lies in
    maps: Tensor  # float32 (P, heads, h, w), on the CPU; only the patches' columns, so a map adds up to less than 1


@torch.no_grad()
def attention_of_image(
    extractor: FeatureExtractor, image: str | Path, points: Sequence[str] = ('0.5,0.5',), layer: int = -1
) -> ImageAttention:
    """What points of an image file attend to, in every head of a layer.

    Args:
        extractor: for any BEiT or plain ViT, with `whole=True`.
        points: see `patch_at`.
        layer: block, 0-based, negative from the end.

    Source: paper section 4.4; microsoft/unilm `beit2/visualize_attention.py`.
    """
    extractor.check_whole()
    sample = extractor.reader.load(image)
    size = sample['img'].shape[:2]
    pixels = extractor.reader.prepare(sample)['inputs']  # 3, H, W, of whole patches
    backbone = extractor.backbone
    grid = pixels.shape[1] // backbone.patch_size, pixels.shape[2] // backbone.patch_size
    patches = [patch_at(point, size, grid) for point in points]
    normalised = (pixels.to(extractor.device).float() - extractor.mean) / extractor.std
    first = backbone.num_prefix_tokens
    queries = torch.tensor([[first + row * grid[1] + column for row, column in patches]], device=extractor.device)
    attention, _ = backbone.attention_maps(normalised[None], layer, queries)  # 1, heads, P, N
    maps = attention[0, :, :, first:].transpose(0, 1).unflatten(-1, grid).float().cpu()
    return ImageAttention(pixels.float() / 255, patches, maps)


def patch_at(point: str, size: tuple[int, int], grid: Grid) -> tuple[int, int]:
    """The patch (row, column) of a grid (h, w) that holds a point 'X,Y' of an image of (height, width) pixels.

    X and Y are pixels ('210,140'), or with a decimal point shares of the sides ('0.5,0.25').
    """
    height, width = size
    try:
        first, second = point.split(',')
        x = float(first) * (width if '.' in first else 1)
        y = float(second) * (height if '.' in second else 1)
    except (AttributeError, ValueError):  # not a string, or not two numbers
        x = y = -1.0
    if not (0 <= x < width and 0 <= y < height):
        raise UserError(
            f'--points: {point!r} is not a point of the image; '
            f"expected X,Y within {width} x {height} pixels ('210,140') or as shares ('0.5,0.25')"
        )
    return int(y * grid[0] / height), int(x * grid[1] / width)


def largest_mass_mask(attention: Tensor, mass: float = MASS) -> Tensor:
    """The smallest set of patches, bool (..., h, w), that holds a share `mass` of the attention (..., h, w).

    Source: microsoft/unilm `beit2/visualize_attention.py`.
    """
    values, order = attention.double().flatten(-2).sort(dim=-1, descending=True, stable=True)  # ..., h*w
    before = values.cumsum(dim=-1) - values
    needed = before < mass * values.sum(dim=-1, keepdim=True)
    return torch.zeros_like(needed).scatter(-1, order, needed).view(attention.shape)


def draw_attention(trained: ImageAttention, control: ImageAttention) -> Image.Image:
    """A sheet: for each point the image, the mean over the heads, that of `control`, and each head."""
    image, patches, maps = trained
    means = [weights.maps.mean(dim=1, keepdim=True) for weights in (trained, control)]  # P, 1, h, w
    drawn = torch.cat([*means, maps], dim=1)  # P, tiles, h, w
    titles = ['mean of heads', 'random weights, same scale', *(f'head {head}' for head in range(maps.shape[1]))]
    scale = ATTENTION_SIDE / max(image.shape[1:])
    size = tuple(max(1, round(scale * pixels)) for pixels in image.shape[1:])
    image = F.interpolate(image[None], size, mode='bilinear', antialias=True)[0]
    columns = math.ceil(math.sqrt((1 + len(titles)) * image.shape[1] / image.shape[2]))
    rows = []
    for (row, column), attention in zip(patches, drawn, strict=True):
        point = torch.zeros(maps.shape[2:], dtype=torch.bool)
        point[row, column] = True
        highest = attention.amax(dim=(1, 2)).clamp(min=torch.finfo().tiny)
        highest[1] = highest[0]  # random weights are drawn at the scale of the mean of the heads
        tiles = [('image', outlined(image, point, POINT, 2))]
        for title, values, most in zip(titles, attention, highest, strict=True):
            tiles.append((title, with_heat(image, values, most)))
        rows += [tiles[first : first + columns] for first in range(0, len(tiles), columns)]
    return sheet(rows, ATTENTION_SIDE)


def with_heat(image: Tensor, attention: Tensor, highest: Tensor) -> Tensor:
    """An image (3, H, W) in gray under the colours of attention (h, w), `highest` the brightest, with its contour."""
    colours = torch.from_numpy(colormaps['hot']((attention / highest).numpy())[..., :3]).float().permute(2, 0, 1)
    heat = F.interpolate(colours[None], image.shape[1:], mode='nearest-exact')[0]
    mixed = (1 - HEAT) * image.mean(dim=0, keepdim=True) + HEAT * heat
    return outlined(mixed, largest_mass_mask(attention), CONTOUR)


def outlined(image: Tensor, mask: Tensor, colour: Sequence[int], width: int = 1) -> Tensor:
    """An image (3, H, W) with a line, `width` pixels wide, around the patches of a mask, bool (h, w), inside them."""
    inside = F.interpolate(mask.float()[None, None], image.shape[1:], mode='nearest-exact')[0]  # 1, H, W
    outside = F.pad(1 - inside, [width] * 4, value=1.0)
    outside = F.max_pool2d(outside, 2 * width + 1, stride=1)  # 1, H, W; `width` pixels wider
    return torch.where(inside * outside > 0, torch.tensor(colour)[:, None, None] / 255, image)


def read_scalars(work_dir: str | Path) -> tuple[Scalars, Scalars]:
    """What a run has logged in training and in validation, by step; a later start of the run overrides an earlier."""
    training: Scalars = {}
    validation: Scalars = {}
    for path in sorted(Path(work_dir).glob('*/vis_data/scalars.json')):
        for line in path.read_text().splitlines():
            with suppress(json.JSONDecodeError):  # a run that was killed may leave half a line
                row = json.loads(line)
                (training if 'iter' in row else validation)[row['step']] = row
    training = dict(sorted(training.items()))
    ends = {row['epoch']: step for step, row in training.items() if 'epoch' in row}
    if max(validation, default=0) > max(ends, default=0):  # validations are not logged by epoch, but by step
        ends = {}
    return training, {ends.get(step, step): row for step, row in sorted(validation.items())}


def draw_runs(runs: Mapping[str, tuple[Scalars, Scalars]], keys: Sequence[str], columns: int = 2) -> Figure:
    """A panel for each key, with a curve of each run (from `read_scalars`) and one with dots of its validations."""
    columns = min(len(keys), columns)
    rows = math.ceil(len(keys) / columns)
    figure = Figure(figsize=(6 * columns, 3.5 * rows), layout='constrained')
    panels = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes, key in zip(panels, keys, strict=False):
        for number, (name, (training, validation)) in enumerate(runs.items()):
            for scalars, style, label in ((training, '-', name), (validation, 'o--', f'{name}, validation')):
                points = {step: row[key] for step, row in scalars.items() if key in row}
                if points:
                    axes.plot([*points], [*points.values()], style, color=f'C{number}', label=label, markersize=4)
        axes.set(xlabel='step', ylabel=key)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend(fontsize=7)
    for axes in panels[len(keys) :]:
        axes.remove()
    return figure

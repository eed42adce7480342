"""Pictures of what a config trains on and how: its samples, its masks, the curves of its runs."""

import copy
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from mmengine.config import Config
from mmengine.dataset import default_collate
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from beit_mm.datasets.image_folder import UnlabeledImages
from beit_mm.datasets.masking import BlockwiseMask, RandomMask
from beit_mm.datasets.samplers import SampleKey, seed_generators
from beit_mm.datasets.segmentation_folder import distinct_colours
from beit_mm.models.beit import TwoViewDataPreprocessor
from beit_mm.models.tokenizers.base import Tokenizer
from beit_mm.pictures.pictures import titled_grid
from beit_mm.registry import DATASETS, MODELS, TRANSFORMS
from beit_mm.terminal import UserError

MASK_SHADE = 0.5  # gray that is laid over masked patches

Scalars = dict[int, dict[str, float]]  # step -> name -> number


# --- samples --------------------------------------------------------------------------------------


def training_dataset(cfg: Config) -> Dataset:
    """The training images of a config, with its pipeline."""
    loader = cfg.get('train_dataloader')
    if not loader:
        raise UserError('the config has no train_dataloader; expected the config of a training')
    return DATASETS.build(copy.deepcopy(loader['dataset']))


def draw_training_samples(
    cfg: Config,
    number: int = 8,
    seed: int = 0,
    epoch: int = 0,
    tokens: bool = True,
    channels: Sequence[int] = (0, 1, 2),
) -> Image.Image:
    """A sheet of training samples as the model gets them, a row each, spread evenly over the dataset.

    Of a pretraining: the first view; the same with its masked patches gray; the tokenizer's view; its visual tokens,
    decoded where the tokenizer can, else a colour for each; DINO's other crops. Of other trainings the images, and
    label maps as colours.

    Args:
        cfg: a config whose `default_scope` is set.
        number: of samples.
        seed, epoch: of which the crops, jitter and masks are.
        tokens: False does without the tokenizer, and its weights.
        channels: of images with many bands, the three that are drawn.
    """
    dataset = training_dataset(cfg)
    samples = []
    for row in range(min(number, len(dataset))):
        key = SampleKey(seed, epoch, row * len(dataset) // min(number, len(dataset)))
        seed_generators(key)
        samples.append(dataset[key if isinstance(dataset, UnlabeledImages) else key.index])
    if isinstance(samples[0]['inputs'], dict):
        return titled_grid(view_columns(cfg, default_collate(samples), tokens), channels)
    columns = dict(image=torch.stack([sample['inputs'] for sample in samples]) / 255)
    if 'gt_sem_seg' in samples[0]['data_samples']:
        palette = torch.full((256, 3), 1.0)  # what is ignored is white
        colours = torch.tensor(dataset.metainfo['palette']) / 255
        palette[: len(colours)] = colours
        maps = torch.stack([sample['data_samples'].gt_sem_seg.data[0] for sample in samples])  # B, H, W
        columns['labels'] = palette[maps.long()].permute(0, 3, 1, 2)
    return titled_grid(columns, channels)


@torch.no_grad()
def view_columns(cfg: Config, batch: dict, tokens: bool = True) -> dict[str, Tensor]:
    """Title -> float (B, C, H, W) in [0, 1] of a pretraining's batch, see `draw_training_samples`."""
    preprocessor = MODELS.build(cfg.model.data_preprocessor)
    if not isinstance(preprocessor, TwoViewDataPreprocessor):
        raise UserError(f'views of a {type(preprocessor).__name__} cannot be drawn; expected a TwoViewDataPreprocessor')
    inputs = preprocessor(batch)['inputs']
    image = preprocessor.denormalize(inputs['images'])
    columns = {'first view': image}
    if (mask := inputs['mask']) is not None:
        columns['masked'] = torch.where(enlarged(mask, image.shape[2:]), MASK_SHADE, image)
    if (second := inputs['tokenizer_images']) is not None:
        columns["tokenizer's view"] = second
        config = cfg.model.get('target_generator')
        if tokens and config and isinstance(tokenizer := MODELS.build(config), Tokenizer):
            columns.update(token_column(tokenizer.eval(), second))
    for name in ('second_images', 'local_images'):
        if (crops := inputs.get(name)) is not None:
            parts = preprocessor.denormalize(crops).split(len(image))
            title = name.split('_')[0] + ' crop'
            columns.update({title + f' {i}' * (len(parts) > 1): part for i, part in enumerate(parts)})
    return columns


def enlarged(mask: Tensor, size: Sequence[int]) -> Tensor:
    """A mask of patches, bool (B, h, w), as one of pixels, bool (B, 1, H, W)."""
    return F.interpolate(mask[:, None].float(), tuple(size), mode='nearest-exact') > 0


def token_column(tokenizer: Tokenizer, images: Tensor) -> dict[str, Tensor]:
    """Title -> the visual tokens of images (B, C, H, W): decoded, or each word of the vocabulary in a colour."""
    ids = tokenizer.encode(images)  # B, h, w
    if tokenizer.can_decode:
        return {'tokens, decoded': tokenizer.decode(ids)}
    colours = torch.tensor(distinct_colours(tokenizer.vocab_size)) / 255
    return {'tokens as colours': colours[ids].permute(0, 3, 1, 2)}


# --- masks ----------------------------------------------------------------------------------------


def draw_masks(cfg: Config, number: int = 10_000, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """How often a config masks each patch, and how many patches it masks.

    Args:
        cfg: of a pretraining; its `default_scope` is set.
        number: of masks.
        seed: of the masks.

    Returns:
        float (rows, columns), the part of the masks that have the patch; int (number,), masked patches of each.

    Raises:
        ValueError: the pipeline has no BlockwiseMask or RandomMask.
    """
    pipeline = (cfg.get('train_dataloader') or {}).get('dataset', {}).get('pipeline', [])
    steps = [step for step in pipeline if str(step.get('type')).endswith('Mask')]
    masker = TRANSFORMS.build(steps[0]) if steps else None
    if not isinstance(masker, (BlockwiseMask, RandomMask)):
        raise UserError('the training pipeline has no beit_mm.BlockwiseMask or RandomMask; expected a pretraining')
    seed_generators(SampleKey(seed, 0, 0))
    masks = np.stack([masker.transform({})['mask'] for _ in range(number)])
    return masks.mean(axis=0), masks.sum(axis=(1, 2))


def draw_mask_statistics(frequency: np.ndarray, counts: np.ndarray) -> Figure:
    """A heat map of how often patches are masked (rows, columns), beside the histogram of their number (masks,)."""
    figure = Figure(figsize=(11, 4.5), layout='constrained')
    heat, histogram = figure.subplots(1, 2)
    drawn = heat.imshow(frequency, cmap='viridis')
    figure.colorbar(drawn, ax=heat)
    if frequency.size <= 400:
        for (row, column), value in np.ndenumerate(frequency):
            light = drawn.norm(value) > 0.6
            text = f'{100 * value:.0f}'
            heat.text(column, row, text, ha='center', va='center', color='black' if light else 'white', size=7)
    heat.set(title=f'masked in part of {len(counts):,} masks (numbers: %)', xticks=[], yticks=[])
    numbers, times = np.unique(counts, return_counts=True)
    histogram.bar(numbers, times / len(counts), width=0.9)
    title = f'mean {counts.mean():.2f} of {frequency.size} patches ({counts.mean() / frequency.size:.1%})'
    histogram.set(title=title, xlabel='masked patches of an image', ylabel='part of the masks')
    return figure


# --- curves ---------------------------------------------------------------------------------------


def read_scalars(work_dir: str | Path) -> tuple[Scalars, Scalars]:
    """What a run has logged in all its starts; where two of them have a step, the later one counts.

    Args:
        work_dir: whose `*/vis_data/scalars.json` mmengine has written; where there is none, nothing was logged.

    Returns:
        What was logged in training and in validations, by the steps of training, in rising order.
    """
    training: Scalars = {}
    validation: Scalars = {}
    for path in sorted(Path(work_dir).glob('*/vis_data/scalars.json')):
        for line in path.read_text().splitlines():
            with suppress(json.JSONDecodeError):  # a run that was killed may leave half a line
                row = json.loads(line)
                (training if 'iter' in row else validation)[row['step']] = row
    training = dict(sorted(training.items()))
    # a run that counts epochs logs its validations by them
    ends = {row['epoch']: step for step, row in training.items() if 'epoch' in row}
    return training, {ends.get(step, step): row for step, row in sorted(validation.items())}


def draw_runs(runs: Mapping[str, tuple[Scalars, Scalars]], keys: Sequence[str]) -> Figure:
    """A panel for each key, with a curve of each run: in training a line, in validations one with dots.

    Args:
        runs: name -> what `read_scalars` returns.
    """
    figure = Figure(figsize=(6 * min(len(keys), 2), 3.5 * ((len(keys) + 1) // 2)), layout='constrained')
    panels = figure.subplots((len(keys) + 1) // 2, min(len(keys), 2), squeeze=False).ravel()
    for axes, key in zip(panels, keys, strict=False):
        for number, (name, parts) in enumerate(runs.items()):
            for part, style, suffix in zip(parts, ('-', 'o--'), ('', ', validation'), strict=True):
                points = {step: row[key] for step, row in part.items() if key in row}
                if points:
                    label = name + suffix
                    axes.plot(*zip(*points.items(), strict=True), style, color=f'C{number}', label=label, markersize=4)
        axes.set(xlabel='step', ylabel=key)
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend(fontsize=7)
    for axes in panels[len(keys) :]:
        axes.remove()
    return figure

"""Pictures of what a config trains on and how: its samples, its masks, its schedules, the curves of its runs."""

import copy
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from mmengine.config import Config
from mmengine.dataset import default_collate
from mmengine.optim import build_optim_wrapper
from mmengine.registry import PARAM_SCHEDULERS
from PIL import Image
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import Dataset

from beit_mm.datasets.image_folder import UnlabeledImages
from beit_mm.datasets.masking import BlockwiseMask, RandomMask
from beit_mm.datasets.samplers import SampleKey, seed_generators
from beit_mm.datasets.segmentation_folder import distinct_colours
from beit_mm.engine.hooks import DINOHook
from beit_mm.models.beit import TwoViewDataPreprocessor
from beit_mm.models.tokenizers.base import Tokenizer
from beit_mm.registry import DATASETS, MODELS, TRANSFORMS
from beit_mm.visualization.pictures import titled_grid

MASK_SHADE = 0.5  # gray that is laid over masked patches
POINTS = 1000  # of a curve

Scalars = dict[int, dict[str, float]]  # step -> name -> number


# --- samples --------------------------------------------------------------------------------------


def training_dataset(cfg: Config) -> Dataset:
    """The training images of a config, with its pipeline; a FolderRunner's `data_root` goes where it belongs."""
    loader = cfg.get('train_dataloader')
    if not loader:
        raise ValueError('the config has no train_dataloader; expected the config of a training')
    options = copy.deepcopy(loader['dataset'])
    if 'data_root' in cfg:
        options.setdefault('data_root', cfg.data_root)
    return DATASETS.build(options)


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
        raise ValueError(
            f'views of a {type(preprocessor).__name__} cannot be drawn; expected a TwoViewDataPreprocessor'
        )
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
        raise ValueError('the training pipeline has no beit_mm.BlockwiseMask or RandomMask; expected a pretraining')
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


# --- schedules ------------------------------------------------------------------------------------


@dataclass
class Schedules:
    """What changes over a run, at some of its steps.

    Attributes:
        steps: int (P,), from 0.
        total: steps of the run.
        lr: group -> learning rate at each of the steps; groups of one layer with and without weight decay are one.
        weight_decay: of the groups that have it.
        momentum, temperature: of DINO's teacher; empty without a DINOHook.
    """

    steps: np.ndarray
    total: int
    lr: dict[str, np.ndarray]
    weight_decay: np.ndarray
    momentum: np.ndarray = field(default_factory=lambda: np.empty(0))
    temperature: np.ndarray = field(default_factory=lambda: np.empty(0))


def run_schedules(cfg: Config, num_images: int | None = None, points: int = POINTS) -> Schedules:
    """Steps the schedulers of a config, over as many steps as its run has, on an optimizer that does nothing.

    Args:
        cfg: a config whose `default_scope` is set. Its model is built without memory, for its parameter groups.
        num_images: of the training set; None lists them. With the effective batch of the recipe
            (auto_scale_lr.base_batch_size, else one process's) they give the steps of an epoch.
        points: of the steps, evenly spread, are noted.

    Raises:
        ValueError: the config has no training, or an epoch of its has no step; FileNotFoundError: the images are not
            there, and `num_images` is needed.
    """
    if not cfg.get('train_cfg') or not cfg.get('optim_wrapper'):
        raise ValueError('the config has no train_cfg and optim_wrapper; expected the config of a training')
    length = epoch_length(cfg, num_images)
    loop = cfg.train_cfg
    total = loop.max_iters if 'max_iters' in loop else loop.max_epochs * length
    wrapper, names = optimizer_of(cfg)
    groups = wrapper.optimizer.param_groups
    schedulers = []
    for config in cfg.get('param_scheduler') or []:
        config = dict(config)
        config.setdefault('end', loop.get('max_epochs', 1) if config.get('by_epoch', True) else total)
        schedulers.append(PARAM_SCHEDULERS.build(config, default_args=dict(optimizer=wrapper, epoch_length=length)))
    noted = np.unique(np.linspace(0, total - 1, min(points, total)).round().astype(int))
    wanted, rates, decays = set(noted.tolist()), [], []
    for step in range(total):
        if step in wanted:
            rates.append([group['lr'] for group in groups])
            decays.append(max(group['weight_decay'] for group in groups))
        for scheduler in schedulers:
            # a loop that counts steps has one epoch, at whose end nothing is left to schedule
            if not scheduler.by_epoch or ('max_epochs' in loop and (step + 1) % length == 0):
                scheduler.step()
    lr = {name: np.array(column) for name, column in zip(names, zip(*rates, strict=True), strict=True)}
    found = Schedules(noted, total, lr, np.array(decays))
    for config in cfg.get('custom_hooks') or []:
        if str(config.get('type')).removeprefix('beit_mm.') == 'DINOHook':
            hook = DINOHook(**{key: value for key, value in config.items() if key not in ('type', 'priority')})
            found.momentum = np.array([hook.momentum_at(step / total) for step in noted])
            found.temperature = np.array([hook.temperature_at(step // length) for step in noted])
    return found


def epoch_length(cfg: Config, num_images: int | None = None) -> int:
    """Steps of an epoch of a recipe."""
    accumulated = cfg.optim_wrapper.get('accumulative_counts', 1)
    batch = cfg.train_dataloader.batch_size
    together = (cfg.get('auto_scale_lr') or {}).get('base_batch_size', batch * accumulated) // accumulated
    if num_images is None:
        try:
            num_images = len(training_dataset(cfg))
        except FileNotFoundError as error:
            raise FileNotFoundError(f'{error}; or say how many images there are: --images N') from None
    if num_images < together:
        raise ValueError(f'{num_images} images are less than the batch of {together} that the recipe has')
    return num_images // together


def optimizer_of(cfg: Config) -> tuple[Any, list[str]]:
    """An optimizer wrapper with one parameter for each different learning rate of a config's, and their names."""
    model = copy.deepcopy(cfg.model)
    model.pop('target_generator', None)  # is not trained, and may want a file
    with torch.device('meta'):
        network = MODELS.build(model)
    settings = {key: cfg.optim_wrapper[key] for key in ('constructor', 'paramwise_cfg') if key in cfg.optim_wrapper}
    given = cfg.optim_wrapper.optimizer
    rates = dict(type='SGD', lr=given.lr, weight_decay=given.get('weight_decay', 0.0))
    real = build_optim_wrapper(network, dict(type='OptimWrapper', optimizer=rates, **settings)).optimizer
    known = {parameter: name for name, parameter in network.named_parameters()}
    distinct: dict[float, dict] = {}
    for group in real.param_groups:
        names = {layer_name(known[parameter]) for parameter in group['params']}
        entry = distinct.setdefault(group['lr'], dict(lr=group['lr'], weight_decay=0.0, layers=set()))
        entry['weight_decay'] = max(entry['weight_decay'], group['weight_decay'])
        entry['layers'] |= names
    groups = [distinct[lr] for lr in sorted(distinct)]
    layers = [group.pop('layers') for group in groups]
    titles = ['all parameters' if len(groups) == 1 else summary(names) for names in layers]
    parameters = [
        dict(lr=g['lr'], weight_decay=g['weight_decay'], params=[nn.Parameter(torch.zeros(1))]) for g in groups
    ]
    wrapper = build_optim_wrapper(nn.Linear(1, 1), dict(type='OptimWrapper', optimizer=rates))
    wrapper.optimizer = SGD(parameters, lr=given.lr)
    return wrapper, titles


def layer_name(parameter: str) -> str:
    """The layer of a parameter, by its name."""
    if match := re.search(r'\bblocks\.(\d+)\.', parameter):
        return f'block {match[1]}'
    return 'embeddings' if re.search(r'\b(cls_token|mask_token|pos_embed|patch_embed)', parameter) else 'head, norms'


def summary(names: set[str]) -> str:
    """Names of layers that learn at one rate."""
    return ', '.join(sorted(names)) if len(names) < 4 else f'{len(names)} layers'


def draw_schedules(found: Schedules) -> Figure:
    """A panel for learning rates, one for weight decay, and two for DINO's teacher where there is one."""
    panels: list[tuple[str, dict[str, np.ndarray]]] = [
        ('learning rate', found.lr),
        ('weight decay', {'': found.weight_decay}),
    ]
    if len(found.momentum):
        panels += [("teacher's momentum", {'': found.momentum}), ("teacher's temperature", {'': found.temperature})]
    figure = Figure(figsize=(6.5 * 2, 4 * ((len(panels) + 1) // 2)), layout='constrained')
    for axes, (title, curves) in zip(np.ravel(figure.subplots((len(panels) + 1) // 2, 2)), panels, strict=True):
        for index, (name, curve) in enumerate(curves.items()):
            colour = None if len(curves) == 1 else (index / len(curves), 0.3, 1 - index / len(curves))
            axes.plot(found.steps, curve, label=name, color=colour, linewidth=1.2)
        axes.set(title=title, xlabel=f'step of {found.total:,}')
        axes.grid(alpha=0.3)
        if all(np.ptp(curve) == 0 for curve in curves.values()):  # else a constant fills the panel with rounding
            axes.set_ylim(0, 1.5 * max(curve[0] for curve in curves.values()) or 1)
        if len(curves) > 1:
            axes.legend(fontsize=7, frameon=False)
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

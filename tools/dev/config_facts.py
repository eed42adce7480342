"""What a config makes, computed from it: architecture, batch, steps, cost, what comes before it and what was published.

configs/paper_tables.yml has the published figures, configs/*/metafile.yml the addresses of released weights.
"""

from __future__ import annotations

import copy
import functools
import re
import sys
from pathlib import Path
from typing import NamedTuple

import yaml

sys.path.append(str(Path(__file__).parents[1]))
from reproduce_table import DATA, ROOT, load, start_of, work_dir  # noqa: E402

FOLDERS = ('beit', 'beit_plus', 'beit_v2', 'beit_dino', 'dinov2', 'ablation', 'dvae')
DATASETS = {  # data_root -> name, training images
    'data/imagenet/train': ('ImageNet-1K', 1_281_167),
    'data/imagenet22k/train': ('ImageNet-22K', 14_197_122),
    'data/cifar100/train': ('CIFAR-100', 50_000),
    'data/ade20k': ('ADE20K', 20_210),
}
CARD = ('an A100', 312e12, 0.4)  # name, FLOP/s in bfloat16, the share of it that a training reaches


def list_configs(*folders: str) -> list[str]:
    """The configs of the folders, of all unless named, relative to configs/."""
    return sorted(f'{name}/{path.name}' for name in folders or FOLDERS for path in ROOT.glob(f'configs/{name}/*.py'))


def last_checkpoint(config: str) -> str:
    loop = load(config).train_cfg
    name = f'epoch_{loop.max_epochs}' if 'max_epochs' in loop else f'iter_{loop.max_iters}'
    return f'{work_dir(config)}/{name}.pth'


def previous(config: str) -> str | None:
    """The config whose last checkpoint this one starts from, or takes its tokenizer from."""
    return start_of(config)[2]


class Figure(NamedTuple):
    """A published number and what makes it."""

    value: str
    task: str
    source: str
    config: str
    start: str  # a config or an address; empty: what the config names itself
    options: dict[str, str]


@functools.cache
def figures() -> list[Figure]:
    """All published figures that a config makes, the paper's first."""
    found = []
    for table in DATA['tables'].values():
        for row in table['rows']:
            quoted = f', quoted from {row["quoted"]}' if 'quoted' in row else ''
            for column, config in row.get('configs', {}).items():
                key, value = table['columns'][column], row.get('paper', {}).get(column)
                if not value:
                    continue
                task = DATA['tasks'][key['metric']].format(
                    data=dataset_of(config)[0],
                    size=backbone_of(config).get('img_size', 224),
                    layer=load(config).model.get('layers', 0) + 1,
                    scales='all scales with flip' if key.get('tta') else 'single scale',
                )
                named = row.get('start', {}).get(column, '')
                start = '' if named == previous(config) else named
                source = f'paper, {table["source"]}{quoted}'
                found.append(Figure(value, task, source, config, start, row.get('options', {}).get(column, {})))
    for config, rows in DATA['others'].items():
        found += [Figure(row['value'], row['task'], row['source'], config, '', {}) for row in rows]
    return found


def results(config: str) -> list[tuple[str, str, str]]:
    """Value, task and source: of the config itself, then from others' weights, then of what starts from it."""
    own, later = {}, {}
    for figure in sorted(figures(), key=lambda figure: bool(figure.start)):
        if figure.config == config and not figure.start.endswith('.py'):
            task = figure.task + (f', from {Path(figure.start).name}' if figure.start else '')
            own.setdefault((figure.value, task, figure.source))
        elif config == (figure.start or previous(figure.config)) and not re.search('top-5|all scales', figure.task):
            folder = Path(config).parent
            task = f'{figure.task}, by {figure.config.removeprefix(f"{folder}/")}'
            later.setdefault(task, (figure.value, task, figure.source))  # the first of each
    return [*own, *later.values()]


def architecture(config: str) -> str:
    model = load(config).model
    if 'backbone' not in model:
        kinds = dict(dalle="DALL-E's discrete VAE", conv='discrete VAE of strided convolutions and residual blocks')
        kinds['base'] = 'ViT-Base, VQ-KD with a decoder of three blocks'
        return kinds[model.arch]
    backbone = backbone_of(config)
    parts = [f'ViT-{backbone.arch.capitalize()}']
    if backbone.get('abs_pos_embed', True):
        parts.append('absolute position embedding')
    if bias := backbone.get('rel_pos_bias'):
        parts.append('shared relative position bias' if bias == 'shared' else 'relative position bias in every block')
    if backbone.get('layer_scale_init'):
        parts.append('LayerScale')
    if registers := backbone.get('num_registers'):
        parts.append(f'{registers} registers')
    if 'rank' in model.backbone:
        parts.append(f'LoRA of rank {model.backbone.rank}')
    if is_frozen(config):
        parts.append('frozen')
    return ', '.join(parts)


def backbone_of(config: str) -> dict:
    """The config of the backbone, without LoRA around it; empty for tokenizers."""
    backbone = load(config).model.get('backbone', {})
    return backbone.get('module', backbone)


def is_frozen(config: str) -> bool:
    return load(config).model.type.endswith('Probe') or backbone_of(config).get('frozen_stages', -1) > 0


def batch_of(config: str) -> tuple[int, int, int, int]:
    """GPUs, images of a GPU, batches that are accumulated, images of a step."""
    cfg = load(config)
    images, accumulated = cfg.train_dataloader.batch_size, cfg.optim_wrapper.get('accumulative_counts', 1)
    total = cfg.auto_scale_lr.base_batch_size
    return total // (images * accumulated), images, accumulated, total


def dataset_of(config: str) -> tuple[str, int]:
    return DATASETS[load(config).train_dataloader.dataset.data_root]


def input_of(config: str) -> str:
    """Size of the images and what is masked."""
    steps = {step.type.removeprefix('beit_mm.'): step for step in load(config).train_dataloader.dataset.pipeline}
    backbone = backbone_of(config)
    size = backbone.get('img_size', 224) if backbone else steps['TwoViewRandomResizedCrop'].size
    masks = (step for name, step in steps.items() if name.endswith('Mask'))
    masked = (f', {mask.num_masked} of {mask.grid[0] * mask.grid[1]} patches masked' for mask in masks)
    return f'{size} x {size} pixels' + ''.join(masked)


def rate_of(config: str) -> str:
    """The peak learning rate as it is written in configs: 1.5e-3."""
    mantissa, exponent = f'{load(config).optim_wrapper.optimizer.lr:e}'.split('e')
    return f'{float(mantissa):g}e{int(exponent)}'


def command_lines(config: str) -> list[str]:
    """All commands from data to this row, in order."""
    chain = [config]
    while (before := previous(chain[0])) is not None:
        chain.insert(0, before)
    lines = [f'tools/dist_train.sh configs/{step} {batch_of(step)[0]}' for step in chain]
    starts = {figure.start: None for figure in figures() if figure.config == config and '://' in figure.start}
    found = released_weights(chain[-2]) if len(chain) > 1 else []
    released = [weights['URL'] for weights in found if weights['Source'] == 'microsoft/unilm']
    lines += [f'The last from {"other" if starts else "the released"} weights:'] * bool(starts or released)
    for url in [*released, *starts]:
        name = url if url in starts else Path(url).stem  # of list_models()
        inside = '.module' * ('module' in load(config).model.backbone)
        lines.append(f'  --cfg-options model.backbone{inside}.init_cfg.checkpoint={name}')
    return lines


def later_lines(config: str) -> list[str]:
    """Commands of the rows that start from this config's checkpoint with a config that names another."""
    commands = {}
    for figure in figures():
        if figure.start == config:
            name = figure.config
            commands[name] = continued(
                f'tools/dist_train.sh configs/{name} {batch_of(name)[0]}',
                f'--work-dir {work_dir(name)}_after_{Path(config).stem}',
                f'--cfg-options model.backbone.init_cfg.checkpoint={last_checkpoint(config)}',
                *(f'{key}={value}' for key, value in figure.options.items()),
            )
    return [line for lines in commands.values() for line in lines]


def test_lines(config: str) -> list[str]:
    """The command that tests the last checkpoint; none where there are no images to test on."""
    cfg = load(config)
    if not cfg.get('test_dataloader'):
        return []
    end = f'{last_checkpoint(config)} {batch_of(config)[0]}' + ' [--tta]' * (cfg.default_scope == 'mmseg')
    return continued(f'tools/dist_test.sh configs/{config}', end)


def continued(*parts: str) -> list[str]:
    """A command in one line where it fits beside a header's labels, else in a line for each part."""
    if len(line := ' '.join(parts)) <= 120 - 9:
        return [line]
    return [f'{"  " * (index > 0)}{part}' + ' \\' * (part is not parts[-1]) for index, part in enumerate(parts)]


def updates_of(config: str) -> tuple[int, int]:
    """Optimizer steps of the run, and of its warm-up."""
    cfg, (_, _, accumulated, total) = load(config), batch_of(config)
    loop, of_epoch = cfg.train_cfg, dataset_of(config)[1] // total
    first, last = cfg.param_scheduler[0], cfg.param_scheduler[-1]
    steps = loop.max_epochs * of_epoch if 'max_epochs' in loop else loop.max_iters // accumulated
    if first.type != 'LinearLR' or first.get('convert_to_iter_based'):
        return steps, (first.type == 'LinearLR') * first.end * of_epoch
    # PolyLR arrives one batch before its `end`, and the warm-up beside it too.
    return steps, (first.end - (last.type == 'PolyLR')) // accumulated


def sections(config: str) -> dict[str, list[str]]:
    """The generated paragraph of a header: what stands behind each label."""
    loop, (steps, warmup) = load(config).train_cfg, updates_of(config)
    (gpus, images, accumulated, total), (data, number) = batch_of(config), dataset_of(config)
    batch = f'{gpus} GPUs x {images}' + f', an update every {accumulated} batches' * (accumulated > 1)
    updates, times = f'{steps:,} updates', f', {steps * total / number:.1f} times'
    if 'max_epochs' in loop:
        updates, times = f'{loop.max_epochs} epochs x {steps // loop.max_epochs:,} = {updates}', ''
    elif accumulated > 1:
        updates += f', as max_iters counts {loop.max_iters:,} batches'
    return {
        'Result': [f'{value} {task} ({source})' for value, task, source in results(config)] or ['none published'],
        'Model': [f'{architecture(config)}, {parameters_of(config)}; {input_of(config)}'],
        'Command': command_lines(config),
        'Then': later_lines(config),
        'Test': test_lines(config),
        'Batch': [f'{batch} = {total} images, lr {rate_of(config)}'],
        'Steps': [updates + (f', {warmup:,} of them warm-up' if warmup else '')],
        'Data': [f'{data}, {number:,} images{times}'],
        'Cost': cost_lines(config),
    }


def parameters_of(config: str) -> str:
    """Parameters, and where the backbone is adapted or frozen how many of them are trained."""
    words = f'{counted(config)[0]:,} parameters'
    if not is_frozen(config) and 'module' not in load(config).model.get('backbone', {}):
        return words
    import torch
    from flops import build

    with torch.device('meta'):
        model = build(copy.deepcopy(load(config)))
    return f'{words}, {sum(p.numel() for p in model.parameters() if p.requires_grad):,} of them trained'


@functools.cache
def counted(config: str) -> tuple[int, float]:
    """Parameters, and FLOP of an image forward and backward; of a tokenizer no arithmetic is counted."""
    cfg = load(config)
    if 'backbone' not in cfg.model:
        import torch

        from beit_mm.registry import MODELS

        with torch.device('meta'):
            return sum(p.numel() for p in MODELS.build(cfg.model).parameters()), 0.0
    from flops import count_config

    numbers, flops, _ = count_config(cfg)
    once, twice = flops['tokenizer'] + flops['teacher'], 0  # forward only; without gradients of weights
    of_backbone = flops.total() - sum(flops[part] for part in ('tokenizer', 'neck', 'head', 'auxiliary heads'))
    if is_frozen(config):
        once = of_backbone
    elif 'module' in cfg.model.backbone:  # LoRA, whose own matrices are hardly anything
        twice = of_backbone
    return numbers.total() - numbers['tokenizer'], once + 2 * twice + 3 * (flops.total() - once - twice)


def cost_lines(config: str) -> list[str]:
    """Arithmetic of an image, and the GPU hours of the run on a card that is named; none for tokenizers."""
    (_, of_image), (name, peak, share) = counted(config), CARD
    if not of_image:
        return []
    hours = of_image * updates_of(config)[0] * batch_of(config)[3] / (peak * share) / 3600
    shown = f'{hours:,.0f}' if hours >= 10 else f'{hours:.1f}'
    arithmetic = f'{of_image / 1e9:,.0f} GFLOP an image forward and backward'
    return [f'{arithmetic}; {shown} GPU hours of {name} at {share * 100:.0f} %']


@functools.cache
def metafile_entries(folder: str) -> dict[str, str]:
    """Config -> text of its entry in the folder's metafile."""
    text = (ROOT / 'configs' / folder / 'metafile.yml').read_text()
    parts = re.split(r'^(?=  - Name: )', text, flags=re.M)[1:]
    return {re.search(r'Config: configs/(\S+)', entry)[1]: entry for entry in parts}


def released_weights(config: str) -> list[dict]:
    """The released files of a config's model; tokenizers stand elsewhere."""
    entry = metafile_entries(str(Path(config).parent)).get(config, '  - {}')
    released = yaml.load(entry, yaml.BaseLoader)[0].get('Released Weights', [])
    kept = [weights for weights in released if not weights['Fits'].startswith('target_generator')]
    return kept if 'backbone' in load(config).model else []


def reported(config: str, weights: dict) -> list[tuple[str, str]]:
    """Task and value of the figures that the source of a released file reports of it."""
    return [
        (task, value)
        for value, task, source in results(config)
        if ', by ' not in task and source.startswith(weights['Source'])
    ]

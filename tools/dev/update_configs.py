"""Writes what can be computed: part of the configs' headers, the metafiles, the tables of READMEs, the maps of files.

    python tools/dev/update_configs.py            rewrites the files that are out of date
    python tools/dev/update_configs.py --check    names them and exits with 1

In the header of a config the paragraph that starts with `Command:` is generated, title and last paragraph are written
by hand. In configs/*/metafile.yml everything but `Published Results` and `Released Weights` is generated, and in
configs/*/README.md what stands between the two marks.
"""

from __future__ import annotations

import argparse
import ast
import functools
import json
import re
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mmengine.config import Config

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = tuple(f'configs/{name}' for name in ('beit', 'beit_plus', 'beit_v2', 'beit_dino', 'ablation', 'dvae'))
DATASETS = {  # data_root -> name, training images
    'data/imagenet/train': ('ImageNet-1K', 1_281_167),
    'data/imagenet22k/train': ('ImageNet-22K', 14_197_122),
    'data/cifar100/train': ('CIFAR-100', 50_000),
    'data/ade20k': ('ADE20K', 20_210),
}
MAP = 'docs/architecture.md'
PACKAGE_MAP, MAP_BEGINS = 'beit_mm/__init__.py', 'Where what lives:\n\n'
RELEASED = 'docs/released.md'
BEGIN, END = '<!-- table by tools/dev/update_configs.py -->\n', '<!-- end of table -->'


def list_configs(*folders: str) -> list[str]:
    """The configs of the folders, of all unless named, relative to the root."""
    return sorted(
        path.relative_to(ROOT).as_posix() for folder in folders or FOLDERS for path in (ROOT / folder).glob('*.py')
    )


@functools.cache
def load(config: str) -> Config:
    from mmengine.config import Config

    return Config.fromfile(ROOT / config)


def work_dir(config: str) -> str:
    return load(config).get('work_dir', f'work_dirs/{Path(config).stem}')


def last_checkpoint(config: str) -> str:
    loop = load(config).train_cfg
    return f'{work_dir(config)}/' + (
        f'epoch_{loop.max_epochs}.pth' if 'max_epochs' in loop else f'iter_{loop.max_iters}.pth'
    )


def model_of(config: str) -> dict:
    return load(config).model


def previous(config: str) -> str | None:
    """The config whose last checkpoint this one starts from, or takes its tokenizer from; None for others' weights."""
    model = model_of(config)
    tokenizer = model.get('target_generator') or {}
    init = model.get('backbone', {}).get('init_cfg') or {}
    checkpoint = load(config).load_from or init.get('checkpoint') or tokenizer.get('checkpoint')
    if checkpoint is None or checkpoint.startswith('https://'):
        return None
    return next(other for other in list_configs() if last_checkpoint(other) == checkpoint)


@functools.cache
def count_parameters(model: str, scope: str) -> int:
    """Parameters of a model that is given as JSON; each is built once."""
    import torch
    from mmengine.config import Config
    from mmengine.registry import init_default_scope

    from beit_mm.registry import MODELS

    init_default_scope(scope)
    with torch.device('meta'):
        model = MODELS.build(Config(json.loads(model)))
    model.target_generator = None
    return sum(p.numel() for p in model.parameters())


def parameters(config: str) -> int:
    """Parameters of the model, without those of the tokenizer that makes its targets."""
    model = {key: value for key, value in model_of(config).items() if key not in ('data_preprocessor', 'train_cfg')}
    if tokenizer := model.get('target_generator'):
        weights = dict(checkpoint=None) if tokenizer['type'] == 'beit_mm.DiscreteVAE' else dict(random_weights=True)
        model['target_generator'] = {**tokenizer, **weights}
    if 'backbone' in model:
        model['backbone'] = dict(model['backbone'], init_cfg=None)
    return count_parameters(json.dumps(model), load(config).default_scope)


def architecture(config: str) -> str:
    model = model_of(config)
    if 'backbone' not in model:
        return (
            "DALL-E's discrete VAE"
            if model.arch == 'dalle'
            else 'discrete VAE of strided convolutions and residual blocks'
        )
    backbone = model.backbone
    parts = [f'ViT-{backbone.arch.capitalize()}']
    if backbone.get('abs_pos_embed', True):
        parts.append('absolute position embedding')
    if bias := backbone.get('rel_pos_bias'):
        parts.append('shared relative position bias' if bias == 'shared' else 'relative position bias in every block')
    if backbone.get('layer_scale_init'):
        parts.append('LayerScale')
    return ', '.join(parts)


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
    backbone = model_of(config).get('backbone')
    size = backbone.get('img_size', 224) if backbone else steps['TwoViewRandomResizedCrop'].size
    masks = [
        f', {step.num_masked} of {step.grid[0] * step.grid[1]} patches masked'
        for name, step in steps.items()
        if name.endswith('Mask')
    ]
    return f'{size} x {size} pixels' + ''.join(masks)


def rate_of(config: str) -> str:
    """The peak learning rate as it is written in configs: 1.5e-3."""
    mantissa, exponent = f'{load(config).optim_wrapper.optimizer.lr:e}'.split('e')
    return f'{float(mantissa):g}e{int(exponent)}'


def command_lines(config: str) -> list[str]:
    """All commands from data to this row, in order."""
    chain = [config]
    while (before := previous(chain[0])) is not None:
        chain.insert(0, before)
    lines = [f'tools/dist_train.sh {step} {batch_of(step)[0]}' for step in chain]
    released = (
        []
        if len(chain) == 1
        else [
            weights['URL'].rsplit('/', 1)[1]
            for weights in entries(chain[-2]).get('Released Weights', ())
            if weights['Source'] == 'microsoft/unilm'
        ]
    )
    if released:
        lines += [
            'The last alone, from the released weights: --cfg-options',
            f'model.backbone.init_cfg.checkpoint={released[0]}',
        ]
    return lines


def step_line(config: str) -> str:
    """Optimizer steps of the run and of its warm-up."""
    cfg, (name, images), (_, _, accumulated, total) = load(config), dataset_of(config), batch_of(config)
    first, last = cfg.param_scheduler[0], cfg.param_scheduler[-1]
    if 'max_epochs' in cfg.train_cfg:
        epochs, of_epoch = cfg.train_cfg.max_epochs, images // total
        text = f'{epochs} epochs x {of_epoch:,} = {epochs * of_epoch:,}, {name} with {images:,} images'
    else:
        steps = cfg.train_cfg.max_iters // accumulated
        text = f'{steps:,}, {steps * total / images:.1f} times through {name} with {images:,} images'
    if first.type != 'LinearLR':
        return text
    if first.get('convert_to_iter_based'):
        return f'{text}; warm-up {first.end * of_epoch:,}'
    # PolyLR arrives one batch before its `end`, and the warm-up beside it too.
    return f'{text}; warm-up {(first.end - (last.type == "PolyLR")) // accumulated:,}'


def header_lines(config: str) -> str:
    """The generated paragraph of a header."""
    cfg = load(config)
    gpus, images, accumulated, total = batch_of(config)
    sections = {}
    batch = f'{gpus} GPUs x {images}' + (f' x {accumulated} accumulated' if accumulated > 1 else '')
    sections['Command'] = command_lines(config)
    sections['Batch'] = [f'{batch} = {total} images, lr {rate_of(config)}']
    sections['Steps'] = [step_line(config)]
    sections['Writes'] = [last_checkpoint(config)]
    sections['Model'] = [f'{architecture(config)}, {parameters(config):,} parameters; {input_of(config)}']
    if cfg.default_scope == 'mmseg':
        sections['Test'] = [f'tools/dist_test.sh {config} CHECKPOINT {gpus} [--tta]']
    sections['Result'] = [
        f'{row["Value"]} {row["Task"]} ({row["Source"]})' for row in entries(config)['Published Results']
    ] or ["none of BEiT's own"]
    lines = []
    for key, values in sections.items():
        for index, value in enumerate(values):
            label = f'{key}:' if index == 0 else ''
            lines += textwrap.wrap(
                value,
                120,
                initial_indent=f'{label:9}',
                subsequent_indent=' ' * 11,
                break_long_words=False,
                break_on_hyphens=False,
            )
    return '\n'.join(lines)


def update_header(config: str) -> str:
    _, header, code = (ROOT / config).read_text().split('"""', 2)
    title, generated, *by_hand = header.rstrip('\n').split('\n\n')
    if not generated.startswith('Command:'):
        sys.exit(f'{config}: the second paragraph of the header does not start with "Command:"')
    return '"""' + '\n\n'.join([title, header_lines(config), *by_hand]) + '\n"""' + code


@functools.cache
def metafile_entries(folder: str) -> dict[str, str]:
    """Config -> text of its entry in the folder's metafile."""
    text = (ROOT / folder / 'metafile.yml').read_text()
    parts = re.split(r'^(?=  - Name: )', text, flags=re.M)[1:]
    return {re.search(r'Config: (\S+)', entry)[1]: entry for entry in parts}


@functools.cache
def entries(config: str) -> dict:
    """The entry of a config, all values as they are written."""
    text = metafile_entries(str(Path(config).parent)).get(config, '  - Published Results: []')
    import yaml

    return yaml.load(text, yaml.BaseLoader)[0]


def update_metafile(folder: str) -> str:
    text = re.split(r'^  - Name: ', (ROOT / folder / 'metafile.yml').read_text(), maxsplit=1, flags=re.M)[0]
    for config in list_configs(folder):
        loop = load(config).train_cfg
        length = f'Epochs: {loop.max_epochs}' if 'max_epochs' in loop else f'Iterations: {loop.max_iters}'
        old = metafile_entries(folder).get(config, '    Published Results: []\n')
        text += f"""\
  - Name: {Path(folder).name}_{Path(config).stem}
    In Collection: {'BEiTv2' if folder.endswith('v2') else 'BEiT'}
    Config: {config}
    Metadata:
      Architecture: {architecture(config)}
      Parameters: {parameters(config)}
      {length}
      Batch Size: {batch_of(config)[3]}
      Training Data: {dataset_of(config)[0]}
""" + old[old.index('    Published Results:') :]
    return text


def update_table(folder: str) -> str:
    rows = ['| config | what it is | batch, lr | length | input | parameters | published |', '| --- ' * 7 + '|']
    for config in list_configs(folder):
        name, loop = Path(config).stem, load(config).train_cfg
        title = (ROOT / config).read_text().split('"""', 2)[1].splitlines()[0].rstrip('.')
        length = f'{loop.max_epochs} epochs' if 'max_epochs' in loop else f'{loop.max_iters:,} batches'
        results = {}
        for row in entries(config)['Published Results']:
            results.setdefault(row['Task'], row['Value'])  # the first of each task
        published = '<br>'.join(f'{value} {task}' for task, value in results.items())
        rows.append(
            f'| [{name}]({name}.py) | {title} | {batch_of(config)[3]}, {rate_of(config)} '
            f'| {length} | {input_of(config)} | {parameters(config):,} | {published} |'
        )
    before, _, rest = (ROOT / folder / 'README.md').read_text().partition(BEGIN)
    return before + BEGIN + '\n'.join(rows) + '\n' + END + rest.partition(END)[2]


def released_weights(config: str) -> list[dict]:
    """The released files of a config's model; tokenizers stand elsewhere."""
    released = entries(config).get('Released Weights', []) if 'backbone' in model_of(config) else []
    return [weights for weights in released if not weights['Fits'].startswith('target_generator')]


def released_lines(config: str, weights: dict) -> list[str]:
    """Commands that test a released file, each below what its source reports of it."""
    direct: dict[bool, list[str]] = {}  # multi-scale? -> figures of the file itself
    later = []  # figures of what was trained from it
    for row in entries(config)['Published Results']:
        figure = f'{row["Value"]} {row["Task"]}'
        theirs = row['Source'].startswith(weights['Source'])
        if 'after fine-tuning' not in row['Task'] and theirs:
            direct.setdefault('all scales' in row['Task'], []).append(figure)
        elif theirs or weights['Source'] == 'microsoft/unilm' and row['Source'].startswith('paper'):
            later.append(figure)
    lines = [f'# {weights["URL"].rsplit("/", 1)[1]}: {weights["Holds"]}']
    command = f'python tools/test.py {config} {weights["URL"]}'
    precision = ' --cfg-options model.test_cfg.precision=float32' * (load(config).default_scope == 'mmseg')
    for multi_scale, figures in sorted(direct.items()):
        lines += [f'# {", ".join(figures)}', command + ' --tta' * multi_scale + precision]
    if not direct:  # what the paper reports is of other files, or of later training
        test = 'loss and accuracy on held-out images' if load(config).test_dataloader else 'no images to test on'
        lines += [f'# {test}; published: {", ".join(later)}', *[command] * bool(load(config).test_dataloader)]
    return lines


def update_released() -> str:
    """The command and the published figures of each released file."""
    groups: dict[str, list[str]] = dict.fromkeys(('Segmentation', 'Classification', 'Pretraining'), [])
    for config in list_configs():
        for weights in released_weights(config):
            scope, model = load(config).default_scope, model_of(config).type
            group = 'Classification' if model == 'ImageClassifier' else 'Pretraining'
            group = 'Segmentation' if scope == 'mmseg' else group
            groups[group] = [*groups[group], '\n'.join(released_lines(config, weights))]
    text = ''.join(
        f'## {title}, {len(blocks)} files\n\n```shell\n' + '\n\n'.join(blocks) + '\n```\n\n'
        for title, blocks in groups.items()
    )
    before, _, rest = (ROOT / RELEASED).read_text().partition(BEGIN)
    return before + BEGIN + text + END + rest.partition(END)[2]


def title_of(file: Path) -> str:
    """What a file's docstring begins with."""
    return ast.get_docstring(ast.parse(file.read_text())).splitlines()[0].rstrip('.')


def update_package_map() -> str:
    """The package's docstring: a line for each file, and for each folder with the names of its files."""
    package, lines = ROOT / 'beit_mm', []
    for path in sorted(package.glob('*.py')):
        if path.name != '__init__.py':
            lines.append((path.name, title_of(path)))
    for init in sorted(package.glob('*/__init__.py')):
        names = sorted(path.stem for path in init.parent.rglob('*.py') if path.name != '__init__.py')
        lines.append((f'{init.parent.name}/', f'{title_of(init)}: {", ".join(names)}'))
    indents = dict(initial_indent=' ' * 4, subsequent_indent=' ' * 20)
    text = '\n'.join(textwrap.fill(f'{name:<15} {title}', 119, **indents) for name, title in lines)
    before, _, rest = (ROOT / PACKAGE_MAP).read_text().partition(MAP_BEGINS)
    return before + MAP_BEGINS + text + '\n"""' + rest.partition('"""')[2]


def update_file_map() -> str:
    """The files of the package with their lines and what their docstrings begin with."""
    rows = ['| file | lines | what it holds |', '| --- | --- | --- |']
    for path in sorted((ROOT / 'beit_mm').rglob('*.py')):
        source = path.read_text()
        if path.name != '__init__.py' and '.mim' not in path.parts:
            title = title_of(path)
            rows.append(f'| `{path.relative_to(ROOT / "beit_mm")}` | {len(source.splitlines())} | {title} |')
    before, _, rest = (ROOT / MAP).read_text().partition(BEGIN)
    return before + BEGIN + '\n'.join(rows) + '\n' + END + rest.partition(END)[2]


def stale_files() -> dict[str, str]:
    """File -> what it should hold, for all that hold something else."""
    texts = {config: update_header(config) for config in list_configs()}
    texts[PACKAGE_MAP], texts[MAP], texts[RELEASED] = update_package_map(), update_file_map(), update_released()
    for folder in FOLDERS:
        texts[f'{folder}/metafile.yml'] = update_metafile(folder)
        texts[f'{folder}/README.md'] = update_table(folder)
    return {file: text for file, text in texts.items() if text != (ROOT / file).read_text()}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    parser.add_argument('--check', action='store_true', help='write nothing; exit with 1 if a file is out of date')
    check = parser.parse_args(arguments).check
    stale = stale_files()
    for file, text in stale.items():
        print(f'{file} is out of date; run python tools/dev/update_configs.py' if check else f'{file} rewritten')
        if not check:
            (ROOT / file).write_text(text)
    return int(check and bool(stale))


if __name__ == '__main__':
    sys.exit(main())

"""Writes what can be computed: part of the configs' headers, the metafiles, the tables of READMEs, the maps of files.

    python tools/dev/update_configs.py            rewrites the files that are out of date
    python tools/dev/update_configs.py --check    names them and exits with 1

configs/paper_tables.yml has the published figures. In the header of a config the paragraph that starts with `Result:`
is generated; title and last paragraph are written by hand. In configs/*/metafile.yml everything but `Released Weights`
is generated, and in configs/*/README.md what stands between the two marks.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
import textwrap
from pathlib import Path

import config_facts as facts
from config_facts import ROOT

from beit_mm.checkpoint.find import plain_vits
from beit_mm.terminal import quiet

MAP = 'docs/architecture.md'
PACKAGE_MAP, MAP_BEGINS = 'beit_mm/__init__.py', 'The plugin:\n\n'
APPLICATION_BEGINS = '\n\nThe application, which plans, runs and judges trainings on a folder of images:\n\n'
READING = {  # groups of files in the order in which a newcomer reads them
    'The method of the paper': 'models/vit models/layers positions models/beit datasets/masking models/tokenizers/base',
    'Tokenizers and other targets': 'models/tokenizers/dalle models/tokenizers/* models/feature_targets models/beit_v2 '
    'models/dino',
    'Images': 'datasets/reading datasets/image_folder datasets/transforms datasets/*',
    'A training': 'engine/loops engine/steps engine/optim engine/progress engine/*',
    'Checkpoints': 'checkpoint/find checkpoint/read checkpoint/names checkpoint/* models/provenance models/lora',
    'Features and probes': 'features/* models/probe',
    'Segmentation': 'segmentation/*',
    'Commands for configs, and the use of trained weights': 'apis/commands apis/configs apis/rebuild apis/* pictures',
    'What all of these use': 'errors locations registry files precision terminal',
    'The application on own images': 'own_images/run own_images/record own_images/images own_images/label_maps '
    'own_images/look own_images/task own_images/classification own_images/segmentation own_images/pretraining '
    'own_images/* __main__',
}
RELEASED = 'docs/released.md'
SEGMENTATION, CLASSIFICATION = 'Segmentation: mIoU on ADE20K', 'Classification on ImageNet-1K'
COLLECTIONS = dict(beit_v2='BEiTv2', dinov2='DINOv2')  # of model-index.yml; other folders are BEiT's
BEGIN, END = '<!-- table by tools/dev/update_configs.py -->\n', '<!-- end of table -->'


def between_marks(file: Path, text: str) -> str:
    """What a page should hold."""
    before, _, rest = file.read_text().partition(BEGIN)
    return before + BEGIN + text + END + rest.partition(END)[2]


def header_lines(config: str) -> str:
    lines = []
    for key, values in facts.sections(config).items():
        for index, value in enumerate(values):
            start = f'{f"{key}:" if index == 0 else "":9}'
            wrapped = textwrap.wrap(
                value, 120, initial_indent=start, subsequent_indent=' ' * 11, break_on_hyphens=False
            )
            lines += [start + value] if value.startswith(('  ', 'tools/')) else wrapped
    return '\n'.join(lines)


def update_header(config: str) -> str:
    _, header, code = (ROOT / 'configs' / config).read_text().split('"""', 2)
    title, generated, *by_hand = header.rstrip('\n').split('\n\n')
    if not generated.startswith('Result:'):
        sys.exit(f'{config}: the second paragraph of the header does not start with "Result:"')
    return '"""' + '\n\n'.join([title, header_lines(config), *by_hand]) + '\n"""' + code


def update_metafile(folder: str) -> str:
    text = re.split(r'^  - Name: ', (ROOT / 'configs' / folder / 'metafile.yml').read_text(), maxsplit=1, flags=re.M)[0]
    for config in facts.list_configs(folder):
        loop = facts.load(config).train_cfg
        length = f'Epochs: {loop.max_epochs}' if 'max_epochs' in loop else f'Iterations: {loop.max_iters}'
        _, *weights = facts.metafile_entries(folder).get(config, '').partition('    Released Weights:')
        rows = ''.join(
            f'      - Task: {task}\n        Value: {value}\n        Source: {source}\n'
            for value, task, source in facts.results(config)
        )
        text += f"""\
  - Name: {folder}_{Path(config).stem}
    In Collection: {COLLECTIONS.get(folder, 'BEiT')}
    Config: configs/{config}
    Metadata:
      Architecture: {facts.architecture(config)}
      Parameters: {facts.counted(config)[0]}
      {length}
      Batch Size: {facts.batch_of(config)[3]}
      Training Data: {facts.dataset_of(config)[0]}
    Published Results:{chr(10) + rows if rows else ' []' + chr(10)}{''.join(weights)}"""
    return text


def update_table(folder: str) -> str:
    rows = ['| config | what it is | batch, lr | length | input | parameters | published |', '| --- ' * 7 + '|']
    for config in facts.list_configs(folder):
        name, loop = Path(config).stem, facts.load(config).train_cfg
        title = (ROOT / 'configs' / config).read_text().split('"""', 2)[1].splitlines()[0].rstrip('.')
        length = f'{loop.max_epochs} epochs' if 'max_epochs' in loop else f'{loop.max_iters:,} batches'
        first = {}  # of each task
        for value, task, _ in facts.results(config):
            first.setdefault(task, f'{value} {task}')
        rows.append(
            f'| [{name}]({name}.py) | {title} | {facts.batch_of(config)[3]}, {facts.rate_of(config)} '
            f'| {length} | {facts.input_of(config)} | {facts.counted(config)[0]:,} | {"<br>".join(first.values())} |'
        )
    return between_marks(ROOT / 'configs' / folder / 'README.md', '\n'.join(rows) + '\n')


def released_row(config: str, weights: dict) -> str:
    """A released file, its config, and what its source reports of it; top-5 and more digits stand in the config."""
    figures: dict[str, str] = {}
    for task, value in facts.reported(config, weights):
        if 'top-5' not in task:
            figures.setdefault(task.removeprefix('ADE20K mIoU, ').removeprefix('ImageNet-1K '), value)
    name, reported = Path(weights['URL']).stem, '<br>'.join(f'{value} {task}' for task, value in figures.items())
    return f'| [{name}]({weights["URL"]}) | {config} | {reported} |'


def update_released() -> str:
    """The released files by what they are for."""
    groups: dict[str, list[str]] = dict.fromkeys((SEGMENTATION, CLASSIFICATION, 'Pretraining'), [])
    for config in facts.list_configs():
        for weights in facts.released_weights(config):
            group = CLASSIFICATION if facts.load(config).model.type == 'ImageClassifier' else 'Pretraining'
            group = SEGMENTATION if facts.load(config).default_scope == 'mmseg' else group
            groups[group] = [*groups[group], released_row(config, weights)]
    head = '| name | CONFIG below configs/ | reported |\n| --- | --- | --- |\n'
    text = ''.join(f'## {title}\n\n{head}' + '\n'.join(rows) + '\n\n' for title, rows in groups.items())
    text += '## Plain ViTs\n\n| name | model | licence | reported, % (of ImageNet-1K) |\n| --- | --- | --- | --- |\n'
    for name, entry in plain_vits().items():
        url = entry['url'].replace('hf://', 'https://huggingface.co/')
        text += f'| [{name}]({url}) | {entry["model"]} | {entry["licence"]} | {entry.get("figures", "")} |\n'
    return between_marks(ROOT / RELEASED, text + '\n')


def title_of(file: Path) -> str:
    """What a file's docstring begins with."""
    return ast.get_docstring(ast.parse(file.read_text())).splitlines()[0].rstrip('.')


def update_package_map() -> str:
    """The package's docstring: a line for each file, and for each folder with the names of its files, by house."""
    package = ROOT / 'beit_mm'
    indents = dict(initial_indent=' ' * 4, subsequent_indent=' ' * 20)
    houses: dict[bool, list[str]] = {False: [], True: []}
    for path in [*sorted(package.glob('*.py')), *sorted(package.glob('*/__init__.py'))]:
        folder = path.parent
        if path == package / '__init__.py':
            continue
        name, title = path.name, title_of(path)
        if folder != package:
            files = sorted(file.stem for file in folder.rglob('*.py') if file.name != '__init__.py')
            name, title = f'{folder.name}/', f'{title}: {", ".join(files)}'
        line = textwrap.fill(f'{name:<15} {title}', 119, **indents)
        houses[name in ('own_images/', '__main__.py')].append(line)
    before, _, rest = (ROOT / PACKAGE_MAP).read_text().partition(MAP_BEGINS)
    text = '\n'.join(houses[False]) + APPLICATION_BEGINS + '\n'.join(houses[True])
    return before + MAP_BEGINS + text + '\n"""' + rest.partition('"""')[2]


def update_file_map() -> str:
    """The files of the package in the order of READING, with their sizes and what their docstrings begin with."""
    package = ROOT / 'beit_mm'
    left = {path for path in package.rglob('*.py') if path.name != '__init__.py' and '.mim' not in path.parts}
    text = ''
    for title, names in READING.items():
        rows, total = [], 0
        for name in names.split():
            for path in sorted(left & {*package.glob(f'{name}.py')}):
                lines = len(path.read_text().splitlines())
                rows.append(f'- `{path.relative_to(package)}`, {rounded(lines)} lines: {title_of(path)}')
                total += lines
                left.remove(path)
        text += f'### {title}: {rounded(total):,} lines\n\n' + '\n'.join(rows) + '\n\n'
    if left:
        raise SystemExit(f'READING in {__file__} lacks {", ".join(sorted(str(path) for path in left))}')
    return between_marks(ROOT / MAP, text)


def rounded(lines: int) -> int:
    """To fifties, so that few changes of a file change its page."""
    return max(50, 50 * round(lines / 50))


def stale_files() -> dict[str, str]:
    """File -> what it should hold, for all that hold something else."""
    texts = {f'configs/{config}': update_header(config) for config in facts.list_configs()}
    texts[PACKAGE_MAP], texts[MAP], texts[RELEASED] = update_package_map(), update_file_map(), update_released()
    for folder in facts.FOLDERS:
        texts[f'configs/{folder}/metafile.yml'] = update_metafile(folder)
        texts[f'configs/{folder}/README.md'] = update_table(folder)
    return {file: text for file, text in texts.items() if text != (ROOT / file).read_text()}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    parser.add_argument('--check', action='store_true', help='write nothing; exit with 1 if a file is out of date')
    check = parser.parse_args(arguments).check
    with quiet():
        stale = stale_files()
    for file, text in stale.items():
        print(f'{file} is out of date; run python tools/dev/update_configs.py' if check else f'{file} rewritten')
        if not check:
            (ROOT / file).write_text(text)
    return int(check and bool(stale))


if __name__ == '__main__':
    sys.exit(main())

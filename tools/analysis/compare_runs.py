"""Compares runs by what they logged: a table, the entries of their configs that differ, and a picture of their curves.

    python tools/analysis/compare_runs.py work_dirs/pretrain work_dirs/other --out curves.png
    python tools/analysis/compare_runs.py work_dirs/a work_dirs/b --keys mim_loss,loss --out curves.png

A run is a work directory; of one that was resumed all starts count, of a step the last. In the table stand the metrics
that all runs have validated, the last and, where it is known which way is better, the best with its step; the median of
images_per_second; and the minutes of the training steps, without validations and the start.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from beit_mm.terminal import UserError, run

if TYPE_CHECKING:
    from beit_mm.pictures import Scalars

NO_METRICS = {'step', 'time', 'data_time'}  # of a validation
OF_THE_START = {'work_dir', 'resume', 'load_from', 'launcher', 'experiment_name'}  # entries that are not compared
LONGEST = 60  # of a value of a config, in characters


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('runs', nargs='+', type=Path, metavar='RUN', help='work directory')
    parser.add_argument('--keys', help='to draw, with commas (default: loss and the metrics that all runs have)')
    parser.add_argument('--out', type=Path, help='picture of the curves')
    args = parser.parse_args()
    from beit_mm.terminal import quiet

    with quiet():
        from beit_mm.pictures import draw_runs, read_scalars
    folders = [work_dir_of(folder) for folder in args.runs]
    found = {str(folder): read_scalars(folder) for folder in folders}
    for name, (training, validation) in found.items():
        if not training and not validation:
            raise FileNotFoundError(f'{name} has no */vis_data/scalars.json; expected the work directory of a training')
    metrics = shared_metrics([validation for _, validation in found.values()])
    keys = args.keys.split(',') if args.keys else ['loss', *metrics]
    logged = {key for parts in found.values() for part in parts for row in part.values() for key in row}
    if unknown := [key for key in keys if key not in logged]:
        raise UserError(f'--keys: no run has logged {unknown[0]!r}; choose of {", ".join(sorted(logged - NO_METRICS))}')
    rows = [['run', 'step', 'minutes', 'images/s', *metrics]]
    rows += [[name, *figures(*parts, metrics)] for name, parts in found.items()]
    print_rows(rows)
    if differing := differences([flat_config(folder) for folder in folders]):
        print('\nConfigs differ in')
        print_rows([['', *found], *([key, *values] for key, values in differing.items())])
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        draw_runs(found, keys).savefig(args.out, dpi=120)
        print(args.out)


def work_dir_of(folder: Path) -> Path:
    """A work directory; of a run of python -m beit_mm the one of its last stage."""
    stages = [folder / name for name in ('finetune', 'pretrain') if (folder / 'plan.json').is_file()]
    return next((stage for stage in stages if stage.is_dir()), folder)


def print_rows(rows: list[list[str]]) -> None:
    """Columns as wide as their widest cell, the first to the left."""
    from beit_mm.terminal import printable

    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *others in rows:
        cells = (f'{cell:>{width}}' for cell, width in zip(others, widths[1:], strict=True))
        print(printable('  '.join([f'{first:{widths[0]}}', *cells])))


def shared_metrics(validations: list[Scalars]) -> list[str]:
    """Metrics that all runs have, in the first run's order."""
    known = [dict.fromkeys(key for row in validation.values() for key in row) for validation in validations]
    return [key for key in known[0] if key not in NO_METRICS and all(key in keys for keys in known)]


def figures(training: Scalars, validation: Scalars, metrics: list[str]) -> list[str]:
    """A run's row of the table."""
    from mmengine.hooks import CheckpointHook

    rates = [row['images_per_second'] for row in training.values() if 'images_per_second' in row]
    pairs = itertools.pairwise([0, *training])
    seconds = sum((step - before) * training[step].get('time', 0.0) for before, step in pairs)
    cells = [f'{max((*training, *validation)):,}', f'{seconds / 60:.1f}']
    cells.append(f'{statistics.median(rates):,.1f}' if rates else '-')
    for key in metrics:
        values = {step: row[key] for step, row in validation.items() if key in row}
        text = f'{list(values.values())[-1]:.4g}'
        for words, best in ((CheckpointHook._default_greater_keys, max), (['loss', 'mae'], min)):
            if any(word in key for word in words):
                step = best(values, key=values.__getitem__)
                text += f' ({values[step]:.4g} at {step:,})'
                break
        cells.append(text)
    return cells


def flat_config(folder: Path) -> dict[str, str]:
    """Key with dots -> value of the config with which a run was last started; empty where there is none.

    Runs may be other people's: of the file that mmengine has written values are read, and nothing is executed.
    """
    files = [*sorted(folder.glob('*.py')), *sorted(folder.glob('*/vis_data/config.py'))]
    lines = ast.parse(files[-1].read_text(encoding='utf-8')).body if files else []
    settings = {line.targets[0].id: value_of(line.value) for line in lines if isinstance(line, ast.Assign)}
    return dict(flat(settings))


def value_of(node: ast.expr) -> object:
    """The value of an expression of literals and dict(...); of another one its text."""
    if isinstance(node, ast.Call) and ast.unparse(node.func) == 'dict':
        return {keyword.arg: value_of(keyword.value) for keyword in node.keywords}
    if isinstance(node, ast.List | ast.Tuple):
        return [value_of(entry) for entry in node.elts]
    try:
        return ast.literal_eval(node)
    except ValueError:
        return ast.unparse(node)


def flat(value: object, key: str = '') -> Iterator[tuple[str, str]]:
    """Pairs of a key with dots and the text of a value; dicts and lists of dicts are taken apart."""
    if isinstance(value, list) and value and all(isinstance(entry, dict) for entry in value):
        value = dict(enumerate(value))
    if not isinstance(value, dict) or not value:
        yield key, repr(plain(value))
        return
    for name, entry in value.items():
        if key or name not in OF_THE_START:
            yield from flat(entry, f'{key}.{name}'.lstrip('.'))


def plain(value: object) -> object:
    """Lists in the place of tuples, which a plan that was stored as JSON does not have."""
    return [plain(entry) for entry in value] if isinstance(value, list | tuple) else value


def differences(configs: list[dict[str, str]]) -> dict[str, list[str]]:
    """Key -> value of each run, '-' where it has none, of the keys whose values are not the same everywhere."""
    keys = dict.fromkeys(key for config in configs for key in config)
    found = {key: [config.get(key, '-') for config in configs] for key in keys}
    return {
        key: [value if len(value) <= LONGEST else f'{value[: LONGEST - 2]}..' for value in values]
        for key, values in found.items()
        if len(set(values)) > 1
    }


if __name__ == '__main__':
    run(main)

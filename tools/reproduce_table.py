"""Runs the rows of a table of the paper, one run after the other, and prints our numbers beside the paper's.

    python tools/reproduce_table.py ablation --scale full                      the configs as they are: weeks on 16 GPUs
    python tools/reproduce_table.py ablation --scale full --gpus 1 --steps 100     100 steps for each training
    python tools/reproduce_table.py ablation --scale demo                      Caltech-101, a small model, two CPU cores

configs/paper_tables.yml holds the paper's numbers and the runs for each row. After an interruption the same command
continues. A config without changes writes into its own work_dir. Changed configs write into work_dirs/tables, into a
folder for each set of changes. The table is written into work_dirs/tables too.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import shlex
import statistics
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from beit_mm.errors import UserError
from beit_mm.terminal import Parser, run

ROOT = Path(__file__).resolve().parents[1]
DATA = yaml.safe_load((ROOT / 'configs/paper_tables.yml').read_text())
TABLES_DIR = Path('work_dirs/tables')


@dataclass(eq=False)
class Step:
    """One command, and the file that shows that it has finished. A training also holds what its test needs."""

    title: str
    command: list[str]
    result: Path
    needs: list[Step] = field(default_factory=list)
    config: str = ''
    gpus: int = 1
    options: list[str] = field(default_factory=list)

    def finished(self) -> bool:
        is_json = self.result.suffix == '.json'  # which may be half written
        return self.result.exists() and (not is_json or self.result.read_text().endswith('}\n'))


class Plan:
    """The steps of all rows; each step comes after the steps that it needs, and rows share runs."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.steps: dict[Path, Step] = {}

    def add(self, title: str, command: list[str], result: Path, *others: object) -> Step:
        return self.steps.setdefault(result, Step(title, command, result, *others))

    def tests(self, table: dict, row: dict, column: str) -> list[Step]:
        """The tests whose mean is one of our numbers."""
        if self.args.scale == 'demo':
            stage = row.get('demo_stages', {}).get(column, column)
            seeds = self.args.seeds if 'demo' in row else []
            return [self.test(self.training_of_recipe(row['demo'], stage, seed)) for seed in seeds]
        if not (config := row.get('configs', {}).get(column)):
            return []
        if weights := row.get('weights', {}).get(column):  # weights from elsewhere: nothing is trained
            options = [*weights, *self.args.cfg_options]
            return [self.test(Step(config, [], changed_dir(config, options) / 'none', [], config, 1, options))]
        start, options = (row.get(key, {}).get(column) for key in ('start', 'options'))
        tta = 'tta' in table['columns'][column]
        return [self.test(self.training_of_config(config, seed, start, options), tta) for seed in self.args.seeds]

    def training_of_config(self, config: str, seed: int, start: str | None = None, changes: dict | None = None) -> Step:
        """The training of a config at full scale, which needs the training of `start` or of the config before it."""
        options, needs = dict(changes or {}), []
        key, weights, before = start_of(config)
        if start and '://' in start:
            options[key] = start
        elif start or before:
            needs.append(self.training_of_config(start or before, 0))
            if str(needs[0].result) != weights:
                options[key] = needs[0].result
        return self.training(config, config, options, needs, seed)

    def training_of_recipe(self, recipe: str, stage: str, seed: int) -> Step:
        """The training of a stage at demo scale."""
        settings = recipe_settings(recipe, stage)
        options, needs = dict(settings['options']), []
        for source, key in settings.get('from', {}).items():
            needs.append(self.training_of_recipe(recipe, source, seed))
            options[key] = needs[-1].result
        if labels := settings.get('labels'):
            root, name = Path(options['data_root']), f'labels_{labels}_seed{seed}.txt'
            words = ['python', 'tools/datasets/sample_labels.py', root / 'train', labels, root / name, '--seed', seed]
            needs.append(self.add(f'labels of seed {seed}', [*map(str, words)], root / name))
            options['train_dataloader.dataset.ann_file'] = name
        words = [] if settings.get('validate') else ['--no-validate']
        seed, steps = seed if settings.get('seeds') else 0, settings.get('steps')
        return self.training(f'{recipe} / {stage}', settings['config'], options, needs, seed, steps, words)

    def training(self, title, config, options, needs, seed, steps=None, words=()) -> Step:
        """The training of a config; with changes it gets its own folder."""
        cfg, loop = load(config), load(config).train_cfg
        accumulated, total = cfg.optim_wrapper.get('accumulative_counts', 1), cfg.auto_scale_lr.base_batch_size
        own = total // (cfg.train_dataloader.batch_size * accumulated)  # processes that the config expects
        gpus = self.args.gpus or own
        if total % (gpus * accumulated):
            raise UserError(f'--gpus is {gpus}; expected a divisor of the batch of {config}, {total // accumulated}')
        batch = [f'train_dataloader.batch_size={total // (gpus * accumulated)}'] if gpus != own else []
        result = f'epoch_{loop.max_epochs}.pth' if 'max_epochs' in loop else f'iter_{loop.max_iters}.pth'
        if steps := self.args.steps or steps:
            words, result = [*words, '--steps', str(steps)], f'iter_{steps}.pth'
        options |= {'randomness.seed': seed} if seed else {}
        changes = [f'{key}={json.dumps(value) if isinstance(value, list) else value}' for key, value in options.items()]
        changes += self.args.cfg_options
        folder = work_dir(config)
        if words or changes:
            folder = changed_dir(config, [*words, *changes])
            words = [*words, '--work-dir', str(folder)]
        command = launch('train', gpus, [f'configs/{config}'], ['--resume', *words], batch + changes)
        return self.add(f'{title}, seed {seed}', command, folder / result, needs, config, gpus, changes)

    def test(self, trained: Step, tta: bool = False) -> Step:
        """The test of a training."""
        out = trained.result.with_name('metrics_tta.json' if tta else 'metrics.json')
        needs = [trained] if trained.command else []
        files = [f'configs/{trained.config}', *(str(step.result) for step in needs)]
        words = ['--work-dir', str(out.parent), '--out', str(out), *['--tta'] * tta]
        command = launch('test', trained.gpus, files, words, trained.options)
        return self.add(f'{trained.title}, test', command, out, needs)


@functools.cache
def load(config: str):
    from mmengine.config import Config

    return Config.fromfile(ROOT / 'configs' / config)


def work_dir(config: str) -> Path:
    return Path(load(config).get('work_dir') or f'work_dirs/{Path(config).stem}')


def changed_dir(config: str, changes: list[str]) -> Path:
    digest = hashlib.sha256('\n'.join([config, *changes]).encode()).hexdigest()
    return TABLES_DIR / f'{Path(config).stem}-{digest[:8]}'


@functools.cache
def start_of(config: str) -> tuple[str, str, str | None]:
    """Key and path of the checkpoint that a config starts from, or of its tokenizer, and the config that makes it.

    The config is None for weights from elsewhere.
    """
    of_backbone = ('model.backbone.init_cfg.checkpoint', 'model.backbone.module.init_cfg.checkpoint')  # of LoRA
    for key in ('load_from', *of_backbone, 'model.target_generator.checkpoint'):
        checkpoint = functools.reduce(lambda entry, name: (entry or {}).get(name), key.split('.'), load(config))
        if checkpoint:
            folder = Path(checkpoint).parent
            names = (path.relative_to(ROOT / 'configs').as_posix() for path in (ROOT / 'configs').glob('*/*.py'))
            likely = (name for name in names if folder.name.endswith(Path(name).stem))
            return key, checkpoint, next((name for name in likely if work_dir(name) == folder), None)
    return '', '', None


def recipe_settings(recipe: str, stage: str) -> dict:
    """Settings of a stage, with the changes of the recipe and of the recipes that it is based on."""
    if recipe == 'baseline':
        return DATA['demo']['stages'][stage]
    own = DATA['demo']['recipes'][recipe]
    below, change = recipe_settings(own.get('base', 'baseline'), stage), own.get(stage, {})
    return {**below, **change, 'options': {**below['options'], **change.get('options', {})}}


def launch(tool: str, gpus: int, files: list[str], words: list[str], options: list[str]) -> list[str]:
    start = ['python', f'tools/{tool}.py', *files] if gpus == 1 else [f'tools/dist_{tool}.sh', *files, str(gpus)]
    return start + words + (['--cfg-options', *options] if options else [])


def run_steps(steps: list[Step], dry: bool) -> None:
    """Prints all steps and, unless `dry`, runs the unfinished ones, except where a step that they need has failed."""
    for number, step in enumerate(steps, start=1):
        title = step.title + ': finished' * step.finished()
        print(f'[{number}/{len(steps)}] {title}\n    {shlex.join(step.command)}', flush=True)
        if dry or step.finished() or not all(before.finished() for before in step.needs):
            continue
        step.result.parent.mkdir(parents=True, exist_ok=True)
        # paths of the repository, whatever the working directory is
        words = [str(ROOT / word) if word.startswith(('tools/', 'configs/')) else word for word in step.command]
        process = subprocess.Popen([sys.executable if words[0] == 'python' else words[0], *words[1:]])
        try:
            process.wait()
        except KeyboardInterrupt:  # the process gets it too, and saves a checkpoint
            process.wait()
            raise
        if not step.finished():
            print(f'error: {step.title} ended with exit code {process.returncode}', file=sys.stderr)


def cell(tests: list[Step], metric: str) -> str:
    """Text of a cell: mean over the seeds, sample standard deviation, and the number of each seed."""
    values = [json.loads(test.result.read_text())[metric] for test in dict.fromkeys(tests) if test.finished()]
    digits = 4 if metric.startswith('tokenizer/') else 1  # other metrics are percentages
    shown = [f'{value:.{digits}f}' for value in values]
    if len(values) < 2:
        return shown[0] if values else '–'
    mean, spread = statistics.mean(values), statistics.stdev(values)
    return f'**{mean:.{digits}f}** ± {spread:.{digits}f} ({", ".join(shown)})'


def main() -> None:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('table', choices=DATA['tables'], metavar='TABLE', help=', '.join(DATA['tables']))
    parser.add_argument('--scale', choices=['demo', 'full'], required=True, help='small models, or the full configs')
    parser.add_argument('--rows', nargs='+', type=int, metavar='N', help='rows to run, from 1 (default: all)')
    parser.add_argument('--columns', nargs='+', metavar='NAME', help='columns to fill (default: all)')
    parser.add_argument('--seeds', nargs='+', type=int, default=[0], metavar='SEED', help='a run for each (default: 0)')
    own = "GPUs of this node; the batch stays the same (default: the config's number)"
    parser.add_argument('--gpus', type=int, metavar='N', help=own)
    parser.add_argument('--steps', type=int, metavar='N', help='train N steps in each training')
    parser.add_argument('--dry-run', action='store_true', help='print commands and finished steps, run nothing')
    parser.add_argument('--cfg-options', nargs='+', default=[], action='extend', metavar='KEY=VALUE')
    args = parser.parse_args()
    if length := next((one for one in args.cfg_options if one.startswith('train_cfg.max_')), None):
        parser.error(f'{length}: a training is expected to have the length of its config; use --steps')
    table, demo = DATA['tables'][args.table], args.scale == 'demo'
    known = {key: one for key, one in (DATA['demo']['stages'] if demo else table['columns']).items() if 'metric' in one}
    if demo and 'demo' not in table:
        parser.error(f'{args.table} has no demo scale; use --scale full')
    numbered = dict(enumerate(table['rows'], start=1))
    columns, numbers = args.columns or [*(table['demo'] if demo else known)], args.rows or [*numbered]
    for name, chosen, available in (('columns', columns, known), ('rows', numbers, numbered)):
        if unknown := [one for one in chosen if one not in available]:
            parser.error(f'--{name}: no {unknown[0]} in {args.table}; choose from {", ".join(map(str, available))}')
    plan, rows = Plan(args), [row for number, row in numbered.items() if number in numbers]
    made = [{column: plan.tests(table, row, column) for column in columns} for row in rows]
    steps = list(plan.steps.values())
    run_steps(steps, args.dry_run)
    if args.dry_run:
        return
    paper = [key for key in table['columns'] if any(key in row.get('paper', {}) for row in rows)]
    head = ['row', *(f'paper: {table["columns"][key]["title"]}' for key in paper)]
    lines = [head + [f'here: {known[key]["title"]}' for key in columns], ['---'] * (1 + len(paper) + len(columns))]
    for row, cells in zip(rows, made, strict=True):
        printed = (row.get('paper', {}).get(key, '–') for key in paper)
        lines.append([row['name'], *printed, *(cell(cells[key], known[key]['metric']) for key in columns)])
    text = '\n'.join(f'| {" | ".join(line)} |' for line in lines)
    path = TABLES_DIR / f'{args.table}_{args.scale}.md'
    TABLES_DIR.mkdir(parents=True, exist_ok=True)
    path.write_text(f'{text}\n')
    print(f'\n{table["caption"]} ({args.scale} scale), written to {path}\n{text}')
    if 'curves' in table:
        from beit_mm.pictures import draw_runs, read_scalars

        curves = {step.title: read_scalars(step.result.parent) for step in steps if step.result.suffix == '.json'}
        draw_runs(curves, [table['curves']]).savefig(path.with_suffix('.png'), dpi=120)
    if left := sum(not step.finished() for step in steps):
        sys.exit(f'error: {left} of {len(steps)} steps are unfinished; run the same command again to retry them')


if __name__ == '__main__':
    run(main)

"""Runs the rows of one of the paper's tables and sets our figures beside the paper's.

    python tools/reproduce_table.py ablation --scale demo --jobs 2       Caltech-101, a small model, two CPU cores
    python tools/reproduce_table.py ablation --scale full                the configs as they are: weeks on 16 GPUs
    python tools/reproduce_table.py ablation --scale demo --dry-run      the commands, and what is done already

configs/paper_tables.yml has the paper's numbers and what is run for each row: the tokenizer where none is there,
pretraining, fine-tuning, and what the row's metrics need besides. What is finished is left as it is, an interrupted run
goes on, so the same command goes on with a table. The table is printed and written between two marks of
docs/results.md. A seed changes the labelled images, the order and the new weights of what is run after pretraining.

Runs of the demo scale are in work_dirs/tables/demo/<recipe>, those of the full scale where their configs say. Each run
has its log, train.log or test.log, beside its checkpoints.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from _cli import few_of_each, run
from _steps import ROOT, Execution, Step, StoppedError, read, with_predecessors

from beit_mm.terminal import UserError

if TYPE_CHECKING:
    from mmengine.config import Config

sys.path.append(str(ROOT / 'tools/dev'))  # update_configs: what comes before a config
DATA = ROOT / 'configs/paper_tables.yml'
TABLES = (
    'cls',
    'seg',
    'ablation',
    'arch_variants',
    'supervised_cls',
    'supervised_seg',
    'tokenizer',
    'linear_probe',
    'multitask_dino',
    'cifar100',
    'convergence',
)
START_SECONDS, TEST_SECONDS = 10, 15  # of one core, for the estimate


# --- what is run for a row -------------------------------------------------------------------------


class DemoPlan:
    """Steps of rows at demo scale, each made once however many rows share it.

    Args:
        data: `demo` of the file of tables.
        folder: where the runs go.
        shorten: all lengths are divided by it.
        options: `--cfg-options` of every run.
    """

    def __init__(self, data: dict, folder: Path, shorten: int, options: list[str]):
        self.stages, self.recipes = data['stages'], data['recipes']
        self.folder, self.shorten, self.options = folder, shorten, options
        self.steps: dict[Path, Step] = {}
        self.configs: dict[str, Config] = {}
        self.lengths: dict[str, dict[str, list[str]]] = {}  # stage -> how long, in words -> recipes
        self.lists: dict[Path, tuple[Path, int, int]] = {}  # of labelled images: folder, images a class, seed

    def config(self, name: str) -> Config:
        from mmengine.config import Config

        if name not in self.configs:
            self.configs[name] = Config.fromfile(ROOT / 'configs' / name)
        return self.configs[name]

    def settings(self, recipe: str, stage: str) -> dict:
        """A stage's settings with what the recipe, and those that it is based on, change."""
        base = self.base(recipe)
        below = self.settings(base, stage) if base else self.stages[stage]
        change = self.recipes[recipe].get(stage, {})
        return {**below, **change, 'options': below.get('options', []) + change.get('options', [])}

    def base(self, recipe: str) -> str | None:
        return None if recipe == 'baseline' else self.recipes[recipe].get('base', 'baseline')

    def owner(self, recipe: str, stage: str) -> str:
        """The recipe whose run this is: the one that last changed the stage or what it starts from."""
        while (base := self.base(recipe)) and not self.changed(recipe, stage):
            recipe = base
        return recipe

    def changed(self, recipe: str, stage: str) -> bool:
        return stage in self.recipes[recipe] or any(
            self.changed(recipe, source) for source in self.settings(recipe, stage).get('from', {})
        )

    def train(self, recipe: str, stage: str, seed: int) -> Step:
        """The training of a stage."""
        recipe, settings = self.owner(recipe, stage), self.settings(recipe, stage)
        seeded = settings.get('seeds', False)
        place = self.folder / recipe / (stage + (f'_seed{seed}' if seeded else ''))
        cfg = self.config(settings['config'])
        options, length, unit = schedule(cfg, settings.get('length'), self.shorten)
        options += [str(option) for option in settings['options']]
        options += changed_pretraining(cfg, settings.get('changes', []))
        sources = []
        for source, key in settings.get('from', {}).items():
            sources.append(self.train(recipe, source, seed))
            options.append(f'{key}={sources[-1].result}')
        if seeded:
            options.append(f'randomness.seed={seed}')
        if labels := settings.get('labels'):
            root = dict(option.split('=', 1) for option in options).get('data_root', cfg.data_root)
            options.append(f'train_dataloader.dataset.ann_file={self.labels(root, labels, seed)}')
        options += self.options
        words = [f'configs/{settings["config"]}', '--work-dir', str(place)]
        words += [] if settings.get('validate') else ['--no-validate']
        own = settings['config'] == self.stages[stage]['config']
        text = (
            ('' if own else f'configs/{settings["config"]}, ')
            + f'{length:,} {"epochs" if unit == "epoch" else "steps"}'
            + (f', {labels} labelled images a class' if labels else '')
        )
        recipes = self.lengths.setdefault(stage, {}).setdefault(text, [])
        recipes += [] if recipe in recipes else [recipe]
        step = Step(
            f'{recipe} / {stage}' + (f' / seed {seed}' if seeded else ''),
            ['python', 'tools/train.py', *words, '--resume', '--cfg-options', *options],
            place / f'{unit}_{length}.pth',
            sources,
            weight=START_SECONDS + length * settings.get('seconds', 1),
            recorded=[*words, *options],
        )
        return self.steps.setdefault(step.result, step)

    def test(self, recipe: str, stage: str, seed: int) -> Step:
        """The test of a stage, after its training."""
        step = self.train(recipe, stage, seed)
        config, options = step.recorded[0], step.command[step.command.index('--cfg-options') :]
        place = step.result.parent
        command = ['python', 'tools/test.py', config, str(step.result), '--work-dir', str(place)]
        command += ['--out', str(place / 'metrics.json'), *options]
        test = Step(f'{step.title} / test', command, place / 'metrics.json', [step], TEST_SECONDS)
        return self.steps.setdefault(test.result, test)

    def labels(self, root: str, count: int, seed: int) -> Path:
        """Path of the list of `count` images of each class that the seed draws."""
        path = (self.folder / f'labels_{count}_seed{seed}.txt').absolute()
        self.lists[path] = Path(root, 'train'), count, seed
        return path

    def write_lists(self) -> None:
        """Writes the lists of labelled images that are not there."""

        for path, (folder, count, seed) in self.lists.items():
            if path.exists():
                continue
            if not folder.is_dir():
                raise UserError(f'no folder {folder}; expected one folder of images a class in it')
            classes = sorted(place.name for place in folder.iterdir() if place.is_dir())
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(''.join(f'{image}\n' for image in few_of_each(folder, classes, count, seed)))


def schedule(cfg: Config, length: int | None, shorten: int) -> tuple[list[str], int, str]:
    """Options for a run of another length, the warm-up keeping its share; the length; 'epoch' or 'iter'."""
    key = 'max_epochs' if 'max_epochs' in cfg.train_cfg else 'max_iters'
    unit, own = key.removeprefix('max_').removesuffix('s'), cfg.train_cfg[key]
    shortest = 1 if unit == 'epoch' else 2  # a warm-up that ends
    length = max(2 * shortest, (length or own) // shorten)
    if length == own:
        return [], own, unit
    options = [f'train_cfg.{key}={length}']
    late = int(cfg.param_scheduler[-1].type == 'PolyLR')  # mmengine's PolyLR arrives one step before its end

    def moved(value: int) -> int:
        return length if value == own else value and max(shortest, round(value * length / own))

    for number, scheduler in enumerate(cfg.param_scheduler):
        begin, end = moved(scheduler.get('begin', 0)), moved(scheduler.end - late) + late
        changes = dict(begin=begin, end=end, T_max=end - begin)
        options += [
            f'param_scheduler.{number}.{name}={value}'
            for name, value in changes.items()
            if scheduler.get(name) not in (None, value)
        ]
    return options, length, unit


CHANGES = {'random_mask': 'patches drawn one by one', 'no_mask': 'nothing is masked', 'pixels': 'no tokenizer'}


def changed_pretraining(cfg: Config, changes: list[str]) -> list[str]:
    """Options that make a config of masked image modeling a row of the ablation, as configs/ablation does.

    Args:
        cfg: the pretraining.
        changes: names in CHANGES.
    """
    if unknown := set(changes) - set(CHANGES):
        raise UserError(f'changes {sorted(unknown)} are unknown; choose from {sorted(CHANGES)}')
    if not changes:
        return []
    pipeline = []
    for transform in cfg.train_dataloader.dataset.pipeline:
        transform = dict(transform)
        if transform['type'] == 'beit_mm.BlockwiseMask' and 'no_mask' in changes:
            continue
        if transform['type'] == 'beit_mm.BlockwiseMask' and 'random_mask' in changes:
            transform = dict(type='beit_mm.RandomMask', grid=transform['grid'], num_masked=transform['num_masked'])
        if 'second_size' in transform and 'pixels' in changes:
            transform['second_size'] = None
        pipeline.append(transform)
    options = [f'train_dataloader.dataset.pipeline={json.dumps(pipeline)}']
    if 'no_mask' in changes:
        options.append('model.backbone.masked_input=False')
    if 'pixels' in changes:
        head = dict(
            _delete_=True,
            type='beit_mm.PixelRegressionHead',
            embed_dims=cfg.model.backbone.arch.embed_dims,
            patch_size=cfg.model.backbone.patch_size,
        )
        options += ['model.target_generator=None', *(f'model.head.{key}={value}' for key, value in head.items())]
    return options


class FullPlan:
    """Steps of rows at full scale: the config's predecessors as its header names them, itself, its test.

    Args:
        gpus: of this node; None takes as many as each config is written for.
        options: `--cfg-options` of every run.
    """

    def __init__(self, gpus: int | None, options: list[str]):
        self.gpus, self.options = gpus, options
        self.steps: dict[Path, Step] = {}

    def train(self, config: str, seed: int = 0) -> Step:
        """The training of a config; its predecessors have seed 0."""
        import update_configs

        options = list(self.options)
        result = Path(update_configs.last_checkpoint(config))
        gpus, images, accumulated, total = update_configs.batch_of(config)
        identity = ['randomness.seed=' + str(seed)] if seed else []
        place = ['--work-dir', f'{result.parent}_seed{seed}'] if seed else []
        if seed:
            result = Path(place[1], result.name)
        batch = []
        if self.gpus and self.gpus != gpus:
            if total % (self.gpus * accumulated):
                raise UserError(f'--gpus {self.gpus}: the batch of {config}, {total} images, cannot be divided')
            gpus, batch = self.gpus, [f'train_dataloader.batch_size={total // (self.gpus * accumulated)}']
        changes = [*identity, *options]
        overrides = ['--cfg-options', *changes, *batch] if changes or batch else []
        previous = update_configs.previous(config)
        step = Step(
            config + (f' / seed {seed}' if seed else ''),
            ['tools/dist_train.sh', config, str(gpus), '--resume', *place, *overrides],
            result,
            [self.train(previous)] if previous else [],
            weight=images_seen(config),
            recorded=[config, *changes],
        )
        return self.steps.setdefault(result, step)

    def test(self, config: str, seed: int, tta: bool) -> Step:
        """The test of a config, after its training."""
        step = self.train(config, seed)
        out = step.result.parent / ('metrics_tta.json' if tta else 'metrics.json')
        gpus = step.command[2]
        command = ['tools/dist_test.sh', config, str(step.result), gpus, '--work-dir', str(step.result.parent)]
        command += ['--out', str(out), *(['--tta'] if tta else [])]
        command += ['--cfg-options', *self.options] if self.options else []
        return self.steps.setdefault(out, Step(f'{step.title} / test', command, out, [step]))

    def test_others(self, config: str, weights: list[str]) -> Step:
        """The test of a config with weights of others, which the options name."""
        place = Path('work_dirs/tables/full', Path(config).stem)
        command = ['python', 'tools/test.py', config, '--work-dir', str(place), '--out', str(place / 'metrics.json')]
        command += ['--cfg-options', *weights, *self.options]
        step = Step(f'{config} / test', command, place / 'metrics.json')
        return self.steps.setdefault(step.result, step)


def images_seen(config: str) -> float:
    """Images of a whole training at 224 pixels; larger ones count for their area."""
    import update_configs

    cfg, total = update_configs.load(config), update_configs.batch_of(config)[3]
    loop = cfg.train_cfg
    if 'max_epochs' in loop:
        seen = loop.max_epochs * update_configs.dataset_of(config)[1]
    else:
        seen = loop.max_iters // cfg.optim_wrapper.get('accumulative_counts', 1) * total
    size = update_configs.model_of(config).get('backbone', {}).get('img_size', 224)
    return seen * (size / 224) ** 2


# --- the table -------------------------------------------------------------------------------------


@dataclass
class Cell:
    """What one figure of ours is the mean of: tests, one for each seed, and the metric in their files."""

    tests: list[Step]
    metric: str

    def values(self) -> list[float]:
        """Of the tests that are finished."""
        return [json.loads(step.result.read_text())[self.metric] for step in self.tests if step.finished()]

    def text(self) -> str:
        values = self.values()
        if not values:
            return '–'
        digits = 4 if self.metric.startswith('tokenizer/') else 1  # the others are percentages
        shown = [f'{value:.{digits}f}' for value in values]
        if len(values) == 1:
            return shown[0]
        spread = statistics.stdev(values)
        return f'**{statistics.mean(values):.{digits}f}** ± {spread:.{digits}f} ({", ".join(shown)})'


def figures(plan: DemoPlan | FullPlan, table: dict, columns: list[str], row: dict, seeds: list[int]) -> dict[str, Cell]:
    """The figures of a row that are made here, by column."""
    cells = {}
    for column in columns:
        if isinstance(plan, FullPlan):
            if column in row.get('configs', {}) and 'metric' in table['columns'][column]:
                config, tta = f'configs/{row["configs"][column]}', table['columns'][column].get('tta', False)
                if column in row.get('weights', {}):
                    tests = [plan.test_others(config, row['weights'][column])]
                else:
                    tests = [plan.test(config, seed, tta) for seed in seeds]
                cells[column] = Cell(tests, table['columns'][column]['metric'])
        elif 'demo' in row:
            stage = row.get('demo_stages', {}).get(column, column)
            tests = [plan.test(row['demo'], stage, seed) for seed in seeds]
            cells[column] = Cell(list(dict.fromkeys(tests)), plan.stages[stage]['metric'])
    return cells


def table_lines(table: dict, titles: dict[str, str], rows: list[dict[str, Cell]], folder: Path) -> list[str]:
    """The table in Markdown.

    Args:
        table: of the file.
        titles: of our columns.
        rows: our figures of each row, by column.
        folder: of the page, which links start from.
    """
    configs = os.path.relpath(ROOT / 'configs', folder)
    paper = [key for key in table['columns'] if any(key in row.get('paper', {}) for row in table['rows'])]
    reasons = [row.get('why', '') for row in table['rows']]
    head = ['row', *(f'paper: {table["columns"][key]["title"]}' for key in paper)]
    head += [f'here: {title}' for title in titles.values()] + ['no config' for _ in reasons if any(reasons)][:1]
    lines = [head, ['---'] * len(head)]
    for row, cells, reason in zip(table['rows'], rows, reasons, strict=True):
        line = [row['name']]
        for key in paper:
            number, config = row.get('paper', {}).get(key, '–'), row.get('configs', {}).get(key)
            line.append(f'[{number}]({configs}/{config})' if config else number)
        line += [cells[key].text() if key in cells else '–' for key in titles]
        lines.append((line + [reason])[: len(head)])
    return [f'| {" | ".join(line)} |' for line in lines]


def describe(plan: DemoPlan) -> str:
    """Configs, lengths and labels of what is run, stage by stage."""
    texts = []
    for stage, lengths in plan.lengths.items():
        parts = [
            length + ('' if 'baseline' in recipes or len(lengths) == 1 else f' ({", ".join(recipes)})')
            for length, recipes in lengths.items()
        ]
        texts.append(f'{stage}: configs/{plan.stages[stage]["config"]}, {"; ".join(parts)}')
    if plan.options:
        texts.append('every run with --cfg-options ' + shlex.join(plan.options))
    return '. '.join(text[0].upper() + text[1:] for text in texts) + '.'


def write_between_marks(path: Path, name: str, lines: list[str]) -> None:
    """Puts lines between the marks of a table in a page, which are added at its end where there are none."""
    begin, end = f'<!-- {name} by tools/reproduce_table.py -->', f'<!-- end of {name} -->'
    text = read(path)
    if begin not in text:
        text += f'{begin}\n{end}\n'
    before, _, rest = text.partition(begin)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text('\n'.join([before + begin, *lines, end]) + rest.partition(end)[2])


def picture(table: dict, rows: list[dict[str, Cell]], page: Path) -> list[str]:
    """Draws the curves of a table that has a picture; returns the line that shows it."""
    if 'picture' not in table:
        return []
    cells = {row['name']: cell for row, made in zip(table['rows'], rows, strict=True) for cell in made.values()}
    if not all(test.finished() for cell in cells.values() for test in cell.tests):
        return []
    draw_curves(
        page.parent / table['picture'],
        {name: [curve(test.result.parent, cell.metric) for test in cell.tests] for name, cell in cells.items()},
    )
    return ['', f'![{table["caption"]}]({table["picture"]})']


def draw_curves(path: Path, curves: dict[str, list[dict[int, float]]]) -> None:
    """A picture of the top-1 of each epoch: of each row the mean over its runs, the runs themselves in gray."""
    import matplotlib

    matplotlib.use('Agg')
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4), layout='constrained')
    for (name, runs), style in zip(curves.items(), ('--', '-', ':', '-.'), strict=False):
        for values in runs:
            axes.plot(list(values), list(values.values()), color='0.7', linewidth=0.8)
        shared = sorted(set.intersection(*map(set, runs)))
        axes.plot(shared, [statistics.mean(values[e] for values in runs) for e in shared], style, color='k', label=name)
    axes.set(xlabel='epochs', ylabel='top-1 on held-out images, %')
    axes.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def curve(folder: Path, metric: str) -> dict[int, float]:
    """Epoch -> metric of a run, of all its starts; later ones count."""
    values = {}
    for path in sorted(folder.glob('*/vis_data/scalars.json')):
        for line in path.read_text().splitlines():
            row = json.loads(line)
            if metric in row:
                values[row['step']] = row[metric]
    return dict(sorted(values.items()))


def parse_arguments() -> tuple[argparse.Namespace, dict]:
    """The arguments, and what the file of tables holds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('table', choices=TABLES, metavar='TABLE', help=', '.join(TABLES))
    parser.add_argument(
        '--scale',
        choices=['demo', 'full'],
        required=True,
        help='Caltech-101 and a small model, or the configs as they are',
    )
    parser.add_argument('--rows', nargs='+', type=int, metavar='N', help='rows to run, from 1 (default: all)')
    parser.add_argument(
        '--columns',
        nargs='+',
        metavar='NAME',
        help='figures to make: columns of the table, or stages of the demo scale',
    )
    parser.add_argument('--seeds', nargs='+', type=int, metavar='SEED', help='default: 0 1 2 at demo scale, 0 at full')
    parser.add_argument('--jobs', type=int, default=1, help='processes at a time, which share the cores')
    parser.add_argument('--gpus', type=int, help='full scale: GPUs of this node, each with a larger part of the batch')
    parser.add_argument(
        '--shorten', type=int, default=1, metavar='N', help='demo scale: all lengths divided by N, as a try'
    )
    parser.add_argument('--output', type=Path, help='page to write the table into (default: docs/results.md)')
    parser.add_argument('--dry-run', action='store_true', help='print the commands and what is finished, run nothing')
    parser.add_argument(
        '--cfg-options', nargs='+', default=[], action='extend', metavar='KEY=VALUE', help='for every run'
    )
    args = parser.parse_args()
    import yaml

    data = yaml.safe_load(DATA.read_text())
    table = data['tables'][args.table]
    if args.scale == 'demo' and 'demo' not in table:
        parser.error(f'{args.table} has no demo scale: it is about models and data that only --scale full has')
    if any(not 0 < row <= len(table['rows']) for row in args.rows or ()):
        parser.error(f'--rows: {args.table} has rows 1 to {len(table["rows"])}')
    if args.jobs < 1 or args.shorten < 1 or args.shorten > 1 and args.scale == 'full':
        parser.error('--jobs and --shorten are numbers from 1; --shorten is for the demo scale')
    args.seeds = args.seeds or ([0, 1, 2] if args.scale == 'demo' else [0])
    return args, data


def main() -> None:
    args, data = parse_arguments()
    table = data['tables'][args.table]
    plan: DemoPlan | FullPlan
    if args.scale == 'demo':
        folder = Path('work_dirs/tables/demo' + (f'_{args.shorten}' if args.shorten > 1 else ''))
        plan = DemoPlan(data['demo'], folder, args.shorten, args.cfg_options)
        columns, known = table['demo'], plan.stages
    else:
        plan = FullPlan(args.gpus, args.cfg_options)
        columns = known = table['columns']
    titles = {name: column['title'] for name, column in known.items() if 'metric' in column}
    columns = args.columns or [name for name in columns if name in titles]
    if unknown := set(columns) - set(titles):
        raise UserError(f'--columns: no {", ".join(sorted(unknown))} in {args.table}; choose from {", ".join(titles)}')
    cells = [figures(plan, table, columns, row, args.seeds) for row in table['rows']]
    chosen = [row for number, row in enumerate(cells, start=1) if not args.rows or number in args.rows]
    steps = with_predecessors([test for row in chosen for cell in row.values() for test in cell.tests])
    for step in steps:
        step.check()
    if args.dry_run:
        for number, step in enumerate(steps, start=1):
            print(f'[{number}/{len(steps)}] {step.title}: {"finished" if step.finished() else "to do"}')
            print('    ' + shlex.join(step.command))
        return

    if isinstance(plan, DemoPlan):
        plan.write_lists()
    execution = Execution(steps, args.jobs, clock=args.scale == 'demo')
    stopped = False
    try:
        execution.run()
    except StoppedError:
        stopped = True
    page = args.output or ROOT / 'docs/results.md'
    lines = table_lines(table, {name: titles[name] for name in columns}, cells, page.parent)
    lines += ['', describe(plan)] if isinstance(plan, DemoPlan) else ['']
    many = 'Mean ± sample standard deviation (each seed); seeds'
    lines.append(f'{many if len(args.seeds) > 1 else "Seed"} {", ".join(map(str, args.seeds))}.')
    print('\n'.join(['', f'{table["caption"]} ({args.scale} scale)', *lines]))
    if args.output or args.shorten == 1:  # shortened runs are no results
        lines += picture(table, cells, page)
        write_between_marks(page, f'{args.table} at {args.scale} scale', lines)
        print(f'written to {page}')
    if stopped:
        sys.exit('stopped; the same command goes on from here')
    if execution.failed:
        sys.exit(f'error: {len(execution.failed)} of {len(steps)} steps failed; the same command tries them again')


if __name__ == '__main__':
    run(main)

"""Pretrains one small ViT by BEiT, its variants and its peers on the same photos, and measures what each has learned.

    tar xf train.tar -C tiny; tar xf val.tar -C tiny               64-pixel photos in a folder a class
    python tools/dev/compare_methods.py tiny --rows tokens mae_ours --seeds 0 1    what is finished is not run again
    python tools/dev/compare_methods.py tiny --rows mae_ours --rate 1e-3 --steps 750 --stages measure   to choose a rate
    python tools/dev/compare_methods.py tiny --rows mae_ours --finetune-rate 2e-3   the same, of fine-tuning
    python tools/dev/compare_methods.py tiny --table                          tables and picture of what there is
    python tools/dev/compare_methods.py tiny --calibrate                       how many steps a row makes in MINUTES

Rows: see --help. One process and one thread a row, bfloat16, and as many steps as it made in MINUTES of a core when all
were timed in turn (STEPS), with its data path. A row is pretrained without labels, then measured by

k-NN, linear: of frozen features, the mean of the patches or the class token after one block, for k-NN as they are or
standardised, linear by logistic regression or least squares, all chosen on a tenth of the training photos;
fine-tuned: with 20 and with all labels a class, by configs/demo/finetune_folder.py, the same for all. Rates are chosen
on that tenth too. The tokenizer's minutes come on top; the row `short` has as many in all as the rows without one.

Everything lies in --out; results.json there has the figures, and put there again from a record it spares their rows.
"""

import argparse
import json
import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from threading import Lock
from typing import Any

from _methods import (
    CLASSES,
    CODES,
    DEPTH,
    DIMS,
    HEADS,
    IMAGENET,
    PATCH,
    ROWS,
    SHARED,
    SIDE,
    STEPS,
    TOKENLESS,
    UNTRAINED,
    make_runner,
    rate_of,
)
from _results import add_result, pooled_variance, print_steps, read_results, run_all, run_command, step_of
from matplotlib.figure import Figure

from beit_mm.errors import UserError
from beit_mm.terminal import Parser, run

Locks = defaultdict[str, Lock]
MINUTES, BATCH, HELD_OUT = 8, 64, 5000  # of a core; photos at a time; photos of val
PENALTIES = (1e-4, 1e-5, 1e-6, 1e-7, 1e-3)  # of the linear layer; each fit begins with the result of the one before
PREPARED = {'1.scale': SIDE, '2.crop_size': SIDE}  # of the test pipeline
FINETUNE = {'20': 400, 'all': 625}  # steps: 6.4 times through 4,000 photos, once through 40,000
COLUMNS = dict(knn='k-NN', linear='linear', finetune_20='fine-tuned, 20 labels', finetune_all='fine-tuned, all labels')
CLAIMS = [('tokens', other) for other in ('pixels', 'single', 'all', 'short', 'vqkd')]
CLAIMS += [('short', 'pixels')]  # whose minutes are equal with those of the tokenizer
CLAIMS += [('larger_start', 'tokens'), ('features_demo', 'tokens'), ('features_ema', 'pixels')]
CLAIMS += [('features_two', 'features_ema')]


def pretrain(row: str, args: argparse.Namespace, steps: int, folder: Path) -> None:
    """A row's pretraining, resumed; writes its encoder in our format."""
    import torch

    from beit_mm.checkpoint.names import convert_state_dict
    from beit_mm.checkpoint.read import write_checkpoint
    from beit_mm.models import BEiTBackbone

    if row in UNTRAINED:
        torch.manual_seed(args.seeds[0])
        arch = dict(embed_dims=DIMS, num_layers=DEPTH, num_heads=HEADS)
        encoder = BEiTBackbone(arch=arch, img_size=SIDE, patch_size=PATCH)
        state = {f'backbone.{name}': tensor for name, tensor in encoder.state_dict().items()}
    else:
        make_runner(row, args.data, args.out, steps, folder, args.seeds[0], args.rate).train()
        part = 'teacher.backbone.' if row == 'dino' else 'backbone.'
        path = folder / f'iter_{steps}.pth'
        found = torch.load(path, weights_only=False, map_location='cpu')['state_dict']  # written by this command
        ours = {f'backbone.{name.removeprefix(part)}': it for name, it in found.items() if name.startswith(part)}
        state = convert_state_dict(ours).state_dict
    meta = dict(beit_mm_format=1, architecture=dict(num_heads=HEADS), preprocessing=dict(IMAGENET, size=[SIDE, SIDE]))
    write_checkpoint(folder / f'encoder_{steps}.pth', dict(state_dict=state, meta=meta))


def encoder_of(folder: Path) -> Path:
    (path,) = folder.glob('encoder_*.pth')
    return path


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Figures of frozen features, % of the held-out photos."""
    import numpy as np
    import torch

    from beit_mm.datasets import ImageFolder, LoadImage
    from beit_mm.features import evaluation
    from beit_mm.features.extractor import FeatureExtractor

    def photos(split: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Pixels uint8 (N, 3, SIDE, SIDE), which are as large as they are needed, and classes (N,)."""
        dataset = ImageFolder(data_root=str(args.data / split), pipeline=[LoadImage()], test_mode=True)
        samples = [dataset[place] for place in range(len(dataset))]
        pixels = torch.from_numpy(np.stack([sample['img'] for sample in samples])).permute(0, 3, 1, 2)
        return pixels, torch.tensor([sample['gt_label'] for sample in samples])

    def features(pixels: torch.Tensor) -> list[torch.Tensor]:
        """Of each block the mean of the patches, then of each block the class token: (N, C)."""
        if folder.name.startswith('thumbnails'):
            thumbnails = [evaluation.thumbnail(image.permute(1, 2, 0).numpy()) for image in pixels]
            return [torch.from_numpy(np.stack(thumbnails)).float()]
        extractor = FeatureExtractor(encoder_of(folder))
        with torch.autocast('cpu', torch.bfloat16):
            parts = [extractor.features(part, range(DEPTH)) for part in pixels.split(BATCH)]
        return [
            torch.cat([part[kind][:, block] for part in parts])
            for kind in ('mean', 'class_token')
            for block in range(DEPTH)
        ]

    def right(predicted: torch.Tensor, labels: torch.Tensor) -> float:
        return round(100 * float((predicted == labels).double().mean()), 2)

    def knn(bank: torch.Tensor, y: torch.Tensor, queries: torch.Tensor, answers: torch.Tensor) -> float:
        return right(evaluation.knn_predict(queries, bank, y, CLASSES), answers)

    def least_squares(bank: torch.Tensor, y: torch.Tensor, queries: torch.Tensor, answers: torch.Tensor) -> float:
        return right(evaluation.ridge(bank.double(), y, queries.double()), answers)

    (pixels, labels), (held_out, truth), found = photos('train'), photos('val'), {}
    tenth = torch.arange(len(labels)) % 10 == 0
    rest = (~tenth).nonzero().squeeze(1)
    banks, queries = features(pixels), features(held_out)
    scales = [evaluation.standardiser(bank) for bank in banks]
    banks += [scale(bank) for scale, bank in zip(scales, banks, strict=True)]
    queries += [scale(query) for scale, query in zip(scales, queries, strict=True)]

    def best(name: str, method: Callable, candidates: range, rows: torch.Tensor) -> int:
        """The features that are best on the tenth, by these rows of the rest."""
        by = {i: method(banks[i][rows], labels[rows], banks[i][tenth], labels[tenth]) for i in candidates}
        found[name] = dict(features=max(by, key=by.__getitem__), tenth=[*by.values()])
        return found[name]['features']

    i = best('knn', knn, range(len(banks)), rest)
    found['knn']['top1'] = knn(banks[i], labels, queries[i], truth)
    i, layer = best('linear', least_squares, range(len(scales), len(banks)), rest[::3]), None  # a third is enough
    asked = torch.cat([banks[i][tenth], queries[i]])
    answers = {'least squares': evaluation.ridge(banks[i][rest].double(), labels[rest], asked.double())}
    for penalty in PENALTIES:
        layer = evaluation.fit_linear(banks[i][rest], labels[rest], CLASSES, penalty, start=layer)
        answers[f'logistic, {penalty:g}'] = layer(asked).argmax(dim=1)
    by = {name: right(answer[: int(tenth.sum())], labels[tenth]) for name, answer in answers.items()}
    tops = {name: right(answer[int(tenth.sum()) :], truth) for name, answer in answers.items()}
    chosen = max(by, key=by.__getitem__)
    found['linear'] |= dict(layer=chosen, layers=by, tops=tops, top1=tops[chosen])
    return found


def finetuning(row: str, seed: int, labels: str, args: argparse.Namespace, folder: Path) -> list[list[str]]:
    """Commands of a fine-tuning and its test, which writes metrics.json; `tenth`: of that tenth of the photos."""
    steps, place = FINETUNE.get(labels, FINETUNE['all']), folder / f'finetune_{labels}'
    if row == 'supervised':
        steps += STEPS['supervised']
    rate = args.finetune_rate or (2e-3 if row in UNTRAINED else 4e-3)
    options: dict[str, Any] = {
        'data_root': args.data,
        'model.head.num_classes': CLASSES,
        'model.data_preprocessor.num_classes': CLASSES,
        'model.backbone.img_size': SIDE,
        'model.backbone.init_cfg.checkpoint': encoder_of(folder),
        'train_dataloader.num_workers': 0,
        'train_dataloader.persistent_workers': False,
        'train_dataloader.dataset.pipeline.1.size': SIDE,
        'optim_wrapper.optimizer.lr': rate,
        'randomness.seed': seed,
    }
    for loader in ('val', 'test'):
        options |= {f'{loader}_dataloader.dataset.pipeline.{key}': value for key, value in PREPARED.items()}
    if row in UNTRAINED:
        options |= {'model.backbone.init_cfg': None, 'optim_wrapper.paramwise_cfg.layer_decay_rate': 1.0}
        del options['model.backbone.init_cfg.checkpoint']
    if labels != 'all':
        options['train_dataloader.dataset.ann_file'] = folder / f'labels_{labels}.txt'
    if labels.startswith('tenth'):
        tenth, photos = folder / 'tenth.txt', sorted(args.data.glob('train/*/*'))
        options |= {'test_dataloader.dataset.data_prefix': 'train', 'test_dataloader.dataset.ann_file': tenth}
        rest = sorted({*photos} - {*photos[::10]})
        for path, part in ((tenth, photos[::10]), (folder / f'labels_{labels}.txt', rest)):
            path.write_text(''.join(f'{photo.relative_to(args.data / "train")}\n' for photo in part))
    words = ['configs/demo/finetune_folder.py', '--work-dir', place, '--cfg-options']
    words += [f'{key}={value}' for key, value in options.items()]
    tested = [words[0], place / f'iter_{steps}.pth', '--out', place / 'metrics.json', *words[1:]]
    sample = ['tools/datasets/sample_labels.py', args.data / 'train', labels, folder / f'labels_{labels}.txt']
    commands = [['tools/train.py', words[0], '--steps', steps, '--resume', '--no-validate', *words[1:]]]
    commands += [['tools/test.py', *tested]]
    if labels.isdecimal():
        commands.insert(0, [*sample, '--seed', seed])
    return [[str(word) for word in command] for command in commands]


def train_tokenizer(kind: str, args: argparse.Namespace, locks: Locks) -> None:
    """Trains the discrete VAE on the photos, or the VQ-KD, whose teacher is the row `tokens`."""
    options = [f'data_root={args.data}', 'train_dataloader.num_workers=0']
    options += ['train_dataloader.persistent_workers=False']
    if kind == 'vqkd':
        train_tokenizer('tokenizer', args, locks)
        teacher = argparse.Namespace(**{**vars(args), 'rate': None, 'steps': None})
        run_stage('pretrain', 'tokens', 0, teacher, locks)
        options += [f'model.img_size={SIDE}', f'model.vocab_size={CODES}']
        options += [f'model.teacher.checkpoint={encoder_of(folder_of("tokens", 0, teacher))}']
        options += [f'train_dataloader.dataset.pipeline.1.size={SIDE}']
    config, steps = dict(tokenizer=('dvae', 3000), vqkd=('vqkd', 1000))[kind]
    words = [f'configs/demo/{config}.py', '--work-dir', str(args.out / kind), '--resume', '--no-validate']
    with locks[kind]:
        if not (args.out / kind / f'iter_{steps}.pth').exists():
            command = [sys.executable, 'tools/train.py', *words, '--cfg-options', *options]
            run_command(command, args.out / f'{kind}.log')


def run_row(row: str, seed: int, args: argparse.Namespace, locks: Locks) -> None:
    """The stages of a row that are not finished."""
    stages = args.stages
    if args.finetune_rate:
        stages = [f'finetune_tenth_{args.finetune_rate:g}']
    elif row in ('supervised', 'thumbnails'):
        stages = ['finetune_all' if row == 'supervised' else 'measure']
    with locks['results']:
        finished = read_results(args.out).get(folder_of(row, seed, args).name, {})
    left = [stage for stage in stages if stage not in finished]
    if left and row.partition('_')[0] not in TOKENLESS:
        train_tokenizer('vqkd' if row == 'vqkd' else 'tokenizer', args, locks)
    if left and row == 'features_two':
        run_stage('pretrain', 'features_ema', seed, args, locks)
    for stage in ['pretrain', *left] if left else []:
        run_stage(stage, row, seed, args, locks)


def run_stage(stage: str, row: str, seed: int, args: argparse.Namespace, locks: Locks) -> None:
    """A stage, unless it is finished; its figures and minutes go to results.json."""
    folder = folder_of(row, seed, args)
    with locks[folder.name]:
        with locks['results']:
            done = stage in read_results(args.out).get(folder.name, {})
        steps = args.steps or steps_of(row)
        if done and (stage != 'pretrain' or (folder / f'encoder_{steps}.pth').exists()):
            return
        words = [__file__, str(args.data), '--out', str(args.out), '--rows', row, '--seeds', str(seed)]
        words += ['--rate', str(args.rate)] * bool(args.rate) + ['--steps', str(steps)]
        commands = [[*words, '--child', stage, str(folder)]]
        folder.mkdir(parents=True, exist_ok=True)
        if stage.startswith('finetune'):
            commands = finetuning(row, seed, stage.removeprefix('finetune_'), args, folder)
        minutes = sum(run_command([sys.executable, *words], folder / f'{stage}.log') for words in commands)
        figures: dict[str, Any] = dict(minutes=round(minutes, 2))
        if stage == 'measure':
            figures |= json.loads((folder / 'measure.json').read_text())
        elif stage != 'pretrain':
            figures['top1'] = round(json.loads((folder / stage / 'metrics.json').read_text())['accuracy/top1'], 2)
        add_result(args.out, folder.name, {stage: figures}, locks['results'])


def folder_of(row: str, seed: int, args: argparse.Namespace) -> Path:
    """Its name says all that the options set, so that no run is resumed as another."""
    how = '' if row in UNTRAINED else f'-{args.rate or rate_of(row):g}-{args.steps or steps_of(row)}'
    return args.out / f'{row}-{seed}{how}'


def steps_of(row: str) -> int:
    return STEPS['tokens'] // 3 if row == 'short' else 0 if row in UNTRAINED else STEPS[SHARED.get(row, row)]


def calibrate(args: argparse.Namespace) -> None:
    """Steps that rows make in MINUTES."""
    import torch

    torch.set_num_threads(1)
    train_tokenizer('tokenizer', args, defaultdict(Lock))
    steps: dict[str, Callable[[], object]] = {}
    for row in [row for row in args.rows if row not in (*SHARED, *UNTRAINED, 'short')]:
        runner = make_runner(row, args.data, args.out, 1000, args.out / 'calibrate' / row, 0, None)
        steps[row] = step_of(runner)
        if row == 'dino':
            runner.model.teacher_temperature = torch.tensor(0.04)
        if row in ('dino', 'features_ema'):
            steps[row] = taught_step(steps[row], runner.model)
    print_steps(steps, 20, MINUTES)


def taught_step(step: Callable[[], object], model: Any) -> Callable[[], None]:
    def step_and_follow() -> None:
        step()
        model.update_teacher(0.99)

    return step_and_follow


def table(args: argparse.Namespace) -> None:
    """Prints rows, and differences of rows, over seeds; draws two columns of them.

    Errors are standard errors: of the seeds, by their spread within all rows, and of the held-out photos. Those of
    differences are too large, as their photos are the same.
    """
    results = read_results(args.out)
    found = {(row, seed): results.get(folder_of(row, seed, args).name, {}) for row in ROWS for seed in range(9)}

    def values(row: str, column: str) -> dict[int, float]:
        """By seed."""
        stage, *key = ('measure', column) if column in ('knn', 'linear') else (column,)
        runs = {seed: found[row, seed][stage] for seed in range(9) if stage in found[row, seed]}
        return {seed: (run[key[0]] if key else run)['top1'] for seed, run in runs.items()}

    spread = {column: pooled_variance([*values(row, column).values()] for row in ROWS) for column in COLUMNS}

    def error(column: str, *rows: list[float]) -> float:
        photos = sum(mean * (100 - mean) for mean in map(statistics.mean, rows)) / HELD_OUT
        return math.sqrt(photos + spread[column] * sum(1 / len(tops) for tops in rows))

    def minutes(row: str) -> float:
        """CPU time of its pretraining, 0 if it has none; mean of seeds."""
        of = [found[row, seed]['pretrain']['minutes'] for seed in range(9) if 'pretrain' in found[row, seed]]
        return statistics.mean(of) if of and row not in UNTRAINED else 0.0

    def minutes_before(row: str) -> float:
        return minutes('features_ema') if row == 'features_two' else 0.0

    heads = ' | '.join(COLUMNS.values())
    print(f'| row | steps | minutes | seeds | {heads} |\n|{" --- |" * (4 + len(COLUMNS))}')
    for row, title in ROWS.items():
        of = {column: [*values(row, column).values()] for column in COLUMNS}
        seeds = max(map(len, of.values()))
        total = minutes_before(row) + minutes(row)
        cells = [str(steps_of(row) or '–'), f'{total:.1f}' if total else '–', str(seeds)]
        for column, tops in of.items():
            cells.append(f'{statistics.mean(tops):.1f} ± {error(column, tops):.1f}' if tops else '–')
        if seeds:
            print(f'| {title} | {" | ".join(cells)} |')
    print(f'\n| difference | {heads} |\n|{" --- |" * (1 + len(COLUMNS))}')
    for first, second in CLAIMS:
        cells = []
        for column in COLUMNS:
            of = [values(row, column) for row in (first, second)]
            pair = [[tops[seed] for seed in sorted(of[0].keys() & of[1].keys())] for tops in of]
            difference = statistics.mean(pair[0]) - statistics.mean(pair[1]) if all(pair) else 0.0
            cells.append(f'{difference:+.1f} ± {error(column, *pair):.1f}' if all(pair) else '–')
        if set(cells) != {'–'}:
            print(f'| {first} - {second} | {" | ".join(cells)} |')
    shown = [row for row in ROWS if values(row, 'linear')]
    shown.sort(key=lambda row: statistics.mean(values(row, 'linear').values()))
    figure = Figure(figsize=(11, 0.3 * len(shown) + 1), layout='constrained')
    for axes, column in zip(figure.subplots(1, 2, sharey=True), ('linear', 'finetune_all'), strict=True):
        for place, row in enumerate(shown):
            tops = [*values(row, column).values()]
            if tops:
                colour = 'gray' if row in UNTRAINED else 'tab:orange' if 'mmpretrain' in ROWS[row] else 'tab:blue'
                axes.errorbar(statistics.mean(tops), place, xerr=error(column, tops), fmt='o', capsize=3, color=colour)
        axes.set(yticks=range(len(shown)), yticklabels=[ROWS[row] for row in shown], xlabel=f'{COLUMNS[column]}, %')
        axes.grid(axis='x', alpha=0.4)
    longer = values('supervised', 'finetune_all').values()
    if longer:
        axes.axvline(statistics.mean(longer), color='gray', linestyle='--', label=ROWS['supervised'])
        figure.legend(loc='outside lower right')
    figure.savefig(args.out / 'rows.png', dpi=110)


def main() -> None:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('data', type=Path, help='holds train/<class>/*.JPEG and val/<class>/*.JPEG')
    parser.add_argument('--out', type=Path, default=Path('work_dirs/compare'))
    parser.add_argument('--rows', nargs='+', choices=ROWS, default=[*ROWS], metavar='ROW', help=', '.join(ROWS))
    parser.add_argument('--seeds', nargs='+', type=int, default=[0, 1])
    parser.add_argument('--jobs', type=int, default=2, help='rows at a time, each on one core')
    parser.add_argument('--rate', type=float, help='learning rate instead of the one chosen')
    parser.add_argument('--steps', type=int, help='of pretraining')
    stages = ['pretrain', 'measure', *(f'finetune_{labels}' for labels in FINETUNE)]
    parser.add_argument('--stages', nargs='+', choices=stages, default=stages, metavar='STAGE', help=', '.join(stages))
    parser.add_argument('--finetune-rate', type=float, help='tried on a tenth of the training photos')
    parser.add_argument('--calibrate', action='store_true')
    parser.add_argument('--table', action='store_true')
    parser.add_argument('--child', nargs=2, help=argparse.SUPPRESS)  # a stage in a process of its own
    args = parser.parse_args()
    args.data, args.out = args.data.resolve(), args.out.resolve()
    if not args.table and not (args.data / 'train').is_dir():
        raise UserError(f'{args.data} holds no folder train; expected train/<class>/*.JPEG and val/<class>/*.JPEG')
    if args.child:
        stage, folder = args.child[0], Path(args.child[1])
        folder.mkdir(parents=True, exist_ok=True)
        if stage == 'pretrain':
            pretrain(args.rows[0], args, args.steps, folder)
        else:
            (folder / 'measure.json').write_text(json.dumps(measure(args, folder)))
    elif args.calibrate or args.table:
        (calibrate if args.calibrate else table)(args)
    else:
        locks: Locks = defaultdict(Lock)
        run_all(run_row, [(row, seed, args, locks) for seed in args.seeds for row in args.rows], args.jobs)


if __name__ == '__main__':
    run(main)

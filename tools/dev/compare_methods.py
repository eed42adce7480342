"""Pretrains one small ViT by BEiT, its variants and its peers on the same photos, and measures what each has learned.

    tar xf train.tar -C tiny; tar xf val.tar -C tiny               64-pixel photos in a folder a class
    python tools/dev/compare_methods.py tiny --rows tokens mae_ours --seeds 0 1    what is finished is not run again
    python tools/dev/compare_methods.py tiny --rows mae_ours --rate 1e-3 --steps 750    to choose a rate: no fine-tuning
    python tools/dev/compare_methods.py tiny --table                           the table and the curves of what there is
    python tools/dev/compare_methods.py tiny --calibrate                       how many steps a row makes in MINUTES

Rows: see --help. One process and one thread a row, bfloat16, and as many steps as it made in MINUTES of a core when all
were timed in turn (STEPS), with its data path. A row is pretrained without labels, then measured by

k-NN, linear: of frozen features, the mean of the patches after the block whose k-NN is best on a tenth of the training
photos; fine-tuned: with 20 and with all labels a class, by configs/demo/finetune_folder.py, the same for all.

Everything lies in --out; results.json there has the figures, and put there again from a record it spares their rows.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
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
    ROOT,
    ROWS,
    SHARED,
    SIDE,
    STEPS,
    UNTRAINED,
    make_runner,
)

from beit_mm.files import atomic_file
from beit_mm.terminal import Parser, UserError, run

MINUTES, BATCH = 15, 256  # of a core; photos at a time
PREPARED = {'1.scale': SIDE, '2.crop_size': SIDE}  # of the test pipeline
FINETUNE = {'20': 1500, 'all': 1875}  # steps: 24 times through 4,000 photos, 3 times through 40,000


def pretrain(row: str, args: argparse.Namespace, steps: int, folder: Path) -> None:
    """A row's pretraining, resumed; writes the encoder of each quarter in our format, and the last one's minutes."""
    import torch

    from beit_mm.checkpoint.names import convert_state_dict
    from beit_mm.checkpoint.read import write_checkpoint
    from beit_mm.models import BEiTBackbone

    if row in UNTRAINED:
        torch.manual_seed(args.seeds[0])
        arch = dict(embed_dims=DIMS, num_layers=DEPTH, num_heads=HEADS)
        encoder = BEiTBackbone(arch=arch, img_size=SIDE, patch_size=PATCH)
        weights = {0: {f'backbone.{name}': tensor for name, tensor in encoder.state_dict().items()}}
    else:
        make_runner(row, args.data, args.out, steps, folder, args.seeds[0], args.rate).train()
        part = 'teacher.backbone.' if row == 'dino' else 'backbone.'
        weights = {}
        for path in [folder / f'iter_{steps}.pth'] if args.rate else folder.glob('iter_*.pth'):
            found = torch.load(path, weights_only=False, map_location='cpu')['state_dict']  # written by this command
            ours = {f'backbone.{name.removeprefix(part)}': it for name, it in found.items() if name.startswith(part)}
            weights[int(path.stem.partition('_')[2])] = convert_state_dict(ours).state_dict
    meta = dict(beit_mm_format=1, architecture=dict(num_heads=HEADS), preprocessing=dict(IMAGENET, size=[SIDE, SIDE]))
    for step, state in weights.items():
        write_checkpoint(folder / f'encoder_{step}.pth', dict(state_dict=state, meta=meta))


def last_encoder(folder: Path) -> Path:
    return max(folder.glob('encoder_*.pth'), key=lambda path: int(path.stem.partition('_')[2]))


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Figures of frozen features, % of the held-out photos: k-NN at each quarter, and the linear layer at the end."""
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

    def features(extractor: FeatureExtractor, pixels: torch.Tensor) -> torch.Tensor:
        """Of all blocks: (N, blocks, C)."""
        return torch.cat([extractor.features(part, range(DEPTH))['mean'] for part in pixels.split(BATCH)])

    def right(predicted: torch.Tensor, labels: torch.Tensor) -> float:
        return round(100 * float((predicted == labels).double().mean()), 2)

    (pixels, labels), (held_out, truth), curve = photos('train'), photos('val'), {}
    for encoder in folder.glob('encoder_*.pth'):
        last, extractor = encoder == last_encoder(folder), FeatureExtractor(encoder)
        every = 1 if last else 4  # photo of the bank; a quarter is enough for the curve
        bank, y = features(extractor, pixels[::every]), labels[::every]
        tenth = torch.arange(len(y)) % 10 == 0
        chosen = [
            right(evaluation.knn_predict(x[tenth], x[~tenth], y[~tenth], CLASSES), y[tenth]) for x in bank.unbind(1)
        ]
        block = max(range(DEPTH), key=chosen.__getitem__)
        bank, queries = bank[:, block], features(extractor, held_out)[:, block]
        step = int(encoder.stem.partition('_')[2])
        curve[step] = right(evaluation.knn_predict(queries, bank[:: 4 // every], y[:: 4 // every], CLASSES), truth)
        if last:
            standard = evaluation.standardiser(bank)
            layer, how = evaluation.choose_penalty(standard(bank), y, CLASSES, torch.arange(len(bank)), False)
            linear = right(layer(standard(queries)).argmax(dim=1), truth)
            knn = right(evaluation.knn_predict(queries, bank, y, CLASSES), truth)
            found = dict(knn=knn, linear=linear, block=block, linear_train=round(max(how['held_out'].values()), 2))
    return dict(found, curve=dict(sorted(curve.items())))


def finetuning(row: str, seed: int, labels: str, args: argparse.Namespace, folder: Path) -> list[list[str]]:
    """Commands of a fine-tuning and its test, which writes metrics.json."""
    steps, place = FINETUNE[labels], folder / f'finetune_{labels}'
    if row == 'supervised':
        steps += STEPS['pixels']
    options: dict[str, Any] = {
        'data_root': args.data.resolve(),
        'model.head.num_classes': CLASSES,
        'model.data_preprocessor.num_classes': CLASSES,
        'model.backbone.img_size': SIDE,
        'model.backbone.init_cfg.checkpoint': last_encoder(folder),
        'train_dataloader.num_workers': 0,
        'train_dataloader.persistent_workers': False,
        'train_dataloader.dataset.pipeline.1.size': SIDE,
        'randomness.seed': seed,
    }
    for loader in ('val', 'test'):
        options |= {f'{loader}_dataloader.dataset.pipeline.{key}': value for key, value in PREPARED.items()}
    if row in UNTRAINED:
        rate = {'optim_wrapper.optimizer.lr': 1e-3, 'optim_wrapper.paramwise_cfg.layer_decay_rate': 1.0}
        options |= {'model.backbone.init_cfg': None, **rate}
        del options['model.backbone.init_cfg.checkpoint']
    if labels != 'all':
        options['train_dataloader.dataset.ann_file'] = f'labels_{labels}_{seed}.txt'
    words = ['configs/demo/finetune_folder.py', '--work-dir', place, '--cfg-options']
    words += [f'{key}={value}' for key, value in options.items()]
    tested = [words[0], place / f'iter_{steps}.pth', '--out', place / 'metrics.json', *words[1:]]
    sample = ['tools/datasets/sample_labels.py', args.data / 'train', labels, args.data / f'labels_{labels}_{seed}.txt']
    commands = [['tools/train.py', words[0], '--steps', steps, '--resume', '--no-validate', *words[1:]]]
    commands += [['tools/test.py', *tested]]
    if labels != 'all':
        commands.insert(0, [*sample, '--seed', seed])
    return [[str(word) for word in command] for command in commands]


def tokenizer(kind: str, args: argparse.Namespace) -> list[str]:
    """The command that trains the discrete VAE on the photos, or the VQ-KD, whose teacher is the row `tokens`."""
    options = [f'data_root={args.data.resolve()}', 'train_dataloader.num_workers=0']
    options += ['train_dataloader.persistent_workers=False']
    if kind == 'vqkd':
        teacher = last_encoder(args.out / 'tokens-0')
        options += [f'model.img_size={SIDE}', f'model.vocab_size={CODES}', f'model.teacher.checkpoint={teacher}']
        options += [f'train_dataloader.dataset.pipeline.1.size={SIDE}']
    config = dict(tokenizer='dvae', vqkd='vqkd')[kind]
    words = [f'configs/demo/{config}.py', '--work-dir', str(args.out / kind), '--resume', '--no-validate']
    return ['tools/train.py', *words, '--cfg-options', *options]


def call(words: list[str], log: Path) -> float:
    """Runs a script of this repository on one thread; returns the minutes of CPU time that it took."""
    environment = dict(os.environ, OMP_NUM_THREADS='1', PYTHONPATH=str(ROOT))
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open('a') as file:
        process = subprocess.Popen(
            [sys.executable, *words], cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT
        )
        _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise UserError(f'{words[0]} failed: {log} says why')
    return round((usage.ru_utime + usage.ru_stime) / 60, 2)


def run_row(row: str, seed: int, args: argparse.Namespace, lock: Lock) -> None:
    """The stages of a row that are not finished; each one's figures and minutes go to results.json when it is."""
    steps = args.steps or steps_of(row)
    name = f'{row}-{seed}' + (f'-rate_{args.rate or "own"}-{steps}' if args.rate or args.steps else '')
    folder = args.out / name
    stages = ['pretrain', 'measure', *(f'finetune_{labels}' for labels in FINETUNE)]
    if args.rate or args.steps:
        stages = stages[:2]
    for stage in ('pretrain', 'finetune_all') if row == 'supervised' else stages:
        with lock:
            if stage in read_results(args).get(name, {}):
                continue
        words = [__file__, str(args.data), '--out', str(args.out), '--rows', row, '--seeds', str(seed)]
        words += ['--rate', str(args.rate)] * bool(args.rate) + ['--steps', str(steps)]
        commands = [[*words, '--child', stage, str(folder)]]
        if stage.startswith('finetune'):
            commands = finetuning(row, seed, stage.partition('_')[2], args, folder)
        minutes = sum(call(command, folder / f'{stage}.log') for command in commands)
        figures: dict[str, Any] = dict(minutes=minutes)
        if stage == 'measure':
            figures |= json.loads((folder / 'measure.json').read_text())
        elif stage != 'pretrain':
            figures['top1'] = round(json.loads((folder / stage / 'metrics.json').read_text())['accuracy/top1'], 2)
        else:
            figures['steps'] = 0 if row in UNTRAINED else steps
        with lock:
            results = read_results(args)
            results.setdefault(name, {})[stage] = figures
            with atomic_file(args.out / 'results.json') as file:
                file.write((json.dumps(results, indent=1) + '\n').encode())
        print(f'{time.strftime("%H:%M")} {name} {stage} {figures}', flush=True)


def read_results(args: argparse.Namespace) -> dict[str, Any]:
    path = args.out / 'results.json'
    return json.loads(path.read_text()) if path.exists() else {}


def steps_of(row: str) -> int:
    return STEPS['tokens'] // 3 if row == 'short' else 0 if row in UNTRAINED else STEPS[SHARED.get(row, row)]


def calibrate(args: argparse.Namespace) -> None:
    """Steps that rows make in MINUTES: medians of CPU seconds a step, data path included, of rounds of all rows."""
    import torch
    from mmengine.optim import build_optim_wrapper

    torch.set_num_threads(1)
    steps = {}
    for row in [row for row in ROWS if row not in (*SHARED, *UNTRAINED, 'short')]:
        runner = make_runner(row, args.data, args.out, 1000, args.out / 'calibrate' / row, 0, None)
        model, loader = runner.model.train(), runner.build_dataloader(runner.cfg.train_dataloader)
        wrapper = build_optim_wrapper(model, runner.cfg.optim_wrapper)
        wrapper.initialize_count_status(model, 0, 1000)
        if row == 'dino':
            model.teacher_temperature = torch.tensor(0.04)
        steps[row] = (model, wrapper, iter(loader), [])
    for number in range(4):
        for row, (model, wrapper, batches, seconds) in steps.items():
            for _ in range(20):
                start = time.process_time()
                model.train_step(next(batches), wrapper)
                if row == 'dino':
                    model.update_teacher(0.99)
                seconds += [time.process_time() - start] * bool(number)
    for row, (*_, seconds) in steps.items():
        print(
            f'    {row}={60 * MINUTES / statistics.median(seconds):.0f},  # {statistics.median(seconds):.3f} s a step'
        )


def table(args: argparse.Namespace) -> None:
    """Prints the table of what is finished, and draws the k-NN of each row's quarters."""
    import matplotlib.pyplot as plt

    results, figure = read_results(args), plt.figure(figsize=(8, 5), layout='constrained')
    columns = dict(
        knn='k-NN', linear='linear', finetune_20='fine-tuned, 20 labels', finetune_all='fine-tuned, all labels'
    )
    print(f'| row | steps | seeds | {" | ".join(columns.values())} |\n|{" --- |" * (3 + len(columns))}')
    for row, title in ROWS.items():
        runs = [run for name, run in results.items() if name.rpartition('-')[0] == row]
        if not runs:
            continue
        values = dict(
            knn=[run['measure']['knn'] for run in runs if 'measure' in run],
            linear=[run['measure']['linear'] for run in runs if 'measure' in run],
            **{name: [run[name]['top1'] for run in runs if name in run] for name in columns if name.startswith('fine')},
        )
        steps = runs[0]['pretrain']['steps']
        print(f'| {title} | {steps:,} | {len(runs)} | {" | ".join(cell(values[name]) for name in columns)} |')
        curves = [run['measure']['curve'] for run in runs if 'measure' in run and steps]
        if curves:
            minutes = [0, *(MINUTES * int(step) / steps_of(row if row != 'short' else 'tokens') for step in curves[0])]
            heights = [statistics.mean(curve[step] for curve in curves) for step in curves[0]]
            start = [run['measure']['knn'] for name, run in results.items() if name.startswith('random-')]
            plt.plot(minutes[not start :], start[:1] + heights, marker='o', label=title)
    plt.xlabel('minutes of a core')
    plt.ylabel('k-NN, % of 5,000 held-out photos')
    plt.legend(fontsize='small')
    figure.savefig(args.out / 'curves.png', dpi=120)


def cell(values: list[float]) -> str:
    """Mean and standard error over seeds."""
    if len(values) < 2:
        return f'{values[0]:.1f}' if values else '–'
    return f'{statistics.mean(values):.1f} ± {statistics.stdev(values) / math.sqrt(len(values)):.1f}'


def main() -> None:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('data', type=Path, help='holds train/<class>/*.JPEG and val/<class>/*.JPEG')
    parser.add_argument('--out', type=Path, default=Path('work_dirs/compare'))
    parser.add_argument('--rows', nargs='+', choices=ROWS, default=[*ROWS], metavar='ROW', help=', '.join(ROWS))
    parser.add_argument('--seeds', nargs='+', type=int, default=[0, 1])
    parser.add_argument('--jobs', type=int, default=2, help='rows at a time, each on one core')
    parser.add_argument('--rate', type=float, help='learning rate instead of the one chosen')
    parser.add_argument('--steps', type=int, help='of pretraining')
    parser.add_argument('--calibrate', action='store_true')
    parser.add_argument('--table', action='store_true')
    parser.add_argument('--child', nargs=2, help=argparse.SUPPRESS)  # a stage in a process of its own
    args = parser.parse_args()
    args.out = args.out.resolve()
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
        if not (args.out / 'tokenizer/iter_3000.pth').exists():
            call(tokenizer('tokenizer', args), args.out / 'tokenizer.log')
        if 'vqkd' in args.rows and not (args.out / 'vqkd/iter_1000.pth').exists():
            call(tokenizer('vqkd', args), args.out / 'vqkd.log')
        lock = Lock()
        with ThreadPoolExecutor(args.jobs) as pool:
            futures = [pool.submit(run_row, row, seed, args, lock) for seed in args.seeds for row in args.rows]
            for future in futures:
                future.result()


if __name__ == '__main__':
    run(main)

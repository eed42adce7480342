"""Segments CamVid with one small BEiT under several heads, each for as long as the others, and compares them.

    python tools/dev/compare_heads.py data/camvid --seeds 0 1       what is finished is not run again
    python tools/dev/compare_heads.py data/camvid --rows masks_decoder --rates 5e-4 --seeds 0     another rate
    python tools/dev/compare_heads.py data/camvid --calibrate        CPU seconds of each head's step, and so its STEPS
    python tools/dev/compare_heads.py data/camvid --table            the table of what there is

All begin with the packaged weights, by configs/demo/camvid_upernet.py except for what ROWS says: 8 crops of 128 pixels
a step. A row makes as many steps as it would in MINUTES of one CPU core, wherever it is run. Every row is tried at
each of --rates; the table has the rate with the best mean, chosen on the validation frames that it shows.
Everything lies in --out; results.json has the figures of ROW-RATE-SEED, or with --steps of ROW-RATE-SEED-STEPS, which
the table leaves out.
"""

import argparse
import json
import math
import statistics
import sys
import time
from pathlib import Path
from threading import Lock
from typing import Any

from _results import ROOT, add_result, pooled_variance, print_steps, read_results, run_all, run_command, step_of

from beit_mm.models.lora import with_lora
from beit_mm.terminal import Parser, run

MINUTES, WARMUP, DEPTH, DIMS, RANK = 10, 0.1, 5, 128, 8
ROWS = dict(
    upernet='UperNet',
    upernet_lora='UperNet, LoRA in the backbone',
    upernet_frozen='UperNet, frozen backbone',
    setr_pup='SETR-PUP',
    linear='linear layer',
    masks_backbone='masks, queries in the last two blocks',
    masks_decoder='masks, decoder of two blocks',
    masks_frozen='masks, decoder of two blocks, frozen backbone',
)
STEPS = dict(  # in MINUTES of one core of an AMD EPYC (Zen 4), by --calibrate beside other work, 26 November 2026
    upernet=1475,  # 0.407 s a step
    upernet_lora=1643,  # 0.365
    upernet_frozen=2428,  # 0.247
    setr_pup=865,  # 0.694
    linear=2101,  # 0.286
    masks_backbone=659,  # 0.910
    masks_decoder=614,  # 0.978
    masks_frozen=793,  # 0.757
)


def config_of(row: str, data: Path, steps: int, rate: float, seed: int, folder: Path) -> Any:
    """A row's training, which ends with a validation."""
    from mmengine.config import Config

    cfg = Config.fromfile(ROOT / f'configs/demo/camvid_{"setr_pup" if row == "setr_pup" else "upernet"}.py')
    model, optimizer = cfg.model, cfg.optim_wrapper
    masks = row.startswith('masks')
    if masks or row == 'linear':
        model.pop('neck')
        model.pop('auxiliary_head')
    if row == 'linear':
        loss = dict(type='CrossEntropyLoss')
        layer = dict(in_channels=DIMS, in_index=3, channels=DIMS, num_convs=0, concat_input=False, dropout_ratio=0)
        model.decode_head = dict(type='beit_mm.FCNHead', num_classes=11, loss_decode=loss, **layer)
    if masks:
        head = dict(in_channels=DIMS, num_classes=11, num_queries=30, num_blocks=2, num_points=2048)
        model.decode_head = dict(type='beit_mm.MaskClassificationHead', where='decoder', in_index=[0, 1, 2, 3], **head)
        optimizer.clip_grad = dict(max_norm=0.1)
    if row == 'masks_backbone':
        model.decode_head.update(where='backbone', in_index=-1)
        model.backbone.out_indices = [DEPTH - 1]
    if row.endswith('frozen'):
        model.backbone.update(frozen_stages=DEPTH, drop_path_rate=0.0)
    if row.endswith('lora'):
        model.backbone = with_lora(model.backbone.to_dict(), RANK)
    if row.endswith(('frozen', 'lora')):
        optimizer.paramwise_cfg.layer_decay_rate = 1.0
    optimizer.optimizer.lr = rate
    warmup, power = max(2, int(WARMUP * steps)), 0.9 if masks else 1.0
    cfg.param_scheduler = [
        dict(type='LinearLR', start_factor=1e-6, by_epoch=False, begin=0, end=warmup),
        dict(type='PolyLR', power=power, eta_min=0, by_epoch=False, begin=0, end=steps + 1),
    ]
    cfg.train_cfg.update(max_iters=steps, val_interval=steps)
    for loader in (cfg.train_dataloader, cfg.val_dataloader, cfg.test_dataloader):
        loader.dataset.data_root = str(data)
    cfg.default_hooks.checkpoint.update(interval=steps, max_keep_ckpts=1)
    cfg.randomness, cfg.resume, cfg.work_dir = dict(seed=seed), True, str(folder)
    return cfg


def train(row: str, rate: float, seed: int, args: argparse.Namespace, folder: Path) -> None:
    """In a process of its own; leaves result.json in the folder."""
    from mmengine.runner import Runner

    runner = Runner.from_cfg(config_of(row, args.data, args.steps or STEPS[row], rate, seed, folder))
    start = time.time()
    runner.train()
    lines = [json.loads(line) for file in folder.glob('*/vis_data/scalars.json') for line in file.open()]
    metrics = next(line for line in reversed(lines) if 'mIoU' in line)
    trained = sum(parameter.numel() for parameter in runner.model.parameters() if parameter.requires_grad)
    found = dict(mIoU=metrics['mIoU'], aAcc=metrics['aAcc'], trained=trained, seconds=round(time.time() - start))
    (folder / 'result.json').write_text(json.dumps(found))


def run_row(row: str, rate: float, seed: int, args: argparse.Namespace, lock: Lock) -> None:
    name = name_of(row, rate, seed, args)
    if name in read_results(args.out):
        return
    folder = args.out / name
    folder.mkdir(parents=True, exist_ok=True)
    words = [__file__, str(args.data), '--out', str(args.out), '--child', row, f'{rate:g}', str(seed)]
    words += ['--steps', str(args.steps)] * bool(args.steps)
    run_command([sys.executable, *words], folder / 'log.txt')
    add_result(args.out, name, json.loads((folder / 'result.json').read_text()), lock)


def name_of(row: str, rate: float, seed: int, args: argparse.Namespace) -> str:
    return f'{row}-{rate:g}-{seed}' + (f'-{args.steps}' if args.steps else '')


def calibrate(args: argparse.Namespace) -> None:
    """Steps that rows make in MINUTES."""
    import torch
    from mmengine.runner import Runner

    torch.set_num_threads(1)
    steps = {}
    for row in args.rows:
        cfg = config_of(row, args.data, 1000, 2e-3, 0, args.out / 'calibrate' / row)
        cfg.train_dataloader.update(num_workers=0, persistent_workers=False)
        steps[row] = step_of(Runner.from_cfg(cfg))
    print_steps(steps, 6, MINUTES)


def table(args: argparse.Namespace) -> None:
    """Rows at their best rate; the error is that of seeds, by their spread within all rows and rates."""
    results = read_results(args.out)
    runs: dict[str, dict[str, list[dict]]] = {row: {} for row in ROWS}
    for name, result in sorted(results.items()):
        row, _, rest = name.partition('-')
        rate, _, seed = rest.partition('-')
        if seed.isdigit():
            runs[row].setdefault(rate, []).append(result)
    groups = [[run['mIoU'] for run in found] for rates in runs.values() for found in rates.values()]
    spread = math.sqrt(pooled_variance(groups))
    print('| head | steps | trained parameters | rate | mIoU, % | of seeds | at other rates |\n|' + ' --- |' * 7)
    for row, rates in runs.items():
        if not rates:
            continue
        means = {rate: statistics.mean(run['mIoU'] for run in found) for rate, found in rates.items()}
        # the best of the rates that have the most seeds
        most = max(map(len, rates.values()))
        best = max((rate for rate in rates if len(rates[rate]) == most), key=lambda rate: means[rate])
        found = [run['mIoU'] for run in rates[best]]
        others = ', '.join(f'{rate}: {mean:.1f}' for rate, mean in means.items() if rate != best)
        mean = f'{means[best]:.1f}' + (f' ± {spread / math.sqrt(most):.1f}' if spread else '')
        seeds = ', '.join(f'{value:.1f}' for value in found)
        cells = [ROWS[row], STEPS[row], f'{rates[best][0]["trained"]:,}', best, mean, seeds, others]
        print(f'| {" | ".join(map(str, cells))} |')


def main() -> None:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('data', type=Path, help='CamVid, as configs/demo/camvid_upernet.py says')
    parser.add_argument('--out', type=Path, default=Path('work_dirs/compare_heads'))
    parser.add_argument('--rows', nargs='+', choices=ROWS, default=[*ROWS], metavar='ROW', help=', '.join(ROWS))
    parser.add_argument('--seeds', nargs='+', type=int, default=[0, 1])
    parser.add_argument('--rates', nargs='+', type=float, default=[1e-3, 2e-3], help='at least 1e-4')
    parser.add_argument('--jobs', type=int, default=1, help='trainings at a time')
    parser.add_argument('--steps', type=int, help='of each training, in place of those of MINUTES')
    parser.add_argument('--calibrate', action='store_true')
    parser.add_argument('--table', action='store_true')
    parser.add_argument('--child', nargs=3, help=argparse.SUPPRESS)  # a training in a process of its own
    args = parser.parse_args()
    args.data, args.out = args.data.resolve(), args.out.resolve()
    if args.child:
        row, rate, seed = args.child
        train(row, float(rate), int(seed), args, args.out / name_of(row, float(rate), int(seed), args))
    elif args.calibrate or args.table:
        (calibrate if args.calibrate else table)(args)
    else:
        lock = Lock()
        runs = [(row, rate, seed, args, lock) for seed in args.seeds for rate in args.rates for row in args.rows]
        run_all(run_row, runs, args.jobs)


if __name__ == '__main__':
    run(main)

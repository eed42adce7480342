"""Calculates a pretraining on many GPUs from rates that were measured on one: exchange, input, checkpoints, restarts.

    python tools/dev/scale.py --gpus 16 64                       BEiT-Base on H100s
    python tools/dev/scale.py --rate 868 --parameters 311674880 --backward 0.58 --adapters 1

Assumed, and not measured: a ring leaves each node of `--per-node` GPUs once, through all of its adapters, at their
full bandwidth; latency is nothing; what the backward pass hides costs nothing, but its last bucket cannot be hidden;
the rate of a GPU does not fall with its batch (it does below some dozens of images); each node reads files as fast as
its cores prepare them; a failure costs half of the time between two checkpoints, and a restart.
"""

import argparse
import math

from beit_mm.terminal import Parser, run

FLOAT = 4  # bytes: gradients are exchanged, and weights and moments stored, in float32
BUCKET = 25 * 2**20  # bytes of gradients that DistributedDataParallel exchanges together
MOMENTS = 2  # that AdamW keeps of each parameter
IMAGENET = 1_281_167  # images of an epoch
GB = 1e9


def sent_bytes(parameters: float, gpus: int) -> float:
    """What a ring sends of the gradients from each GPU in a step."""
    return 2 * (gpus - 1) / gpus * FLOAT * parameters


def lines(gpus: int, args: argparse.Namespace) -> dict[str, str]:
    images = args.images / gpus  # of a GPU in a step
    step = images / args.rate  # s
    bandwidth = args.nvlink if gpus <= args.per_node else min(args.nvlink, args.adapters * args.adapter)
    sent = sent_bytes(args.parameters, gpus)
    exchange = sent / (bandwidth * GB)
    last = exchange * BUCKET / (FLOAT * args.parameters)
    exposed = max(exchange - args.backward * step, last)
    speed = gpus * images / (step + exposed)  # images/s of all
    hours = args.epochs * IMAGENET / speed / 3600
    node = min(gpus, args.per_node)
    read = args.rate * node  # images/s
    checkpoint = FLOAT * (1 + MOMENTS) * args.parameters
    writing = checkpoint / (args.disk * GB)
    saves = hours * 60 / args.save_minutes
    failures = hours * gpus / args.hours_to_failure
    lost = failures * (args.save_minutes / 2 + args.restart_minutes) / 60 + saves * writing / 3600
    return {
        'images of a GPU in a step': f'{images:g}',
        'GB that a GPU sends in a step': f'{sent / GB:.2f}',
        'step of a GPU alone, ms': f'{1e3 * step:.1f}',
        'exchange, and what nothing hides, ms': f'{1e3 * exchange:.2f}, {1e3 * exposed:.2f}',
        'images/s of all GPUs': f'{speed:,.0f} ({step / (step + exposed):.0%} of {gpus} alone)',
        f'hours for {args.epochs:g} epochs': f'{hours:.1f} ({hours * gpus:,.0f} GPU hours)',
        'cores of a node that read images': f'{math.ceil(read / args.reads)}',
        'GB/s that a node reads': f'{read * args.kilobytes / 1e6:.2f}',
        'GB of a checkpoint, and seconds to write it': f'{checkpoint / GB:.2f}, {writing:.1f}',
        'failures in the whole run': f'{failures:.2f}',
        'hours that checkpoints and failures take': f'{lost:.2f} ({lost / hours:.1%})',
    }


def main() -> None:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers = dict(
        parameters=(92_089_856, 'of the model (beit/pretrain_800e.py)'),
        images=(2048, 'of all GPUs in a step'),
        epochs=(800, 'of ImageNet-1K'),
        rate=(1911, 'images/s of one GPU (H100, compiled, 26 November 2026)'),
        backward=(0.46, 'share of a step that is the backward pass (two cores, docs/performance.md)'),
        per_node=(8, 'GPUs of a node'),
        nvlink=(450, 'GB/s and direction of a GPU within a node'),
        adapters=(8, 'network adapters of a node'),
        adapter=(50, 'GB/s and direction of one (400 Gb/s)'),
        reads=(595, 'images/s that one core prepares'),
        kilobytes=(110, 'of an image file'),
        disk=(1, 'GB/s of writing a checkpoint'),
        save_minutes=(30, 'between two checkpoints'),
        restart_minutes=(5, 'to notice a failure and to start again'),
        hours_to_failure=(50_000, 'of one GPU'),
    )
    parser.add_argument('--gpus', type=int, nargs='+', default=[16, 64])
    for name, (default, what) in numbers.items():
        parser.add_argument(f'--{name.replace("_", "-")}', type=float, default=default, help=f'{what}: {default}')
    args = parser.parse_args()
    if min(args.gpus) < 1:
        parser.error(f'--gpus is {min(args.gpus)}; expected at least 1')
    columns = [lines(gpus, args) for gpus in args.gpus]
    print(f'| | {" | ".join(f"{gpus} GPUs" for gpus in args.gpus)} |\n|{" --- |" * (1 + len(columns))}')
    for name in columns[0]:
        print(f'| {name} | {" | ".join(column[name] for column in columns)} |')


if __name__ == '__main__':
    run(main)

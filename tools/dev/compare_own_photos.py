"""What pays with few photos and few minutes: ways to a classifier, by the verbs, at several numbers of photos.

    python tools/dev/compare_own_photos.py data/caltech101 --minutes 3       what is finished is not run again
    python tools/dev/compare_own_photos.py data/caltech101 --table           the table of what there is
    python tools/dev/compare_own_photos.py data/caltech101 --start vit_small      also from weights of your own

DATA has train/<class>/ and val/<class>/. N photos are ten of each of N / 10 classes, or of all classes as many as there
are; the held-out photos are val's of these classes. Each way has the same minutes of one core; a pretraining takes half
of them. Everything lies in --out; results.json has the figures of WAY-NUMBER-MINUTES-SEED.
"""

import argparse
import json
import random
import statistics
import sys
from itertools import zip_longest
from pathlib import Path
from queue import Queue
from threading import Lock

from _results import add_result, read_results, run_all, run_command

from beit_mm.terminal import Parser, run

PER_CLASS = 10
WAYS = dict(  # what it begins with, whether it is pretrained on these photos first, and options of `finetune`
    packaged=('packaged weights, `finetune`', 'demo', False, ()),
    packaged_frozen=('packaged weights, `finetune --freeze all`', 'demo', False, ('--freeze', 'all')),
    packaged_more=('packaged weights, `pretrain`, then `finetune`', 'demo', True, ()),
    random=('random weights, `finetune`', 'none', False, ()),
    random_more=('random weights, `pretrain`, then `finetune`', 'none', True, ()),
)
START = 'start'  # in place of what --start names
FROM_START = dict(
    start_frozen=('--start, `finetune --freeze all`', START, False, ('--freeze', 'all')),
    start_lora=('--start, `finetune --lora 8`', START, False, ('--lora', '8')),
    start_all=('--start, `finetune`', START, False, ()),
)
ALL_WAYS = WAYS | FROM_START


def sample(data: Path, number: int, seed: int, folder: Path) -> None:
    """Makes a folder of links to `number` photos of train/, and to val/ of their classes."""
    if folder.exists():
        return
    generator = random.Random(seed)
    classes = sorted(path.name for path in (data / 'train').iterdir())
    classes = sorted(generator.sample(classes, min(len(classes), number // PER_CLASS)))
    photos = {name: sorted((data / 'train' / name).iterdir()) for name in classes}
    for shuffled in photos.values():
        generator.shuffle(shuffled)
    rounds = zip_longest(*photos.values())  # of each class one more
    chosen = [photo for photos_of_round in rounds for photo in photos_of_round if photo][:number]
    partial = folder.with_suffix('.part')
    held_out = [photo for name in classes for photo in (data / 'val' / name).iterdir()]
    for photo in [*chosen, *held_out]:
        link = partial / photo.relative_to(data)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(photo)
    partial.rename(folder)


def run_way(way: str, number: int, seed: int, args: argparse.Namespace, cores: Queue, lock: Lock) -> None:
    name = f'{way}-{number}-{args.minutes:g}-{seed}'
    if name in read_results(args.out):
        return
    _, init, pretrains, options = ALL_WAYS[way]
    init = args.start if init == START else init
    photos, folder = args.out / f'photos-{number}-{seed}', args.out / name
    minutes = args.minutes / 2 if pretrains else args.minutes
    core = cores.get()

    def verb(*words: object) -> None:
        command = ['taskset', '-c', core, sys.executable, '-m', 'beit_mm', *words, '--seed', seed]
        run_command(command, folder.with_suffix('.log'))

    try:
        if pretrains:
            verb('pretrain', photos, '--init', init, '--minutes', minutes, '--out', f'{folder}_pretrained')
            init = f'{folder}_pretrained'
        verb('finetune', photos, '--init', init, '--minutes', minutes, '--out', folder, *options)
    finally:
        cores.put(core)
    runs = [folder, Path(f'{folder}_pretrained')][: 1 + pretrains]
    record, *others = (json.loads((run / 'plan.json').read_text()) for run in runs)
    seconds = sum(each['seconds'] for each in [record, *others])
    seen = record['stages']['finetune']['steps'] * record['options']['batch']
    found = dict(record['metrics'], seconds=round(seconds), passes=round(seen / number, 2))
    add_result(args.out, name, found, lock)


def table(args: argparse.Namespace) -> None:
    """A column for each number of photos and minutes: means of seeds, standard errors of the held-out photos."""
    results = read_results(args.out)
    columns = sorted({(int(name.split('-')[1]), float(name.split('-')[2])) for name in results})
    heads = [f'{number:,} photos, {minutes:g} minutes' for number, minutes in columns]
    print(f'| {" | ".join(["", *heads])} |\n|{" --- |" * (len(columns) + 1)}')
    for way, (title, *_) in dict(ALL_WAYS, thumbnails=('ridge regression on thumbnails',)).items():
        cells = []
        for number, minutes in columns:
            is_baseline = way == 'thumbnails'  # the same in each way of a seed
            metric = 'thumbnails' if is_baseline else 'accuracy/top1'
            of_seed = {
                name.split('-')[3]: figures[metric]
                for name, figures in results.items()
                if name.split('-')[1:3] == [f'{number}', f'{minutes:g}'] and (is_baseline or name.startswith(f'{way}-'))
            }
            found = [*of_seed.values()]
            mean = statistics.mean(value for value, *_ in found) if found else None
            error = statistics.mean(error for _, error, _ in found) / len(found) ** 0.5 if found else None
            cells.append(f'{mean:.1f} ± {error:.1f}' if found else '')
        if any(cells):
            print(f'| {" | ".join([title, *cells])} |')


def main() -> None:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('data', type=Path, help='Caltech-101, as beit_mm/weights/README.md says')
    parser.add_argument('--out', type=Path, default=Path('work_dirs/compare_own_photos'))
    parser.add_argument('--ways', nargs='+', choices=ALL_WAYS, metavar='WAY', help=', '.join(ALL_WAYS))
    parser.add_argument('--start', metavar='FILE', help='weights of your own, for the ways that begin with `start_`')
    parser.add_argument('--numbers', nargs='+', type=int, default=[100, 300, 1000, 4000])
    parser.add_argument('--minutes', type=float, default=3)
    parser.add_argument('--seeds', nargs='+', type=int, default=[0])
    parser.add_argument('--cores', nargs='+', default=['0', '1'], help='one training at a time on each')
    parser.add_argument('--table', action='store_true')
    args = parser.parse_args()
    args.data, args.out = args.data.resolve(), args.out.resolve()
    args.ways = args.ways or [*(ALL_WAYS if args.start else WAYS)]
    if not args.start and FROM_START.keys() & set(args.ways):
        parser.error('the ways that begin with `start_` need --start')
    if args.table:
        return table(args)
    args.out.mkdir(parents=True, exist_ok=True)
    cores: Queue = Queue()
    for core in args.cores:
        cores.put(core)
    pairs, lock = [(number, seed) for seed in args.seeds for number in args.numbers], Lock()
    for number, seed in pairs:
        sample(args.data, number, seed, args.out / f'photos-{number}-{seed}')
    calls = [(way, number, seed, args, cores, lock) for number, seed in pairs for way in args.ways]
    run_all(run_way, calls, len(args.cores))


if __name__ == '__main__':
    run(main)

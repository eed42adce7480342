"""Times the reading of images on one core: from a folder and from tar shards, from the originals and at 256 pixels.

    python tools/dev/benchmarks/shards.py                   # 200 images painted here: 500 x 375, about 110 kB
    python tools/dev/benchmarks/shards.py --data DIR        # your own, on the disk in question
    python tools/dev/benchmarks/shards.py --index 14197122  # an index of so many images, as ImageNet-22K has

Rounds are interleaved and their medians printed, in CPU time. "Cold" rounds begin with the files' pages dropped from
the system's cache and go by the clock.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / 'datasets'))
from _timing import anonymous_bytes
from make_shards import IndexWriter
from pipeline import PRETRAIN, make_images, ours, transforms

from beit_mm.datasets.image_folder import INDEX
from beit_mm.datasets.samplers import SeededSampler
from beit_mm.registry import DATASETS


def prepare(tool: str, *arguments: object) -> None:
    command = [sys.executable, f'{sys.path[0]}/{tool}', *map(str, arguments)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def drop_pages(folder: Path) -> None:
    for path in folder.rglob('*.*'):
        with path.open('rb') as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def images_per_second(dataset, epoch: int, clock: Callable[[], float]) -> float:
    """Of all images in a random order."""
    start = clock()
    for key in SeededSampler(dataset, seed=epoch):
        dataset[key]
    return len(dataset) / (clock() - start)


def time_index(images: int) -> None:
    """Writes an index of so many images in archives of 90,000, and reads it as a run does."""
    with tempfile.TemporaryDirectory(dir='.') as folder:
        index, start = IndexWriter(), time.process_time()
        for shard, first in enumerate(range(0, images, 90_000)):
            archive = Path(folder, f'shard-{shard:06}.tar')
            with archive.open('wb') as file:
                file.truncate(90_000 * 11_776)
            rows = range(first, min(first + 90_000, images))
            names = (f'n{row // 650:08}/n{row // 650:08}_{row % 650}.JPEG' for row in rows)
            index.add(archive, ((name, 512 + 11_776 * row, 11_000, -1) for row, name in enumerate(names)))
        index.write(Path(folder))
        written, size = time.process_time() - start, Path(folder, INDEX).stat().st_size
        del index
        start, before = time.process_time(), anonymous_bytes(os.getpid())
        dataset = DATASETS.build(dict(type='beit_mm.ImageFolder', data_root=folder, pipeline=[]))
        read, memory = time.process_time() - start, anonymous_bytes(os.getpid()) - before
        start = time.process_time()
        for row in range(0, images, max(images // 10_000, 1)):
            dataset.get_data_info(row)
        each = (time.process_time() - start) / 10_000 * 1e6
    print(f'{len(dataset):,} images, {len(dataset.CLASSES):,} classes: {size / 1e6:.0f} MB, written in {written:.1f} s')
    print(f'read and checked in {read:.1f} s, {memory / 1e6:.0f} MB of memory; {each:.0f} microseconds a path')


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--data', type=Path, help='folder of images instead of painted ones')
    parser.add_argument('--images', type=int, default=200, help='how many to paint')
    parser.add_argument('--rounds', type=int, default=9, help='interleaved rounds over them')
    parser.add_argument('--index', type=int, help='images of an index to write and read, instead')
    args = parser.parse_args()
    if args.index:
        time_index(args.index)
        return
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir='.') as folder:
        places = {'originals': args.data or Path(folder, 'originals'), '256 pixels': Path(folder, 'resized')}
        if args.data is None:
            places['originals'].mkdir()
            make_images(places['originals'], args.images)
        prepare('resize_images.py', *places.values(), '--short-side', 256, '--workers', 1)
        for name, place in list(places.items()):
            places[f'{name}, shards'] = Path(folder, f'shards of {name}')
            prepare('make_shards.py', place, places[f'{name}, shards'], '--shard-size', '10MB')
        steps = transforms(PRETRAIN, ColorJitter=dict(device='model'))
        for title, pipeline in (('read and decode', steps[:1]), ('pretraining', steps)):
            datasets = {name: ours(pipeline, data_root=str(place)) for name, place in places.items()}
            rates = {(name, cold): [] for name in datasets for cold in (False, True)}
            for epoch in range(args.rounds + 1):
                for name, cold in rates:
                    if cold:
                        drop_pages(places[name])
                    clock = time.perf_counter if cold else time.process_time
                    rates[name, cold].append(images_per_second(datasets[name], epoch, clock))
            print(f'\n{title:24s} {"images/s":>9s} {"cold":>9s}  to files, warm (rounds)')
            for name in datasets:
                warm, cold = (rates[name, cold][1:] for cold in (False, True))
                files = rates[name.removesuffix(', shards'), False][1:]
                ratios = [one / other for one, other in zip(warm, files, strict=True)]
                print(
                    f'{name:24s} {statistics.median(warm):9.0f} {statistics.median(cold):9.0f}  '
                    f'{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})'
                )
        for name, place in places.items():
            size = sum(path.stat().st_size for path in place.rglob('*.*'))
            print(f'{name}: {size / len(datasets[name]) / 1000:.0f} kB an image')


if __name__ == '__main__':
    main()

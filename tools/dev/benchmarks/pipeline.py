"""Times the pipelines on one core: mask generators, each stage, the whole beside mmpretrain's, interleaved in one run.

    python tools/dev/benchmarks/pipeline.py                 # images painted here: 500x375, about 110 kB
    python tools/dev/benchmarks/pipeline.py --data DIR      # your own
    python tools/dev/benchmarks/pipeline.py --finetune      # fine-tuning's pipeline instead of pretraining's

Collation included, CPU time of one thread. Absolute figures depend on what else the machine does; the ratio is taken
between neighbouring rounds and hardly does.
"""

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import cv2
import mmpretrain.datasets
import numpy as np
import torch
from mmengine.config import Config
from mmengine.dataset import BaseDataset, default_collate
from mmengine.registry import init_default_scope
from mmpretrain.registry import DATASETS
from PIL import Image

from beit_mm.datasets.masking import BlockwiseMask, RandomMask
from beit_mm.datasets.samplers import SampleKey, seed_generators

sys.path.append(str(Path(__file__).parents[2] / 'demo'))
from scenes import OBJECTS, paint_scene  # noqa: E402

CONFIGS = Path(__file__).resolve().parents[3] / 'configs'
PRETRAIN, FINETUNE = CONFIGS / 'beit/pretrain_800e.py', CONFIGS / 'beit/finetune_in1k_100e.py'
THEIRS = Path(mmpretrain.__file__).parent / '.mim/configs/beit'
THEIR_PRETRAIN = THEIRS / 'beit_beit-base-p16_8xb256-amp-coslr-300e_in1k.py'
THEIR_FINETUNE = THEIRS / 'benchmarks/beit-base-p16_8xb128-coslr-100e_in1k.py'
THEIR_CROP = [
    dict(type='RandomResizedCrop', scale=224, backend='pillow', interpolation='bicubic'),
    dict(type='RandomFlip', prob=0.5, direction='horizontal'),
]


def transforms(config: Path, **options: dict) -> list[dict]:
    """The pipeline of a config's training, with options of its transforms by a part of their type's name."""
    steps = Config.fromfile(config).train_dataloader.dataset.pipeline
    return [dict(step, **next((options[name] for name in options if name in step.type), {})) for step in steps]


def ours(pipeline: list[dict], **data: object) -> BaseDataset:
    return DATASETS.build(dict(type='beit_mm.UnlabeledImages', pipeline=pipeline, **data))


def theirs(config: Path, **data: object) -> BaseDataset:
    """One of mmpretrain's pipelines, read by its own data set."""
    return DATASETS.build(dict(type='CustomDataset', with_label=False, pipeline=transforms(config), **data))


def make_images(folder: Path, count: int) -> None:
    """Painted images of ImageNet's usual size; the JPEG quality is searched for about 110 kB."""
    for index in range(count):
        pixels, _ = paint_scene(index % len(OBJECTS), 375, np.random.default_rng(index))
        image = Image.fromarray(pixels).resize((500, 375))
        path = folder / f'{index:04d}.jpg'
        for quality in range(98, 60, -2):
            image.save(path, quality=quality)
            if path.stat().st_size < 115_000:
                break


def time_masks() -> None:
    def microseconds(function: Callable[[], object], calls: int = 3000) -> float:
        rounds = []
        for _ in range(7):
            start = time.process_time()
            for _ in range(calls):
                function()
            rounds.append((time.process_time() - start) / calls * 1e6)
        return statistics.median(rounds)

    random.seed(0)
    print(f'{"mask":34s} {"us":>7s}')
    for variant, number in (('released', 75), ('exact', 75), ('paper', 78.4)):
        generate = BlockwiseMask((14, 14), number, variant=variant).draw
        print(f'{"blockwise, " + variant:34s} {microseconds(generate):7.1f}')
    print(f'{"random":34s} {microseconds(lambda: RandomMask((14, 14), 75).transform({})):7.1f}')
    print(f'{"seeding a sample":34s} {microseconds(lambda: seed_generators(SampleKey(0, 1, 2))):7.1f}')


def time_stages(dataset: BaseDataset, rounds: int, title: str) -> None:
    stages: dict[str, list[float]] = {}
    for _ in range(rounds):
        for index in range(len(dataset)):
            results = dataset.get_data_info(index)
            for transform in dataset.pipeline.transforms:
                start = time.process_time()
                results = transform(results)
                stages.setdefault(type(transform).__name__, []).append(time.process_time() - start)
    print(f'\n{title + ", stage":50s} {"ms":>7s}')
    for name, times in stages.items():
        print(f'{name:50s} {statistics.median(times) * 1e3:7.3f}')


def images_per_second(dataset: BaseDataset, epoch: int) -> float:
    """Of one round over the data set, collated in batches of 16."""
    keyed = type(dataset).__name__ == 'UnlabeledImages'
    keys = [SampleKey(0, epoch, index) if keyed else index for index in range(len(dataset))]
    start = time.process_time()
    for first in range(0, len(keys), 16):
        default_collate([dataset[key] for key in keys[first : first + 16]])
    return len(dataset) / (time.process_time() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--data', help='folder of images instead of painted ones')
    parser.add_argument('--images', type=int, default=48, help='how many to use')
    parser.add_argument('--rounds', type=int, default=15, help='interleaved rounds over them')
    parser.add_argument('--finetune', action='store_true', help="fine-tuning's pipeline on ImageNet")
    args = parser.parse_args()
    torch.set_num_threads(1)
    cv2.setNumThreads(1)
    init_default_scope('mmpretrain')
    if not args.finetune:
        time_masks()
    with tempfile.TemporaryDirectory() as folder:
        if args.data is None:
            make_images(Path(folder), args.images)
        data = dict(data_root=args.data or folder, indices=args.images)
        if args.finetune:
            steps = transforms(FINETUNE)
            datasets = {
                'beit_mm': ours(steps, **data),
                "beit_mm, mmpretrain's crop": ours([steps[0], *THEIR_CROP, *steps[2:]], **data),
                'mmpretrain': theirs(THEIR_FINETUNE, **data),
            }
        else:
            jitter, view = dict(ColorJitter=dict(device='model')), dict(ResizedCrop=dict(second_size=None))
            datasets = {
                'beit_mm, jitter on the CPU': ours(transforms(PRETRAIN), **data),
                'beit_mm, jitter on the device': ours(transforms(PRETRAIN, **jitter), **data),
                "and the tokenizer's view": ours(transforms(PRETRAIN, **jitter, **view), **data),
                'mmpretrain': theirs(THEIR_PRETRAIN, **data),
            }
        for epoch in range(10):  # fills the cache of resizing weights, as the first images do
            for name in list(datasets)[:-1]:
                images_per_second(datasets[name], epoch)
        rates = {name: [] for name in datasets}
        for epoch in range(args.rounds):
            for name, dataset in datasets.items():
                rates[name].append(images_per_second(dataset, 100 + epoch))
        for name, dataset in datasets.items():
            time_stages(dataset, 3, name)

    print(f'\n{"whole pipeline, collated, one core":34s} {"images/s":>9s} {"ratio":>6s}')
    for name, values in rates.items():
        ratios = [a / b for a, b in zip(values, rates['mmpretrain'], strict=True)]
        print(f'{name:34s} {statistics.median(values):9.0f} {statistics.median(ratios):6.2f}')
    print(f'medians of {args.rounds} rounds over {len(dataset)} images; torch {torch.__version__}')


if __name__ == '__main__':
    main()

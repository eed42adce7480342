"""Times the pipelines on one core: mask generators, each stage, the whole beside mmpretrain's, interleaved in one run.

    python tools/dev/benchmarks/pipeline.py                 # images painted here: 500x375, about 110 kB
    python tools/dev/benchmarks/pipeline.py --data DIR      # your own
    python tools/dev/benchmarks/pipeline.py --finetune      # fine-tuning's pipeline instead of pretraining's
    python tools/dev/benchmarks/pipeline.py --photos DIR    # its JPEGs at 0.2, 2 and 12 megapixels, decoded no larger
                                                        # than needed beside in full, in two configs

Collation included, CPU time of one thread. Absolute figures depend on what else the machine does; the
ratio is taken between neighbouring rounds and hardly does.
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
import mmpretrain
import numpy as np
import torch
from mmengine.config import Config
from mmengine.dataset import default_collate
from mmengine.registry import DefaultScope
from PIL import Image

from beit_mm.datasets.masking import BlockwiseMask, RandomMask
from beit_mm.datasets.samplers import SampleKey, seed_generators
from beit_mm.registry import DATASETS

sys.path.append(str(Path(__file__).parents[2] / 'demo'))
from scenes import OBJECTS, paint_scene  # noqa: E402

CONFIGS = Path(__file__).resolve().parents[3] / 'configs'
FINETUNE = CONFIGS / '_base_/datasets/finetune_in1k.py'
PRETRAIN = ('demo/pretrain.py', 'beit/pretrain_800e.py')
MASK = dict(type='beit_mm.BlockwiseMask', grid=(14, 14), num_masked=75)
THEIRS = [
    dict(type='LoadImageFromFile'),
    dict(type='ColorJitter', brightness=0.4, contrast=0.4, saturation=0.4, hue=0.0),
    dict(type='RandomFlip', prob=0.5, direction='horizontal'),
    dict(
        type='RandomResizedCropAndInterpolationWithTwoPic',
        size=224,
        second_size=112,
        interpolation='bicubic',
        second_interpolation='lanczos',
        scale=(0.08, 1.0),
    ),
    dict(
        type='BEiTMaskGenerator', input_size=(14, 14), num_masking_patches=75, max_num_patches=None, min_num_patches=16
    ),
    dict(type='PackInputs'),
]


THEIR_FINETUNING = '.mim/configs/beit/benchmarks/beit-base-p16_8xb128-coslr-100e_in1k.py'  # in mmpretrain's package


def our_pipeline(jitter: str = 'model', second_size: int | None = 112) -> list[dict]:
    return [
        dict(type='beit_mm.LoadImage'),
        dict(type='beit_mm.TwoViewRandomResizedCrop', second_size=second_size),
        dict(type='beit_mm.TwoViewColorJitter', device=jitter),
        MASK,
        dict(type='beit_mm.PackViews'),
    ]


def with_mmpretrains_crop(pipeline: list[dict]) -> list[dict]:
    """Fine-tuning's pipeline with mmpretrain's crop and flip in the place of ours."""
    crop = dict(type='mmpretrain.RandomResizedCrop', scale=224, backend='pillow', interpolation='bicubic')
    flip = dict(type='RandomFlip', prob=0.5, direction='horizontal')
    return [pipeline[0], crop, flip, *pipeline[2:]]


def make_images(folder: str, count: int) -> None:
    """Painted images of ImageNet's usual size; the JPEG quality is searched for about 110 kB."""
    for index in range(count):
        pixels, _ = paint_scene(index % len(OBJECTS), 375, np.random.default_rng(index))
        image = Image.fromarray(pixels).resize((500, 375))
        path = Path(folder, f'{index:04d}.jpg')
        for quality in range(98, 60, -2):
            image.save(path, quality=quality)
            if path.stat().st_size < 115_000:
                break


def microseconds(function: Callable[[], object], calls: int = 3000) -> float:
    """Median over 7 rounds of the CPU time of a call."""
    rounds = []
    for _ in range(7):
        start = time.process_time()
        for _ in range(calls):
            function()
        rounds.append((time.process_time() - start) / calls * 1e6)
    return statistics.median(rounds)


def time_masks() -> None:
    random.seed(0)
    print(f'{"mask":34s} {"us":>7s}')
    for variant, number in (('released', 75), ('exact', 75), ('paper', 78.4)):
        generate = BlockwiseMask((14, 14), number, variant=variant).draw
        print(f'{"blockwise, " + variant:34s} {microseconds(generate):7.1f}')
    print(f'{"random":34s} {microseconds(lambda: RandomMask((14, 14), 75).transform({})):7.1f}')
    print(f'{"seeding a sample":34s} {microseconds(lambda: seed_generators(SampleKey(0, 1, 2))):7.1f}')


def time_stages(dataset, rounds: int, title: str) -> None:
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


def images_per_second(dataset, epoch: int) -> float:
    """Of one round over the data set, collated in batches of 16."""
    keyed = type(dataset).__name__ == 'UnlabeledImages'
    start = time.process_time()
    for first in range(0, len(dataset), 16):
        default_collate(
            [dataset[SampleKey(0, epoch, i) if keyed else i] for i in range(first, min(first + 16, len(dataset)))]
        )
    return len(dataset) / (time.process_time() - start)


def time_photos(folder: str, images: int, rounds: int) -> None:
    """Images a second and difference of the views, decoded no larger than needed and in full."""
    print(f'{"config, size of the images":50s} {"full":>6s} {"scaled":>6s} {"ratio":>5s}  levels: mean, 99.9 %, most')
    sources = [path for path in sorted(Path(folder).rglob('*')) if path.suffix.lower() in ('.jpg', '.jpeg')][:images]
    for size in ((500, 375), (1632, 1224), (4032, 3024)):
        with tempfile.TemporaryDirectory() as resized:
            for index, path in enumerate(sources):
                image = Image.open(path).convert('RGB').resize(size, Image.Resampling.BICUBIC)
                image.save(Path(resized, f'{index:04d}.jpg'), quality=93)
            for config in PRETRAIN:
                datasets = []
                for scaled in (False, True):
                    load, *steps = Config.fromfile(CONFIGS / config).train_pipeline
                    datasets.append(ours([dict(load, scaled=scaled), *steps], dict(data_root=resized)))
                rates = []
                for epoch in range(rounds + 1):  # each is first in every other round; the first round warms up
                    pair = {index: images_per_second(datasets[index], epoch) for index in (epoch % 2, 1 - epoch % 2)}
                    rates.append((pair[0], pair[1]))
                full, scaled = map(statistics.median, zip(*rates[1:], strict=True))
                ratio = statistics.median(b / a for a, b in rates[1:])
                views = [
                    [data[SampleKey(0, 0, i)]['inputs']['images'].int() for i in range(len(sources))]
                    for data in datasets
                ]
                levels = (torch.stack(views[0]) - torch.stack(views[1])).abs().float().numpy()
                print(
                    f'{f"{config}, {size[0]} x {size[1]}":50s} {full:6.1f} {scaled:6.1f} {ratio:5.2f}  '
                    f'{levels.mean():.2f} {np.percentile(levels, 99.9):.0f} {levels.max():.0f}'
                )


def ours(pipeline: list[dict], data: dict):
    with DefaultScope.overwrite_default_scope('mmpretrain'):
        return DATASETS.build(dict(type='beit_mm.UnlabeledImages', pipeline=pipeline, **data))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--data', help='folder of images instead of painted ones')
    parser.add_argument('--images', type=int, default=48, help='how many to use')
    parser.add_argument('--rounds', type=int, default=15, help='interleaved rounds over them')
    parser.add_argument('--finetune', action='store_true', help="fine-tuning's pipeline on ImageNet")
    parser.add_argument('--photos', metavar='DIR', help='folder of JPEGs, timed at three sizes')
    args = parser.parse_args()
    torch.set_num_threads(1)
    cv2.setNumThreads(1)
    if args.photos:
        time_photos(args.photos, args.images, args.rounds)
        return

    if not args.finetune:
        time_masks()
    with tempfile.TemporaryDirectory() as folder:
        if args.data is None:
            make_images(folder, args.images)
        data = dict(data_root=args.data or folder, indices=args.images)
        if args.finetune:
            pipeline = Config.fromfile(FINETUNE).train_pipeline
            theirs = Path(mmpretrain.__file__).parent / THEIR_FINETUNING
            datasets = {
                'beit_mm': ours(pipeline, data),
                "beit_mm, mmpretrain's crop": ours(with_mmpretrains_crop(pipeline), data),
                'mmpretrain': build_theirs(Config.fromfile(theirs).train_pipeline, data),
            }
        else:
            datasets = {
                'beit_mm, jitter on the CPU': ours(our_pipeline('cpu'), data),
                'beit_mm, jitter on the device': ours(our_pipeline(), data),
                "and the tokenizer's view": ours(our_pipeline(second_size=None), data),
                'mmpretrain': build_theirs(THEIRS, data),
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


def build_theirs(pipeline: list[dict], data: dict):
    """One of mmpretrain's pipelines, read by its own data set."""
    import mmpretrain.datasets  # noqa: F401  registers
    from mmpretrain.registry import DATASETS as theirs

    return theirs.build(dict(type='CustomDataset', with_label=False, pipeline=pipeline, **data))


if __name__ == '__main__':
    main()

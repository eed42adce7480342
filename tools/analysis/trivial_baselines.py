"""How far one gets without a network on the images of a config: what its model has to beat.

    python tools/analysis/trivial_baselines.py configs/demo/finetune_folder.py
    python tools/analysis/trivial_baselines.py configs/demo/finetune_folder.py --cfg-options \
        train_dataloader.dataset.ann_file=labels.txt
    python tools/analysis/trivial_baselines.py configs/demo/camvid_setr_pup.py --out baselines.json

Images, labels and classes are those of the config's training and validation datasets; its model and its transforms play
no part.

Classification, top-1 in %, from thumbnails of 8 x 8 pixels (the whole image, its sides brought to one length):
    most_frequent     the class with most training images
    nearest           the class of the nearest training image, L2 distance of the pixels
    ridge             linear least squares on the pixels; the penalty with the best accuracy of leave-one-out on the
                      training images

Segmentation, mIoU in % over all validation pixels, from images of 120 x 160 pixels, answers in the annotation's size:
    most_frequent     the class with most training pixels, everywhere
    position          at each position the class that is most frequent there
    position_colour   naive Bayes of position and colour: P(class | position) P(colour | class), 8 levels of each of
                      red, green and blue
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from beit_mm.apis.options import merge_options
from beit_mm.terminal import UserError, run

if TYPE_CHECKING:
    from mmengine.dataset import BaseDataset
    from torch import Tensor

GRID = (120, 160)
LEVELS = 8  # of red, green and blue each


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('config', help='path of a config of classification or segmentation')
    parser.add_argument('--cfg-options', nargs='+', default=[], action='extend', metavar='KEY=VALUE')
    parser.add_argument('--out', type=Path, help='JSON file for the figures')
    args = parser.parse_args()
    from beit_mm.terminal import quiet

    with quiet():
        from mmengine.config import Config
        from mmengine.registry import init_default_scope

        cfg = Config.fromfile(args.config)
        merge_options(cfg, args.cfg_options)
        init_default_scope(cfg.default_scope)
        segmentation = cfg.default_scope == 'mmseg'
        train, val = (dataset(cfg, split, segmentation) for split in ('train', 'val'))
        figures = segment(train, val) if segmentation else classify(train, val)
        print(f'{len(train):,} training images, {len(val):,} held out, {len(train.metainfo["classes"])} classes')
        print('mIoU, %' if segmentation else 'top-1, %')
        for name, figure in figures.items():
            print(f'  {name:16}{figure:6.1f}')
        if args.out:
            args.out.write_text(json.dumps(figures, indent=2) + '\n')


def dataset(cfg: dict, split: str, segmentation: bool) -> BaseDataset:
    """The images and labels of a config's dataset, without its transforms."""
    from beit_mm.registry import DATASETS

    loader = cfg.get(f'{split}_dataloader')
    if not loader:
        raise UserError(f'the config has no {split}_dataloader; expected one with labels')
    steps = ['beit_mm.LoadImage', *(['beit_mm.LoadAnnotation'] if segmentation else [])]
    built = DATASETS.build(dict(loader['dataset'], pipeline=[dict(type=step) for step in steps]))
    if 'classes' not in built.metainfo:
        raise UserError(f'the {split} dataset of the config has no classes; expected one with labels')
    return built


def classify(train: BaseDataset, val: BaseDataset) -> dict[str, float]:
    """Top-1 in % of each baseline."""
    import torch

    from beit_mm.features.evaluation import ridge

    x, y = thumbnails(train)
    held_out, labels = thumbnails(val)
    predicted = dict(
        most_frequent=y.bincount().argmax().expand_as(labels),
        nearest=y[torch.cdist(held_out, x).argmin(dim=1)],
        ridge=ridge(x, y, held_out),
    )
    return {name: 100 * float((answer == labels).double().mean()) for name, answer in predicted.items()}


def thumbnails(images: BaseDataset) -> tuple[Tensor, Tensor]:
    """Pixels float64 (N, 192) in [0, 1], and labels int64 (N,)."""
    import numpy as np
    import torch
    from rich.progress import track

    from beit_mm.features.evaluation import thumbnail

    pixels, labels = [], []
    for index in track(range(len(images)), 'images', transient=True):
        sample = images[index]
        pixels.append(thumbnail(sample['img']))
        labels.append(sample['gt_label'])
    return torch.from_numpy(np.stack(pixels)), torch.tensor(labels)


def segment(train: BaseDataset, val: BaseDataset) -> dict[str, float]:
    """MIoU in % of each baseline."""
    import numpy as np
    import torch
    from rich.progress import track

    from beit_mm.features.evaluation import confusion, mean_iou

    classes = len(train.metainfo['classes'])
    at_position = np.zeros((*GRID, classes))
    of_colour = np.zeros((LEVELS**3, classes))
    rows, columns = np.indices(GRID)
    for index in track(range(len(train)), 'training images', transient=True):
        colours, labels = colours_and_labels(train[index])
        kept = labels < classes
        np.add.at(at_position, (rows[kept], columns[kept], labels[kept]), 1)
        np.add.at(of_colour, (colours[kept], labels[kept]), 1)
    frequency = at_position.sum(axis=(0, 1))
    # one more of everything, so that what was never seen is unlikely rather than impossible
    log_position = np.log((at_position + 1) / (at_position + 1).sum(axis=2, keepdims=True))
    log_colour = np.log((of_colour + 1) / (of_colour + 1).sum(axis=0))
    position = np.where(at_position.any(axis=2), at_position.argmax(axis=2), frequency.argmax())
    counts = dict.fromkeys(('most_frequent', 'position', 'position_colour'), torch.zeros(classes, classes))
    for index in track(range(len(val)), 'held-out images', transient=True):
        sample = val[index]
        truth = sample['gt_seg_map']
        colours, _ = colours_and_labels(sample)
        answers = (np.full(GRID, frequency.argmax()), position, (log_position + log_colour[colours]).argmax(axis=2))
        labels = torch.from_numpy(np.ascontiguousarray(truth))
        for name, answer in zip(counts, answers, strict=True):
            predicted = torch.from_numpy(np.ascontiguousarray(nearest(answer, truth.shape)))
            counts[name] = counts[name] + confusion(predicted, labels, classes)
    return {name: 100 * mean_iou(found) for name, found in counts.items()}


def colours_and_labels(sample: dict) -> tuple:
    """Bins of colour and labels, both int64 of GRID."""
    import numpy as np

    from beit_mm.datasets.transforms import resize_bicubic

    red, green, blue = np.moveaxis(resize_bicubic(sample['img'], GRID).astype(np.int64) * LEVELS // 256, 2, 0)
    return (red * LEVELS + green) * LEVELS + blue, nearest(sample['gt_seg_map'], GRID).astype(np.int64)


def nearest(labels, size: tuple[int, int]):
    """Labels (h, w) at another size, each the nearest pixel's."""
    import numpy as np

    rows, columns = ((np.arange(new) * 2 + 1) * old // (2 * new) for new, old in zip(size, labels.shape, strict=True))
    return labels[rows[:, None], columns]


if __name__ == '__main__':
    run(main)

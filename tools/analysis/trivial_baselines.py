"""How far one gets without a network on the label maps of a config: what its model has to beat.

    python tools/analysis/trivial_baselines.py configs/demo/camvid_setr_pup.py --out baselines.json

Images, labels and classes are those of the config's training and validation datasets; its model and its transforms play
no part. mIoU in % over all validation pixels, from images of 120 x 160 pixels, answers in the annotation's size:

    most_frequent     the class with most training pixels, everywhere
    position          at each position the class that is most frequent there
    position_colour   naive Bayes of position and colour: P(class | position) P(colour | class), 8 levels of each of
                      red, green and blue

Of class folders the report of `beit-mm finetune` says what thumbnails reach.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from beit_mm.terminal import UserError, quiet, run, with_bar

if TYPE_CHECKING:
    import numpy as np
    from mmengine.dataset import BaseDataset

GRID = (120, 160)
LEVELS = 8  # of red, green and blue each


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('config', help='path of a config of segmentation')
    parser.add_argument('--cfg-options', nargs='+', default=[], action='extend', metavar='KEY=VALUE')
    parser.add_argument('--out', type=Path, help='JSON file for the figures')
    args = parser.parse_args()
    with quiet():
        from mmengine.config import Config
        from mmengine.registry import init_default_scope

        from beit_mm.apis.options import merge_options

        cfg = Config.fromfile(args.config)
        merge_options(cfg, args.cfg_options)
        init_default_scope(cfg.default_scope)
        if cfg.default_scope != 'mmseg':
            raise UserError(f'{args.config} is of no segmentation; expected label maps')
        train, val = (dataset(cfg, split) for split in ('train', 'val'))
        figures = segment(train, val)
    print(f'{len(train):,} training images, {len(val):,} held out, {len(train.metainfo["classes"])} classes; mIoU, %')
    for name, figure in figures.items():
        print(f'  {name:16}{figure:6.1f}')
    if args.out:
        args.out.write_text(json.dumps(figures, indent=2) + '\n')


def dataset(cfg: dict, split: str) -> BaseDataset:
    """The images and label maps of a config's dataset, without its transforms."""
    from beit_mm.registry import DATASETS

    if not (loader := cfg.get(f'{split}_dataloader')):
        raise UserError(f'the config has no {split}_dataloader; expected one with label maps')
    steps = [dict(type='beit_mm.LoadImage'), dict(type='beit_mm.LoadAnnotation')]
    return DATASETS.build(dict(loader['dataset'], pipeline=steps))


def segment(train: BaseDataset, val: BaseDataset) -> dict[str, float]:
    """MIoU in % of each baseline."""
    import numpy as np
    import torch

    from beit_mm.features.evaluation import confusion, mean_iou

    classes = len(train.metainfo['classes'])
    at_position = np.zeros((*GRID, classes))
    of_colour = np.zeros((LEVELS**3, classes))
    rows, columns = np.indices(GRID)
    for sample in with_bar((train[index] for index in range(len(train))), len(train)):
        colours, labels = colours_of(sample['img']), nearest(sample['gt_seg_map'], GRID).astype(int)
        kept = labels < classes
        np.add.at(at_position, (rows[kept], columns[kept], labels[kept]), 1)
        np.add.at(of_colour, (colours[kept], labels[kept]), 1)
    frequency = at_position.sum(axis=(0, 1))
    # one more of everything, so that what was never seen is unlikely rather than impossible
    log_position = np.log((at_position + 1) / (at_position + 1).sum(axis=2, keepdims=True))
    log_colour = np.log((of_colour + 1) / (of_colour + 1).sum(axis=0))
    position = np.where(at_position.any(axis=2), at_position.argmax(axis=2), frequency.argmax())
    counts = dict.fromkeys(('most_frequent', 'position', 'position_colour'), torch.zeros(classes, classes))
    for sample in with_bar((val[index] for index in range(len(val))), len(val)):
        truth = torch.from_numpy(sample['gt_seg_map'].copy())
        by_colour = (log_position + log_colour[colours_of(sample['img'])]).argmax(axis=2)
        answers = np.full(GRID, frequency.argmax()), position, by_colour
        for name, answer in zip(counts, answers, strict=True):
            counts[name] = counts[name] + confusion(torch.from_numpy(nearest(answer, truth.shape)), truth, classes)
    return {name: 100 * mean_iou(found) for name, found in counts.items()}


def colours_of(image: np.ndarray) -> np.ndarray:
    """Bins of colour, int64 of GRID."""
    import numpy as np

    from beit_mm.datasets.transforms import resize_bicubic

    red, green, blue = np.moveaxis(resize_bicubic(image, GRID).astype(np.int64) * LEVELS // 256, 2, 0)
    return (red * LEVELS + green) * LEVELS + blue


def nearest(labels: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Labels (h, w) at another size, each the nearest pixel's."""
    import numpy as np

    rows, columns = ((np.arange(new) * 2 + 1) * old // (2 * new) for new, old in zip(size, labels.shape, strict=True))
    return labels[rows[:, None], columns]


if __name__ == '__main__':
    run(main)

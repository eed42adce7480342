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

import json
from pathlib import Path
from typing import TYPE_CHECKING

from beit_mm.apis.options import argument_parser, load_config
from beit_mm.terminal import UserError, quiet, run, with_bar

if TYPE_CHECKING:
    from mmengine.dataset import BaseDataset

GRID = (120, 160)
LEVELS = 8  # of red, green and blue each


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument('--out', type=Path, help='JSON file for the figures')
    args = parser.parse_args()
    with quiet():
        from mmengine.registry import init_default_scope

        from beit_mm.registry import DATASETS

        cfg = load_config(args)
        init_default_scope(cfg.default_scope)
        if cfg.default_scope != 'mmseg' or not cfg.get('train_dataloader') or not cfg.get('val_dataloader'):
            raise UserError(f'{args.config} is no training of a segmentor; expected images with label maps')
        steps = [dict(type='beit_mm.LoadImage'), dict(type='beit_mm.LoadAnnotation')]
        datasets = cfg.train_dataloader.dataset, cfg.val_dataloader.dataset
        train, val = (DATASETS.build(dict(dataset, pipeline=steps)) for dataset in datasets)
        figures = segment(train, val)
    print(f'{len(train):,} training images, {len(val):,} held out, {len(train.metainfo["classes"])} classes; mIoU, %')
    for name, figure in figures.items():
        print(f'  {name:16}{figure:6.1f}')
    if args.out:
        args.out.write_text(json.dumps(figures, indent=2) + '\n')


def segment(train: BaseDataset, val: BaseDataset) -> dict[str, float]:
    """MIoU in % of each baseline."""
    import torch

    from beit_mm.apis.segmentation_report import PositionAndColour
    from beit_mm.features.evaluation import confusion, mean_iou

    classes = len(train.metainfo['classes'])
    baseline, counts = PositionAndColour(classes), {}
    for sample in with_bar((train[index] for index in range(len(train))), len(train)):
        baseline.learn(sample['img'], sample['gt_seg_map'])
    for sample in with_bar((val[index] for index in range(len(val))), len(val)):
        truth = torch.from_numpy(sample['gt_seg_map'].copy())
        for name, labels in baseline.answers(sample['img'], truth.shape).items():
            counts[name] = counts.get(name, 0) + confusion(torch.from_numpy(labels), truth, classes)
    return {name: 100 * mean_iou(found) for name, found in counts.items()}


if __name__ == '__main__':
    run(main)

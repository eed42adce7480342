"""Writes a list of a few images of each class, for training with few labels.

    python tools/datasets/sample_labels.py data/caltech101/train 20 data/caltech101/labels.txt --seed 0
    python tools/train.py configs/demo/finetune_folder.py --cfg-options data_root=data/caltech101 \\
        train_dataloader.dataset.ann_file=labels.txt model.head.num_classes=97 model.data_preprocessor.num_classes=97

The list has a path a line, relative to the folder. A generator, random.Random(seed), shuffles the sorted images of each
class, class by class in the order of the names, and the first images are taken. So with the same seed a list of 5
images a class is part of a list of 20. A class with fewer images gives all its images.
"""

import argparse
import random
from pathlib import Path

from beit_mm.errors import UserError
from beit_mm.terminal import run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('folder', help='folder with one folder for each class')
    parser.add_argument('per_class', type=int, help='images of each class')
    parser.add_argument('target', type=Path, help='list to write')
    parser.add_argument('--seed', type=int, default=0)
    args = parser.parse_args()
    if args.per_class < 1:
        raise UserError(f'per_class is {args.per_class}; expected 1 or more')
    from beit_mm.datasets import ImageFolder
    from beit_mm.datasets.image_folder import INDEX, list_images
    from beit_mm.files import quoted

    if Path(args.folder, INDEX).exists():
        raise UserError(f'{args.folder} holds shards; name the folder of images that they were made from')
    dataset = ImageFolder(args.folder, pipeline=[])
    generator, chosen = random.Random(args.seed), []
    for name in dataset.metainfo['classes']:
        images = list(list_images(args.folder, subfolders=[name]))
        generator.shuffle(images)
        chosen += images[: args.per_class]
    args.target.parent.mkdir(parents=True, exist_ok=True)
    args.target.write_text(''.join(f'{quoted(path)}\n' for path in chosen), encoding='utf-8')
    print(f'{args.target}: {len(chosen):,} of {len(dataset):,} images of {len(dataset.metainfo["classes"])} classes')


if __name__ == '__main__':
    run(main)

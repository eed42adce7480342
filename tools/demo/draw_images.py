"""Draws a dataset for the small configs: images of ten classes, with label maps.

    python tools/demo/draw_images.py              # 1,200 images to train on and 600 held out, in data/demo

The results are train/<class>/*.jpg, val/<class>/*.jpg, label maps with the same names in annotations/, meta/classes.txt
(10 classes) and meta/segmentation_classes.txt (13 classes, the first 10 are those of classes.txt). Label maps follow
ADE20K: 0 is unlabelled, 1 the first line of segmentation_classes.txt. The same arguments give the same images.
"""

import argparse
import json
import shutil
from multiprocessing import Pool
from pathlib import Path

import numpy as np
from PIL import Image
from scenes import OBJECTS, STUFF, paint_scene

from beit_mm.errors import UserError
from beit_mm.terminal import run

SPLITS = ('train', 'val')


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('folder', nargs='?', type=Path, default=Path('data/demo'), help='default: %(default)s')
    parser.add_argument('--num-train', type=int, default=1200, help='training images (default: %(default)s)')
    parser.add_argument('--num-val', type=int, default=600, help='held-out images (default: %(default)s)')
    parser.add_argument('--size', type=int, default=160, help='short side in pixels (default: %(default)s)')
    args = parser.parse_args()
    folder, settings = args.folder, json.dumps({key: value for key, value in vars(args).items() if key != 'folder'})
    record = folder / 'meta/settings.json'
    if not record.is_file() or record.read_text() != settings:
        if folder.exists() and any(folder.iterdir()):
            raise UserError(f'{folder} is not empty and does not hold images of {settings}; choose another folder')
        draw_images(folder, settings, {'train': args.num_train, 'val': args.num_val}, args.size)
    print(f'{args.num_train:,} images to train on and {args.num_val:,} held out: {folder}')


def draw_images(folder: Path, settings: str, numbers: dict[str, int], size: int) -> None:
    """Draws the images of each split, the classes in turn; the folder appears when it is complete."""
    partial = folder.with_name(f'{folder.name}.partial')
    shutil.rmtree(partial, ignore_errors=True)  # left by a killed run
    for split in SPLITS:
        for name in OBJECTS:
            (partial / split / name).mkdir(parents=True)
            (partial / 'annotations' / split / name).mkdir(parents=True)
    with Pool() as pool:
        jobs = [(partial, split, index, size) for split in SPLITS for index in range(numbers[split])]
        pool.starmap(draw_image, jobs, chunksize=16)
    (partial / 'meta').mkdir()
    for name, classes in dict(classes=OBJECTS, segmentation_classes=OBJECTS + STUFF).items():
        (partial / f'meta/{name}.txt').write_text('\n'.join(classes) + '\n')
    (partial / 'meta/settings.json').write_text(settings)
    partial.rename(folder)


def draw_image(folder: Path, split: str, index: int, size: int) -> None:
    """Draws one image and its label map."""
    rng = np.random.default_rng([0, SPLITS.index(split), index])
    label = index % len(OBJECTS)
    image, labels = paint_scene(label, size, rng)
    name = f'{split}/{OBJECTS[label]}/{index:06d}'
    Image.fromarray(image).save(folder / f'{name}.jpg', quality=int(rng.integers(80, 96)))
    Image.fromarray(labels).save(folder / f'annotations/{name}.png')


if __name__ == '__main__':
    run(main)

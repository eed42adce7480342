"""Draws a data set for the small configs: image-like pictures of ten classes, with label maps.

    python tools/demo/draw_images.py              # 1,200 images to train on and 300 held out, in data/demo

It makes train/<class>/*.jpg, val/<class>/*.jpg, label maps of the same names in annotations/, meta/classes.txt
(10 classes) and meta/segmentation_classes.txt (13). Label maps follow ADE20K: 0 is unlabelled, 1 the first line of
segmentation_classes.txt, which begins with those of classes.txt. The same arguments give the same pictures.
"""

import argparse
import json
import shutil
import sys
from multiprocessing import Pool
from pathlib import Path

SPLITS = ('train', 'val')


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('folder', nargs='?', type=Path, default=Path('data/demo'), help='default: %(default)s')
    parser.add_argument('--num-train', type=int, default=1200, help='default: %(default)s')
    parser.add_argument('--num-val', type=int, default=600, help='default: %(default)s')
    parser.add_argument('--size', type=int, default=160, help='short side in pixels (default: %(default)s)')
    args = parser.parse_args()
    try:
        draw_images(args.folder, args.num_train, args.num_val, args.size)
    except OSError as error:
        sys.exit(f'error: {error}')
    print(f'{args.num_train:,} images to train on and {args.num_val:,} held out: {args.folder}')


def draw_images(folder: Path, num_train: int, num_val: int, size: int) -> None:
    """Draws the data set of the module's docstring. The folder appears when it is complete; if it is, nothing is done.

    Args:
        folder: where to; must not exist, be empty or be of an earlier call with the same arguments.
        num_train, num_val: number of pictures; classes take turns.
        size: short side in pixels; the long side is up to 1.5 times as long.

    Raises:
        FileExistsError: the folder holds something else.
    """
    from scenes import OBJECTS, STUFF

    settings = dict(num_train=num_train, num_val=num_val, size=size)
    record = folder / 'meta/settings.json'
    if record.is_file() and json.loads(record.read_text()) == settings:
        return
    if folder.exists() and any(folder.iterdir()):
        raise FileExistsError(f'{folder} is not empty and not the drawn images of {settings}; choose another folder')

    partial = folder.with_name(f'{folder.name}.partial')
    shutil.rmtree(partial, ignore_errors=True)  # of a call that was killed
    for split in SPLITS:
        for name in OBJECTS:
            (partial / split / name).mkdir(parents=True)
            (partial / 'annotations' / split / name).mkdir(parents=True)
    jobs = [
        (partial, split, index, size)
        for split, number in zip(SPLITS, (num_train, num_val), strict=True)
        for index in range(number)
    ]
    with Pool() as pool:
        pool.starmap(draw_image, jobs, chunksize=16)
    (partial / 'meta').mkdir()
    (partial / 'meta/classes.txt').write_text('\n'.join(OBJECTS) + '\n')
    (partial / 'meta/segmentation_classes.txt').write_text('\n'.join(OBJECTS + STUFF) + '\n')
    (partial / record.relative_to(folder)).write_text(json.dumps(settings))
    if folder.exists():
        folder.rmdir()
    partial.rename(folder)


def draw_image(folder: Path, split: str, index: int, size: int) -> None:
    """Draws one image and its label map."""
    import numpy as np
    from PIL import Image
    from scenes import OBJECTS, paint_scene

    rng = np.random.default_rng([0, SPLITS.index(split), index])
    label = index % len(OBJECTS)
    image, labels = paint_scene(label, size, rng)
    name = f'{OBJECTS[label]}/{index:06d}'
    Image.fromarray(image).save(folder / split / f'{name}.jpg', quality=int(rng.integers(80, 96)))
    Image.fromarray(labels).save(folder / 'annotations' / split / f'{name}.png')


if __name__ == '__main__':
    main()

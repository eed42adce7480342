"""Data for trying the package out: image-like pictures with classes and label maps."""
import json
import shutil
from multiprocessing import Pool
from pathlib import Path

import numpy as np
from PIL import Image

from .demo_scenes import OBJECTS, STUFF, paint_scene

SPLITS = ('train', 'val')


def make_demo_images(folder: str, num_train: int = 1200, num_val: int = 300, size: int = 160,
                     seed: int = 0) -> str:
    """Paint a data set: `train/<class>/*.jpg`, `val/<class>/*.jpg`, label maps of the same names
    in `annotations/`, `meta/classes.txt` (10 classes) and `meta/segmentation_classes.txt` (13).

    Label maps follow ADE20K: 0 unlabelled, 1.. the lines of `segmentation_classes.txt`, which begin
    with those of `classes.txt`. The same arguments give the same pictures. The folder appears when
    it is complete; if it is there already, nothing is done.

    Args:
        folder: Where to; must not exist, be empty or be of an earlier call with the same arguments.
        num_train, num_val: Number of pictures; classes take turns.
        size: Short side in pixels; the long side is up to 1.5 times as long.
        seed: Decides the pictures.

    Returns:
        The folder.

    Raises:
        FileExistsError: The folder holds something else.
    """
    settings = dict(num_train=num_train, num_val=num_val, size=size, seed=seed)
    folder = Path(folder)
    record = folder / 'meta' / 'settings.json'
    if record.is_file() and json.loads(record.read_text()) == settings:
        return str(folder)
    if folder.exists() and any(folder.iterdir()):
        raise FileExistsError(
            f'{folder} is not empty and not the demo data of {settings}; choose another folder')

    partial = folder.with_name(f'{folder.name}.partial')
    shutil.rmtree(partial, ignore_errors=True)  # of a call that was killed
    for split in SPLITS:
        for name in OBJECTS:
            (partial / split / name).mkdir(parents=True)
            (partial / 'annotations' / split / name).mkdir(parents=True)
    jobs = [(partial, split, index, size, seed)
            for split, number in zip(SPLITS, (num_train, num_val), strict=True)
            for index in range(number)]
    with Pool() as pool:
        pool.starmap(_paint_one, jobs, chunksize=16)
    (partial / 'meta').mkdir()
    (partial / 'meta' / 'classes.txt').write_text('\n'.join(OBJECTS) + '\n')
    (partial / 'meta' / 'segmentation_classes.txt').write_text('\n'.join(OBJECTS + STUFF) + '\n')
    (partial / 'meta' / record.name).write_text(json.dumps(settings))
    if folder.exists():
        folder.rmdir()
    partial.rename(folder)
    return str(folder)


def _paint_one(folder: Path, split: str, index: int, size: int, seed: int) -> None:
    rng = np.random.default_rng([seed, SPLITS.index(split), index])
    kind = index % len(OBJECTS)
    image, labels = paint_scene(kind, size, rng)
    name = f'{OBJECTS[kind]}/{index:06d}'
    Image.fromarray(image).save(folder / split / f'{name}.jpg', quality=int(rng.integers(80, 96)))
    Image.fromarray(labels).save(folder / 'annotations' / split / f'{name}.png')

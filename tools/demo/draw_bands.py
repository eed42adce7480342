"""Draws a dataset of six-band images for the configs demo/bands_*.py: .tif files of 16 bits, like satellite images.

    python tools/demo/draw_bands.py               # 1,600 images to train on and 400 held out, in data/bands

Bands 1 to 3 are visible light, 4 to 6 infrared. There are eight classes: four shapes, each either brighter than the
ground in band 4 and darker in bands 5 and 6, or the other way round. Bands 1 to 3 show a random shape at another place,
which says nothing about the class. Brightness and contrast of each band vary between images.

The results are train/<class>/*.tif and val/<class>/*.tif, half of which store one band after the other, and
meta/few_labels.txt, a list of 30 training images of each class. The same arguments give the same images.
"""

import argparse
import shutil
from pathlib import Path

import numpy as np

from beit_mm.errors import UserError
from beit_mm.terminal import run

SHAPES = ('cross', 'disc', 'ring', 'square')
CLASSES = tuple(f'{shape}_{sign}' for shape in SHAPES for sign in ('bright', 'dark'))  # in band 4
DARKEST = (800, 600, 400, 1500, 1000, 500)  # value of black in the file, for each band
SPANS = (1500, 1800, 2200, 4000, 3500, 3000)
SIGNATURE = (1, -0.8, -0.6)  # contrast of a bright shape in bands 4 to 6
CONTRAST = 0.3
NUM_LABELLED = 30  # of each class


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('folder', nargs='?', type=Path, default=Path('data/bands'), help='default: %(default)s')
    parser.add_argument('--num-train', type=int, default=1600, help='training images (default: %(default)s)')
    parser.add_argument('--num-val', type=int, default=400, help='held-out images (default: %(default)s)')
    parser.add_argument('--size', type=int, default=64, help='side in pixels (default: %(default)s)')
    args = parser.parse_args()
    if args.folder.exists():
        raise UserError(f'{args.folder} already exists; delete it, or choose another folder')
    draw_bands(args.folder, args.num_train, args.num_val, args.size)
    print(f'{args.num_train:,} images to train on and {args.num_val:,} held out: {args.folder}')


def draw_bands(folder: Path, num_train: int, num_val: int, size: int) -> None:
    """Draws train/, val/ and meta/; the folder appears when it is complete."""
    try:
        from tifffile import imwrite
    except ImportError as error:
        raise UserError(f"{error}: pip install 'beit_mm[bands]'") from error
    partial = folder.with_name(f'{folder.name}.partial')
    shutil.rmtree(partial, ignore_errors=True)  # left by a killed run
    labelled = []
    for split, number in (('train', num_train), ('val', num_val)):
        for name in CLASSES:
            (partial / split / name).mkdir(parents=True)
        for index in range(number):
            label = index % len(CLASSES)
            image = paint(label, size, np.random.default_rng([split == 'val', index]))
            path = f'{CLASSES[label]}/{index:05d}.tif'
            layout = dict(planarconfig='contig')
            if index // len(CLASSES) % 2:
                image, layout = np.moveaxis(image, -1, 0), dict(planarconfig='separate')
            imwrite(partial / split / path, image, photometric='minisblack', metadata=None, software=False, **layout)
            if split == 'train' and index < NUM_LABELLED * len(CLASSES):
                labelled.append(path)
    (partial / 'meta').mkdir()
    (partial / 'meta/few_labels.txt').write_text('\n'.join(labelled) + '\n')
    partial.rename(folder)


def paint(label: int, size: int, rng: np.random.Generator) -> np.ndarray:
    """One image of a class: uint16 (size, size, 6)."""
    common = ground(size, rng)
    image = np.stack([0.85 * common + 0.15 * ground(size, rng) for _ in DARKEST], axis=-1)  # H, W, 6
    image = 0.5 + rng.uniform(0.05, 0.1, 6) * image + rng.normal(0, 0.05) + rng.normal(0, 0.03, 6)
    shape, sign = SHAPES[label // 2], 1 - 2 * (label % 2)
    strength = sign * CONTRAST * rng.uniform(0.8, 1.2)
    image[..., 3:] += strength * np.array(SIGNATURE) * outline(shape, size, rng)[..., None]
    decoy = outline(str(rng.choice(SHAPES)), size, rng)[..., None]
    image[..., :3] += rng.choice([-1, 1]) * CONTRAST * rng.uniform(0.6, 1, 3) * decoy
    image += rng.normal(0, 0.015, image.shape)
    values = np.array(DARKEST) + image.clip(0, 1.5) * np.array(SPANS)
    values[rng.random((size, size)) < 0.0005] = 65535  # single saturated pixels
    return values.astype(np.uint16)


def ground(size: int, rng: np.random.Generator) -> np.ndarray:
    """A smooth random surface (size, size), mean 0 and standard deviation 1."""
    waves = np.zeros((size, size))
    rows, columns = np.mgrid[:size, :size] / size
    for _ in range(6):
        down, right = rng.normal(0, 0.7, 2)
        waves += rng.normal() * np.cos(2 * np.pi * (down * rows + right * columns + rng.random()))
    return (waves - waves.mean()) / (waves.std() + 1e-6)


def outline(shape: str, size: int, rng: np.random.Generator) -> np.ndarray:
    """A shape of random size at a random place: 1 inside and 0 outside, (size, size), with soft edges."""
    radius = size * rng.uniform(0.14, 0.22)
    y, x = (np.mgrid[:size, :size].T - rng.uniform(radius, size - radius, 2)).T
    from_center = np.hypot(x, y)
    distance = dict(  # from the edge, in pixels, positive outside
        disc=from_center - radius,
        ring=abs(from_center - 0.75 * radius) - 0.25 * radius,
        square=np.maximum(abs(x), abs(y)) - 0.85 * radius,
        cross=np.maximum(np.minimum(abs(x), abs(y)) - 0.28 * radius, np.maximum(abs(x), abs(y)) - radius),
    )[shape]
    return (0.5 - distance).clip(0, 1)


if __name__ == '__main__':
    run(main)

"""Images of six bands for draw_bands.py: a shape in infrared that tells the class, another one in visible light."""

import shutil
import struct
from pathlib import Path

import numpy as np

SHAPES = ('cross', 'disc', 'ring', 'square')
CLASSES = tuple(f'{shape}_{sign}' for shape in SHAPES for sign in ('bright', 'dark'))  # in band 4
DARKEST = (800, 600, 400, 1500, 1000, 500)  # values in the files, band by band
SPANS = (1500, 1800, 2200, 4000, 3500, 3000)
SIGNATURE = (1, -0.8, -0.6)  # of a bright shape in bands 4 to 6
CONTRAST = 0.3
NUM_LABELLED = 30  # of each class


def draw_bands(folder: Path, num_train: int, num_val: int, size: int) -> None:
    """Draws train/, val/ and meta/ of draw_bands.py; the folder appears when it is complete."""
    partial = folder.with_name(f'{folder.name}.partial')
    shutil.rmtree(partial, ignore_errors=True)  # of a call that was killed
    labelled = []
    for split, number in (('train', num_train), ('val', num_val)):
        for name in CLASSES:
            (partial / split / name).mkdir(parents=True)
        for index in range(number):
            label = index % len(CLASSES)
            image = paint(label, size, np.random.default_rng([split == 'val', index]))
            path = f'{CLASSES[label]}/{index:05d}.tif'
            write_tif(partial / split / path, image, planar=index // len(CLASSES) % 2 == 1)
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
    values[rng.random((size, size)) < 0.0005] = 65535  # single pixels that are saturated
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
    """A shape of random size and place: 1 inside and 0 outside, (size, size), with soft edges."""
    radius = size * rng.uniform(0.14, 0.22)
    y, x = (np.mgrid[:size, :size].T - rng.uniform(radius, size - radius, 2)).T
    far = np.hypot(x, y)
    distance = dict(  # beyond the edge, in pixels
        disc=far - radius,
        ring=abs(far - 0.75 * radius) - 0.25 * radius,
        square=np.maximum(abs(x), abs(y)) - 0.85 * radius,
        cross=np.maximum(np.minimum(abs(x), abs(y)) - 0.28 * radius, np.maximum(abs(x), abs(y)) - radius),
    )[shape]
    return (0.5 - distance).clip(0, 1)


def write_tif(path: Path, image: np.ndarray, planar: bool) -> None:
    """Writes uint16 (H, W, C) without compression, band after band or pixel after pixel."""
    height, width, bands = image.shape
    data = np.ascontiguousarray(np.moveaxis(image, -1, 0) if planar else image, '<u2').tobytes()
    parts = bands if planar else 1
    lists = struct.pack(f'<{bands}H', *[16] * bands)
    starts = [8 + len(lists) + 8 * parts + len(data) // parts * part for part in range(parts)]
    lists += struct.pack(f'<{2 * parts}I', *starts, *[len(data) // parts] * parts)
    places = 8, 8 + 2 * bands, 8 + 2 * bands + 4 * parts
    tags = [  # number, type (3: 16 bits, 4: 32 bits), count, value or its place
        (256, 4, 1, width),
        (257, 4, 1, height),
        (258, 3, bands, places[0]),
        (259, 3, 1, 1),
        (262, 3, 1, 1),
        (273, 4, parts, places[1] if planar else starts[0]),
        (277, 3, 1, bands),
        (278, 4, 1, height),
        (279, 4, parts, places[2] if planar else len(data)),
        (284, 3, 1, 2 if planar else 1),
    ]
    directory = struct.pack('<H', len(tags)) + b''.join(struct.pack('<HHII', *tag) for tag in tags) + bytes(4)
    path.write_bytes(b'II*\0' + struct.pack('<I', 8 + len(lists) + len(data)) + lists + data + directory)

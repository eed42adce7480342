"""Images with label maps whose classes can be told apart by their colour, in ADE20K's layout."""

from pathlib import Path

import numpy as np
from PIL import Image

CLASSES = ['red', 'green', 'blue']


def make_label_maps(folder: Path, number: int = 4, size: tuple[int, int] = (40, 56)) -> Path:
    """Images of `size` (height, width) in noisy rectangles of the classes' colours; 0 is unlabelled, classes from 1."""
    rng = np.random.default_rng(0)
    for split in ('training', 'validation'):
        for part in ('images', 'annotations'):
            (folder / part / split).mkdir(parents=True)
        for index in range(number):
            labels = rng.integers(1, 4, (2, 3)).repeat(size[0] // 2, 0).repeat(-(-size[1] // 3), 1)[:, : size[1]]
            pixels = rng.integers(0, 100, (*size, 3))
            pixels += 150 * np.eye(3, dtype=int)[labels - 1]
            labels[:3] = 0
            Image.fromarray(pixels.astype(np.uint8)).save(folder / f'images/{split}/{index}.png')
            Image.fromarray(labels.astype(np.uint8)).save(folder / f'annotations/{split}/{index}.png')
    (folder / 'classes.txt').write_text('\n'.join(CLASSES))
    return folder


def options(folder: Path, split: str) -> dict:
    """Of a SegmentationFolder."""
    prefix = dict(img_path=f'images/{split}', seg_map_path=f'annotations/{split}')
    return dict(data_root=str(folder), classes='classes.txt', reduce_zero_label=True, data_prefix=prefix)

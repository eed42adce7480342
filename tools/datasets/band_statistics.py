"""What a config says of images with many bands: which values become 0 and 255, and mean and deviation of each band.

    python tools/datasets/band_statistics.py data/bands/train
    python tools/datasets/band_statistics.py data/bands/train --bands 3 2 1 7

It reads some .tif and .npy files of a folder, to any depth, and prints what goes into `LoadBands` and into the data
preprocessor.
"""

import argparse
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from beit_mm.errors import UserError
from beit_mm.terminal import run

SAMPLED = 10_000  # pixels of an image that its statistics are taken from


def band_statistics(
    paths: Sequence[str], bands: Sequence[int] | None = None, percentiles: tuple[float, float] = (1, 99)
) -> dict[str, Any]:
    """`low` and `high` of each band, those percentiles, and `mean` and `std` of what LoadBands makes with these."""
    import numpy as np

    from beit_mm.datasets.reading import LoadBands, read_bands, unreadable

    generator, sampled, number = random.Random(0), [], None
    for path in paths:
        values = read_bands(path)
        with unreadable(path, IndexError):
            values = values if bands is None else values[..., list(bands)]
        values = values.reshape(-1, values.shape[2])
        if number not in (None, values.shape[1]):
            raise UserError(f'{path} has {values.shape[1]} bands, files before it {number}; name the ones to take')
        number = values.shape[1]
        rows = generator.sample(range(len(values)), min(SAMPLED, len(values)))
        sampled.append(values[rows].astype(np.float64))
    pixels = np.concatenate(sampled)
    pixels[~np.isfinite(pixels)] = np.nan
    low, high = np.nanpercentile(pixels, percentiles, axis=0)
    if not (low < high).all():
        band = int(np.flatnonzero(~(low < high))[0])
        raise UserError(f'band {band} is {low[band]:g} nearly everywhere; name the bands to take, or wider percentiles')
    low, high = ([float(f'{value:.6g}') for value in values] for values in (low, high))
    scaled = LoadBands(low=low, high=high).scale(pixels[None])
    mean, std = scaled.mean(axis=(0, 1), dtype=np.float64), scaled.std(axis=(0, 1), dtype=np.float64)
    return dict(low=low, high=high, mean=mean.round(2).tolist(), std=std.round(2).tolist())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('folder', type=Path, help='of .tif and .npy files')
    parser.add_argument('--bands', type=int, nargs='+', metavar='BAND', help='bands to take, counted from 0')
    ends = 'of the values of a band that become 0 and 255 (default: 1 99)'
    parser.add_argument('--percentiles', type=float, nargs=2, default=(1, 99), metavar=('LOW', 'HIGH'), help=ends)
    parser.add_argument('--num-images', type=int, default=200, help='drawn at random (default: %(default)s)')
    args = parser.parse_args()
    from beit_mm.datasets.image_folder import BAND_EXTENSIONS, list_images

    if not (args.folder.is_dir() and (paths := [*list_images(str(args.folder), BAND_EXTENSIONS)])):
        raise FileNotFoundError(f'no {", ".join(BAND_EXTENSIONS)} files in {args.folder}')
    chosen = random.Random(0).sample(paths, min(args.num_images, len(paths)))
    found = band_statistics([str(args.folder / path) for path in chosen], args.bands, args.percentiles)
    bands = f'bands={args.bands}, ' if args.bands else ''
    print(f'# {len(chosen)} of {len(paths):,} images')
    print(f"dict(type='beit_mm.LoadBands', {bands}low={found['low']}, high={found['high']})")
    print(f'data_preprocessor: mean={found["mean"]}, std={found["std"]}')


if __name__ == '__main__':
    run(main)

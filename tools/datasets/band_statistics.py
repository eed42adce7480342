"""Prints the settings for images with many bands: the values that become 0 and 255, and mean and std of each band.

    python tools/datasets/band_statistics.py data/bands/train
    python tools/datasets/band_statistics.py data/bands/train --bands 3 2 1 7

It reads a sample of the .tif and .npy files in a folder, at any depth. The settings belong into `LoadBands` and the
data preprocessor of a config.
"""

import argparse
import random
from pathlib import Path

from beit_mm.terminal import run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('folder', type=Path, help='folder of .tif and .npy files')
    parser.add_argument('--bands', type=int, nargs='+', metavar='BAND', help='bands to use, counted from 0')
    ends = 'percentiles of a band that become 0 and 255 (default: 1 99)'
    parser.add_argument('--percentiles', type=float, nargs=2, default=(1, 99), metavar=('LOW', 'HIGH'), help=ends)
    parser.add_argument('--num-images', type=int, default=200, help='images to draw at random (default: %(default)s)')
    args = parser.parse_args()
    if args.num_images < 1 or not 0 <= args.percentiles[0] < args.percentiles[1] <= 100:
        parser.error('expected --num-images from 1, --percentiles LOW below HIGH, from 0 to 100')
    from beit_mm.datasets.image_folder import BAND_EXTENSIONS, list_images
    from beit_mm.datasets.reading import band_statistics

    if not (args.folder.is_dir() and (paths := [*list_images(str(args.folder), BAND_EXTENSIONS)])):
        raise FileNotFoundError(f'no images in {args.folder}; expected {", ".join(BAND_EXTENSIONS)} files')
    chosen = random.Random(0).sample(paths, min(args.num_images, len(paths)))
    found = band_statistics([str(args.folder / path) for path in chosen], args.bands, args.percentiles)
    bands = f'bands={args.bands}, ' if args.bands else ''
    print(f'# {len(chosen)} of {len(paths):,} images')
    for note in found['notes']:
        print(f'# {note}')
    nodata = f', nodata={found["nodata"]}' if found['nodata'] else ''
    print(f"dict(type='beit_mm.LoadBands', {bands}low={found['low']}, high={found['high']}{nodata})")
    print(f'data_preprocessor: mean={found["mean"]}, std={found["std"]}')


if __name__ == '__main__':
    run(main)

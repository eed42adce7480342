"""Draws a data set of six-band images for the configs demo/bands_*.py: .tif files of 16 bits, as satellites' are.

    python tools/demo/draw_bands.py               # 1,600 images to train on and 400 held out, in data/bands

Bands 1 to 3 are what a camera sees, 4 to 6 infrared. Eight classes: one of four shapes, brighter than the ground around
it in band 4 and darker in bands 5 and 6, or the other way round. In bands 1 to 3 a shape of another kind, drawn by
chance, lies elsewhere: they tell nothing of the class. Brightness and contrast of each band differ from image to image.

It makes train/<class>/*.tif and val/<class>/*.tif, half of which store band after band, and meta/few_labels.txt, a list
of 30 training images of each class. The same arguments give the same images.
"""

import argparse
from pathlib import Path

from beit_mm.terminal import UserError, run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('folder', nargs='?', type=Path, default=Path('data/bands'), help='default: %(default)s')
    parser.add_argument('--num-train', type=int, default=1600, help='default: %(default)s')
    parser.add_argument('--num-val', type=int, default=400, help='default: %(default)s')
    parser.add_argument('--size', type=int, default=64, help='side in pixels (default: %(default)s)')
    args = parser.parse_args()
    if args.folder.exists():
        raise UserError(f'{args.folder} is there already; delete it, or choose another folder')
    try:
        from bands import draw_bands
    except ImportError as error:
        raise UserError(f"{error}: pip install 'beit_mm[bands]'") from error
    draw_bands(args.folder, args.num_train, args.num_val, args.size)
    print(f'{args.num_train:,} images to train on and {args.num_val:,} held out: {args.folder}')


if __name__ == '__main__':
    run(main)

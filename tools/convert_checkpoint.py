"""Converts a BEiT checkpoint of any format into another format, and DALL-E's pickled networks into state dicts.

python tools/convert_checkpoint.py beit_base_patch16_224_pt22k beit.pth
python tools/convert_checkpoint.py work_dirs/run/epoch_300.pth for_transformers --to hf
python tools/convert_checkpoint.py work_dirs/run/epoch_300.pth beit_base.safetensors --publish
"""

import argparse
import functools

from beit_mm.checkpoint.convert import convert_checkpoint, publish_checkpoint
from beit_mm.checkpoint.formats import FORMATS
from beit_mm.terminal import run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        'source', help='checkpoint file, name of a released one, or transformers folder; its format is detected'
    )
    parser.add_argument('target', help='file to write, .pth or .safetensors; for --to hf a folder')
    parser.add_argument('--to', choices=FORMATS, default='beit_mm', help='format to write (default: %(default)s)')
    parser.add_argument('--publish', action='store_true', help='write only the weights, with a hash in the file name')
    args = parser.parse_args()
    if args.publish and args.to != 'beit_mm':
        parser.error('--publish writes the beit_mm format; leave out --to')
    write = publish_checkpoint if args.publish else functools.partial(convert_checkpoint, to=args.to)
    print(write(args.source, args.target))


if __name__ == '__main__':
    run(main)

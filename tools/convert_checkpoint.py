"""Converts a BEiT checkpoint of any format into another; DALL-E's pickled networks into state dicts.

python tools/convert_checkpoint.py beit_base_patch16_224_pt22k.pth beit.pth
python tools/convert_checkpoint.py work_dirs/run/epoch_300.pth for_transformers --to hf
"""

import argparse
import sys

from beit_mm.checkpoint.convert import convert_checkpoint
from beit_mm.checkpoint.names import FORMATS
from beit_mm.checkpoint.read import CheckpointError


def main() -> None:
    parser = argparse.ArgumentParser(description='Convert a checkpoint; its format is detected.')
    parser.add_argument('source', help='a file, or a folder of transformers')
    parser.add_argument('target', help='the file to write, .pth or .safetensors; a folder for --to hf')
    parser.add_argument('--to', choices=FORMATS, default='beit_mm', help='format to write (default: %(default)s)')
    args = parser.parse_args()
    try:
        print(convert_checkpoint(args.source, args.target, args.to))
    except (CheckpointError, OSError) as error:
        sys.exit(f'error: {error}')


if __name__ == '__main__':
    main()

"""Unpacks ImageNet-22K into class folders.

    python tools/datasets/prepare_imagenet22k.py fall11_whole.tar data/imagenet22k/train

The source is fall11_whole.tar (21,841 classes, as in the paper), winter21_whole.tar.gz (19,167) or a folder of one
n########.tar a class. Run again after an interruption, it goes on where it was.
"""

import argparse
import sys
from pathlib import Path

from _archives import one_line_errors, unpack_classes

RELEASES = {21_841: 'fall 2011', 19_167: 'winter 2021'}
CONFIG_CLASSES = 21_841  # in configs/beit_plus/intermediate_*in22k_90e.py


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('source', type=Path, help='archive, or folder of archives')
    parser.add_argument('target', type=Path, help='folder to make the class folders in')
    args = parser.parse_args()
    with one_line_errors(args.source):
        unpack_classes(args.source, args.target)
    count = sum(path.is_dir() for path in args.target.glob('n*'))
    options = f'--cfg-options model.data_preprocessor.num_classes={count} model.head.num_classes={count}'
    if count not in RELEASES:
        releases = ' or '.join(f'{number:,} ({name})' for number, name in RELEASES.items())
        sys.exit(
            f'error: {args.target} holds {count:,} classes, expected {releases}; if it is meant, train with {options}'
        )
    print(f'{args.target}: {count:,} classes, the release of {RELEASES[count]}')
    if count != CONFIG_CLASSES:
        print(
            f'configs/beit_plus/intermediate_*in22k_90e.py have {CONFIG_CLASSES:,} classes; train them with {options}'
        )


if __name__ == '__main__':
    main()

"""Unpacks ImageNet-22K into class folders.

    python tools/prepare_imagenet22k.py fall11_whole.tar data/imagenet22k/train

The source is fall11_whole.tar (21,841 classes, as in the paper), winter21_whole.tar.gz (19,167) or a folder of one
n########.tar a class. Run again after an interruption, it goes on where it was.
"""
import argparse
import sys
from pathlib import Path

from beit_mm.datasets.archives import ArchiveError, unpack_classes
from beit_mm.datasets.image_folder import class_folders

RELEASES = {21_841: 'fall 2011', 19_167: 'winter 2021'}
OF_CONFIGS = 21_841  # classes in configs/beit_plus/intermediate_*in22k_90e.py


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('source', type=Path, help='archive, or folder of archives')
    parser.add_argument('target', type=Path, help='folder to make the class folders in')
    args = parser.parse_args()
    try:
        unpack_classes(args.source, args.target, 19_167 if 'winter21' in args.source.name else 21_841)
    except (ArchiveError, OSError) as error:
        sys.exit(f'error: {error}')
    found = len(class_folders(str(args.target)))
    if found not in RELEASES:
        known = ' or '.join(f'{count:,} ({name})' for count, name in RELEASES.items())
        sys.exit(f'error: {args.target} holds {found:,} classes, expected {known}; if it is meant, train with '
                 f'{options(found)}')
    print(f'{args.target}: {found:,} classes, the release of {RELEASES[found]}')
    if found != OF_CONFIGS:
        print(f'configs/beit_plus/intermediate_*in22k_90e.py have {OF_CONFIGS:,} classes; train them with '
              f'{options(found)}')


def options(classes: int) -> str:
    """What a training on another number of classes than its config's is started with."""
    return f'--cfg-options model.data_preprocessor.num_classes={classes} model.head.num_classes={classes}'


if __name__ == '__main__':
    main()

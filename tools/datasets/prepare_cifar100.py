"""Unpacks CIFAR-100 from its official archive into class folders of PNGs.

    python tools/datasets/prepare_cifar100.py cifar-100-python.tar.gz data/cifar100

The archive is at https://www.cs.toronto.edu/~kriz/cifar.html. It makes train/<class>/*.png (50,000) and
val/<class>/*.png (the 10,000 of its test set).
"""

import argparse
import shutil
import tempfile
from pathlib import Path

from beit_mm.errors import UserError
from beit_mm.terminal import run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('source', type=Path, help='cifar-100-python.tar.gz')
    parser.add_argument('target', type=Path, help='folder to make train/ and val/ in')
    args = parser.parse_args()
    from torchvision.datasets import CIFAR100
    from torchvision.datasets.utils import check_integrity, extract_archive

    if not check_integrity(args.source, CIFAR100.tgz_md5):  # its pickles could run a program
        found = f'{args.source} is missing, incomplete or another file'
        raise UserError(f'{found} (MD5 {CIFAR100.tgz_md5} expected); download it again')
    with tempfile.TemporaryDirectory() as unpacked:
        extract_archive(args.source, unpacked)
        for split in ('train', 'val'):
            folder, part = args.target / split, args.target / f'.{split}.part'
            if folder.exists():
                print(f'{folder} is there already')
                continue
            shutil.rmtree(part, ignore_errors=True)
            images = CIFAR100(unpacked, train=split == 'train')
            for name in images.classes:
                (part / name).mkdir(parents=True)
            for index, (image, label) in enumerate(images):
                image.save(part / images.classes[label] / f'{index:05}.png')
            part.rename(folder)
            print(f'{folder}: {len(images):,} images')


if __name__ == '__main__':
    run(main)

"""Unpacks CIFAR-100 from its official archive into class folders of PNGs.

    python tools/datasets/prepare_cifar100.py cifar-100-python.tar.gz data/cifar100

Download the archive from https://www.cs.toronto.edu/~kriz/cifar.html. The results are train/<class>/*.png (50,000
images) and val/<class>/*.png (the 10,000 images of the test set).
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
    parser.add_argument('target', type=Path, help='folder that gets train/ and val/')
    args = parser.parse_args()
    from torchvision.datasets import CIFAR100
    from torchvision.datasets.utils import check_integrity, extract_archive

    if not check_integrity(args.source, CIFAR100.tgz_md5):  # pickles of another file could run a program
        raise UserError(
            f'{args.source} is missing, truncated or a different file; '
            f'expected MD5 {CIFAR100.tgz_md5}: download it again'
        )
    with tempfile.TemporaryDirectory() as unpacked:
        extract_archive(args.source, unpacked)
        for split in ('train', 'val'):
            folder, part = args.target / split, args.target / f'.{split}.part'
            if folder.exists():
                print(f'{folder} already exists')
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

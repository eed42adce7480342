"""Unpacks ImageNet-1K or ImageNet-22K from the official archives into class folders.

    python tools/datasets/prepare_imagenet.py DOWNLOADS data/imagenet
    python tools/datasets/prepare_imagenet.py fall11_whole.tar data/imagenet22k/train

DOWNLOADS holds ILSVRC2012_img_train.tar, ILSVRC2012_img_val.tar and ILSVRC2012_devkit_t12.tar.gz from
https://image-net.org (after registration). The results are train/<class>/*.JPEG and val/<class>/*.JPEG, 145 GB.
ImageNet-22K is fall11_whole.tar (21,841 classes, as in the paper), winter21_whole.tar.gz (19,167), or a folder with an
archive n########.tar for each class. After an interruption the same command continues.
"""

import argparse
import lzma
import re
import shutil
import tarfile
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from make_shards import TarMember

from beit_mm.errors import UserError
from beit_mm.terminal import run, with_bar

TRAIN, VAL, DEVKIT = 'ILSVRC2012_img_train.tar', 'ILSVRC2012_img_val.tar', 'ILSVRC2012_devkit_t12.tar.gz'
NUM_IMAGES = dict(train=1_281_167, val=50_000)
RELEASES = {21_841: 'fall 2011', 19_167: 'winter 2021'}  # of ImageNet-22K, by number of classes
CONFIG_CLASSES = 21_841  # in configs/beit_plus/finetune_*in22k_90e.py
SYNSET = re.compile(r'n\d{8}')  # name of a class


def unpack_classes(source: Path, target: Path) -> None:
    """Unpacks a tar archive or a folder that holds an archive for each class; existing classes are kept."""
    name = None
    try:
        for name, file in with_bar(class_archives(source), None):
            if not SYNSET.fullmatch(name):
                raise UserError(f'{source} holds {name!r}; expected n########.tar for each class: check the archive')
            if (target / name).exists():
                continue
            part = target / f'.{name}.part'  # hidden, so that it is not listed as a class
            shutil.rmtree(part, ignore_errors=True)
            with file, tarfile.open(fileobj=file, mode='r|', tarinfo=TarMember) as archive:
                archive.extractall(part, filter='data')  # nothing is written outside of the folder
            part.rename(target / name)
    except (tarfile.TarError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise UserError(f'{source}: damaged or incomplete ({error}); download it again') from error
    if name is None:
        raise UserError(f'{source} holds no archives; expected n########.tar for each class')


def class_archives(source: Path) -> Iterator[tuple[str, BinaryIO]]:
    """Yields the name and the archive of each class."""
    if source.is_dir():
        yield from ((path.stem, path.open('rb')) for path in sorted(source.glob('*.tar')))
        return
    try:
        whole = tarfile.open(source, 'r:', tarinfo=TarMember)
    except tarfile.ReadError:  # compressed: read as a stream, because seeking back would start again
        whole = tarfile.open(source, 'r|*', tarinfo=TarMember)
    with whole:
        yield from ((Path(member.name).stem, whole.extractfile(member)) for member in whole if member.isfile())


def unpack_val(downloads: Path, target: Path) -> None:
    """Unpacks the validation images with torchvision, which checks MD5s; the development kit holds their classes."""
    from torchvision.datasets.imagenet import load_meta_file, parse_devkit_archive, parse_val_archive

    part = target.resolve() / '.val.part'
    shutil.rmtree(part, ignore_errors=True)
    name = DEVKIT
    with tempfile.TemporaryDirectory() as folder:
        try:
            parse_devkit_archive(folder, str((downloads / name).resolve()))
            name = VAL
            parse_val_archive(target, str((downloads / name).resolve()), load_meta_file(folder)[1], part.name)
        except RuntimeError as error:  # torchvision's advice would name our temporary folder
            raise UserError(
                f'{downloads / name} is truncated or not the official file (its MD5 differs); '
                'download it again from https://image-net.org'
            ) from error
    part.rename(target / 'val')


def unpack_1k(downloads: Path, target: Path) -> None:
    if missing := [name for name in (TRAIN, VAL, DEVKIT) if not (downloads / name).is_file()]:
        raise FileNotFoundError(f'no {", ".join(missing)} in {downloads}; download from https://image-net.org')
    if not (target / 'val').exists():
        unpack_val(downloads, target)
    unpack_classes(downloads / TRAIN, target / 'train')
    for split, expected in NUM_IMAGES.items():
        count = sum(1 for _ in (target / split).glob('*/*.JPEG'))
        print(f'{target / split}: {count:,} images')
        if count != expected:
            raise UserError(f'{target / split} holds {count:,} images; expected {expected:,}')


def unpack_22k(source: Path, target: Path) -> None:
    unpack_classes(source, target)
    count = sum(path.is_dir() for path in target.glob('n*'))
    options = f'train with --cfg-options model.data_preprocessor.num_classes={count} model.head.num_classes={count}'
    if count not in RELEASES:
        releases = ' or '.join(f'{number:,} ({name})' for number, name in RELEASES.items())
        raise UserError(f'{target} holds {count:,} classes; expected {releases}; if {count:,} is right, {options}')
    print(f'{target}: {count:,} classes, the release of {RELEASES[count]}' + f'; {options}' * (count != CONFIG_CLASSES))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('source', type=Path, help='folder of the three archives; for 22K an archive or a folder')
    parser.add_argument('target', type=Path, help='folder that gets train/ and val/; for 22K the class folders')
    args = parser.parse_args()
    of_1k = any((args.source / name).exists() for name in (TRAIN, VAL, DEVKIT))
    (unpack_1k if of_1k else unpack_22k)(args.source, args.target)


if __name__ == '__main__':
    run(main)

"""Unpacks ImageNet-1K (ILSVRC 2012) from its three official archives into class folders.

    python tools/datasets/prepare_imagenet.py DOWNLOADS data/imagenet

DOWNLOADS holds ILSVRC2012_img_train.tar, ILSVRC2012_img_val.tar and ILSVRC2012_devkit_t12.tar.gz of
https://image-net.org (after registration). It makes train/<class>/*.JPEG and val/<class>/*.JPEG, 145 GB, beside the
archives; run again after an interruption, it goes on where it was.
"""

import argparse
import io
import sys
from pathlib import Path

from _archives import SYNSET, ArchiveError, Budget, memory_limit, one_line_errors, open_tar, unpack_classes, write_file

TRAIN, VAL, DEVKIT = 'ILSVRC2012_img_train.tar', 'ILSVRC2012_img_val.tar', 'ILSVRC2012_devkit_t12.tar.gz'
SYNSETS, LABELS = 'meta.mat', 'ILSVRC2012_validation_ground_truth.txt'  # in the development kit
MAX_TABLE = 50_000_000  # bytes of each of the two
NUM_IMAGES = dict(train=1_281_167, val=50_000)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('source', type=Path, help='folder of the three archives')
    parser.add_argument('target', type=Path, help='folder to make train/ and val/ in')
    args = parser.parse_args()
    if missing := [name for name in (TRAIN, VAL, DEVKIT) if not (args.source / name).is_file()]:
        sys.exit(f'error: no {", ".join(missing)} in {args.source}; download from https://image-net.org')
    with one_line_errors(args.source / DEVKIT):
        class_of = val_classes(args.source / DEVKIT)
    with one_line_errors(args.source / VAL):
        unpack_val(args.source / VAL, args.target / 'val', class_of)
    with one_line_errors(args.source / TRAIN):
        unpack_classes(args.source / TRAIN, args.target / 'train')
    for split, expected in NUM_IMAGES.items():
        count = sum(1 for _ in (args.target / split).glob('*/*.JPEG'))
        print(f'{args.target / split}: {count:,} images')
        if count != expected:
            sys.exit(f'error: {args.target / split} holds {count:,} images, expected {expected:,}')


def val_classes(devkit: Path) -> dict[str, str]:
    """Name of each validation image -> its class (WordNet id), from the development kit.

    Raises:
        ArchiveError: it is damaged or another archive.
    """
    with open_tar(devkit) as archive:
        content = {
            Path(member.name).name: archive.extractfile(member).read()
            for member in archive
            if member.isfile() and member.name.endswith((f'/{SYNSETS}', f'/{LABELS}')) and member.size <= MAX_TABLE
        }
    if len(content) != 2:
        raise ArchiveError(f'{devkit} lacks {SYNSETS} or {LABELS}: is it another archive?')
    from scipy.io import loadmat

    try:
        with memory_limit():
            synsets = loadmat(io.BytesIO(content[SYNSETS]), squeeze_me=True, variable_names=['synsets'])['synsets']
        names = {int(number): str(name) for number, name in zip(synsets['ILSVRC2012_ID'], synsets['WNID'], strict=True)}
        labels = [names[int(label)] for label in content[LABELS].split()]
    except Exception as error:  # scipy at work on damaged bytes raises nearly everything
        raise ArchiveError(f'{devkit}: damaged or incomplete ({type(error).__name__}); download it again') from error
    if unsafe := [name for name in labels if not SYNSET.fullmatch(name)]:  # it would be a path to write to
        raise ArchiveError(f'{devkit} names the class {unsafe[0]!r}, expected n########: is it another archive?')
    return {f'ILSVRC2012_val_{i:08}.JPEG': name for i, name in enumerate(labels, start=1)}


def unpack_val(source: Path, target: Path, class_of: dict[str, str]) -> None:
    """Unpacks the validation images into class folders; files that are there already are skipped.

    Args:
        source: a tar archive of images.
        target: folder for the class folders.
        class_of: name of a file -> its class.
    """
    from rich.progress import track

    budget = Budget(source)
    with open_tar(source) as archive:
        for member in track(archive, 'validation images', total=len(class_of)):
            name = Path(member.name).name
            if member.isdir():
                continue
            if name not in class_of or not member.isfile():
                raise ArchiveError(f'{source} holds {member.name!r}, which is no validation image: another archive?')
            path = target / class_of[name] / name
            if not path.exists() or path.stat().st_size != member.size:
                write_file(archive.extractfile(member), path, budget)


if __name__ == '__main__':
    main()

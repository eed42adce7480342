"""Unpacks ImageNet-1K (ILSVRC 2012) from its three official archives into class folders.

    python tools/prepare_imagenet.py DOWNLOADS data/imagenet

DOWNLOADS holds ILSVRC2012_img_train.tar, ILSVRC2012_img_val.tar and ILSVRC2012_devkit_t12.tar.gz of
https://image-net.org (after registration). It makes train/<class>/*.JPEG and val/<class>/*.JPEG, 145 GB, beside the
archives; run again after an interruption, it goes on where it was.
"""
import argparse
import io
import sys
from pathlib import Path

from scipy.io import loadmat

from beit_mm.datasets.archives import ArchiveError, intact, open_tar, unpack_classes, unpack_files
from beit_mm.datasets.image_folder import list_images

TRAIN, VAL, DEVKIT = 'ILSVRC2012_img_train.tar', 'ILSVRC2012_img_val.tar', 'ILSVRC2012_devkit_t12.tar.gz'
SYNSETS, LABELS = 'meta.mat', 'ILSVRC2012_validation_ground_truth.txt'  # in the development kit
COUNTS = dict(train=1_281_167, val=50_000)
CLASSES = 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('source', type=Path, help='folder of the three archives')
    parser.add_argument('target', type=Path, help='folder to make train/ and val/ in')
    args = parser.parse_args()
    if missing := [name for name in (TRAIN, VAL, DEVKIT) if not (args.source / name).is_file()]:
        sys.exit(f'error: no {", ".join(missing)} in {args.source}; download from https://image-net.org')
    try:
        class_of = val_classes(args.source / DEVKIT)
        print(f'{VAL} -> {args.target / "val"}')
        unpack_files(args.source / VAL, args.target / 'val', class_of)
        print(f'{TRAIN} -> {args.target / "train"}')
        unpack_classes(args.source / TRAIN, args.target / 'train', CLASSES)
    except (ArchiveError, OSError) as error:
        sys.exit(f'error: {error}')
    for split, expected in COUNTS.items():
        found = len(list_images(str(args.target / split)))
        print(f'{args.target / split}: {found:,} images')
        if found != expected:
            sys.exit(f'error: {args.target / split} holds {found:,} images, expected {expected:,}; the archive is '
                     'incomplete, or files of another kind lie there')


def val_classes(devkit: Path) -> dict[str, str]:
    """Name of each validation image -> its class (WordNet id), from the development kit.

    Raises:
        ArchiveError: it is damaged or another archive.
    """
    with intact(devkit), open_tar(devkit) as archive:
        content = {Path(member.name).name: archive.extractfile(member).read() for member in archive
                   if member.isfile() and member.name.endswith((f'/{SYNSETS}', f'/{LABELS}'))}
    if len(content) != 2:
        raise ArchiveError(f'{devkit} lacks {SYNSETS} or {LABELS}: is it another archive?')
    with intact(devkit, Exception):  # scipy at work on damaged bytes raises nearly everything
        synsets = loadmat(io.BytesIO(content[SYNSETS]), squeeze_me=True)['synsets']
        names = {int(number): str(name) for number, name in zip(synsets['ILSVRC2012_ID'], synsets['WNID'], strict=True)}
        labels = content[LABELS].split()
        return {f'ILSVRC2012_val_{i:08}.JPEG': names[int(label)] for i, label in enumerate(labels, start=1)}


if __name__ == '__main__':
    main()

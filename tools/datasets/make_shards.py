"""Puts a folder of images into large tar archives (shards), with an index to read them in any order.

    python tools/datasets/make_shards.py data/imagenet22k_256/train data/imagenet22k_shards --shard-size 1GB
    python tools/datasets/make_shards.py --index-only data/webdataset

To train on them, set data_root of a config to the folder of the shards. It holds shard-000000.tar, shard-000001.tar,
... in webdataset's layout, with the names of the images in the first folder, and the index, shards.npz. After an
interruption the same command continues behind the last complete shard. With --index-only the folder already holds
uncompressed tar archives from any program, and gets an index. The class of an image is the number in the .cls file
beside it, or if there are no such files, its folder in the archive.
"""

import argparse
import io
import os
import re
import tarfile
from array import array
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from beit_mm.errors import UserError
from beit_mm.terminal import run, with_bar

UNITS = dict(KB=10**3, MB=10**6, GB=10**9)
SHARD = 'shard-{:06}.tar'
CLASS = re.compile(rb'\s*(\d{1,6})\s*')
MAX_CLASS = 32  # bytes of a .cls file


class TarMember(tarfile.TarInfo):
    """A member of an archive. A damaged header is an error; in tarfile it can mean the end of the archive."""

    @classmethod
    def fromtarfile(cls, archive: tarfile.TarFile) -> 'TarMember':
        try:
            return super().fromtarfile(archive)
        except (tarfile.InvalidHeaderError, tarfile.TruncatedHeaderError) as error:
            raise tarfile.ReadError(str(error)) from None


class IndexWriter:
    """Collects the contents of the archives in a folder, some dozen bytes for an image, and writes their index."""

    def __init__(self) -> None:
        self.shards, self.names, self.sizes = bytearray(), bytearray(), array('q')
        self.columns = {name: array('q') for name in ('offset', 'length', 'label', 'shard', 'folder')}
        self.number_of: dict[str, int] = {}  # class folder -> number, in order of appearance

    def add(self, archive: Path, images: Iterable[tuple[str, int, int, int]]) -> None:
        """Adds the next archive of the folder, with the images that `scan` has found."""
        for name, *numbers in images:
            self.names += os.fsencode(name) + b'\0'
            folder, slash, _ = name.partition('/')
            of_class = self.number_of.setdefault(folder, len(self.number_of)) if slash else -1
            for column, number in zip(self.columns.values(), (*numbers, len(self.sizes), of_class), strict=True):
                column.append(number)
        self.shards += os.fsencode(archive.name) + b'\0'
        self.sizes.append(archive.stat().st_size)

    def write(self, folder: Path) -> None:
        """Writes the index, which `image_folder.read_shards` reads, and prints the numbers of images and classes.

        The index is an .npz file of plain arrays: `shards` and their `sizes` in bytes; for each image `names`, `shard`,
        `offset`, `length` and `label`, -1 for none; `classes`, empty if .cls files hold class numbers. Names are bytes
        of the file system, each followed by a NUL. Without .cls files the class is the first folder of the name.
        """
        import numpy as np

        from beit_mm.datasets.image_folder import INDEX
        from beit_mm.files import atomic_file

        arrays = {name: np.array(column) for name, column in dict(self.columns, sizes=self.sizes).items()}
        folders, classes = arrays.pop('folder'), []
        if not (arrays['label'] >= 0).any():
            classes = sorted(self.number_of)
            rank_of = {name: rank for rank, name in enumerate(classes)}
            arrays['label'] = np.array([*(rank_of[name] for name in self.number_of), -1])[folders]  # last: no folder
        arrays |= {name: arrays[name].astype(np.int32) for name in ('label', 'shard')}
        texts = dict(shards=self.shards, names=self.names, classes=b''.join(os.fsencode(x) + b'\0' for x in classes))
        with atomic_file(folder / INDEX) as file:
            np.savez(file, **arrays, **{name: np.frombuffer(text, np.uint8) for name, text in texts.items()})
        number = len(classes) or int(arrays['label'].max()) + 1
        print(f'{folder}: {len(folders):,} images of {number:,} classes in {len(self.sizes):,} archives')


def size_of(text: str) -> int:
    """Parses a size such as 500MB or 1GB into bytes."""
    if not (match := re.fullmatch(r'0*([1-9]\d*)(KB|MB|GB)', text)):
        raise argparse.ArgumentTypeError(f'{text!r}; expected a whole number with KB, MB or GB, such as 1GB')
    return int(match[1]) * UNITS[match[2]]


def scan(path: Path) -> list[tuple[str, int, int, int]]:
    """Reads the headers of an archive: for each image its name, first byte, bytes, and .cls number or -1."""
    from beit_mm.datasets.image_folder import EXTENSIONS, LITTER
    from beit_mm.files import quoted

    images, numbers, size, position = [], {}, path.stat().st_size, 0
    try:
        with tarfile.open(path, 'r:', tarinfo=TarMember) as archive:
            for member in archive:
                archive.members = []  # otherwise it keeps all headers
                # a negative size would lead to an endless loop
                if member.size < 0 or not position < member.offset_data <= size - member.size:
                    raise tarfile.ReadError('unexpected end of data')
                position, name = member.offset_data, member.name.removeprefix('./')
                *folders, file = name.split('/')
                is_litter = any(part.startswith(LITTER) and part != '..' for part in folders)
                if member.isdir() or is_litter or file.startswith('.'):  # skipped as in folders
                    continue
                if not member.isfile() or member.issparse():
                    raise UserError(
                        f'{path}: {quoted(name)} is a link, a sparse file or a device; '
                        'expected plain files, as tar --dereference --hard-dereference writes them'
                    )
                if name.lower().endswith('.cls'):
                    text = archive.extractfile(member).read(MAX_CLASS + 1)
                    if not (match := CLASS.fullmatch(text)):
                        raise UserError(f'{path}: {quoted(name)} holds {text!r}; expected the number of a class')
                    numbers[key_of(name)] = int(match[1])
                elif name.lower().endswith(EXTENSIONS):
                    images.append((name, member.offset_data, member.size))
    except tarfile.TarError as error:
        raise UserError(f'{path} is not a complete tar archive ({error}); copy it again, or unpack it') from error
    return [(*image, numbers.get(key_of(image[0]), -1)) for image in images]


def key_of(name: str) -> str:
    """The part of a name that all files of a sample share in webdataset's layout: what precedes its first dot."""
    folder, slash, file = name.rpartition('/')
    return folder + slash + file.split('.')[0]


def write_shard(file: BinaryIO, folder: Path, names: Iterator[str], size: int) -> None:
    """Writes the next images into an archive until it has `size` bytes.

    Equal images give equal archives, because owner, mode and time of the files are not stored.
    """
    from beit_mm.datasets.reading import MAX_PIXELS, open_file, unreadable

    with tarfile.open(fileobj=file, mode='w', format=tarfile.GNU_FORMAT) as archive:
        while archive.offset < size and (name := next(names, None)):
            path = os.path.join(folder, name)
            with unreadable(path, OSError), open_file(path, MAX_PIXELS) as image:
                content = image.read()
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
            archive.members = []  # otherwise it keeps all headers


def images_of(folder: Path, target: Path) -> Sequence[str]:
    """Lists the images of a folder, with paths relative to it; refuses label maps, and a target inside the folder."""
    from beit_mm.datasets.image_folder import list_images
    from beit_mm.datasets.segmentation_folder import check_images_alone

    check_images_alone(folder)
    if folder.resolve() in (target.resolve(), *target.resolve().parents):
        raise UserError(f'{target} is {folder} or inside it; choose a folder elsewhere')
    if not (folder.is_dir() and (paths := list_images(str(folder)))):
        raise FileNotFoundError(f'no images in {folder}; expected a folder of images')
    return paths


def write_shards(folder: Path, target: Path, size: int) -> None:
    """Writes shards and index; complete shards of an earlier run are kept."""
    from beit_mm.datasets.image_folder import INDEX
    from beit_mm.files import atomic_file, remove_leftovers

    paths, index, done = images_of(folder, target), IndexWriter(), 0
    for path in sorted(target.glob('*.tar')):
        members = scan(path)
        expected = paths[done : done + len(members)]
        if path.name != SHARD.format(len(index.sizes)) or [name for name, *_ in members] != list(expected):
            raise UserError(f'{path} does not hold the images of {folder}; choose an empty folder to write to')
        index.add(path, members)
        done += len(members)
    if done:
        print(f'{target}: {len(index.sizes):,} archives of an earlier run, with {done:,} images, are kept as they are')
    (target / INDEX).unlink(missing_ok=True)  # until all shards are complete
    remove_leftovers(target)
    names = with_bar((paths[row] for row in range(done, len(paths))), len(paths) - done)
    while done < len(paths):
        path = target / SHARD.format(len(index.sizes))
        with atomic_file(path) as file:
            write_shard(file, folder, names, size)
        index.add(path, members := scan(path))
        done += len(members)
    index.write(target)


def index_shards(folder: Path) -> None:
    """Writes the index of the tar archives in a folder, in the order of their names."""
    index, archives = IndexWriter(), sorted(folder.glob('*.tar'))
    for path in with_bar(archives, len(archives)):
        index.add(path, scan(path))
    if not index.names:
        raise FileNotFoundError(f'no images in {folder}; expected uncompressed .tar archives with images')
    index.write(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('folder', type=Path, help='folder of images, to any depth; with --index-only of tar archives')
    parser.add_argument('target', type=Path, nargs='?', help='folder to write to')
    parser.add_argument('--shard-size', type=size_of, help='size of an archive (default: 1GB)')
    parser.add_argument('--index-only', action='store_true', help='only write the index of existing archives')
    args = parser.parse_args()
    if args.index_only == bool(args.target):
        parser.error('expected FOLDER TARGET, or --index-only FOLDER')
    if not args.index_only:
        write_shards(args.folder, args.target, args.shard_size or UNITS['GB'])
    elif args.shard_size:
        parser.error('--shard-size has no effect with --index-only, which keeps the archives as they are')
    else:
        index_shards(args.folder)


if __name__ == '__main__':
    run(main)

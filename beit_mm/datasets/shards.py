"""Images in tar shards of webdataset's layout, read in any order: an index says where the bytes of each image lie.

A folder with an index takes the place of a folder of images. What is drawn then stays a matter of the sample's number,
so that shuffling and resuming are as with files. `tools/datasets/make_shards.py` writes shards and index.
"""

import os
import re
import zipfile
import zlib
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from tarfile import BLOCKSIZE
from typing import Any, NamedTuple

import numpy as np

from beit_mm.datasets.listing import Paths, Samples
from beit_mm.datasets.reading import MemberPath, open_archive, readable
from beit_mm.files import atomic_file
from beit_mm.terminal import UserError

INDEX = 'shards.npz'
MAX_NUMBER = 999_999  # of a class in a .cls file
# Its arrays. Texts are names in the file system's bytes, each ended by a NUL.
TYPES = dict(
    shards=np.uint8,  # text: names of the S archives
    sizes=np.int64,  # (S,) their bytes
    sums=np.int64,  # (S,) CRC-32 of the header of the last image in each, which tells archives of one size apart
    names=np.uint8,  # text: names of the N images
    shard=np.int32,  # (N,) archive of each image
    offset=np.int64,  # (N,) of its first byte there
    length=np.int64,  # (N,) its bytes
    label=np.int32,  # (N,) its class, -1 for none
    classes=np.uint8,  # text: names of the classes; none where .cls files number them
)
# In a text with a NUL before it: of names that are absolute, empty, or lead out of their folder.
UNSAFE = (b'\0/', b'\0\0', b'\0../', b'\0..\0', b'/../', b'/..\0')


class Member(NamedTuple):
    """An image in an archive: its name there, where its bytes lie, and the number of its class in a .cls file."""

    name: str
    offset: int
    length: int
    number: int | None = None


@dataclass
class Shards:
    """The images of a folder of shards, as its index has them.

    Attributes:
        folder: of the archives.
        archives, paths: names of the archives, and of the images in them.
        shard, offset, length: int (N,): archive of each image, and where in it its bytes lie.
        label: int (N,): its class, -1 for none.
        classes: names of the classes in sorted order; none where .cls files number them.
    """

    folder: str
    archives: Paths
    paths: Paths
    shard: np.ndarray
    offset: np.ndarray
    length: np.ndarray
    label: np.ndarray
    classes: tuple[str, ...]

    def path(self, row: int) -> MemberPath:
        """The path of an image, by which it is read."""
        archive = os.path.join(self.folder, self.archives[self.shard[row]])
        return MemberPath(f'{archive}/{self.paths[row]}', archive, int(self.offset[row]), int(self.length[row]))

    def rows_of(self, paths: Iterable[str], source: str) -> np.ndarray:
        """The rows of some images, int (M,); `source` is the list that names them.

        Raises:
            FileNotFoundError: an image of the list is in no archive.
            ValueError: two images have the same name.
        """
        row_of = {path: row for row, path in enumerate(self.paths)}
        if len(row_of) < len(self.paths):
            raise UserError(f'{self.folder}: two images of one name; expected different names, to find those of a list')
        try:
            return np.array([row_of[path] for path in paths], np.int64)
        except KeyError as error:
            raise FileNotFoundError(f'{source} names {error.args[0]!r}, which is no image in {self.folder!r}') from None


class ShardSamples(Samples):
    """Samples of images in shards.

    Args:
        shards: the index.
        rows: int (M,): the images in it.
        labels: int (M,), or None.
    """

    def __init__(self, shards: Shards, rows: np.ndarray, labels: np.ndarray | None = None) -> None:
        super().__init__(shards.folder, shards.paths, labels)
        self.shards = shards
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> Any:
        labels = None if self.labels is None else self.labels[index]
        if isinstance(index, slice):
            return ShardSamples(self.shards, self.rows[index], labels)
        sample: dict = dict(img_path=self.shards.path(self.rows[index]))
        return sample if labels is None else dict(sample, gt_label=int(labels))


# --- the index: an .npz file of plain arrays -------------------------------------------------------


def read_shards(folder: str) -> Shards | None:
    """The shards in a folder; None for one without an index.

    Nothing in the index is executed, and everything in it is checked: a run does not begin on archives that are cut,
    missing or others than it tells of.

    Raises:
        ValueError: the index is damaged, or does not fit the archives.
        FileNotFoundError: an archive is missing.
    """
    path = os.path.join(folder, INDEX)
    if not os.path.isfile(path):
        return None
    try:
        arrays = read_arrays(path)
        check_arrays(arrays)
    except Exception as error:  # numpy and zipfile raise nearly everything on damaged bytes
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(
            f'{path} is no index of shards ({reason}); make it again: '
            f'python tools/datasets/make_shards.py --index-only {folder}'
        ) from error
    archives, paths, classes = (Paths(arrays.pop(name).tobytes()) for name in ('shards', 'names', 'classes'))
    expected = (arrays.pop(name).tolist() for name in ('sizes', 'sums'))
    check_archives(folder, archives, *expected, last_offsets(arrays, len(archives)))
    open_archive.cache_clear()  # in this process others may have had these paths
    return Shards(folder, archives, paths, classes=tuple(classes), **arrays)


def read_arrays(path: str) -> dict[str, np.ndarray]:
    """The arrays of an index, in no more memory than the file is long."""
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
        if any(member.compress_type != zipfile.ZIP_STORED for member in members):
            raise UserError('it is compressed')
        if sum(member.file_size for member in members) > os.path.getsize(path):
            raise UserError('its parts are larger than the file')
    with np.load(path, allow_pickle=False) as content:
        if set(content.files) != set(TYPES):
            raise UserError(f'it holds {sorted(content.files)}')
        return {name: content[name] for name in TYPES}


def check_arrays(arrays: dict[str, np.ndarray]) -> None:
    """Raises ValueError for an index whose parts do not fit each other."""
    for name, values in arrays.items():
        if values.ndim != 1 or values.dtype != TYPES[name]:
            raise UserError(f'{name} is {values.dtype} of shape {values.shape}')
        if values.dtype == np.uint8 and len(values) and values[-1]:
            raise UserError(f'{name} is cut')
    shards, images, classes = (np.count_nonzero(arrays[name] == 0) for name in ('shards', 'names', 'classes'))
    lengths = {name: len(arrays[name]) for name in ('shard', 'offset', 'length', 'label')}
    of_shards = [len(arrays[name]) for name in ('sizes', 'sums')]
    if set(lengths.values()) != {images} or set(of_shards) != {shards}:
        raise UserError(f'{images} images, {lengths}; {shards} archives, sizes and sums of {of_shards}')
    if re.search(rb'(?<!\.tar)\0|/', arrays['shards'].tobytes()):
        raise UserError('a shard that is no .tar file of this folder')
    if is_unsafe(arrays['names'].tobytes()):
        raise UserError('an unsafe name of an image')
    shard, offset, length, label = (arrays[name] for name in lengths)
    if not images:
        raise UserError('no images')
    if shard.min() < 0 or shard.max() >= shards or label.min() < -1 or label.max() >= (classes or MAX_NUMBER + 1):
        raise UserError('an archive or a class that does not exist')
    if (np.diff(shard) < 0).any():
        raise UserError('images that are not in the order of their archives')
    sizes = arrays['sizes'][shard]
    if wrong := np.flatnonzero((offset < 0) | (length < 0) | (length > sizes) | (offset > sizes - length)).tolist():
        start, size, whole = (int(values[wrong[0]]) for values in (offset, length, sizes))
        raise UserError(f'image {wrong[0]}: bytes {start} to {start + size} of {whole}')


def is_unsafe(text: bytes) -> bool:
    """Whether a text of names, each ended by a NUL, holds one that is no path below a folder."""
    text = b'\0' + text
    return any(part in text for part in UNSAFE)


def last_offsets(arrays: dict[str, np.ndarray], shards: int) -> list[int]:
    """Where the last image of each archive begins; 0 in one without images."""
    ends = np.cumsum(np.bincount(arrays['shard'], minlength=shards)).tolist()
    return [int(arrays['offset'][end - 1]) if end > start else 0 for start, end in pairwise([0, *ends])]


def check_archives(folder: str, archives: Sequence[str], *expected: Sequence[int]) -> None:
    """Raises an error for an archive that is missing or is not the one of which the index tells.

    Args:
        folder: of the archives.
        archives: their names.
        expected: sizes, sums and offsets of the last images, a number for each archive.
    """
    for name, size, total, offset in zip(archives, *expected, strict=True):
        path = os.path.join(folder, name)
        if not os.path.isfile(path):
            raise FileNotFoundError(f'no archive {readable(path)}, of which {INDEX} tells; copy all of them')
        if os.path.getsize(path) != size or header_sum(path, offset) != total:
            raise UserError(
                f'{readable(path)} is cut, or another archive than {INDEX} tells of; copy it again, or make the index '
                f'again: python tools/datasets/make_shards.py --index-only {folder}'
            )


def header_sum(path: str | Path, offset: int) -> int:
    """CRC-32 of the header before the image at an offset: of its name, size and time."""
    with open(path, 'rb') as file:
        file.seek(max(offset - BLOCKSIZE, 0))
        return zlib.crc32(file.read(BLOCKSIZE))


class IndexWriter:
    """Collects what is in the archives of a folder, some dozen bytes an image, and writes their index."""

    def __init__(self) -> None:
        self.shards, self.names = bytearray(), bytearray()
        self.sizes, self.sums, self.offset, self.length = array('q'), array('q'), array('q'), array('q')
        self.shard, self.number, self.folder = array('i'), array('i'), array('i')
        self.number_of: dict[str, int] = {}  # of each class folder, in the order in which they come

    def add(self, archive: Path, members: Iterable[Member]) -> None:
        """Takes the images of the next archive of the folder."""
        offset = 0
        for name, offset, length, number in members:
            text = os.fsencode(name) + b'\0'
            if text.count(b'\0') > 1 or is_unsafe(text):
                raise UserError(f'{archive} holds {readable(name)}; expected a path below a folder, without .. in it')
            self.names += text
            folder, slash, _ = name.partition('/')
            self.shard.append(len(self.sizes))
            self.offset.append(offset)
            self.length.append(length)
            self.number.append(-1 if number is None else number)
            self.folder.append(self.number_of.setdefault(folder, len(self.number_of)) if slash else -1)
        self.shards += os.fsencode(archive.name) + b'\0'
        self.sizes.append(archive.stat().st_size)
        self.sums.append(header_sum(archive, offset))

    def write(self, folder: Path) -> tuple[int, int]:
        """Writes the index, whole or not at all, and returns how many images and classes there are.

        The class of an image is the number in its .cls file; where no image has one, the first folder of its name.
        """
        label, classes = np.array(self.number, np.int32), []
        if not (label >= 0).any():
            classes = sorted(self.number_of)
            rank_of = {name: rank for rank, name in enumerate(classes)}
            ranks = np.array([*(rank_of[name] for name in self.number_of), -1], np.int32)  # the last: in no folder
            label = ranks[np.array(self.folder, np.int32)]
        arrays = dict(
            shards=np.frombuffer(self.shards, np.uint8),
            names=np.frombuffer(self.names, np.uint8),
            classes=np.frombuffer(b''.join(os.fsencode(name) + b'\0' for name in classes), np.uint8),
            label=label,
            **{
                name: np.array(getattr(self, name), TYPES[name])
                for name in ('sizes', 'sums', 'shard', 'offset', 'length')
            },
        )
        with atomic_file(folder / INDEX) as file:
            np.savez(file, **arrays)
        return len(label), len(classes) or int(label.max()) + 1

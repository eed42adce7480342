"""Lists the images below a folder, or those in its tar shards.

Shards are tar archives in webdataset's layout with an index, which says where the bytes of each image lie, so that
images are read in any order. `tools/datasets/make_shards.py` writes shards and index.
"""

import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from mmengine.logging import print_log

from beit_mm.datasets.reading import HeifImageFile, MemberPath
from beit_mm.files import readable
from beit_mm.terminal import UserError

EXTENSIONS = tuple('.jpg .jpeg .jfif .mpo .png .apng .webp .gif .bmp .ppm .pgm .tif .tiff'.split())
HEIF_EXTENSIONS = ('.heic', '.heif')  # which need a package
if HeifImageFile is not None:
    EXTENSIONS += HEIF_EXTENSIONS
BAND_EXTENSIONS = ('.tif', '.tiff', '.npy')  # for LoadBands
INDEX = 'shards.npz'


class Paths(Sequence[str]):
    """Many paths in one block of memory, which forked workers share: a string is made when it is asked for."""

    def __init__(self, text: bytes) -> None:
        self.text = text  # the paths in the file system's bytes, each ended by a NUL
        self.ends = np.flatnonzero(np.frombuffer(text, np.uint8) == 0)
        self.starts = np.r_[0, self.ends + 1][:-1]

    @classmethod
    def of(cls, paths: Iterable[str]) -> 'Paths':
        return cls(b''.join(os.fsencode(path) + b'\0' for path in paths))

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, (slice, np.ndarray)):
            part = object.__new__(Paths)
            part.text, part.starts, part.ends = self.text, self.starts[index], self.ends[index]
            return part
        return os.fsdecode(self.text[self.starts[index] : self.ends[index]])


def list_images(folder: str, extensions: Sequence[str] = EXTENSIONS, subfolders: Sequence[str] = ('',)) -> Paths:
    """Paths of all images below a folder, relative to it, sorted; hidden files and folders are left out.

    A file counts by its ending, whether it can be read or not. Links are followed, and each folder is searched once:
    of several paths to it the one without links is taken, or else one with a link. Only these subfolders are searched,
    one after the other.
    """
    unread = HEIF_EXTENSIONS if HeifImageFile is None and '.jpg' in extensions else ()
    paths: list[str] = []
    left_out = 0
    for subfolder in subfolders:
        found = []
        for parent, names in walk(os.path.join(folder, subfolder)):
            below = os.path.relpath(parent, folder)
            prefix = '' if below == '.' else f'{below}/'
            found += [prefix + name for name in names if name.lower().endswith(tuple(extensions))]
            left_out += sum(name.lower().endswith(unread) for name in names)
        paths += sorted(found, key=os.fsencode)
    if left_out:
        message = f'{readable(folder)}: {left_out} HEIC images are left out; to have them read, pip install pillow-heif'
        print_log(message, logger='current', level=logging.WARNING)
    return Paths.of(paths)


def walk(folder: str) -> Iterator[tuple[str, list[str]]]:
    """The path of each folder from `folder` down, once, and the names of its files; links to folders come last."""
    seen, tops = set(), [folder]
    for top in tops:
        for parent, folders, files in os.walk(top, onerror=stop):
            status = os.stat(parent)
            if (status.st_dev, status.st_ino) in seen:
                folders.clear()
                continue
            seen.add((status.st_dev, status.st_ino))
            folders[:] = sorted(name for name in folders if not name.startswith('.'))
            tops += filter(os.path.islink, (os.path.join(parent, name) for name in folders))
            yield parent, [name for name in files if not name.startswith('.')]


def stop(error: OSError) -> None:
    # without it os.walk would ignore folders that cannot be listed
    if isinstance(error, PermissionError):
        name = readable(os.fsdecode(error.filename))
        raise PermissionError(f'no permission to list the folder {name}; allow it (chmod u+rx), or move it away')
    raise error


@dataclass
class Samples(Sequence[dict]):
    """The data_list of a dataset: a dict of `img_path` and, if there are labels, `gt_label` for each sample."""

    folder: str
    paths: Sequence[str]  # relative to the folder; or the images of shards
    labels: np.ndarray | None = None  # int (N,)

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: Any) -> Any:
        labels = None if self.labels is None else self.labels[index]
        path = self.paths[index]
        if isinstance(index, slice):
            return Samples(self.folder, path, labels)
        sample = dict(img_path=path if isinstance(path, MemberPath) else os.path.join(self.folder, path))
        return sample if labels is None else dict(sample, gt_label=int(labels))


@dataclass
class Shards(Sequence[str]):
    """The images in a folder of shards: a sequence of MemberPath."""

    folder: str
    archives: Paths  # (S,) names
    classes: tuple[str, ...]  # names in sorted order; none where .cls files number them
    # of each image:
    names: Paths  # (N,) names in the archives
    shard: np.ndarray  # int (N,), its archive
    offset: np.ndarray  # int (N,), where in the archive its bytes begin
    length: np.ndarray  # int (N,), their number
    label: np.ndarray  # int (N,), its class, -1 for none

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, (slice, np.ndarray)):
            of_images = 'names', 'shard', 'offset', 'length', 'label'
            return replace(self, **{name: getattr(self, name)[index] for name in of_images})
        archive = os.path.join(self.folder, self.archives[self.shard[index]])
        return MemberPath(f'{archive}/{self.names[index]}', archive, int(self.offset[index]), int(self.length[index]))

    def listed(self, names: Iterable[str], source: str) -> 'Shards':
        """The images of these names, which the list `source` has."""
        row_of = {name: row for row, name in enumerate(self.names)}
        if len(row_of) < len(self):
            raise UserError(f'{self.folder}: two images of one name; expected different names, to find those of a list')
        try:
            return self[np.array([row_of[name] for name in names], np.int64)]
        except KeyError as error:
            raise FileNotFoundError(f'{source} names {error.args[0]!r}, which is no image in {self.folder!r}') from None


def read_shards(folder: str) -> Shards | None:
    """The shards in a folder, by the index that `make_shards.py` wrote; None for a folder without an index."""
    path = os.path.join(folder, INDEX)
    if not os.path.isfile(path):
        return None
    again = f'python tools/datasets/make_shards.py --index-only {folder}'
    try:
        with np.load(path, allow_pickle=False) as content:
            archives, classes, names = (Paths(content[name].tobytes()) for name in ('shards', 'classes', 'names'))
            of_images = {name: content[name] for name in ('shard', 'offset', 'length', 'label')}
            sizes = content['sizes'].tolist()
    except Exception as error:  # numpy and zipfile raise nearly everything on damaged bytes
        raise UserError(f'{path} is no index of shards ({type(error).__name__}); make it again: {again}') from error
    for name, size in zip(archives, sizes, strict=True):
        archive = os.path.join(folder, name)
        if not os.path.isfile(archive):
            raise FileNotFoundError(f'no archive {readable(archive)}, of which {INDEX} tells; copy all of them')
        if os.path.getsize(archive) != size:
            advice = f'copy it again, or make the index again: {again}'
            raise UserError(f'{readable(archive)} is cut, or another archive than {INDEX} tells of; {advice}')
    return Shards(folder, archives, tuple(classes), names, **of_images)

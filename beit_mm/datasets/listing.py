"""Which image files there are: folders are searched, and what was found is held compactly."""

import logging
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from mmengine.logging import print_log

from beit_mm.datasets.reading import HeifImageFile, readable

EXTENSIONS = tuple('.jpg .jpeg .jfif .mpo .png .apng .webp .gif .bmp .ppm .pgm .tif .tiff'.split())
HEIF_EXTENSIONS = ('.heic', '.heif')  # which need a package
if HeifImageFile is not None:
    EXTENSIONS += HEIF_EXTENSIONS
HEIF = re.compile(rb'(?<![^\0])[^\0]*\.hei[cf]\0', re.IGNORECASE)  # a path in a text of paths
BAND_EXTENSIONS = ('.tif', '.tiff', '.npy')  # of what LoadBands reads


class Paths(Sequence[str]):
    """Many paths in one piece of memory, which forked workers share: a string is made when it is asked for.

    Args:
        text: the paths in the file system's bytes, each ended by a NUL.
    """

    def __init__(self, text: bytes) -> None:
        self.text = text
        self.ends = np.flatnonzero(np.frombuffer(text, np.uint8) == 0)
        self.starts = np.r_[0, self.ends + 1][:-1]

    @classmethod
    def of(cls, paths: Iterable[str]) -> 'Paths':
        """The compact form of strings."""
        return cls(b''.join(os.fsencode(path) + b'\0' for path in paths))

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: Any) -> Any:
        if not isinstance(index, slice):
            return os.fsdecode(self.text[self.starts[index] : self.ends[index]])
        part = object.__new__(Paths)
        part.text, part.starts, part.ends = self.text, self.starts[index], self.ends[index]
        return part


class Samples(Sequence[dict]):
    """What BaseDataset calls its data_list: `img_path` and, if there are labels, `gt_label` of each sample.

    The dicts are made when they are asked for: to change one leaves the sample as it was.

    Args:
        folder: of the paths.
        paths: relative to the folder.
        labels: int (N,), or None.
    """

    def __init__(self, folder: str, paths: Paths, labels: np.ndarray | None = None) -> None:
        self.folder = folder
        self.paths = paths
        self.labels = labels

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: Any) -> Any:
        labels = None if self.labels is None else self.labels[index]
        if isinstance(index, slice):
            return Samples(self.folder, self.paths[index], labels)
        sample = dict(img_path=os.path.join(self.folder, self.paths[index]))
        return sample if labels is None else dict(sample, gt_label=int(labels))


def list_images(folder: str, extensions: Sequence[str] = EXTENSIONS) -> Paths:
    """Paths of all images below a folder, relative to it, sorted; hidden files and folders are left out.

    What ends like an image and is no folder counts, if it can be read or not. Links are followed, and every folder is
    searched once: where several paths lead to one, the path without links is taken, or else that of the first link.

    Raises:
        PermissionError: a folder cannot be listed; names it.
    """
    return list_subfolders(folder, [''], extensions)[0]


def list_subfolders(
    folder: str, names: Sequence[str], extensions: Sequence[str] = EXTENSIONS
) -> tuple[Paths, list[int]]:
    """Paths of all images below some folders of a folder, relative to that one, and how many each of them has."""
    root = os.fsencode(folder) or b'.'
    endings = tuple(extension.encode() for extension in extensions)
    text, counts, left_out = bytearray(), [], 0
    heif = () if HeifImageFile or '.jpg' not in extensions else HEIF_EXTENSIONS
    noticed = (*endings, *map(str.encode, heif))
    for name in names:
        found = search(root, os.fsencode(name), noticed)
        if heif:
            left_out += found.count(0)
            found = bytearray(HEIF.sub(b'', found))
            left_out -= found.count(0)
        counts.append(found.count(0))
        text += found
    if left_out:
        message = f'{readable(folder)}: {left_out} HEIC images are left out; to have them read, pip install pillow-heif'
        print_log(message, logger='current', level=logging.WARNING)
    return Paths(bytes(text)), counts


def search(root: bytes, name: bytes, endings: tuple[bytes, ...]) -> bytearray:
    """The images below one folder of `root`, as Paths has them."""
    real = os.path.realpath(os.path.join(root, name))
    # a link to a folder above leads in a circle
    seen = {real, *(os.fsencode(parent) for parent in Path(os.fsdecode(real)).parents)}
    links: list[bytes] = []
    text = bytearray()
    walk(root, name, real, endings, seen, links, text)
    if not links:
        return text
    while links:
        links.sort(key=lambda link: (link.count(b'/'), link))
        link = links.pop(0)
        real = os.path.realpath(os.path.join(root, link))
        if real not in seen:
            seen.add(real)
            walk(root, link, real, endings, seen, links, text)
    return bytearray(b''.join(path + b'\0' for path in sorted(text.split(b'\0')) if path))


def walk(
    root: bytes,
    top: bytes,
    real_top: bytes,
    endings: tuple[bytes, ...],
    seen: set[bytes],
    links: list[bytes],
    text: bytearray,
) -> None:
    """Adds the images below `top` to `text`, in the order of their paths, and links to folders to `links`."""

    def entries(path: bytes) -> Iterator[bytes]:
        prefix = path and path + b'/'
        return (prefix + entry for entry in read_folder(root, path, endings, links))

    stack = [entries(top)]
    while stack:
        for path in stack[-1]:
            if not path.endswith(b'/'):
                text += path + b'\0'
                continue
            path = path[:-1]
            real = os.path.join(real_top, path[len(top) :].lstrip(b'/'))
            if real not in seen:
                seen.add(real)
                stack.append(entries(path))
                break
        else:
            stack.pop()


def read_folder(root: bytes, path: bytes, endings: tuple[bytes, ...], links: list[bytes]) -> list[bytes]:
    """Names of images and, with a slash, of folders in one folder, in the order of the paths that they lead to."""
    names = []
    folder = os.path.join(root, path)
    try:
        with os.scandir(folder) as found:
            for entry in found:
                name = entry.name
                if name.startswith(b'.'):
                    continue
                if entry.is_dir(follow_symlinks=False):
                    names.append(name + b'/')
                elif entry.is_symlink() and os.path.isdir(entry.path):
                    links.append(os.path.join(path, name))
                elif name.lower().endswith(endings):
                    names.append(name)
    except PermissionError:
        raise PermissionError(
            f'no permission to list the folder {readable(os.fsdecode(folder))}; allow it (chmod u+rx), or move it away'
        ) from None
    return sorted(names)

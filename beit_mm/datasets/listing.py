"""Which image files there are: folders are searched, what was found is held compactly and remembered."""

import hashlib
import os
import random
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from beit_mm.checkpoint.io import atomic_file
from beit_mm.datasets.reading import readable

EXTENSIONS = tuple('.jpg .jpeg .jfif .mpo .png .apng .webp .gif .bmp .ppm .pgm .tif .tiff'.split())
BAND_EXTENSIONS = ('.tif', '.tiff', '.npy')  # of what LoadBands reads
MIN_REMEMBERED = 100_000  # images from which on a listing is kept in the cache
SETTLED = 2_000_000_000  # ns since the last change of a folder, after which its time stamp tells of the next one


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
    """Paths of all images below some folders of a folder, relative to that one, and how many each of them has.

    Long listings are remembered in `$XDG_CACHE_HOME/beit_mm`, or `~/.cache/beit_mm`, until a folder changes.
    """
    root = os.fsencode(folder) or b'.'
    endings = tuple(extension.encode() for extension in extensions)
    cache = cache_file(root, names, endings)
    if (remembered := recall(cache, root)) is not None:
        return remembered
    now = time.time_ns()
    text, counts, states = bytearray(), [], {}
    for name in names:
        found = search(root, os.fsencode(name), endings, states)
        counts.append(found.count(0))
        text += found
    paths = Paths(bytes(text))
    if len(paths) >= MIN_REMEMBERED and max(changed for _, changed in states.values()) < now - SETTLED:
        remember(cache, paths, counts, states)
    return paths, counts


def search(root: bytes, name: bytes, endings: tuple[bytes, ...], states: dict[bytes, tuple[int, int]]) -> bytearray:
    """The images below one folder of `root`, as Paths has them; adds the state of each folder that was searched."""
    real = os.path.realpath(os.path.join(root, name))
    # a link to a folder above leads in a circle
    seen = {real, *(os.fsencode(parent) for parent in Path(os.fsdecode(real)).parents)}
    links: list[bytes] = []
    text = bytearray()
    walk(root, name, real, endings, seen, links, states, text)
    if not links:
        return text
    while links:
        links.sort(key=lambda link: (link.count(b'/'), link))
        link = links.pop(0)
        real = os.path.realpath(os.path.join(root, link))
        if real not in seen:
            seen.add(real)
            walk(root, link, real, endings, seen, links, states, text)
    return bytearray(b''.join(path + b'\0' for path in sorted(text.split(b'\0')) if path))


def walk(
    root: bytes,
    top: bytes,
    real_top: bytes,
    endings: tuple[bytes, ...],
    seen: set[bytes],
    links: list[bytes],
    states: dict[bytes, tuple[int, int]],
    text: bytearray,
) -> None:
    """Adds the images below `top` to `text`, in the order of their paths, and links to folders to `links`."""

    def entries(path: bytes) -> Iterator[bytes]:
        prefix = path and path + b'/'
        return (prefix + entry for entry in read_folder(root, path, endings, links, states))

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


def read_folder(
    root: bytes, path: bytes, endings: tuple[bytes, ...], links: list[bytes], states: dict[bytes, tuple[int, int]]
) -> list[bytes]:
    """Names of images and, with a slash, of folders in one folder, in the order of the paths that they lead to."""
    names = []
    folder = os.path.join(root, path)
    try:
        states[path] = state(folder)  # before it is read, so that a change meanwhile shows
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


# --- the cache: an .npz file of plain arrays a folder ---------------------------------------------


def state(folder: bytes) -> tuple[int, int]:
    """What becomes another number when a file of the folder comes, goes or is renamed."""
    info = os.stat(folder)
    return info.st_ino & 2**63 - 1, info.st_mtime_ns


def cache_file(root: bytes, names: Sequence[str], endings: tuple[bytes, ...]) -> Path:
    """Where the listing of some folders of a folder is remembered."""
    key = [os.path.realpath(root), *map(os.fsencode, names), *endings]
    cache = os.environ.get('XDG_CACHE_HOME') or os.path.expanduser('~/.cache')
    return Path(cache, 'beit_mm', f'images_{hashlib.sha256(bytes(1).join(key)).hexdigest()[:32]}.npz')


def recall(cache: Path, root: bytes) -> tuple[Paths, list[int]] | None:
    """The remembered listing; None if there is none, if it cannot be read, or if a folder has changed since."""
    try:
        with np.load(cache, allow_pickle=False) as arrays:
            paths, folders = (Paths(arrays[name].tobytes()) for name in ('paths', 'folders'))
            counts, states = arrays['counts'].tolist(), arrays['states'].tolist()
        same = len(folders) == len(states) and sum(counts) == len(paths)
        for path, before in zip(folders, states, strict=same):
            if state(os.path.join(root, os.fsencode(path))) != tuple(before):
                return None
        return (paths, counts) if same else None
    except Exception:  # whatever is wrong with the file, the folder itself can be listed
        return None


def remember(cache: Path, paths: Paths, counts: list[int], states: dict[bytes, tuple[int, int]]) -> None:
    """Writes a listing, whole or not at all; without a place for it the next run lists again."""
    arrays = dict(
        paths=np.frombuffer(paths.text, np.uint8),
        folders=np.frombuffer(b''.join(path + b'\0' for path in states), np.uint8),
        counts=np.array(counts, np.int64),
        states=np.array(list(states.values()), np.int64),
    )
    try:
        with atomic_file(cache) as file:
            np.savez(file, **arrays)
    except OSError:
        pass


def few_of_each(folder: str | Path, classes: Sequence[str], per_class: int, seed: int) -> list[str]:
    """A few images of each class, for training with few labels.

    Args:
        folder: with one folder a class.
        classes: names of the folders, in the order in which the images are drawn.
        per_class: images of each class; a class that has fewer gives all.
        seed: of `random.Random`, one generator for all classes.

    Returns:
        Paths relative to the folder: of each class the first after the sorted ones were shuffled.
    """
    generator = random.Random(seed)
    chosen = []
    for name in classes:
        images = list(list_subfolders(str(folder), [name])[0])
        generator.shuffle(images)
        chosen += images[:per_class]
    return chosen

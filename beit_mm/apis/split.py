"""The images of a folder: which are learned from, which are held out, and of which classes."""

import os
import random
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from beit_mm.datasets.image_folder import EXTENSIONS, list_images, quoted
from beit_mm.files import atomic_file, folder_of_images
from beit_mm.terminal import UserError

HELD_OUT = 0.1  # of the images, where no folder `val` lies beside `train`
MIN_IMAGES = 100  # fewer say nothing about what images look like
DATE = re.compile(r'(19|20)\d\d[-_.]?(0[1-9]|1[0-2])([-_.]?[0-3]\d)?')  # such folders are no classes


class ImageList(NamedTuple):
    """Images below a folder: their paths relative to it, each with its first folder ('' without one)."""

    root: Path
    names: dict[str, str]


@dataclass
class Images:
    """Images to learn from and held-out ones, and the names of the classes (none: the folders name no classes)."""

    train: ImageList
    held_out: ImageList
    classes: list[str]
    num_validated: ClassVar[int] = 256  # held-out images of which losses are computed
    validation_cost: ClassVar[int] = 1  # of one, in images of a step

    def __str__(self) -> str:
        text = f'{len(self.train.names):,} images to learn from, {len(self.held_out.names):,} held out'
        return f'{text}, {len(self.classes)} classes' if self.classes else f'{text}, no class folders'

    def dataset(self, lists: Path, name: str) -> dict[str, Any]:
        """Arguments of a dataset of the images in the list `name` of `write_lists`."""
        root = self.train.root if name == 'train' else self.held_out.root
        return dict(data_root=str(root), data_prefix='', ann_file=str(lists / f'{name}.txt'))


def find_images(folder: str | Path) -> Images:
    """The images of a folder, some of them held out.

    Where the folder is called `train`, or holds folders `train` and `val`, `val` holds the held-out images; otherwise
    a tenth is held out, of each folder in proportion. The choice depends on the paths only.
    """
    root = folder_of_images(folder)
    folders = {path.name for path in root.iterdir() if path.is_dir()}
    if folders == {'train'} or {'train', 'val'} <= folders:
        root = root / 'train'
    val = root.parent / 'val'
    train = list_folder(root)
    if not train.names:
        raise FileNotFoundError(f'no images in {str(root)!r}; expected files ending in {" ".join(EXTENSIONS)}')
    held_out = list_folder(val) if root.name == 'train' and val.is_dir() else None
    if held_out is None or not held_out.names:
        train, held_out = hold_out(train)
    if len(train.names) < MIN_IMAGES:
        raise UserError(f'{len(train.names)} images in {str(root)!r}; at least {MIN_IMAGES} are needed to learn from')
    classes = sorted(set(train.names.values()))
    labelled = '' not in classes and len(classes) > 1 and set(held_out.names.values()) <= set(classes)
    labelled = labelled and not all(map(DATE.fullmatch, classes))
    return Images(train, held_out, classes if labelled else [])


def list_folder(folder: Path) -> ImageList:
    return ImageList(folder, {path: path.split('/')[0] if '/' in path else '' for path in list_images(str(folder))})


def hold_out(images: ImageList) -> tuple[ImageList, ImageList]:
    """Images to learn from, one of each folder if possible, and a tenth held out, of each folder in proportion."""
    folders: dict[str, list[str]] = {}
    for path, name in images.names.items():
        folders.setdefault(name, []).append(path)
    shuffled = [random.Random(os.fsencode(name)).sample(paths, len(paths)) for name, paths in folders.items()]
    free = [path for paths in shuffled for path in paths[1:]]
    if not free and len(images.names) > 1:
        free = [*images.names]
    held_out = {*evenly(free, max(1, round(HELD_OUT * len(images.names))))}
    learned = {path: name for path, name in images.names.items() if path not in held_out}
    others = {path: name for path, name in images.names.items() if path in held_out}
    return ImageList(images.root, learned), ImageList(images.root, others)


def evenly(items: Iterable[Any], number: int) -> list[Any]:
    """At most `number` of the items, evenly spread over them."""
    items = [*items]
    step = max(1.0, len(items) / number)
    return [items[int((index + 0.5) * step)] for index in range(min(number, len(items)))]


def write_lists(images: Images, folder: Path) -> None:
    """Writes train.txt, held_out.txt, validated.txt (some of the latter) and, with classes, classes.txt."""
    folder.mkdir(parents=True, exist_ok=True)
    labels = {name: f' {label}' for label, name in enumerate(images.classes)}
    validated = dict(evenly(images.held_out.names.items(), images.num_validated))
    for name, listed in dict(train=images.train.names, held_out=images.held_out.names, validated=validated).items():
        write_lines(folder / f'{name}.txt', [quoted(path) + labels.get(of, '') for path, of in listed.items()])
    if images.classes:
        write_lines(folder / 'classes.txt', map(quoted, images.classes))


def write_lines(path: Path, lines: Iterable[str]) -> None:
    with atomic_file(path) as file:
        file.write(('\n'.join(lines) + '\n').encode())

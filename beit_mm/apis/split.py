"""The images of a folder: which are learned from, which are held out, and of which classes."""

import os
import random
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from beit_mm.datasets.image_folder import quoted
from beit_mm.datasets.listing import EXTENSIONS, list_images
from beit_mm.terminal import UserError, folder_of_images

HELD_OUT = 0.1  # of the images, where no folder `val` lies beside `train`
MIN_IMAGES = 100  # fewer say nothing about what images look like
DATE = re.compile(r'(19|20)\d\d[-_.]?(0[1-9]|1[0-2])([-_.]?[0-3]\d)?')  # such folders are no classes
NUM_VALIDATED = 256  # held-out images of which the loss is computed


class Part(NamedTuple):
    """Images of a folder: paths relative to it, and the class of each, its first folder ('' without classes)."""

    root: Path
    paths: list[str]
    names: list[str]


@dataclass
class Images:
    """Images to learn from and held-out ones, and the names of the classes (none: the folders name no classes)."""

    train: Part
    held_out: Part
    classes: list[str]

    def __str__(self) -> str:
        text = f'{len(self.train.paths):,} images to learn from, {len(self.held_out.paths):,} held out'
        return f'{text}, {len(self.classes)} classes' if self.classes else f'{text}, no class folders'


def find_images(folder: str | Path) -> Images:
    """The images of a folder, some of them held out.

    Where the folder is called `train`, or holds folders `train` and `val`, `val` holds the held-out images; otherwise
    a tenth is held out, of each folder in proportion. The choice depends on the paths only.

    Raises:
        FileNotFoundError: no such folder, or no images in it.
        ValueError: too few images to learn from.
    """
    root = folder_of_images(folder)
    folders = {path.name for path in root.iterdir() if path.is_dir()}
    if folders == {'train'} or {'train', 'val'} <= folders:
        root = root / 'train'
    val = root.parent / 'val'
    train = list_part(root)
    if not train.paths:
        raise FileNotFoundError(f'no images in {str(root)!r}; expected files ending in {" ".join(EXTENSIONS)}')
    held_out = list_part(val) if root.name == 'train' and val.is_dir() else None
    if held_out is None or not held_out.paths:
        train, held_out = split(train)
    if len(train.paths) < MIN_IMAGES:
        raise UserError(f'{len(train.paths)} images in {str(root)!r}; at least {MIN_IMAGES} are needed to learn from')
    classes = sorted(set(train.names))
    labelled = '' not in classes and len(classes) > 1 and set(held_out.names) <= set(classes)
    labelled = labelled and not all(map(DATE.fullmatch, classes))
    return Images(train, held_out, classes if labelled else [])


def list_part(folder: Path) -> Part:
    """All images below a folder."""
    paths = list(list_images(str(folder)))
    return Part(folder, paths, [path.split('/')[0] if '/' in path else '' for path in paths])


def split(images: Part) -> tuple[Part, Part]:
    """A part to learn from and a held-out one: a tenth of the images, of each folder in proportion.

    One of each folder is learned from, unless all folders have but one.
    """
    by_class: dict[str, list[str]] = {}
    for path, name in zip(images.paths, images.names, strict=True):
        by_class.setdefault(name, []).append(path)
    shuffled = [random.Random(os.fsencode(name)).sample(paths, len(paths)) for name, paths in by_class.items()]
    free = [path for paths in shuffled for path in paths[1:]]
    if not free and len(images.paths) > 1:
        free = images.paths
    held_out = set(spread(Part(images.root, free, free), max(1, round(HELD_OUT * len(images.paths)))).paths)
    parts = []
    for wanted in (False, True):
        chosen = [pair for pair in zip(images.paths, images.names, strict=True) if (pair[0] in held_out) == wanted]
        parts.append(Part(images.root, [path for path, _ in chosen], [name for _, name in chosen]))
    return parts[0], parts[1]


def spread(part: Part, number: int) -> Part:
    """At most `number` images of a part, spread evenly over it."""
    step = max(1.0, len(part.paths) / number)
    chosen = [int((place + 0.5) * step) for place in range(min(number, len(part.paths)))]
    return Part(part.root, [part.paths[place] for place in chosen], [part.names[place] for place in chosen])


def write_lists(images: Images, folder: Path) -> None:
    """Writes train.txt, held_out.txt, validated.txt (some of the latter) and, with classes, classes.txt."""
    folder.mkdir(parents=True, exist_ok=True)
    parts = dict(train=images.train, held_out=images.held_out, validated=spread(images.held_out, NUM_VALIDATED))
    labels = {name: f' {label}' for label, name in enumerate(images.classes)}
    for name, part in parts.items():
        lines = [quoted(path) + labels.get(of_class, '') for path, of_class in zip(part.paths, part.names, strict=True)]
        write_lines(folder / f'{name}.txt', lines)
    if images.classes:
        write_lines(folder / 'classes.txt', map(quoted, images.classes))


def write_lines(path: Path, lines: Iterable[str]) -> None:
    """Lines of text; names among them are `quoted`."""
    path.write_text('\n'.join(lines) + '\n', encoding='utf-8')


def dataset_of(images: Images, lists: Path, name: str) -> dict[str, Any]:
    """Settings of the dataset of one of the lists."""
    root = images.train.root if name == 'train' else images.held_out.root
    return dict(data_root=str(root), data_prefix='', ann_file=str(lists / f'{name}.txt'))

"""Finds the images and classes of a folder, and which images to hold out."""

import os
import random
import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from beit_mm.checkpoint.names import preview
from beit_mm.datasets.image_folder import EXTENSIONS, list_images
from beit_mm.datasets.segmentation_folder import TRAINING, class_line
from beit_mm.errors import UserError, warn
from beit_mm.files import quoted, write_lines

HELD_OUT = 0.1  # share of the images, if no folder `val` lies beside `train`
MIN_IMAGES = 100  # needed to learn from
FEW, UNEQUAL = 10, 5  # images that a class should have; largest acceptable ratio of class sizes
DATE = re.compile(r'(19|20)\d\d[-_.]?(0[1-9]|1[0-2])([-_.]?[0-3]\d)?')  # such folders are not classes
VALIDATION, TESTING = ('validation', 'val', 'valid'), ('testing', 'test')


class ImageList(NamedTuple):
    """Images below a folder: their paths relative to it, each with its first folder ('' without one)."""

    root: Path
    names: dict[str, str]


@dataclass
class Images:
    """Images to learn from, held-out images, and the class names (empty if the folders are not classes)."""

    train: ImageList
    held_out: ImageList
    classes: list[str]
    notes: list[str] = field(default_factory=list, kw_only=True)  # what was found, for the user
    num_validated: ClassVar[int] = 256  # held-out images that losses are computed on
    validation_cost: ClassVar[int] = 1  # of a held-out image, relative to a training image

    def __str__(self) -> str:
        text = f'{len(self.train.names):,} images to learn from, {len(self.held_out.names):,} held out'
        return f'{text}, {len(self.classes)} classes' if self.classes else f'{text}, no class folders'

    @property
    def learned(self) -> Counter[str]:
        """How many images each class has to learn from."""
        return Counter(self.train.names.values())

    @property
    def unequal(self) -> bool:
        """Whether the largest class has many times the images of the smallest."""
        return max(self.learned.values()) > UNEQUAL * min(self.learned.values())

    def imbalance_advice(self, balance: bool) -> str:
        """Says which class has too few images, or far fewer than another, and what to do; else ''."""
        (largest, most), *_, (smallest, least) = self.learned.most_common()
        if least >= FEW and not self.unequal:
            return ''
        balancing = ', or show those more often with --balance' if self.unequal and not balance else ''
        return (
            f'{least} images of {quoted(smallest)} to learn from, {most:,} of {quoted(largest)}; add images of small '
            f'classes{balancing}'
        )

    def identity(self) -> list[Any]:
        """What a resumed run must find again."""
        return [sorted(self.train.names.items()), sorted(self.held_out.names.items()), self.classes]

    def class_lines(self) -> list[str]:
        """The lines of classes.txt."""
        return [*map(class_line, self.classes)]

    def write_maps(self, lists: Path) -> None:
        """Draws label maps that are no files yet, for `dataset`."""

    def dataset(self, lists: Path, name: str) -> dict[str, Any]:
        """Arguments of a dataset for the list `name` that `write_lists` wrote."""
        root = self.train.root if name == 'train' else self.held_out.root
        return dict(data_root=str(root), data_prefix='', ann_file=str(lists / f'{name}.txt'))


def find_images(folder: str | Path) -> Images:
    """Finds the images of a folder, and holds some of them out.

    The images in `val` are held out if the folder holds `train` and `val` (TRAINING, VALIDATION), or is a `train`
    beside a `val`; otherwise a tenth of each folder is. The choice depends on the paths only.
    """
    root = training_folder(folder)
    train, held_out = split_folder(root)
    if len(train.names) < MIN_IMAGES:
        also = f', and {len(held_out.names)} held out' if held_out.names else ''
        raise UserError(
            f'{len(train.names)} images to learn from in {str(root)!r}{also}; training needs at least {MIN_IMAGES}, in '
            f'files ending in {" ".join(EXTENSIONS)}'
        )
    classes = sorted(set(train.names.values()))
    # several, which are not all dates, and no image lies beside them
    are_classes = len(classes) > 1 and not all(map(DATE.fullmatch, classes)) and '' not in classes
    if not are_classes or not set(held_out.names.values()) <= set(classes):
        return Images(train, held_out, [])
    if empty := subfolders(root) - {*classes}:
        warn(f'{str(root)!r}: no images in {preview(sorted(empty))}; not counted as classes')
    return Images(train, held_out, classes)


def split_folder(root: Path) -> tuple[ImageList, ImageList]:
    """Images to learn from, and held-out images: in `val` beside a `train`, else a tenth of each folder."""
    train = list_folder(root)
    vals = [root.parent / name for name in VALIDATION if (root.parent / name).is_dir()]
    if root.name in TRAINING and vals:
        held_out = list_folder(vals[0])
        if held_out.names:
            return train, held_out
    return hold_out(train)


def training_folder(folder: str | Path) -> Path:
    """The `train` in a folder that also holds `val`, or only `test` or nothing else; otherwise the folder itself."""
    root = Path(folder).expanduser().resolve(strict=True)
    folders = subfolders(root)
    train = next((name for name in TRAINING if name in folders), '')
    return root / train if folders & {*VALIDATION} or folders <= {train, *TESTING} else root


def subfolders(root: Path) -> set[str]:
    return {path.name for path in root.iterdir() if path.is_dir() and not path.name.startswith('.')}


def list_folder(folder: Path) -> ImageList:
    return ImageList(folder, {path: path.split('/')[0] if '/' in path else '' for path in list_images(str(folder))})


def hold_out(images: ImageList) -> tuple[ImageList, ImageList]:
    """Holds out a tenth of each folder; if possible, each folder keeps at least one image to learn from."""
    folders: dict[str, list[str]] = defaultdict(list)
    for path, name in images.names.items():
        folders[name].append(path)
    shuffled = [random.Random(os.fsencode(name)).sample(paths, len(paths)) for name, paths in folders.items()]
    free = [path for paths in shuffled for path in paths[1:]] or [*images.names]
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
    labels = {name: f' {label}' for label, name in enumerate(images.classes)}
    validated = dict(evenly(images.held_out.names.items(), images.num_validated))
    for name, listed in dict(train=images.train.names, held_out=images.held_out.names, validated=validated).items():
        write_lines(folder / f'{name}.txt', [quoted(path) + labels.get(of, '') for path, of in listed.items()])
    if images.classes:
        write_lines(folder / 'classes.txt', images.class_lines())
    images.write_maps(folder)

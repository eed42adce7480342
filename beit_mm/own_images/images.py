"""Finds the images and classes of a folder, and which images to hold out."""

import os
import random
import re
import shlex
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from beit_mm.checkpoint.find import DEMO
from beit_mm.checkpoint.names import preview
from beit_mm.datasets.image_folder import list_images, read_lines, read_list, walk
from beit_mm.datasets.segmentation_folder import class_line
from beit_mm.errors import UserError, warn
from beit_mm.files import quoted, write_lines
from beit_mm.own_images.layouts import ClassFolders, existing_folder, find_class_folders

HELD_OUT = 0.1  # share of the images, if no folder `val` lies beside `train`
MIN_IMAGES = 100  # needed to learn from
MIN_FITTED, MIN_OF_CLASS = 10, 2  # needed to fit a head to frozen features, in all and of each class
FEW, UNEQUAL = 10, 5  # images that a class should have; largest acceptable ratio of class sizes
LIST = re.compile(r'train(val)?(_list|_test_split|1)?\.txt')  # names of lists that data sets come with
UNREAD = '.csv', '.tsv', '.txt', '.json', '.jsonl', '.geojson', '.xlsx', '.xml', '.mat', '.parquet', '.zip', '.tar'
JOINT = '|'  # between the labels of an image
MAX_NAMED = 8  # classes in the plan


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
    notes: list[str] = field(default_factory=list)  # what was found and assumed, for the user
    subject: ClassVar[str] = 'found'  # of the notes

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
        return [sorted(self.train.names.items()), sorted(self.held_out.names.items()), *self.rules()]

    def rules(self) -> list[Any]:
        """The part of it that concerns all images."""
        return [self.classes]

    def named_classes(self) -> str:
        """The first classes, for the plan, each with its number of images to learn from."""
        return preview((f'{quoted(name)} ({self.learned[name]:,})' for name in self.classes), MAX_NAMED)

    def class_lines(self) -> list[str]:
        """The lines of classes.txt."""
        return [*map(class_line, self.classes)]

    def listed_labels(self) -> dict[str, str]:
        """What follows an image's path in lists, by what the image has in `names`."""
        return {name: f' {label}' for label, name in enumerate(self.classes)}

    def lines(self, part: ImageList) -> list[str]:
        """The lines of a list: each path, and what its image is labelled with."""
        labels = self.listed_labels()
        return [quoted(path) + labels.get(of, '') for path, of in part.names.items()]

    def files_of(self, part: ImageList, path: str) -> list[Path]:
        """The files that an image of one of the parts needs."""
        return [part.root / path]

    def leave_out_lost(self) -> None:
        """Leaves out images whose files are gone."""
        for part in (self.train, self.held_out):
            for path in [path for path in part.names if not all(file.is_file() for file in self.files_of(part, path))]:
                del part.names[path]

    def write_maps(self, lists: Path) -> None:
        """Draws label maps that are not files yet, for `dataset`."""

    def dataset(self, lists: Path, name: str) -> dict[str, Any]:
        """Arguments of a dataset for the list `name` that `write_lists` wrote."""
        root = self.train.root if name == 'train' else self.held_out.root
        return dict(data_root=str(root), data_prefix='', ann_file=str(lists / f'{name}.txt'))


@dataclass
class TaggedImages(Images):
    """Images with any number of labels, which their `names` join by JOINT."""

    @property
    def learned(self) -> Counter[str]:
        return Counter(label for labels in self.train.names.values() for label in labels.split(JOINT) if label)

    def digits(self, labels: str) -> list[int]:
        """1 for each class that joined labels hold, else 0."""
        return [int(name in labels.split(JOINT)) for name in self.classes]

    def listed_labels(self) -> dict[str, str]:
        names = {*self.train.names.values(), *self.held_out.names.values()}
        return {labels: f' {"".join(map(str, self.digits(labels)))}' for labels in names}

    def dataset(self, lists: Path, name: str) -> dict[str, Any]:
        return dict(super().dataset(lists, name), type='beit_mm.MultiLabelFolder')


def find_images(
    folder: str | Path, classes: Sequence[str] | None = None, labelled: bool = True, fits_head: bool = False
) -> Images:
    """Finds the images of a folder, and holds some of them out.

    The images in a folder called like `val` are held out (see `find_class_folders`), otherwise a tenth of each folder
    is. The choice depends on the paths only.

    Args:
        folder: with class folders, or of images at any depth.
        classes: names of the folders that are classes; by default all.
        labelled: whether the classes are learned; if not, what only the user can tell about them is not asked.
        fits_head: whether only a head is to be fitted to frozen features, for which fewer images are enough.
    """
    found = find_class_folders(folder, classes)
    if found.question and labelled:
        raise UserError(found.question)
    root, (train, held_out) = found.train, split(found)
    found.notes += [] if found.held_out else unread_lists(existing_folder(folder))
    if len(train.names) < least_number(train, fits_head):
        learned, held, where = len(train.names), len(held_out.names), shlex.quote(str(root))
        if not any(train.names.values()):  # they do not lie in class folders
            raise UserError(
                f'{where} has {learned} images to learn from, {held} held out; training needs {MIN_IMAGES}'
                f'{not_understood(folder)}'
            )
        raise UserError(
            f'{where} has {learned} images to learn from, {held} held out; training needs {MIN_IMAGES}; `beit-mm '
            f'finetune {where} --freeze all --out RUN` needs {MIN_FITTED}, {MIN_OF_CLASS} of each class, and `beit-mm '
            f'classify {DEMO} new_images/ --labelled {where}` none'
        )
    names = sorted(set(train.names.values()))
    are_classes = len(names) > 1 and '' not in names  # several, and no image lies beside them
    if found.question or not are_classes or not set(held_out.names.values()) <= set(names):
        return Images(train, held_out, [], found.notes)
    deep = next((path for path in train.names if path.count('/') > 1), '')
    found.notes += [f'folders in class folders are not classes: {deep} counts as {train.names[deep]}'] if deep else []
    if empty := {path.name for path in root.glob('[!.@#$]*/')} - {*names} - found.left_out:
        warn(f'{str(root)!r}: no images in {preview(sorted(empty))}; not counted as classes')
    return Images(train, held_out, names, found.notes)


def not_understood(folder: str | Path) -> str:
    """Names the lists and archives in a folder in which nothing was understood; '' without them."""
    found = sorted(path.name for path in Path(folder).glob('*.*') if path.suffix.lower() in UNREAD)
    return f'; not understood: {preview(map(quoted, found))}' if found else ''


def least_number(train: ImageList, fits_head: bool) -> int:
    """How many images are needed to learn from."""
    has_enough_of_each = min(Counter(train.names.values()).values(), default=0) >= MIN_OF_CLASS
    return MIN_FITTED if fits_head and has_enough_of_each else MIN_IMAGES


def unread_lists(folder: Path) -> list[str]:
    """A note on a list of images to learn from, such as meta/train.txt."""
    lists = [Path(parent, name) for parent, names in walk(str(folder)) for name in names if LIST.fullmatch(name)]
    if not lists:
        return []
    return [f'{quoted(str(lists[0]))} is not read: a tenth is held out at random, unless val/ lies beside train/']


def split(folders: ClassFolders) -> tuple[ImageList, ImageList]:
    """Images to learn from, and held-out images: in a folder of their own, else a tenth of each folder."""
    train = list_folder(folders.train, folders.left_out)
    held_out = list_folder(folders.held_out, folders.left_out) if folders.held_out else None
    return (train, held_out) if held_out and held_out.names else hold_out(train)


def list_folder(folder: Path, left_out: Collection[str] = ()) -> ImageList:
    """The images of a folder, without some of the folders in it."""
    folder_of = {path: path.split('/')[0] if '/' in path else '' for path in list_images(str(folder))}
    return ImageList(folder, {path: name for path, name in folder_of.items() if name not in left_out})


def hold_out(images: ImageList) -> tuple[ImageList, ImageList]:
    """Holds out a tenth of each folder, or one image of each folder if there are few.

    If possible, each folder keeps at least one image to learn from.
    """
    shuffled = shuffled_folders(images)
    held_out = set()
    if len(images.names) < MIN_IMAGES and len(shuffled) > 1:  # a tenth would leave classes out
        held_out = {paths[-1] for paths in shuffled if len(paths) > MIN_OF_CLASS}
    if not held_out:
        free = [path for paths in shuffled for path in paths[1:]] or [*images.names]
        held_out = {*evenly(free, max(1, round(HELD_OUT * len(images.names))))}
    return divide(images, held_out)


def divide(images: ImageList, held_out: Collection[str]) -> tuple[ImageList, ImageList]:
    """Splits images into the ones to learn from and the ones to hold out."""
    learned = {path: name for path, name in images.names.items() if path not in held_out}
    others = {path: name for path, name in images.names.items() if path in held_out}
    return ImageList(images.root, learned), ImageList(images.root, others)


def in_turn(images: ImageList) -> ImageList:
    """The images in another order: one of each folder in turn, drawn at random."""
    turns = zip_longest(*shuffled_folders(images))
    return ImageList(images.root, {path: images.names[path] for turn in turns for path in turn if path is not None})


def shuffled_folders(images: ImageList) -> list[list[str]]:
    folders: dict[str, list[str]] = defaultdict(list)
    for path, name in images.names.items():
        folders[name].append(path)
    return [random.Random(os.fsencode(name)).sample(paths, len(paths)) for name, paths in folders.items()]


def evenly(items: Iterable[Any], number: int) -> list[Any]:
    """At most `number` of the items, evenly spread over them."""
    items = [*items]
    step = max(1.0, len(items) / number)
    return [items[int((index + 0.5) * step)] for index in range(min(number, len(items)))]


def write_lists(images: Images, folder: Path, num_validated: int = 256) -> None:
    """Writes train.txt, held_out.txt, validated.txt (at most so many of the latter) and, with classes, classes.txt."""
    validated = ImageList(images.held_out.root, dict(evenly(images.held_out.names.items(), num_validated)))
    for name, part in dict(train=images.train, held_out=images.held_out, validated=validated).items():
        write_lines(folder / f'{name}.txt', images.lines(part))
    if images.classes:
        write_lines(folder / 'classes.txt', images.class_lines())
    images.write_maps(folder)


def lost_since(images: Images, lists: Path) -> list[str] | None:
    """Images of an earlier call's lists that are gone, as are those held out; None if there are new or changed ones."""
    keep_split(images, lists)
    parts = dict(train=images.train, held_out=images.held_out)
    lost = [quoted(path) for name, part in parts.items() for path in read_names(lists, name) if path not in part.names]
    has_others = any({*images.lines(part)} - {*written_lines(lists, name)} for name, part in parts.items())
    return None if has_others else lost


def read_names(folder: Path, *names: str) -> list[str]:
    """The paths in lists that `write_lists` wrote."""
    files = [folder / f'{name}.txt' for name in names]
    return [path for file in files if file.is_file() for _, path, _ in read_list(str(file))]


def written_lines(folder: Path, *names: str) -> list[str]:
    """The lines of files that `write_lists` wrote."""
    files = [folder / f'{name}.txt' for name in names]
    return [line for file in files if file.is_file() for line in read_lines(str(file)) if line]


def merge_classes(classes: Sequence[str], numbers: Sequence[object], merge: str) -> tuple[list[str], list[int]]:
    """Joins classes as `merge` says, see `finetune`: the new names, and for each class the index of its new one."""
    new_names: dict[str, str] = {}
    for part in merge.split(';'):
        name, separator, members = part.partition('=')
        new_names |= dict.fromkeys(map(str.strip, members.split(',')), name.strip())
        if not separator or not name.strip():
            raise UserError(f'--merge is {merge!r}; expected NEW=OLD,OLD,... and ; between several, e.g. "road=1,2,7"')
    if unknown := new_names.keys() - {*classes} - {*map(str, numbers)}:
        known = preview(f'{quoted(name)} ({number})' for name, number in zip(classes, numbers, strict=True))
        raise UserError(f'--merge names {preview(sorted(unknown))}; expected classes or numbers among {known}')
    names = [
        new_names.get(str(number), new_names.get(name, name)) for name, number in zip(classes, numbers, strict=True)
    ]
    merged = [*dict.fromkeys(names)]
    if len(merged) < 2:
        raise UserError(f'--merge leaves {len(merged)} class; expected at least two')
    return merged, [merged.index(name) for name in names]


def keep_split(images: Images, lists: Path) -> None:
    """Holds out the images that another run's lists, if they exist, hold out, and none that it learned from."""
    learned, held_out = ({*read_names(lists, name)} for name in ('train', 'held_out'))
    names, root = images.train.names | images.held_out.names, images.train.root
    kept = (held_out & names.keys()) | (images.held_out.names.keys() - learned)
    if root == images.held_out.root and kept:
        images.train, images.held_out = divide(ImageList(root, names), kept)

"""Finds the images, label maps and classes of a folder, and which images to hold out."""

import os
import random
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np

from beit_mm.checkpoint.names import preview
from beit_mm.datasets import reading
from beit_mm.datasets.image_folder import BAND_EXTENSIONS, EXTENSIONS, list_images, read_lines
from beit_mm.datasets.reading import SIDEWAYS, UnreadableImageError, open_image, orientation, read_bands, unreadable
from beit_mm.datasets.segmentation_folder import (
    IGNORE_INDEX,
    IMAGES,
    MAPS,
    TRAINING,
    class_line,
    colour_numbers,
    count_colours,
    named_classes,
    read_labels,
)
from beit_mm.errors import UserError, warn
from beit_mm.files import atomic_file, quoted
from beit_mm.terminal import with_bar

HELD_OUT = 0.1  # share of the images, if no folder `val` lies beside `train`
MIN_IMAGES, MIN_PAIRS = 100, 10  # needed to learn from: images, images with label maps
FEW, UNEQUAL = 10, 5  # images that a class should have; largest acceptable ratio of class sizes
DATE = re.compile(r'(19|20)\d\d[-_.]?(0[1-9]|1[0-2])([-_.]?[0-3]\d)?')  # such folders are not classes
VALIDATION, TESTING = ('validation', 'val', 'valid'), ('testing', 'test')
BESIDE = ('_mask.png', '-mask.png', '_label.png')  # endings of maps that lie beside their images
READ = (*EXTENSIONS, '.npy')  # endings of images, some of them with many bands
MAX_MEASURED = 100  # images that statistics of bands are taken from
EXPECTED = 'expected images/a.jpg and annotations/a.png, or a.jpg and a_mask.png side by side'


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

    def few(self, balance: bool) -> str:
        """Says which class has too few images, or far fewer than another, and what to do; else ''."""
        (largest, most), *_, (smallest, least) = self.learned.most_common()
        if least >= FEW and not self.unequal:
            return ''
        advice = ', or show those more often with --balance' if self.unequal and not balance else ''
        sizes = f'{least} images of {quoted(smallest)} to learn from, {most:,} of {quoted(largest)}'
        return f'{sizes}; add images of small classes{advice}'

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
    train = list_folder(root)
    vals = [root.parent / name for name in VALIDATION if (root.parent / name).is_dir()]
    held_out = list_folder(vals[0]) if vals and root.name in TRAINING else None
    if held_out is None or not held_out.names:
        train, held_out = hold_out(train)
    if len(train.names) < MIN_IMAGES:
        needed = f'training needs at least {MIN_IMAGES}, in files ending in {" ".join(EXTENSIONS)}'
        held = f', and {len(held_out.names)} held out' if held_out.names else ''
        raise UserError(f'{len(train.names)} images to learn from in {str(root)!r}{held}; {needed}')
    classes = sorted(set(train.names.values()))
    named = len(classes) > 1 and '' not in classes and not all(map(DATE.fullmatch, classes))
    if not named or not set(held_out.names.values()) <= set(classes):
        return Images(train, held_out, [])
    if empty := subfolders(root) - {*classes}:
        warn(f'{str(root)!r}: no images in {preview(sorted(empty))}; not counted as classes')
    return Images(train, held_out, classes)


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


@dataclass
class LabelMaps(Images):
    """Images with label maps; the roots of their lists are folders of images."""

    maps: tuple[Path, Path]  # folders of label maps: to learn from, and held out
    suffix: str  # replaces the image's ending in the name of its map
    values: list[int]  # number of each class in the maps; other numbers are unlabelled
    notes: list[str]  # what was found, for the user
    colours: list[list[int]] | None  # of the classes, if the maps are read by colour
    bands: dict[str, Any] | None  # arguments of LoadBands, and `mean` and `std`; None: the images are RGB
    num_validated: ClassVar[int] = 32
    validation_cost: ClassVar[int] = 6  # several windows, and logits of whole images

    def __str__(self) -> str:
        return super().__str__().replace('images', 'images with label maps', 1)

    def dataset(self, lists: Path, name: str) -> dict[str, Any]:
        part, maps = (self.train, self.maps[0]) if name == 'train' else (self.held_out, self.maps[1])
        reduced = self.values == [*range(1, len(self.values) + 1)]
        usual = self.colours or reduced or self.values == [*range(len(self.values))]
        return dict(
            data_root='',
            data_prefix=dict(img_path=str(part.root), seg_map_path=str(maps)),
            ann_file=str(lists / f'{name}.txt'),
            seg_map_suffix=self.suffix,
            classes=str(lists / 'classes.txt'),
            reduce_zero_label=reduced,
            label_values=None if usual else self.values,
        )


def write_lists(images: Images, folder: Path) -> None:
    """Writes train.txt, held_out.txt, validated.txt (some of the latter) and, with classes, classes.txt."""
    labels = {name: f' {label}' for label, name in enumerate(images.classes)}
    validated = dict(evenly(images.held_out.names.items(), images.num_validated))
    for name, listed in dict(train=images.train.names, held_out=images.held_out.names, validated=validated).items():
        write_lines(folder / f'{name}.txt', [quoted(path) + labels.get(of, '') for path, of in listed.items()])
    lines = [*map(class_line, images.classes)]
    if isinstance(images, LabelMaps) and images.colours:
        lines = [f'{line} {" ".join(map(str, rgb))}' for line, rgb in zip(lines, images.colours, strict=True)]
    if lines:
        write_lines(folder / 'classes.txt', lines)


def write_lines(path: Path, lines: Iterable[str]) -> None:
    with atomic_file(path) as file:
        file.write(('\n'.join(lines) + '\n').encode())


def find_label_maps(
    folder: str | Path,
    reduce_zero_label: bool | None = None,
    whole: bool = False,
    bands: str | Sequence[int] | None = None,
    max_pixels: int = reading.MAX_PIXELS,
) -> LabelMaps | None:
    """Finds the images and label maps of a folder, and holds some out; None where there are no label maps.

    Args:
        folder: laid out as docs/label_maps.md describes.
        reduce_zero_label: whether 0 marks unlabelled pixels; None: as classes.txt shows.
        whole: use all images to learn from, which may be few, and hold none of them out.
        bands: bands of the images to read, counted from 0, or 'all'; None: all if reading as RGB would lose some.
        max_pixels: limit for an image or map, see LoadImage.

    Raises:
        UserError: images and maps do not fit together, or nothing shows what 0 means.
    """
    root = Path(folder).expanduser().resolve(strict=True)
    least = 1 if whole else MIN_PAIRS
    folders = find_folders(root, least)
    if not folders:
        return None
    suffix = find_suffix(*folders[0])
    bands = find_bands(folders[0][0], bands)
    names, colours = named_classes(str(root / 'classes.txt')) if (root / 'classes.txt').is_file() else (None, None)
    notes: list[str] = []
    pixels: Counter[int] = Counter()
    read = partial(read_pair, by_bands=bands is not None, by_colour=colours is not None, max_pixels=max_pixels)
    numbers = [find_pairs(*pair, suffix, read, pixels, notes) for pair in folders]
    parts = [ImageList(pair[0], dict.fromkeys(found, '')) for pair, found in zip(folders, numbers, strict=True)]
    if len(parts) == 1 or not parts[1].names:  # no validation
        folders, numbers = folders[:1] * 2, numbers[:1] * 2
        parts = parts[:1] * 2 if whole else [*hold_out(parts[0])]
    train, held_out = parts
    if len(train.names) < least:
        few = f'{len(train.names)} images with label maps to learn from, {len(held_out.names)} held out'
        raise UserError('; '.join([f'{few}, in {str(root)!r}; expected at least {least}', *notes]))
    numbered = table_numbers(root / 'classes.txt') if names else None
    if reduce_zero_label is not None and (colours or numbered):
        has = 'colours' if colours else 'numbers'
        raise UserError(f'classes.txt has {has}; leave out --reduce-zero-label and --keep-zero-label')
    if names and colours:
        classes, values, meaning = choose_colours(pixels, names, colours)
    elif names and numbered:
        classes, values, meaning = [*names], numbered, f'{len(names)} classes of classes.txt, with its numbers'
    else:
        classes, values, meaning = choose_labels(numbers, names, reduce_zero_label)
    if not 1 < len(values) < IGNORE_INDEX:
        raise UserError(f'{len(values)} classes in {str(root)!r} ({meaning}); expected 2 to {IGNORE_INDEX - 1}')
    learned: set[int] = set().union(*(numbers[0][path] for path in train.names))
    asked: set[int] = set().union(*(numbers[1][path] for path in held_out.names))
    for what, without in (('never seen', {*values} - learned - asked), ('only in held-out maps', asked - learned)):
        if lacking := [name for name, value in zip(classes, values, strict=True) if value in without]:
            meaning += f', {what}: {preview(lacking)}'
    for use, part, held in (('to learn from', train, learned), ('held out', held_out, asked)):
        if not held & {*values}:
            where = f'the {len(part.names):,} images {use} in {str(part.root)!r}'
            raise UserError(f'no map of {where} has a labelled pixel; label some ({meaning})')
    labelled_share = sum(pixels[value] for value in values) / pixels.total()
    notes.insert(0, f'{meaning}; {100 - 100 * labelled_share:.0f} % of the pixels are unlabelled')
    measured = None if bands is None else measure_bands([str(train.root / name) for name in train.names], bands)
    maps = folders[0][1], folders[1][1]
    return LabelMaps(train, held_out, classes, maps, suffix, values, notes, colours, measured)


def table_numbers(path: Path) -> list[int] | None:
    """The classes' numbers in a table with the columns Number and Name, as `segment` writes it; None if it has none."""
    header, *rows = [line.split('\t') for line in read_lines(str(path)) if line]
    if not {'Number', 'Name'} <= {*header}:
        return None
    return [int(row[header.index('Number')]) for row in rows]


def find_bands(folder: Path, bands: str | Sequence[int] | None) -> str | Sequence[int] | None:
    """The bands to read: the given ones, or all if the folder's first image needs that; None: read RGB."""
    path = str(folder / next(iter(list_images(str(folder), READ)), ''))
    if bands is None and path.lower().endswith(BAND_EXTENSIONS) and loses_as_rgb(path):
        return 'all'
    return bands


def loses_as_rgb(path: str) -> bool:
    """Whether reading an image as RGB would lose some of its bands or bits."""
    shown = 0
    with suppress(UnreadableImageError), unreadable(path, Exception), open_image(path) as image:
        shown = len(image.getbands())
    try:
        values = read_bands(path)
    except UnreadableImageError:  # a kind of TIFF that only Pillow reads
        return False
    except UserError:  # a Python without tifffile
        if not shown:
            raise
        return False
    return values.shape[2] > shown or values.dtype != np.uint8


def measure_bands(paths: Sequence[str], bands: str | Sequence[int]) -> dict[str, Any]:
    """Arguments of LoadBands and of the data preprocessor, from statistics of some of the files."""
    taken = None if bands == 'all' else [*bands]
    found = reading.band_statistics(evenly(paths, MAX_MEASURED), taken)
    load = dict(type='beit_mm.LoadBands', bands=taken, low=found['low'], high=found['high'])
    return dict(load=load, mean=found['mean'], std=found['std'])


def find_folders(root: Path, least: int) -> list[tuple[Path, Path]]:
    """Folders of images and of their maps: to learn from and, if any, held out; empty without maps.

    Fewer than `least` maps beside images do not count: they may be ordinary images.
    """

    def present(folder: Path, *groups: Sequence[str]) -> list[str]:
        """The first name of each group that is a folder."""
        found = ([name for name in names if (folder / name).is_dir()] for names in groups)
        return [names[0] for names in found if names]

    images, maps, splits = present(root, IMAGES), present(root, MAPS), present(root, TRAINING, VALIDATION)
    folders: list[tuple[Path, Path]] = []
    if images and (maps or not splits):  # else `images` may be the name of a class
        pair = root / images[0], root / (maps or MAPS)[0]
        folders = [(pair[0] / name, pair[1] / name) for name in present(pair[0], TRAINING, VALIDATION) or ['']]
    else:
        for name in splits:
            missing = [(root / name, root / name / MAPS[0])] if folders else []
            folders += find_folders(root / name, 1 if folders else least)[:1] or missing
    if not folders:
        names = list_images(str(root), READ)
        stems = {os.path.splitext(name)[0] for name in names}
        beside = [name for name in names for end in BESIDE if name.endswith(end) and name[: -len(end)] in stems]
        folders = [(root, root)] if len(beside) >= least else []
    return folders


def find_suffix(images: Path, maps: Path) -> str:
    """What replaces the image's ending in a map's name: '.png', '_mask.png', ..."""
    names = list_images(str(maps))
    if images == maps:
        suffixes = Counter(ending for name in names for ending in BESIDE if name.endswith(ending))
    else:
        stems = {os.path.splitext(name)[0] for name in list_images(str(images), READ)}
        cuts = [(name, [cut for cut in range(len(name)) if name[:cut] in stems]) for name in evenly(names, 100)]
        suffixes = Counter(name[found[-1] :] for name, found in cuts if found)
    if not suffixes:
        which = ', '.join(f'{next(iter(list_images(str(f), READ)), "none")!r} in {str(f)!r}' for f in (maps, images))
        raise UserError(f'no label map has the name of an image: {which}; {EXPECTED}')
    (suffix, number), *others = suffixes.most_common(2)
    if others and others[0][1] > number / 2:
        kinds = f'{str(maps)!r} end in {suffix} and in {others[0][0]}'
        raise UserError(f'label maps in {kinds}: two kinds for the same images; keep the one to learn from there')
    if suffix.lower().endswith(('.jpg', '.jpeg', '.webp')):
        raise UserError(f'maps in {str(maps)!r} end in {suffix}, whose compression changes numbers; save them as PNG')
    return suffix


def find_pairs(
    images: Path, maps: Path, suffix: str, read: Callable, pixels: Counter, notes: list[str]
) -> dict[str, set[int]]:
    """Paths of images that have a map of their size -> the numbers in it. `read` is a `read_pair`.

    Adds the number of pixels with each number to `pixels`, and what was left out to `notes`.
    """
    listed = [path for path in list_images(str(images), READ) if images != maps or not path.endswith(BESIDE)]
    existing = {*list_images(str(maps))}
    numbers: dict[str, set[int]] = {}
    left_out: dict[str, list[str]] = defaultdict(list)
    for path in with_bar(listed, len(listed)):
        name = os.path.splitext(path)[0] + suffix
        if name not in existing:
            left_out['without a map'].append(str(images / path))
            continue
        try:
            labels = read(str(images / path), str(maps / name))
        except UnreadableImageError as error:
            left_out['unreadable'].append(str(error))
            continue
        if labels is None:
            left_out['whose map has another size'].append(str(images / path))
            continue
        found, counts = np.unique(labels, return_counts=True)
        pixels.update(dict(zip(found.tolist(), counts.tolist(), strict=True)))
        numbers[path] = {*found.tolist()}
    for why, cases in left_out.items():
        notes.append(f'{len(cases):,} of {len(listed):,} images left out, {why}: {cases[0]}')
    expected = {os.path.splitext(path)[0] + suffix for path in listed}
    if unused := [name for name in existing - expected if name.endswith(suffix)]:
        notes.append(f'{len(unused):,} label maps left out, without an image: {maps / min(unused)}')
    return numbers


def choose_colours(
    pixels: Counter[int], names: Sequence[str], colours: Sequence[Sequence[int]]
) -> tuple[list[str], list[int], str]:
    """Like `choose_labels`, for label maps by colour; `pixels` counts the `colour_numbers`."""
    values = colour_numbers(colours).tolist()
    others = Counter({number: count for number, count in pixels.items() if number not in values})
    meaning = f'{len(names)} classes of classes.txt, by colour'
    if others:
        meaning += f'; colours that no class has: {count_colours(others)}'
    return [*names], values, meaning


def choose_labels(
    found: Sequence[Mapping[str, set[int]]], names: Sequence[str] | None, reduce_zero_label: bool | None
) -> tuple[list[str], list[int], str]:
    """The classes, the number of each in the label maps, and a phrase about them. `names` come from classes.txt.

    `found` gives, for each folder, the numbers in the map of each image.
    """
    maps = [pair for part in found for pair in part.items()]
    numbers = sorted(set().union(*(held for _, held in maps)) - {IGNORE_INDEX})
    if not numbers:
        return [], [], f'every pixel is {IGNORE_INDEX}, which marks ignored pixels'
    if not reduce_zero_label and len(names or ()) < 3:
        if numbers == [0] and any(IGNORE_INDEX in held for _, held in maps):
            numbers = [0, IGNORE_INDEX]  # a mask: otherwise 0 would be the only class
        if numbers in ([0, 1], [0, IGNORE_INDEX]):
            classes = [*(['background'] if len(names or ()) < 2 else []), *(names or ['foreground'])]
            return classes, numbers, f'masks of two classes: 0 is {classes[0]}, {numbers[1]} is {classes[1]}'
    ask = 'what is 0? Give --reduce-zero-label if it marks unlabelled pixels, --keep-zero-label if it is a class'
    if names is None:
        if reduce_zero_label is None and numbers[0] == 0 and len(numbers) > 1:
            held = f'0 and other values ({preview(map(str, numbers[1:]))})'
            raise UserError(f'the label maps hold {held}, and there is no classes.txt: {ask}')
        values = [number for number in numbers if number or not reduce_zero_label]
        return [*map(str, values)], values, f'{len(values)} classes, named by their numbers (no classes.txt)'
    top, number = numbers[-1], len(names)
    if top > number or (top == number and reduce_zero_label is False):
        image = next(path for path, held in maps if top in held)
        expected = f'expected 0 to {number - 1}, or 1 to {number}, and {IGNORE_INDEX} for ignored pixels'
        raise UserError(f'the label map of {image} holds {top}, but classes.txt names {number} classes; {expected}')
    shows_zero = top == number or (top == number - 1 and 0 in numbers)
    if reduce_zero_label is None and not shows_zero:
        raise UserError(f'the label maps hold {numbers[0]} to {top}, but classes.txt names {number} classes: {ask}')
    first = int(top == number if reduce_zero_label is None else reduce_zero_label)
    meaning = f'{number} classes of classes.txt, 0 is {"unlabelled" if first else repr(names[0])}'
    return [*names], [*range(first, first + number)], meaning


def read_pair(image: str, file: str, by_bands: bool, by_colour: bool, max_pixels: int) -> np.ndarray | None:
    """The numbers in a label map, see `read_labels`; None if its image, with bands or not, has another size."""
    labels = read_labels(file, by_colour, max_pixels)
    if by_bands:
        height, width = read_bands(image, max_pixels).shape[:2]
    else:  # the size in the image's header, turned upright
        with unreadable(image, Exception), open_image(image, max_pixels) as opened:
            width, height = opened.size[::-1] if orientation(opened) in SIDEWAYS else opened.size
    return labels if labels.shape == (height, width) else None

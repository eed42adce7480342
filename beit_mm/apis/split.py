"""The images of a folder and their label maps: what is learned from, what is held out, and the classes."""

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
from beit_mm.datasets.segmentation_folder import IGNORE_INDEX, colour_numbers, count_colours, named_classes, read_labels
from beit_mm.errors import UserError
from beit_mm.files import atomic_file, folder_of_images, quoted
from beit_mm.terminal import with_bar

HELD_OUT = 0.1  # of the images, where no folder `val` lies beside `train`
MIN_IMAGES, MIN_PAIRS = 100, 10  # to learn from: images, and images with label maps
FEW, UNEQUAL = 10, 5  # images of a class that are few, and times that the largest class is the smallest
DATE = re.compile(r'(19|20)\d\d[-_.]?(0[1-9]|1[0-2])([-_.]?[0-3]\d)?')  # such folders are not classes
IMAGES = ('images', 'imgs', 'JPEGImages')  # names of folders, in the order in which they are looked for
MAPS = ('annotations', 'masks', 'labels', 'SegmentationClass')
TRAINING, VALIDATION, TESTING = ('training', 'train'), ('validation', 'val', 'valid'), ('testing', 'test')
BESIDE = ('_mask.png', '-mask.png', '_label.png')  # ends of maps that lie beside their images
READ = (*EXTENSIONS, '.npy')  # endings of images, some of them with many bands
MAX_MEASURED = 100  # images that statistics of bands are taken from
EXPECTED = 'expected images/a.jpg and annotations/a.png, or a.jpg and a_mask.png side by side'


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

    @property
    def learned(self) -> Counter[str]:
        """Images to learn from of each class."""
        return Counter(self.train.names.values())

    @property
    def unequal(self) -> bool:
        """Whether the largest class has many times the images of the smallest."""
        return max(self.learned.values()) > UNEQUAL * min(self.learned.values())

    def few(self, balance: bool) -> str:
        """Which class has few images to learn from, or much fewer than another, and what to do; else ''."""
        (largest, most), *_, (smallest, least) = self.learned.most_common()
        if least >= FEW and not self.unequal:
            return ''
        advice = ', or show those more often by --balance' if self.unequal and not balance else ''
        sizes = f'{least} images of {quoted(smallest)} to learn from, {most:,} of {quoted(largest)}'
        return f'{sizes}; add images of small classes{advice}'

    def dataset(self, lists: Path, name: str) -> dict[str, Any]:
        """Arguments of a dataset of the images in the list `name` of `write_lists`."""
        root = self.train.root if name == 'train' else self.held_out.root
        return dict(data_root=str(root), data_prefix='', ann_file=str(lists / f'{name}.txt'))


def find_images(folder: str | Path) -> Images:
    """The images of a folder, some of them held out.

    Where the folder is called `train`, or holds folders `train` and `val` (TRAINING, VALIDATION), `val` holds the
    held-out images; otherwise a tenth is held out, of each folder in proportion. The choice depends on the paths only.
    """
    root = training_folder(folder)
    train = list_folder(root)
    vals = [root.parent / name for name in VALIDATION if (root.parent / name).is_dir()]
    held_out = list_folder(vals[0]) if vals and root.name in TRAINING else None
    if held_out is None or not held_out.names:
        train, held_out = hold_out(train)
    if len(train.names) < MIN_IMAGES:
        needed = f'at least {MIN_IMAGES} are needed to learn from, in files ending in {" ".join(EXTENSIONS)}'
        raise UserError(f'{len(train.names)} images in {str(root)!r}; {needed}')
    classes = sorted(set(train.names.values()))
    named = len(classes) > 1 and '' not in classes and not all(map(DATE.fullmatch, classes))
    known = set(held_out.names.values()) <= set(classes)
    return Images(train, held_out, classes if named and known else [])


def training_folder(folder: str | Path) -> Path:
    """The folder `train` in a folder that holds it and what is held out, or nothing else; otherwise the folder."""
    root = folder_of_images(folder)
    folders = {path.name for path in root.iterdir() if path.is_dir() and not path.name.startswith('.')}
    train = next((name for name in TRAINING if name in folders), '')
    return root / train if folders & {*VALIDATION} or folders <= {train, *TESTING} else root


def list_folder(folder: Path) -> ImageList:
    return ImageList(folder, {path: path.split('/')[0] if '/' in path else '' for path in list_images(str(folder))})


def hold_out(images: ImageList) -> tuple[ImageList, ImageList]:
    """Images to learn from, one of each folder if possible, and a tenth held out, of each folder in proportion."""
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

    maps: tuple[Path, Path]  # folders of the maps of images to learn from, and of held-out ones
    suffix: str  # what stands in a map's path below its folder for the ending of its image
    values: list[int]  # number of each class in the maps; all others are unlabelled
    notes: list[str]  # what was found, for the user
    colours: list[list[int]] | None  # by which the maps are read
    unseen: list[int]  # classes that no map holds
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
    lines = [*map(quoted, images.classes)]
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
    """The images and label maps of a folder, some of them held out; None where there are no label maps.

    Args:
        folder: laid out as docs/label_maps.md describes.
        reduce_zero_label: whether 0 marks unlabelled pixels; None: as classes.txt shows.
        whole: hold none out of the images to learn from, which may be few.
        bands: bands of the images to take, counted from 0, or 'all'; None: all where reading as RGB would lose some.
        max_pixels: of an image or map, see LoadImage.

    Raises:
        UserError: images and maps do not fit, or it cannot be known what 0 means.
    """
    root = folder_of_images(folder)
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
        few = f'{len(train.names)} images with label maps in {str(root)!r}; {least} or more are needed'
        raise UserError('; '.join([few, *notes]))
    numbered = table_numbers(root / 'classes.txt') if names else None
    if names and colours:
        classes, values, meaning = choose_colours(pixels, names, colours, reduce_zero_label)
    elif names and numbered:
        if reduce_zero_label is not None:
            raise UserError('classes.txt has numbers; leave --reduce- and --keep-zero-label out')
        classes, values, meaning = [*names], numbered, f'{len(names)} classes of classes.txt, by its numbers'
    else:
        classes, values, meaning = choose_labels(numbers, names, reduce_zero_label)
    if not 1 < len(values) < IGNORE_INDEX:
        raise UserError(f'{len(values)} classes in {str(root)!r} ({meaning}); expected 2 to {IGNORE_INDEX - 1}')
    unseen = [label for label, value in enumerate(values) if not pixels[value]]
    if unseen:
        meaning += f', never seen: {preview(classes[label] for label in unseen)}'
    for use, part, found in zip(('to learn from', 'held out'), parts, numbers, strict=True):
        if not any(found[path] & {*values} for path in part.names):
            where = f'the {len(part.names):,} images {use} in {str(part.root)!r}'
            raise UserError(f'no map of {where} has a pixel of a class, label some; {meaning}')
    labelled = sum(pixels[value] for value in values) / pixels.total()
    notes.insert(0, f'{meaning}; {100 - 100 * labelled:.0f} % of the pixels are unlabelled')
    measured = None if bands is None else measure_bands([str(train.root / name) for name in train.names], bands)
    maps = folders[0][1], folders[1][1]
    return LabelMaps(train, held_out, classes, maps, suffix, values, notes, colours, unseen, measured)


def table_numbers(path: Path) -> list[int] | None:
    """The numbers of classes in a table with the columns Number and Name, as `segment` writes it; None without."""
    header, *rows = [line.split('\t') for line in read_lines(str(path)) if line]
    if not {'Number', 'Name'} <= {*header}:
        return None
    numbers = [row[header.index('Number')] for row in rows]
    if not all(map(str.isdecimal, numbers)) or len({*numbers}) < len(numbers):
        raise UserError(f'{path}: expected a different number in each line, before the tab')
    return [*map(int, numbers)]


def find_bands(folder: Path, bands: str | Sequence[int] | None) -> str | Sequence[int] | None:
    """The bands to take of a folder's images, if not as given then as the first shows; None: read them as RGB."""
    path = str(folder / next(iter(list_images(str(folder), READ)), ''))
    if path.lower().endswith(BAND_EXTENSIONS):
        return 'all' if bands is None and has_hidden_bands(path) else bands
    if bands is not None:
        raise UserError(f'--bands: {path} does not end in {", ".join(BAND_EXTENSIONS)}; leave it out')
    return None


def has_hidden_bands(path: str) -> bool:
    """Whether reading an image as RGB would lose some of its bands."""
    shown = 0
    with suppress(UnreadableImageError), unreadable(path, Exception), open_image(path) as image:
        shown = len(image.getbands())
    try:
        return read_bands(path).shape[2] > shown
    except UnreadableImageError:  # a kind of TIFF that only Pillow reads
        return False
    except UserError:  # a Python without tifffile
        if not shown:
            raise
        return False


def measure_bands(paths: Sequence[str], bands: str | Sequence[int]) -> dict[str, Any]:
    """Arguments of LoadBands and of the data preprocessor, by statistics of some of the files."""
    taken = None if bands == 'all' else [*bands]
    found = reading.band_statistics(evenly(paths, MAX_MEASURED), taken)
    load = dict(type='beit_mm.LoadBands', bands=taken, low=found['low'], high=found['high'])
    return dict(load=load, mean=found['mean'], std=found['std'])


def find_folders(root: Path, least: int) -> list[tuple[Path, Path]]:
    """Folders of images and of their maps: to learn from and, if any, held out; empty without maps.

    Fewer maps beside their images than `least` may be images of masks.
    """

    def present(folder: Path, *groups: Sequence[str]) -> list[str]:
        """Of each group the first name that is a folder."""
        found = ([name for name in names if (folder / name).is_dir()] for names in groups)
        return [names[0] for names in found if names]

    images, maps, splits = present(root, IMAGES), present(root, MAPS), present(root, TRAINING, VALIDATION)
    folders: list[tuple[Path, Path]] = []
    if images and (maps or not splits):  # no class has that name
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
    for _, folder in folders:
        if not folder.is_dir():
            raise FileNotFoundError(f'no label maps: no folder {str(folder)!r}; {EXPECTED}')
    return folders


def find_suffix(images: Path, maps: Path) -> str:
    """What stands in a map's name for the ending of its image: '.png', '_mask.png', ..."""
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
    """Images with a map of their size, relative to their folder, and the numbers in it, by a `read_pair`.

    `pixels` gets how many pixels have each number, `notes` what was left out.
    """
    listed = [path for path in list_images(str(images), READ) if images != maps or not path.endswith(BESIDE)]
    existing = {*list_images(str(maps))}
    numbers: dict[str, set[int]] = {}
    left_out: dict[str, list[str]] = defaultdict(list)
    for path in with_bar(listed, len(listed)):
        name = os.path.splitext(path)[0] + suffix
        if name not in existing:
            left_out['without a map'].append(path)
            continue
        try:
            labels = read(str(images / path), str(maps / name))
        except UnreadableImageError:
            left_out['unreadable, or their maps'].append(path)
            continue
        if labels is None:
            left_out['whose map has another size'].append(path)
            continue
        found, counts = np.unique(labels, return_counts=True)
        pixels.update(dict(zip(found.tolist(), counts.tolist(), strict=True)))
        numbers[path] = {*found.tolist()}
    for why, paths in left_out.items():
        notes.append(f'{len(paths):,} of {len(listed):,} images left out, {why}: {images / paths[0]}')
    return numbers


def choose_colours(
    pixels: Counter[int], names: Sequence[str], colours: Sequence[Sequence[int]], reduce_zero_label: bool | None
) -> tuple[list[str], list[int], str]:
    """As `choose_labels`, of label maps by colour; `pixels` counts the `colour_numbers`."""
    if reduce_zero_label is not None:
        raise UserError('classes.txt has colours; leave --reduce- and --keep-zero-label, for numbers, out')
    values = colour_numbers(colours).tolist()
    others = Counter({number: count for number, count in pixels.items() if number not in values})
    if others == pixels:
        advice = 'correct it; if the maps hold numbers, write names without colours'
        raise UserError(f'no pixel has a colour of classes.txt, the maps hold {count_colours(others)}; {advice}')
    meaning = f'{len(names)} classes of classes.txt, by colour'
    if others:
        meaning += f'; colours that no class has: {count_colours(others)}'
    return [*names], values, meaning


def choose_labels(
    found: Sequence[Mapping[str, set[int]]], names: Sequence[str] | None, reduce_zero_label: bool | None
) -> tuple[list[str], list[int], str]:
    """The classes, the number of each in label maps, and a sentence on them, by the classes' names, if there are any.

    `found` has the numbers in the map of each image, of each folder.
    """
    maps = [pair for part in found for pair in part.items()]
    numbers = sorted(set().union(*(held for _, held in maps)) - {IGNORE_INDEX})
    if not numbers:
        return [], [], f'every pixel is {IGNORE_INDEX}, which marks ignored ones'
    if not reduce_zero_label and len(names or ()) < 3:
        if numbers == [0] and any(IGNORE_INDEX in held for _, held in maps):
            numbers = [0, IGNORE_INDEX]  # a mask: nothing else would be left to learn
        if numbers in ([0, 1], [0, IGNORE_INDEX]):
            classes = [*(['background'] if len(names or ()) < 2 else []), *(names or ['foreground'])]
            return classes, numbers, f'masks of two classes: 0 is {classes[0]}, {numbers[1]} is {classes[1]}'
    ask = 'what is 0? Say --reduce-zero-label if it marks unlabelled pixels, --keep-zero-label if it is a class'
    if names is None:
        if reduce_zero_label is None and numbers[0] == 0 and len(numbers) > 1:
            held = f'0 and other values ({preview(map(str, numbers[1:]))})'
            raise UserError(f'the label maps hold {held}, and there is no classes.txt: {ask}')
        values = [number for number in numbers if number or not reduce_zero_label]
        return [*map(str, values)], values, f'{len(values)} classes, called by their numbers without classes.txt'
    top, number = numbers[-1], len(names)
    if top > number or (top == number and reduce_zero_label is False):
        image = next(path for path, held in maps if top in held)
        expected = f'expected 0 to {number - 1}, or 1 to {number}, and {IGNORE_INDEX} for ignored pixels'
        raise UserError(f'the label map of {image} holds {top}, classes.txt names {number} classes; {expected}')
    if reduce_zero_label is None and not (top == number or (top == number - 1 and 0 in numbers)):
        raise UserError(f'the label maps hold {numbers[0]} to {top}, classes.txt names {number} classes: {ask}')
    first = int(top == number if reduce_zero_label is None else reduce_zero_label)
    meaning = f'{number} classes of classes.txt, 0 is {"unlabelled" if first else repr(names[0])}'
    return [*names], [*range(first, first + number)], meaning


def read_pair(image: str, file: str, by_bands: bool, by_colour: bool, max_pixels: int) -> np.ndarray | None:
    """The numbers in a label map, see `read_labels`; None where its image, with bands or not, has another size."""
    labels = read_labels(file, by_colour, max_pixels)
    if by_bands:
        height, width = read_bands(image, max_pixels).shape[:2]
    else:  # by its header, upright
        with unreadable(image, Exception), open_image(image, max_pixels) as opened:
            width, height = opened.size[::-1] if orientation(opened) in SIDEWAYS else opened.size
    return labels if labels.shape == (height, width) else None

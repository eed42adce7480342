"""Finds the images and label maps of a folder, and what the numbers or colours in the maps mean."""

import os
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np

from beit_mm.checkpoint.names import preview
from beit_mm.datasets import reading, segmentation_folder
from beit_mm.datasets.image_folder import BAND_EXTENSIONS, list_images, read_lines
from beit_mm.datasets.reading import SIDEWAYS, UnreadableImageError, open_image, orientation, read_bands, unreadable
from beit_mm.datasets.segmentation_folder import IGNORE_INDEX, label_map_name
from beit_mm.errors import UserError
from beit_mm.files import quoted
from beit_mm.own_images.images import MAX_NAMED, ImageList, Images, evenly, hold_out
from beit_mm.own_images.layouts import BESIDE, EXPECTED, LOSSY, READ, Suffixes, count_suffixes, find_map_folders, some
from beit_mm.terminal import with_bar, without_output

MIN_PAIRS = 10  # images with label maps that are needed to learn from
TRAIN_IDS, IDS = '_labelTrainIds.png', '_labelIds.png'  # of Cityscapes; where both are there, the first is learned from
CITYSCAPES_IDS = (7, 8, 11, 12, 13, 17, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 31, 32, 33)  # in _labelIds.png
MAX_MEASURED = 100  # images that statistics of bands are taken from
ASK_ZERO = 'what is 0? Give --reduce-zero-label if it marks unlabelled pixels, --keep-zero-label if it is a class'


@dataclass(kw_only=True)
class LabelMaps(Images):
    """Images with label maps; the roots of their lists are folders of images."""

    maps: tuple[Path, Path]  # folders of label maps: to learn from, and held out
    suffixes: Suffixes  # the end of an image's name, and what replaces it in the name of its map
    values: list[int]  # number of each class in the maps; other numbers are unlabelled
    colours: list[list[int]] | None  # of the classes, if the maps are read by colour
    bands: dict[str, Any] | None  # arguments of LoadBands, and `mean` and `std`; None: the images are RGB
    subject = 'labels'
    num_validated: ClassVar[int] = 32
    validation_cost: ClassVar[int] = 6  # several windows, and logits of whole images

    def __str__(self) -> str:
        return super().__str__().replace('images', 'images with label maps', 1)

    def identity(self) -> list[Any]:
        return [*super().identity(), self.values, *self.suffixes, *([self.colours] if self.colours else [])]

    def named_classes(self) -> str:
        marks = self.colours or [[value] for value in self.values]
        pairs = zip(self.classes, marks, strict=True)
        return preview((f'{quoted(name)} ({" ".join(map(str, mark))})' for name, mark in pairs), MAX_NAMED)

    def class_lines(self) -> list[str]:
        lines = super().class_lines()
        if self.colours is None:
            return lines
        return [f'{line} {" ".join(map(str, rgb))}' for line, rgb in zip(lines, self.colours, strict=True)]

    def dataset(self, lists: Path, name: str) -> dict[str, Any]:
        part, maps = (self.train, self.maps[0]) if name == 'train' else (self.held_out, self.maps[1])
        reduced = not self.colours and self.values == [*range(1, len(self.values) + 1)]
        usual = self.colours or reduced or self.values == [*range(len(self.values))]
        return dict(
            data_root='',
            data_prefix=dict(img_path=str(part.root), seg_map_path=str(maps)),
            ann_file=str(lists / f'{name}.txt'),
            img_suffix=self.suffixes.images,
            seg_map_suffix=self.suffixes.maps,
            classes=str(lists / 'classes.txt'),
            reduce_zero_label=reduced,
            label_values=None if usual else self.values,
        )


class Legend(NamedTuple):
    """What classes.txt says: names, and the colours or the numbers of the classes, if it gives them."""

    names: list[str] | None = None
    colours: list[list[int]] | None = None
    numbers: list[int] | None = None


class Meaning(NamedTuple):
    """What the numbers in label maps stand for."""

    classes: list[str]
    values: list[int]  # the number of each class; other numbers are unlabelled
    text: str  # the same for the user


@dataclass
class Maps:
    """The images of a folder that have a label map of their size, and what these maps hold."""

    images: Path
    folder: Path  # of the maps
    numbers: dict[str, set[int]]  # path of each image, relative to `images` -> the numbers in its map
    pixels: Counter[int]  # how many pixels have each number
    notes: list[str]  # what was left out

    def some(self, images: ImageList) -> 'Maps':
        """The same with these images only."""
        return replace(self, numbers={path: self.numbers[path] for path in images.names})

    @property
    def all_numbers(self) -> set[int]:
        """The numbers that occur."""
        return set().union(*self.numbers.values())

    def listed(self) -> ImageList:
        return ImageList(self.images, dict.fromkeys(self.numbers, ''))


def find_label_maps(
    folder: str | Path,
    reduce_zero_label: bool | None = None,
    whole: bool = False,
    bands: str | Sequence[int] | None = None,
    max_pixels: int = reading.MAX_PIXELS,
    maps: str | None = None,
) -> LabelMaps | None:
    """Finds the images and label maps of a folder, and holds some out; None where there are no label maps.

    Args:
        folder: laid out as docs/label_maps.md describes.
        reduce_zero_label: whether 0 marks unlabelled pixels; None: as classes.txt shows.
        whole: use all images to learn from, which may be few, and hold none of them out.
        bands: bands of the images to read, counted from 0, or 'all'; None: all if reading as RGB would lose some.
        max_pixels: limit for an image or map, see LoadImage.
        maps: the folder of label maps, relative to `folder`; None: it is looked for.

    Raises:
        UserError: images and maps do not fit together, or nothing shows what 0 means.
    """
    least = 1 if whole else MIN_PAIRS
    layout = find_map_folders(folder, least, maps)
    if not layout:
        return None
    root, folders = layout.root, layout.pairs
    suffixes, suffix_notes = choose_suffixes(*folders[0])
    bands = find_bands(folders[0][0], bands)
    legend = read_legend(root / 'classes.txt')
    read = partial(read_pair, by_bands=bands is not None, by_colour=legend.colours is not None, max_pixels=max_pixels)
    found = [read_maps(*pair, suffixes, read) for pair in folders]
    notes = layout.notes + suffix_notes + [note for part in found for note in part.notes]
    train, held_out = (None if whole else listed_splits(root, found[0])) or share_out(found, whole)
    if len(train.numbers) < least:
        raise UserError(
            f'{len(train.numbers)} images with label maps to learn from, {len(held_out.numbers)} held out, in '
            f'{str(root)!r}; expected at least {least}{"".join(f"; {note}" for note in notes)}'
        )
    pixels: Counter[int] = sum((part.pixels for part in found), Counter())
    known = None if legend.names or reduce_zero_label is not None else meaning_of_dataset(found, suffixes.maps)
    meaning = known or meaning_of(legend, found, pixels, reduce_zero_label)
    if not 1 < len(meaning.values) < IGNORE_INDEX:
        raise UserError(
            f'{len(meaning.values)} classes in {str(root)!r} ({meaning.text}); expected 2 to {IGNORE_INDEX - 1}'
        )
    check_labelled(train, held_out, meaning)
    labelled_share = sum(pixels[value] for value in meaning.values) / pixels.total()
    unlabelled = f'{100 - 100 * labelled_share:.0f} % of the pixels are unlabelled'
    notes.insert(0, f'{meaning.text}{unlearned(train, held_out, meaning)}; {unlabelled}')
    return LabelMaps(
        train.listed(),
        held_out.listed(),
        meaning.classes,
        maps=(train.folder, held_out.folder),
        suffixes=suffixes,
        values=meaning.values,
        notes=notes,
        colours=legend.colours,
        bands=None if bands is None else measure_bands([str(train.images / name) for name in train.numbers], bands),
    )


def listed_splits(root: Path, maps: Maps) -> tuple[Maps, Maps] | None:
    """The maps to learn from and those held out that PASCAL VOC's lists name; None without these lists."""
    files = [root / 'ImageSets/Segmentation' / f'{name}.txt' for name in ('train', 'val')]
    if not all(file.is_file() for file in files):
        return None
    parts = []
    for file in files:
        stems = {*read_lines(str(file))}
        parts.append(ImageList(maps.images, {name: '' for name in maps.numbers if os.path.splitext(name)[0] in stems}))
    return maps.some(parts[0]), maps.some(parts[1])


def share_out(found: Sequence[Maps], whole: bool) -> tuple[Maps, Maps]:
    """The maps to learn from and the maps held out: a folder for each, else a tenth of the only folder.

    With `whole`, the only folder is for both.
    """
    first, *others = found
    if others and others[0].numbers:
        return first, others[0]
    if whole:
        return first, first
    train, held_out = hold_out(first.listed())
    return first.some(train), first.some(held_out)


def check_labelled(train: Maps, held_out: Maps, meaning: Meaning) -> None:
    """Refuses a part without any labelled pixel."""
    for use, part in (('to learn from', train), ('held out', held_out)):
        if not part.all_numbers & {*meaning.values}:
            raise UserError(
                f'no map of the {len(part.numbers):,} images {use} in {str(part.images)!r} has a labelled pixel; label '
                f'some ({meaning.text})'
            )


def unlearned(train: Maps, held_out: Maps, meaning: Meaning) -> str:
    """Names the classes that no map to learn from holds; '' if there are none."""
    text, values = '', {*meaning.values}
    learned, asked = train.all_numbers, held_out.all_numbers
    nowhere, not_learned = values - learned - asked, asked - learned
    for what, missing in (('never seen', nowhere), ('only in held-out maps', not_learned)):
        names = [name for name, value in zip(meaning.classes, meaning.values, strict=True) if value in missing]
        if names:
            text += f', {what}: {preview(names)}'
    return text


# classes.txt and what numbers mean


def read_legend(path: Path) -> Legend:
    """Reads a classes.txt, which need not be there: names, also with colours, or the table that `segment` writes."""
    if not path.is_file():
        return Legend()
    names, colours = segmentation_folder.named_classes(str(path))
    header, *rows = [line.split('\t') for line in read_lines(str(path)) if line]
    if not {'Number', 'Name'} <= {*header}:
        return Legend([*names], colours)
    try:
        return Legend([*names], colours, [int(row[header.index('Number')]) for row in rows])
    except (IndexError, ValueError) as error:
        raise UserError(f'{path}: expected a whole number in column Number of each line ({error})') from None


def meaning_of(legend: Legend, found: Sequence[Maps], pixels: Counter[int], reduce_zero_label: bool | None) -> Meaning:
    """The classes of all maps, by the colours or numbers of classes.txt, or by the order of its names."""
    if reduce_zero_label is not None and (legend.colours or legend.numbers):
        has = 'colours' if legend.colours else 'numbers'
        raise UserError(f'classes.txt has {has}; leave out --reduce-zero-label and --keep-zero-label')
    if legend.names and legend.colours:
        return meaning_of_colours(pixels, legend.names, legend.colours)
    if legend.names and legend.numbers:
        text = f'{len(legend.names)} classes of classes.txt, with its numbers'
        return Meaning(legend.names, legend.numbers, text)
    return meaning_of_numbers(found, legend.names, reduce_zero_label)


def meaning_of_dataset(found: Sequence[Maps], suffix: str) -> Meaning | None:
    """The classes of PASCAL VOC and Cityscapes, by the names of their folders and files."""
    if '_gtFine_' not in suffix and found[0].folder.name != 'SegmentationClass':
        return None
    name = 'CityscapesDataset' if '_gtFine_' in suffix else 'PascalVOCDataset'
    with without_output():  # mmseg's import prints
        classes = [*segmentation_folder.named_classes(f'mmseg.{name}')[0]]
    values = [*CITYSCAPES_IDS] if suffix.endswith(IDS) else [*range(len(classes))]
    occurring = set().union(*(maps.all_numbers for maps in found))
    if suffix.endswith(IDS) or occurring <= {*values, IGNORE_INDEX}:
        return Meaning(classes, values, f"{len(classes)} classes of mmseg's {name}")
    return None


def meaning_of_colours(pixels: Counter[int], names: list[str], colours: Sequence[Sequence[int]]) -> Meaning:
    """The classes of label maps by colour; `pixels` counts the `colour_numbers`."""
    values = segmentation_folder.colour_numbers(colours).tolist()
    others = Counter({number: count for number, count in pixels.items() if number not in values})
    text = f'{len(names)} classes of classes.txt, by colour'
    if others:
        text += f'; colours that no class has: {segmentation_folder.count_colours(others)}'
    return Meaning(names, values, text)


def meaning_of_numbers(found: Sequence[Maps], names: list[str] | None, reduce_zero_label: bool | None) -> Meaning:
    """The classes of label maps with numbers. `names` come from classes.txt."""
    occurring = set().union(*(maps.all_numbers for maps in found))
    numbers = sorted(occurring - {IGNORE_INDEX})
    if not numbers:
        return Meaning([], [], f'every pixel is {IGNORE_INDEX}, which marks ignored pixels')
    are_masks = numbers == [0, 1] or (numbers == [0] and IGNORE_INDEX in occurring)
    if are_masks and not reduce_zero_label and len(names or ()) < 3:
        return meaning_of_masks([0, 1 if 1 in occurring else IGNORE_INDEX], names or [])
    if names is not None:
        check_highest(found, numbers[-1], len(names), reduce_zero_label)
    first = int(zero_is_unlabelled(numbers, names, reduce_zero_label))
    if names is None:
        values = [number for number in numbers if number >= first]
        return Meaning([*map(str, values)], values, f'{len(values)} classes, named by their numbers (no classes.txt)')
    text = f'{len(names)} classes of classes.txt, 0 is {"unlabelled" if first else repr(names[0])}'
    return Meaning(names, [*range(first, first + len(names))], text)


def meaning_of_masks(values: list[int], names: Sequence[str]) -> Meaning:
    """The two classes of masks with 0 and another value; classes.txt may name both, or the second."""
    background = [] if len(names) == 2 else ['background']
    classes = [*background, *(names or ['foreground'])]
    return Meaning(classes, values, f'masks of two classes: 0 is {classes[0]}, {values[1]} is {classes[1]}')


def check_highest(found: Sequence[Maps], highest: int, num_names: int, reduce_zero_label: bool | None) -> None:
    """Refuses a number that is too high for the names of classes.txt."""
    if highest < num_names or (highest == num_names and reduce_zero_label is not False):
        return
    image = next(path for maps in found for path, held in maps.numbers.items() if highest in held)
    raise UserError(
        f'the label map of {image} contains {highest}, but classes.txt names {num_names} classes; expected 0 to '
        f'{num_names - 1}, or 1 to {num_names}, and {IGNORE_INDEX} for ignored pixels'
    )


def zero_is_unlabelled(numbers: list[int], names: Sequence[str] | None, given: bool | None) -> bool:
    """Whether 0 marks unlabelled pixels. Unless the user says so (`given`), the sorted numbers in the maps decide:

    | classes.txt | highest number | 0 occurs | 0 marks           |
    | ---         | ---            | ---      | ---               |
    | K names     | K              | or not   | unlabelled pixels |
    | K names     | K - 1          | yes      | the first class   |
    | none        | any            | no       | nothing           |
    | other cases |                |          | refused           |
    """
    highest = numbers[-1]
    if given is not None:
        return given
    if names is None and (0 not in numbers or numbers == [0]):
        return False
    if names is None:
        raise UserError(
            f'label maps contain 0 and other values ({preview(map(str, numbers[1:]))}), and there is no classes.txt: '
            f'{ASK_ZERO}'
        )
    if highest == len(names):
        return True
    if highest == len(names) - 1 and 0 in numbers:
        return False
    raise UserError(
        f'label maps contain {numbers[0]} to {highest}, but classes.txt names {len(names)} classes: {ASK_ZERO}'
    )


# Folders, files and bands


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


def choose_suffixes(images: Path, maps: Path) -> tuple[Suffixes, list[str]]:
    """What replaces what in an image's name to give the map's: '.png', '_mask.png', ..., and a note on others."""
    names = some(list_images(str(maps)))
    if images == maps:
        counts = Counter(Suffixes(None, ending) for name in names for ending in BESIDE if name.endswith(ending))
    else:
        counts = count_suffixes(images, names)
    if not counts:
        map_name, image_name = (next(iter(list_images(str(folder), READ)), 'none') for folder in (maps, images))
        raise UserError(
            f'no label map has the name of an image: {map_name!r} in {str(maps)!r}, {image_name!r} in {str(images)!r}; '
            f'{EXPECTED}'
        )
    for known in (TRAIN_IDS, IDS):
        for suffixes in counts:
            if suffixes.maps.endswith(known):
                return suffixes, [f'of the label maps those that end in {known} are used'] if len(counts) > 1 else []
    (suffixes, number), *others = counts.most_common(2)
    suffix = suffixes.maps
    if others and others[0][1] > number / 2:
        raise UserError(
            f'label maps in {str(maps)!r} end in {suffix} and in {others[0][0].maps}: two kinds for the same images; '
            'keep the one to learn from there'
        )
    if suffix.lower().endswith(LOSSY):
        raise UserError(f'maps in {str(maps)!r} end in {suffix}, whose compression changes numbers; save them as PNG')
    return suffixes, []


def read_maps(images: Path, folder: Path, suffixes: Suffixes, read: Callable) -> Maps:
    """Reads the label maps of a folder; `read` is a `read_pair`."""
    listed = [*list_images(str(images), READ)]
    if images == folder:
        listed = [path for path in listed if not path.endswith(BESIDE)]
    elif images in folder.parents:
        listed = [path for path in listed if not (images / path).is_relative_to(folder)]
    maps = {path: label_map_name(path, *suffixes) for path in listed}
    existing = {*list_images(str(folder))}
    found = Maps(images, folder, {}, Counter(), [])
    left_out: dict[str, list[str]] = defaultdict(list)
    for path, name in with_bar(maps.items(), len(maps)):
        if name not in existing:
            left_out['without a map'].append(str(images / path))
            continue
        try:
            labels = read(str(images / path), str(folder / name))
        except UnreadableImageError as error:
            left_out['unreadable'].append(str(error))
            continue
        if labels is None:
            left_out['whose map has another size'].append(str(images / path))
            continue
        numbers, counts = np.unique(labels, return_counts=True)
        found.pixels.update(dict(zip(numbers.tolist(), counts.tolist(), strict=True)))
        found.numbers[path] = {*numbers.tolist()}
    for why, cases in left_out.items():
        found.notes.append(f'{len(cases):,} of {len(listed):,} images left out, {why}: {cases[0]}')
    unused = [name for name in existing - {*maps.values()} if name.endswith(suffixes.maps)]
    if unused:
        found.notes.append(f'{len(unused):,} label maps left out, without an image: {folder / min(unused)}')
    return found


def read_pair(image: str, file: str, by_bands: bool, by_colour: bool, max_pixels: int) -> np.ndarray | None:
    """The numbers in a label map, see `read_labels`; None if its image, with bands or not, has another size."""
    labels = segmentation_folder.read_labels(file, by_colour, max_pixels)
    if by_bands:
        height, width = read_bands(image, max_pixels).shape[:2]
    else:  # the size in the image's header, turned upright
        with unreadable(image, Exception), open_image(image, max_pixels) as opened:
            width, height = opened.size[::-1] if orientation(opened) in SIDEWAYS else opened.size
    return labels if labels.shape == (height, width) else None

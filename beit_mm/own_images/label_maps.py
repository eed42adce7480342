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
from PIL import Image

from beit_mm.checkpoint.names import preview
from beit_mm.datasets import reading, segmentation_folder
from beit_mm.datasets.image_folder import BAND_EXTENSIONS, EXTENSIONS, list_images, read_lines
from beit_mm.datasets.reading import SIDEWAYS, UnreadableImageError, open_image, orientation, read_bands, unreadable
from beit_mm.datasets.segmentation_folder import IGNORE_INDEX, IMAGES, MAPS, TRAINING
from beit_mm.errors import UserError
from beit_mm.files import atomic_file
from beit_mm.own_images.annotations import Annotations, find_annotations
from beit_mm.own_images.images import VALIDATION, ImageList, Images, evenly, hold_out
from beit_mm.terminal import with_bar

DRAWN = 'label_maps'  # folder of maps that were drawn from annotations, beside a run's lists
MIN_PAIRS = 10  # images with label maps that are needed to learn from
BESIDE = ('_mask.png', '-mask.png', '_label.png')  # endings of maps that lie beside their images
READ = (*EXTENSIONS, '.npy')  # endings of images, some of them with many bands
MAX_MEASURED = 100  # images that statistics of bands are taken from
ASK_ZERO = 'what is 0? Give --reduce-zero-label if it marks unlabelled pixels, --keep-zero-label if it is a class'
EXPECTED = 'expected images/a.jpg and annotations/a.png, or a.jpg and a_mask.png side by side'


@dataclass
class LabelMaps(Images):
    """Images with label maps; the roots of their lists are folders of images."""

    maps: tuple[Path, Path]  # folders of label maps: to learn from, and held out
    suffix: str  # replaces the image's ending in the name of its map
    values: list[int]  # number of each class in the maps; other numbers are unlabelled
    notes: list[str]  # what was found, for the user
    colours: list[list[int]] | None  # of the classes, if the maps are read by colour
    bands: dict[str, Any] | None  # arguments of LoadBands, and `mean` and `std`; None: the images are RGB
    draw: Callable[[str, str], np.ndarray | None] | None = (
        None  # the map of an image from annotations, where no file has it
    )
    num_validated: ClassVar[int] = 32
    validation_cost: ClassVar[int] = 6  # several windows, and logits of whole images

    def __str__(self) -> str:
        return super().__str__().replace('images', 'images with label maps', 1)

    def identity(self) -> list[Any]:
        return [*super().identity(), self.values, self.suffix, *([self.colours] if self.colours else [])]

    def class_lines(self) -> list[str]:
        lines = super().class_lines()
        if self.colours is None:
            return lines
        return [f'{line} {" ".join(map(str, rgb))}' for line, rgb in zip(lines, self.colours, strict=True)]

    def dataset(self, lists: Path, name: str) -> dict[str, Any]:
        part, maps = (self.train, self.maps[0]) if name == 'train' else (self.held_out, self.maps[1])
        maps = lists / DRAWN if self.draw else maps
        reduced = not self.colours and self.values == [*range(1, len(self.values) + 1)]
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

    def write_maps(self, lists: Path) -> None:
        for part in (self.train, self.held_out) if self.draw else ():
            for path in part.names:
                file = lists / DRAWN / f'{os.path.splitext(path)[0]}{self.suffix}'
                if not file.is_file():
                    with atomic_file(file) as opened:
                        Image.fromarray(self.draw(str(part.root / path), '')).save(opened, 'PNG')


class Legend(NamedTuple):
    """What classes.txt says: names, and the colours or the numbers of the classes, if it gives them."""

    names: list[str] | None = None
    colours: list[list[int]] | None = None
    numbers: list[int] | None = None
    source: str = 'classes.txt'


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
    annotations = find_annotations(root)
    folders = [(root, root)] if annotations else find_folders(root, least)
    if not folders:
        return None
    suffix = '.png' if annotations else find_suffix(*folders[0])
    bands = find_bands(folders[0][0], bands)
    if annotations:
        legend = Legend(
            annotations.classes, None, [*range(len(annotations.classes))], f'the {annotations.format} files'
        )
        read = partial(draw_pair, annotations, by_bands=bands is not None, max_pixels=max_pixels)
        found = [read_maps(root, root, suffix, read, part) for part in annotations.parts]
        found[0].notes += annotations.notes
    else:
        legend = read_legend(root / 'classes.txt')
        read = partial(
            read_pair, by_bands=bands is not None, by_colour=legend.colours is not None, max_pixels=max_pixels
        )
        found = [read_maps(*pair, suffix, read) for pair in folders]
    notes = [note for maps in found for note in maps.notes]
    train, held_out = share_out(found, whole)
    if len(train.numbers) < least:
        raise UserError(
            f'{len(train.numbers)} images with label maps to learn from, {len(held_out.numbers)} held out, in '
            f'{str(root)!r}; expected at least {least}{"".join(f"; {note}" for note in notes)}'
        )
    pixels: Counter[int] = sum((maps.pixels for maps in found), Counter())
    meaning = meaning_of(legend, found, pixels, reduce_zero_label)
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
        suffix=suffix,
        values=meaning.values,
        notes=notes,
        colours=legend.colours,
        bands=None if bands is None else measure_bands([str(train.images / name) for name in train.numbers], bands),
        draw=read if annotations else None,
    )


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
        raise UserError(f'{legend.source} has {has}; leave out --reduce-zero-label and --keep-zero-label')
    if legend.names and legend.colours:
        return meaning_of_colours(pixels, legend.names, legend.colours)
    if legend.names and legend.numbers:
        text = f'{len(legend.names)} classes of {legend.source}, by its numbers'
        return Meaning(legend.names, legend.numbers, text)
    return meaning_of_numbers(found, legend.names, reduce_zero_label)


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


def find_folders(root: Path, least: int) -> list[tuple[Path, Path]]:
    """Folders of images and of their maps: to learn from and, if any, held out; empty without maps.

    Fewer than `least` maps beside images do not count: they may be ordinary images.
    """
    images, maps = present(root, IMAGES), present(root, MAPS)
    splits = present(root, TRAINING) + present(root, VALIDATION)
    if images and (maps or not splits):  # else `images` may be the name of a class
        pair = root / images[0], root / (maps or MAPS)[0]
        parts = present(pair[0], TRAINING) + present(pair[0], VALIDATION)
        return [(pair[0] / part, pair[1] / part) for part in parts or ['']]
    return folders_of_splits(root, splits, least) or maps_beside_images(root, least)


def present(folder: Path, names: Sequence[str]) -> list[str]:
    """The first of the names that is a folder in `folder`, in a list; an empty list if none is."""
    return [name for name in names if (folder / name).is_dir()][:1]


def folders_of_splits(root: Path, splits: Sequence[str], least: int) -> list[tuple[Path, Path]]:
    """`train` and `val`, each with images and maps. Once one of them has maps, the other must have them too."""
    found: list[tuple[Path, Path]] = []
    for name in splits:
        missing = [(root / name, root / name / MAPS[0])] if found else []
        found += find_folders(root / name, 1 if found else least)[:1] or missing
    return found


def maps_beside_images(root: Path, least: int) -> list[tuple[Path, Path]]:
    """The folder itself, if maps such as a_mask.png lie beside a.jpg in it."""
    names = list_images(str(root), READ)
    stems = {os.path.splitext(name)[0] for name in names}
    beside = [name for name in names for end in BESIDE if name.endswith(end) and name[: -len(end)] in stems]
    return [(root, root)] if len(beside) >= least else []


def find_suffix(images: Path, maps: Path) -> str:
    """What replaces the image's ending in a map's name: '.png', '_mask.png', ..."""
    names = list_images(str(maps))
    if images == maps:
        suffixes = Counter(ending for name in names for ending in BESIDE if name.endswith(ending))
    else:
        stems = {os.path.splitext(name)[0] for name in list_images(str(images), READ)}
        suffixes = Counter()
        for name in evenly(names, 100):
            cuts = [cut for cut in range(len(name)) if name[:cut] in stems]
            suffixes.update(name[cut:] for cut in cuts[-1:])  # after the longest stem
    if not suffixes:
        map_name, image_name = (next(iter(list_images(str(folder), READ)), 'none') for folder in (maps, images))
        raise UserError(
            f'no label map has the name of an image: {map_name!r} in {str(maps)!r}, {image_name!r} in {str(images)!r}; '
            f'{EXPECTED}'
        )
    (suffix, number), *others = suffixes.most_common(2)
    if others and others[0][1] > number / 2:
        raise UserError(
            f'label maps in {str(maps)!r} end in {suffix} and in {others[0][0]}: two kinds for the same images; keep '
            'the one to learn from there'
        )
    if suffix.lower().endswith(('.jpg', '.jpeg', '.webp')):
        raise UserError(f'maps in {str(maps)!r} end in {suffix}, whose compression changes numbers; save them as PNG')
    return suffix


def read_maps(images: Path, folder: Path, suffix: str, read: Callable, drawn: Sequence[str] = ()) -> Maps:
    """Reads the label maps of a folder by a `read_pair`, or those of the images `drawn` by a `draw_pair`."""
    listed = drawn or [path for path in list_images(str(images), READ) if images != folder or not path.endswith(BESIDE)]
    maps = {path: os.path.splitext(path)[0] + suffix for path in listed}
    existing = {*maps.values()} if drawn else {*list_images(str(folder))}
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
    unused = [name for name in existing - {*maps.values()} if name.endswith(suffix)]
    if unused:
        found.notes.append(f'{len(unused):,} label maps left out, without an image: {folder / min(unused)}')
    return found


def read_pair(image: str, file: str, by_bands: bool, by_colour: bool, max_pixels: int) -> np.ndarray | None:
    """The numbers in a label map, see `read_labels`; None if its image, with bands or not, has another size."""
    labels = segmentation_folder.read_labels(file, by_colour, max_pixels)
    return labels if labels.shape == height_width(image, by_bands, max_pixels) else None


def draw_pair(annotations: Annotations, image: str, _: str, by_bands: bool, max_pixels: int) -> np.ndarray | None:
    """The same of an image with annotations, whose label map is no file yet."""
    path = os.path.relpath(image, annotations.root)
    return annotations.draw(path, *height_width(image, by_bands, max_pixels))


def height_width(image: str, by_bands: bool, max_pixels: int) -> tuple[int, int]:
    """The size of an image; without bands as in its header, turned upright."""
    if by_bands:
        height, width = read_bands(image, max_pixels).shape[:2]
        return height, width
    with unreadable(image, Exception), open_image(image, max_pixels) as opened:
        return opened.size if orientation(opened) in SIDEWAYS else opened.size[::-1]

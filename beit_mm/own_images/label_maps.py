"""Finds the images and label maps of a folder."""

import os
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from beit_mm.checkpoint.names import preview
from beit_mm.datasets import reading, segmentation_folder
from beit_mm.datasets.image_folder import BAND_EXTENSIONS, list_images, read_lines
from beit_mm.datasets.reading import SIDEWAYS, UnreadableImageError, open_image, orientation, read_bands, unreadable
from beit_mm.datasets.segmentation_folder import IGNORE_INDEX, label_map_name
from beit_mm.errors import UserError
from beit_mm.files import atomic_file, quoted
from beit_mm.own_images.annotations import Annotations, find_annotations
from beit_mm.own_images.images import MAX_NAMED, ImageList, Images, evenly, hold_out, unread_lists
from beit_mm.own_images.label_values import (
    IDS,
    TRAIN_IDS,
    Legend,
    Meaning,
    meaning_of,
    meaning_of_dataset,
    read_legend,
    unlabelled,
)
from beit_mm.own_images.layouts import (
    BESIDE,
    EXPECTED,
    READ,
    Suffixes,
    count_suffixes,
    existing_folder,
    find_map_folders,
    some,
    unwrapped,
)
from beit_mm.terminal import with_bar

DRAWN = 'label_maps'  # folder of maps that were drawn from annotations, beside a run's lists
MIN_PAIRS = 10  # images with label maps that are needed to learn from
MAX_MEASURED = 100  # images that statistics of bands are taken from
UPRIGHT, AS_STORED, EITHER = 'upright', 'as stored', 'either'


@dataclass(kw_only=True)
class LabelMaps(Images):
    """Images with label maps; the roots of their lists are folders of images."""

    maps: tuple[Path, Path]  # folders of label maps: to learn from, and held out
    suffixes: Suffixes  # the end of an image's name, and what replaces it in the name of its map
    values: list[int]  # number of each class in the maps; other numbers are unlabelled
    colours: list[list[int]] | None  # of the classes, if the maps are read by colour
    bands: dict[str, Any] | None  # arguments of LoadBands, and `mean` and `std`; None: the images are RGB
    reading: dict[str, bool]  # `nearest_value` and `turn_maps` of SegmentationFolder
    annotations: Annotations | None = None  # that the maps are drawn from; None: they are files
    subject = 'labels'

    def __str__(self) -> str:
        return super().__str__().replace('images', 'images with label maps', 1)

    def identity(self) -> list[Any]:
        colours, readings = ([self.colours] if self.colours else []), [name for name, on in self.reading.items() if on]
        return [*super().identity(), self.values, *self.suffixes, *colours, *readings]

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
        maps = lists / DRAWN if self.annotations else maps
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
            **self.reading,
        )

    def write_maps(self, lists: Path) -> None:
        if self.annotations is None:
            return
        for part in (self.train, self.held_out):
            for path in part.names:
                file = lists / DRAWN / label_map_name(path, *self.suffixes)
                if not file.is_file():
                    pair = draw_pair(self.annotations, str(part.root / path), '', reading.MAX_PIXELS)
                    with atomic_file(file) as opened:
                        Image.fromarray(pair.labels).save(opened, 'PNG')


@dataclass
class Maps:
    """The images of a folder that have a label map of their size, and what these maps hold."""

    images: Path
    folder: Path  # of the maps
    numbers: dict[str, set[int]]  # path of each image, relative to `images` -> the numbers in its map
    pixels: Counter[int]  # how many pixels have each number
    notes: list[str]  # what was left out
    depths: dict[str, str]  # each depth of bands -> an image that has it
    drawn: Counter[str]  # how many maps of images with an EXIF orientation fit them UPRIGHT, AS_STORED or EITHER way

    def some(self, images: ImageList) -> 'Maps':
        """The same with these images only."""
        return replace(self, numbers={path: self.numbers[path] for path in images.names})

    @property
    def all_numbers(self) -> set[int]:
        """The numbers that occur."""
        return set().union(*self.numbers.values())

    def listed(self) -> ImageList:
        return ImageList(self.images, dict.fromkeys(self.numbers, ''))


class Pair(NamedTuple):
    """What is read of an image and its label map."""

    labels: np.ndarray  # H, W
    drawn: str = ''  # for an image with an EXIF orientation: UPRIGHT, AS_STORED or EITHER
    depth: str = ''  # of an image with bands, such as '16 bits'


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
    root = unwrapped(existing_folder(folder))
    if annotations := None if maps else find_annotations(root):
        read = partial(draw_pair, annotations, max_pixels=max_pixels)
        numbers = [*range(len(annotations.classes))]
        legend = Legend(annotations.classes, None, numbers, f'the {annotations.format} files')
        suffixes, bands = Suffixes(None, '.png'), None
        found = [read_maps(root, root, suffixes, read, part) for part in annotations.parts]
        notes = annotations.notes
    elif layout := find_map_folders(folder, least, maps):
        root, folders = layout.root, layout.pairs
        suffixes, notes = choose_suffixes(*folders[0])
        bands = find_bands(folders[0][0], bands)
        legend = read_legend(root, have_colours(folders[0][1], suffixes))
        by_colour = legend.colours is not None
        read = partial(read_pair, by_bands=bands is not None, by_colour=by_colour, max_pixels=max_pixels)
        found = [read_maps(*pair, suffixes, read) for pair in folders]
        notes = layout.notes + notes
    else:
        return None
    notes = notes + [note for part in found for note in part.notes]
    listed = None if whole else listed_splits(root, found[0])
    train, held_out = listed or share_out(found, whole)
    notes += [] if listed or whole or len(found) > 1 else unread_lists(root)
    if len(train.numbers) < least:
        raise UserError(
            f'{len(train.numbers)} images with label maps to learn from, {len(held_out.numbers)} held out, in '
            f'{str(root)!r}; expected at least {least}{"".join(f"; {note}" for note in notes)}'
        )
    pixels: Counter[int] = sum((maps.pixels for maps in found), Counter())
    drawn: Counter[str] = sum((maps.drawn for maps in found), Counter())
    turning, turn_maps = choose_turning(drawn)
    check_depths([depth for maps in found for depth in maps.depths.items()])
    held = {str(maps.images / path): numbers for maps in found for path, numbers in maps.numbers.items()}
    known = None
    if not legend.names and reduce_zero_label is None:
        known = meaning_of_dataset(found[0].folder.name, suffixes.maps, set().union(*held.values()))
    meaning = known or meaning_of(legend, held, pixels, reduce_zero_label, suffixes.maps)
    if not 1 < len(meaning.values) < IGNORE_INDEX:
        raise UserError(
            f'{len(meaning.values)} classes in {str(root)!r} ({meaning.text}); expected 2 to {IGNORE_INDEX - 1}'
        )
    check_labelled(train, held_out, meaning)
    by_colour = legend.colours is not None
    about = f'{meaning.text}{unlearned(train, held_out, meaning)}; {unlabelled(pixels, meaning, by_colour)}'
    measured = None if bands is None else measure_bands([str(train.images / name) for name in train.numbers], bands)
    notes = [about, *turning, *(measured.pop('notes') if measured else []), *notes]
    return LabelMaps(
        train.listed(),
        held_out.listed(),
        meaning.classes,
        maps=(train.folder, held_out.folder),
        suffixes=suffixes,
        values=meaning.values,
        notes=notes,
        colours=legend.colours,
        bands=measured,
        reading=dict(nearest_value=meaning.nearest, turn_maps=turn_maps),
        annotations=annotations,
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


def check_depths(found: Sequence[tuple[str, str]]) -> None:
    """Refuses bands of two depths, each with the path of an image, which one scale cannot fit."""
    for depth, path in found:
        if depth != found[0][0]:
            raise UserError(
                f'{path} holds {depth}, {found[0][1]} {found[0][0]}; all images are scaled alike, so convert those of '
                'one kind, for example by gdal_translate -ot UInt16 -scale'
            )


def choose_turning(drawn: Counter[str]) -> tuple[list[str], bool]:
    """A note about images with an EXIF orientation, if any is needed, and whether their maps are to be turned too."""
    if drawn[AS_STORED] and drawn[UPRIGHT]:
        raise UserError(
            f'{drawn[AS_STORED]} label maps fit their images as stored, {drawn[UPRIGHT]} as EXIF turns them; expected '
            'one of the two for all'
        )
    if drawn[AS_STORED]:
        return [f'{drawn.total()} images are turned by EXIF; their maps are not, and are turned like them'], True
    if drawn[EITHER] and not drawn[UPRIGHT]:
        cure = 'if not, give the images no orientation: exiftool -Orientation= FOLDER'
        return [f'{drawn[EITHER]} images are turned by EXIF; their maps must be upright too; {cure}'], False
    return [], False


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
    load = dict(type='beit_mm.LoadBands', bands=taken, low=found['low'], high=found['high'], nodata=found['nodata'])
    return dict(load=load, mean=found['mean'], std=found['std'], notes=found['notes'])


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
    return suffixes, []


def have_colours(maps: Path, suffixes: Suffixes) -> bool:
    """Whether the first label map is stored with red, green and blue."""
    first = next(name for name in list_images(str(maps)) if name.endswith(suffixes.maps))
    with suppress(UnreadableImageError), open_image(str(maps / first)) as opened:
        return opened.mode in ('RGB', 'RGBA')
    return False


def read_maps(images: Path, folder: Path, suffixes: Suffixes, read: Callable, drawn: Sequence[str] = ()) -> Maps:
    """Reads the label maps of a folder by a `read_pair`, or those of the images `drawn` by a `draw_pair`."""
    listed = [*(drawn or list_images(str(images), READ))]
    if images == folder:
        listed = [path for path in listed if not path.endswith(BESIDE)]
    elif images in folder.parents:
        listed = [path for path in listed if not (images / path).is_relative_to(folder)]
    maps = {path: label_map_name(path, *suffixes) for path in listed}
    existing = {*maps.values()} if drawn else {*list_images(str(folder))}
    found = Maps(images, folder, {}, Counter(), [], {}, Counter())
    left_out: dict[str, list[str]] = defaultdict(list)
    for path, name in with_bar(maps.items(), len(maps)):
        if name not in existing:
            left_out['without a map'].append(str(images / path))
            continue
        try:
            pair = read(str(images / path), str(folder / name))
        except UnreadableImageError as error:
            left_out['unreadable'].append(str(error))
            continue
        if pair is None:
            left_out['whose map has another size'].append(str(images / path))
            continue
        if pair.drawn:
            found.drawn[pair.drawn] += 1
        if pair.depth:
            found.depths.setdefault(pair.depth, str(images / path))
        numbers, counts = np.unique(pair.labels, return_counts=True)
        found.pixels.update(dict(zip(numbers.tolist(), counts.tolist(), strict=True)))
        found.numbers[path] = {*numbers.tolist()}
    for why, cases in left_out.items():
        found.notes.append(f'{len(cases):,} of {len(listed):,} images left out, {why}: {cases[0]}')
    unused = [name for name in existing - {*maps.values()} if name.endswith(suffixes.maps)]
    if unused:
        found.notes.append(f'{len(unused):,} label maps left out, without an image: {folder / min(unused)}')
    return found


def read_pair(image: str, file: str, by_bands: bool, by_colour: bool, max_pixels: int) -> Pair | None:
    """Reads a label map, see `read_labels`, and how it fits its image, with bands or not; None if it does not."""
    labels = segmentation_folder.read_labels(file, by_colour, max_pixels)
    if by_bands:
        values = read_bands(image, max_pixels)
        depth = 'floats' if values.dtype.kind == 'f' else f'{8 * values.dtype.itemsize} bits'
        return Pair(labels, depth=depth) if labels.shape == values.shape[:2] else None
    with unreadable(image, Exception), open_image(image, max_pixels) as opened:  # reads its header
        tag, stored = orientation(opened), opened.size[::-1]
    upright = stored[::-1] if tag in SIDEWAYS else stored
    if labels.shape not in (stored, upright):
        return None
    if tag == 1:
        return Pair(labels)
    if stored == upright:
        return Pair(labels, EITHER)
    return Pair(labels, UPRIGHT if labels.shape == upright else AS_STORED)


def draw_pair(annotations: Annotations, image: str, _: str, max_pixels: int) -> Pair | None:
    """The same of an image with annotations, whose label map is no file yet."""
    with unreadable(image, Exception), open_image(image, max_pixels) as opened:  # reads its header
        width, height = opened.size[::-1] if orientation(opened) in SIDEWAYS else opened.size
    labels = annotations.draw(os.path.relpath(image, annotations.root), height, width)
    return None if labels is None else Pair(labels)

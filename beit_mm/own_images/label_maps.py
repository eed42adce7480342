"""Finds the images and label maps of a folder."""

import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
from PIL import Image

from beit_mm.checkpoint.names import preview
from beit_mm.datasets import reading, segmentation_folder
from beit_mm.datasets.image_folder import BAND_EXTENSIONS, list_images, read_lines
from beit_mm.datasets.reading import SIDEWAYS, UnreadableImageError, open_image, orientation, read_bands, unreadable
from beit_mm.datasets.segmentation_folder import IGNORE_INDEX, label_map_name
from beit_mm.errors import UserError
from beit_mm.files import atomic_file, quoted
from beit_mm.own_images import label_values, layouts
from beit_mm.own_images.annotations import find_annotations
from beit_mm.own_images.images import MAX_NAMED, ImageList, Images, evenly, hold_out, merge_classes, unread_lists
from beit_mm.own_images.label_values import Legend, Meaning
from beit_mm.own_images.layouts import READ, Suffixes
from beit_mm.terminal import with_bar

DRAWN = 'label_maps'  # folder of maps that were drawn from annotations, beside a run's lists
MIN_PAIRS = 10  # images with label maps that are needed to learn from
MAX_MEASURED = 100  # images that statistics of bands are taken from
UPRIGHT, AS_STORED, EITHER = 'upright', 'as stored', 'either'


@dataclass(kw_only=True)
class LabelMaps(Images):
    """Images with label maps; the roots of their lists are folders of images."""

    checksums: dict[Path, int]  # of each image's label map
    maps: tuple[Path, Path]  # folders of label maps: to learn from, and held out
    suffixes: Suffixes  # the end of an image's name, and what replaces it in the name of its map
    values: list[int]  # numbers of the classes in the maps; other numbers are unlabelled
    label_map: list[int] | None = None  # class of each number, if several numbers share one
    all_known: bool  # the maps have no other numbers than those of classes, 0 and IGNORE_INDEX
    colours: list[list[int]] | None  # of the classes, if the maps are read by colour
    bands: dict[str, Any] | None  # arguments of LoadBands, and `mean` and `std`; None: the images are RGB
    reading: dict[str, bool]  # `nearest_value` and `turn_maps` of SegmentationFolder
    draw: Callable[[str, str], 'Pair | None'] | None = None  # draws the map of an image; None: the maps are files
    subject = 'labels'

    def __str__(self) -> str:
        return super().__str__().replace('images', 'images with label maps', 1)

    def identity(self) -> list[Any]:
        return [sorted(self.lines(self.train)), sorted(self.lines(self.held_out)), *self.rules()]

    def lines(self, part: ImageList) -> list[str]:
        """Each with the checksum of the label map: a later call notices corrections. Data sets pass over it."""
        return [f'{quoted(path)} {self.checksums[part.root / path]}' for path in part.names]

    def rules(self) -> list[Any]:
        colours, readings = ([self.colours] if self.colours else []), [name for name, on in self.reading.items() if on]
        return [*super().rules(), self.values, *self.suffixes, *colours, *readings, *(self.label_map or [])]

    def named_classes(self) -> str:
        class_of = self.label_map or range(len(self.values))
        marks: list = self.colours or [[] for _ in self.classes]
        for value, label in zip(self.values, class_of, strict=True) if not self.colours else ():
            marks[label].append(value)
        pairs = zip(self.classes, marks, strict=True)
        return preview((f'{quoted(name)} ({" ".join(map(str, mark))})' for name, mark in pairs), MAX_NAMED)

    def class_lines(self) -> list[str]:
        lines = super().class_lines()
        if self.colours is None:
            return lines
        return [f'{line} {" ".join(map(str, rgb))}' for line, rgb in zip(lines, self.colours, strict=True)]

    def dataset(self, lists: Path, name: str) -> dict[str, Any]:
        part, maps = (self.train, self.maps[0]) if name == 'train' else (self.held_out, self.maps[1])
        maps = lists / DRAWN if self.draw else maps
        plain = self.all_known and not self.colours and not self.label_map
        reduced = plain and self.values == [*range(1, len(self.values) + 1)]
        usual = self.colours or reduced or (plain and self.values == [*range(len(self.values))])
        return dict(
            data_root='',
            data_prefix=dict(img_path=str(part.root), seg_map_path=str(maps)),
            ann_file=str(lists / f'{name}.txt'),
            img_suffix=self.suffixes.images,
            seg_map_suffix=self.suffixes.maps,
            classes=str(lists / 'classes.txt'),
            reduce_zero_label=reduced,
            label_values=None if usual else self.values,
            label_map=self.label_map,
            **self.reading,
        )

    def files_of(self, part: ImageList, path: str) -> list[Path]:
        maps = self.maps[0] if part is self.train else self.maps[1]
        drawn = [] if self.draw else [maps / label_map_name(path, *self.suffixes)]
        return [*super().files_of(part, path), *drawn]

    def write_maps(self, lists: Path) -> None:
        images = [(part.root / path, path) for part in (self.train, self.held_out) for path in part.names]
        for image, path in images if self.draw else ():
            file = lists / DRAWN / label_map_name(path, *self.suffixes)
            pair = None if file.is_file() else self.draw(str(image), path)
            if pair is not None:
                with atomic_file(file) as opened:
                    Image.fromarray(pair[0]).save(opened, 'PNG')


@dataclass
class Maps:
    """The images of a folder that have a label map of their size, and what these maps hold."""

    images: Path
    folder: Path  # of the maps
    numbers: dict[str, set[int]]  # path of each image, relative to `images` -> the numbers in its map
    checksums: dict[str, int]  # of these maps, by path of the image
    pixels: Counter[int]  # how many pixels have each number
    notes: list[str]  # what was left out
    kinds: dict[str, list[str]]  # each kind of pair, see `read_pair` -> its images

    def some(self, images: Iterable[str]) -> 'Maps':
        """The same with these images only."""
        return replace(self, numbers={path: self.numbers[path] for path in images})

    @property
    def all_numbers(self) -> set[int]:
        """The numbers that occur."""
        return set().union(*self.numbers.values())

    def listed(self) -> ImageList:
        return ImageList(self.images, dict.fromkeys(self.numbers, ''))


Pair = tuple[np.ndarray, str]  # a label map (H, W), and of what kind it and its image are


class Found(NamedTuple):
    """What a folder holds, before it is decided what the numbers in its maps mean."""

    root: Path
    parts: list[Maps]  # all, or those to learn from and those to hold out
    legend: Legend
    suffixes: Suffixes
    bands: str | Sequence[int] | None
    notes: list[str]
    draw: Callable[[str, str], Pair | None] | None = None  # see LabelMaps

    @property
    def lists(self) -> list[Path]:
        """PASCAL VOC's lists of images to learn from and to hold out; empty without both."""
        folder = self.root / 'ImageSets' / ('Main' if self.draw else 'Segmentation')
        files = [folder / 'train.txt', folder / 'val.txt']
        return files if all(map(Path.is_file, files)) else []


def find_label_maps(
    folder: str | Path,
    reduce_zero_label: bool | None = None,
    whole: bool = False,
    bands: str | Sequence[int] | None = None,
    max_pixels: int = reading.MAX_PIXELS,
    maps: str | None = None,
    merge: str | None = None,
) -> LabelMaps | None:
    """Finds the images and label maps of a folder, and holds some out; None where there are no label maps.

    Args:
        folder: laid out as docs/label_maps.md describes.
        reduce_zero_label: whether 0 marks unlabelled pixels; None: as classes.txt shows.
        whole: use all images to learn from, which may be few, and hold none of them out.
        bands: bands of the images to read, counted from 0, or 'all'; None: all if reading as RGB would lose some.
        max_pixels: limit for an image or map, see LoadImage.
        maps: the folder of label maps, relative to `folder`; None: it is looked for.
        merge: classes to join, see `finetune`.

    Raises:
        UserError: images and maps do not fit together, or nothing shows what 0 means.
    """
    least = 1 if whole else MIN_PAIRS
    found = find_maps(folder, least, bands, max_pixels, maps)
    if found is None:
        return None
    train, held_out = share_out(found, whole)
    notes = found.notes + [note for part in found.parts for note in part.notes]
    if not whole and len(found.parts) == 1 and not found.lists:
        notes += unread_lists(found.root)
    if found.lists and not whole:
        unlisted = len(found.parts[0].numbers) - len(train.numbers) - len(held_out.numbers)
        notes += [f'{unlisted:,} images left out, which no list of {found.lists[0].parent} names'] if unlisted else []
    if len(train.numbers) < least:
        raise UserError(
            f'{len(train.numbers)} images with label maps to learn from, {len(held_out.numbers)} held out, in '
            f'{str(found.root)!r}; expected at least {least}{"".join(f"; {note}" for note in notes)}'
        )
    kinds: dict[str, list[str]] = defaultdict(list)
    for part in found.parts:
        for kind, images in part.kinds.items():
            kinds[kind] += images
    if found.bands is not None:
        check_depths(kinds)
    turning, turn_maps = choose_turning({kind: len(images) for kind, images in kinds.items()})
    pixels: Counter[int] = sum((part.pixels for part in found.parts), Counter())
    meaning = understand(found, pixels, reduce_zero_label, re.split(r'\s*[=,;]\s*', merge or ''))
    check_meaning(meaning, train, held_out)
    if colours := found.legend.colours:
        numbers = segmentation_folder.colour_numbers(colours)
        colours = [each for each, number in zip(colours, numbers, strict=True) if number in meaning.values]
    shares = label_values.unlabelled(pixels, meaning, by_colour=colours is not None)
    measured, on_bands = measure_bands(train, found.bands)
    classes, label_map = meaning.classes, None
    if merge and colours:
        raise UserError('--merge is for label maps with numbers; classes.txt gives colours')
    if merge:
        classes, label_map = merge_classes(classes, meaning.values, merge)
    return LabelMaps(
        train.listed(),
        held_out.listed(),
        classes,
        checksums={part.images / path: number for part in found.parts for path, number in part.checksums.items()},
        maps=(train.folder, held_out.folder),
        suffixes=found.suffixes,
        values=meaning.values,
        label_map=label_map,
        all_known=max({*pixels} - {*meaning.values, IGNORE_INDEX}, default=0) <= 0,
        notes=[f'{meaning.text}{unlearned(train, held_out, meaning)}; {shares}', *turning, *on_bands, *notes],
        colours=colours,
        bands=measured,
        reading=dict(nearest_value=meaning.nearest, turn_maps=turn_maps),
        draw=found.draw,
    )


def find_maps(
    folder: str | Path, least: int, bands: str | Sequence[int] | None, max_pixels: int, maps: str | None
) -> Found | None:
    """Draws annotations, or reads the label maps in folders; None if there are neither."""
    root = layouts.unpacked(layouts.existing_folder(folder))  # beside the only folder of images may lie annotations
    if annotations := None if maps else find_annotations(root):
        bands = find_bands(root, bands)
        numbers = [*range(len(annotations.classes))]
        legend = Legend(annotations.classes, None, numbers, f'the {annotations.format} files')
        draw = partial(read_pair, annotations.draw, bands is not None, max_pixels)
        parts = [read_maps(root, Path(), {path: path for path in part}, draw) for part in annotations.parts]
        return Found(root, parts, legend, Suffixes(None, '.png'), bands, annotations.notes, draw)
    layout = layouts.find_map_folders(folder, least, maps)
    if layout is None:
        return None
    images, folder = layout.pairs[0]
    suffixes, notes = choose_suffixes(images, folder)
    bands = find_bands(images, bands)
    listed = [path for path in list_images(str(folder), READ) if path.endswith(suffixes.maps)]
    palettes = palettes_of(folder, evenly(listed, MAX_MEASURED))
    legend = label_values.read_legend(layout.root, mode_of(folder / listed[0]), {*palettes[0][1].values()})
    if not legend.colours and not legend.numbers:
        check_palettes(palettes)
    read_labels = partial(segmentation_folder.read_labels, by_colour=legend.colours is not None, max_pixels=max_pixels)
    read = partial(read_pair, lambda file, *_: read_labels(file), bands is not None, max_pixels)
    parts = []
    for images, of_images in layout.pairs:
        pairs, unpaired = pair_up(images, of_images, suffixes)
        parts.append(read_maps(images, of_images, pairs, read))
        notes = notes + unpaired
    return Found(layout.root, parts, legend, suffixes, bands, layout.notes + notes)


def understand(
    found: Found, pixels: Counter[int], reduce_zero_label: bool | None, kept_names: Collection[str]
) -> Meaning:
    """What the numbers in all maps mean; classes of `kept_names` are learned whatever they are called."""
    held = {str(part.images / path): numbers for part in found.parts for path, numbers in part.numbers.items()}
    known, ending = None, found.suffixes.maps
    if not found.legend.names and reduce_zero_label is None:
        listed = [name for file in found.root.glob('label*.txt') for name in read_lines(str(file))]
        known = label_values.meaning_of_dataset(found.parts[0].folder.name, ending, {*pixels}, listed)
    meaning = known or label_values.meaning_of(found.legend, held, pixels, reduce_zero_label, ending)
    return meaning if reduce_zero_label is False else meaning.without_unlabelled(kept_names)


def share_out(found: Found, whole: bool) -> tuple[Maps, Maps]:
    """The maps to learn from and those held out: as folders or PASCAL VOC's lists say, else a tenth is held out.

    With `whole`, maps that are not in two folders are for both.
    """
    first, *others = found.parts
    if found.lists and not whole:
        learned, asked = (read_stems(file) for file in found.lists)
        if shared := learned & asked:
            raise UserError(f'{found.lists[0]} and {found.lists[1].name} both name {preview(sorted(shared))}; keep one')
        stems = {name: os.path.splitext(name)[0].removeprefix('JPEGImages/') for name in first.numbers}
        of_train, of_val = ([name for name, stem in stems.items() if stem in part] for part in (learned, asked))
        return first.some(of_train), first.some(of_val)
    if others and others[0].numbers:
        return first, others[0]
    if whole:
        return first, first
    train, held_out = hold_out(first.listed())
    return first.some(train.names), first.some(held_out.names)


def read_stems(file: Path) -> set[str]:
    """The images that one of VOC's lists names, also by paths and beside those of maps; without endings."""
    paths = [line.split(' /')[0].rsplit('JPEGImages/')[-1] for line in read_lines(str(file)) if line]
    return {os.path.splitext(path)[0] if path.lower().endswith(READ) else path for path in paths}


def check_meaning(meaning: Meaning, train: Maps, held_out: Maps) -> None:
    """Refuses one class or too many, names that cannot be logged, and a part without any labelled pixel."""
    if not 1 < len(meaning.values) < IGNORE_INDEX:
        raise UserError(
            f'{len(meaning.values)} classes in {str(train.folder)!r} ({meaning.text}); expected 2 to {IGNORE_INDEX - 1}'
        )
    if wrong := [name for name in meaning.classes if name.encode(errors='ignore') != name.encode(errors='replace')]:
        raise UserError(f'the name of the class {quoted(wrong[0])} is not in UTF-8; save the list of classes in UTF-8')
    for use, part in (('to learn from', train), ('held out', held_out)):
        if not part.all_numbers & {*meaning.values}:
            raise UserError(
                f'no map of the {len(part.numbers):,} images {use} in {str(part.images)!r} has a labelled pixel; label '
                f'some ({meaning.text})'
            )


def unlearned(train: Maps, held_out: Maps, meaning: Meaning) -> str:
    """Names the classes that no map to learn from holds; '' if there are none."""
    learned, asked = train.all_numbers, held_out.all_numbers
    unseen = {value: name for name, value in zip(meaning.classes, meaning.values, strict=True) if value not in learned}
    never = [name for value, name in unseen.items() if value not in asked]
    later = [name for value, name in unseen.items() if value in asked]
    text = f', never seen: {preview(never)}' if never else ''
    return f'{text}, only in held-out maps: {preview(later)}' if later else text


def check_depths(images_of: Mapping[str, list[str]]) -> None:
    """Refuses bands of two depths, which one scale cannot fit."""
    if len(images_of) > 1:
        (usual, images), (depth, others), *_ = images_of.items()
        raise UserError(
            f'{others[0]} holds {depth}, {images[0]} {usual}; all images are scaled alike, so convert one of the two '
            'kinds, for example by gdal_translate -ot UInt16 -scale'
        )


def choose_turning(numbers: Mapping[str, int]) -> tuple[list[str], bool]:
    """A note about images with an EXIF orientation, if any is needed, and whether their maps are to be turned too."""
    upright, stored, either = (numbers.get(kind, 0) for kind in (UPRIGHT, AS_STORED, EITHER))
    if stored and upright:
        raise UserError(
            f'{stored} label maps fit their images as stored, {upright} as EXIF turns them; expected one of the two '
            'for all'
        )
    if stored:
        return [f'{stored + either} images are turned by EXIF; their maps are not, and are turned like them'], True
    if either and not upright:
        cure = 'if they are not, remove the orientation of the images: exiftool -Orientation= FOLDER'
        return [f'{either} images are turned by EXIF; their maps must be upright too; {cure}'], False
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


def measure_bands(train: Maps, bands: str | Sequence[int] | None) -> tuple[dict[str, Any] | None, list[str]]:
    """Arguments of LoadBands and of the data preprocessor, from statistics of some of the images; and notes on them."""
    if bands is None:
        return None, []
    taken = None if bands == 'all' else [*bands]
    paths = [str(train.images / path) for path in train.numbers]
    found = reading.band_statistics(evenly(paths, MAX_MEASURED), taken)
    load = dict(type='beit_mm.LoadBands', bands=taken, low=found['low'], high=found['high'], nodata=found['nodata'])
    return dict(load=load, mean=found['mean'], std=found['std']), found['notes']


def choose_suffixes(images: Path, maps: Path) -> tuple[Suffixes, list[str]]:
    """What replaces what in an image's name to give the map's: '.png', '_mask.png', ..., and a note on others."""
    names = layouts.maps_beside(maps) if images == maps else list_images(str(maps), READ)
    counts = layouts.count_suffixes(images, layouts.some(names))
    if not counts:
        map_name, image_name = (next(iter(list_images(str(folder), READ)), 'none') for folder in (maps, images))
        raise UserError(
            f'no label map has the name of an image: {map_name!r} in {str(maps)!r}, {image_name!r} in {str(images)!r}; '
            f'{layouts.EXPECTED}'
        )
    for known in (label_values.TRAIN_IDS, label_values.IDS):
        for suffixes in counts:
            if suffixes.maps.endswith(known):
                return suffixes, [f'of the label maps, the ones ending in {known} are used'] if len(counts) > 1 else []
    (suffixes, number), *others = counts.most_common()
    if others and others[0][1] > number / 2:
        raise UserError(
            f'label maps in {str(maps)!r} end in {suffixes.maps} and in {others[0][0].maps}; keep the kind to learn '
            'from there or, if one image has one and another the other, let all end alike'
        )
    if not others:
        return suffixes, []
    endings = preview(kind.maps for kind, _ in others)
    return suffixes, [f'of the label maps, the ones ending in {suffixes.maps} are used, not {endings}']


def mode_of(file: Path) -> str:
    """Pillow's mode of a label map; '' if it cannot be read."""
    with suppress(UnreadableImageError), unreadable(str(file), Exception), open_image(str(file)) as opened:
        return opened.mode
    return ''


Palette = dict[int, tuple[int, ...]]  # the colour of each index that occurs, except 255


def palettes_of(folder: Path, names: Iterable[str]) -> list[tuple[str, Palette]]:
    """The palettes of label maps; those of other kinds have none."""
    found: list[tuple[str, Palette]] = []
    for name in names:
        palette: Palette = {}
        file = str(folder / name)
        with suppress(UnreadableImageError), unreadable(file, Exception), open_image(file) as opened:
            if opened.mode == 'P':
                colours = np.array(opened.getpalette()).reshape(-1, 3).tolist()
                indices = np.unique(np.asarray(opened)).tolist()
                palette = {index: tuple(colours[index]) for index in indices if index < min(len(colours), IGNORE_INDEX)}
        found.append((name, palette))
    return found


def check_palettes(palettes: Iterable[tuple[str, Palette]]) -> None:
    """Refuses maps in which the same index stands for different colours: their indices are not the classes."""
    seen: dict[int, tuple[tuple[int, ...], str]] = {}
    for name, palette in palettes:
        for index, colour in palette.items():
            known, other = seen.setdefault(index, (colour, name))
            if known != colour:
                raise UserError(
                    f'index {index} is {known} in the palette of {other!r}, {colour} in that of {name!r}; name the '
                    'colours in classes.txt, `name R G B` in each line, or save gray maps if indices are the classes'
                )


def pair_up(images: Path, folder: Path, suffixes: Suffixes) -> tuple[dict[str, str], list[str]]:
    """The name of each image's label map, and notes on images without a map and maps without an image."""
    listed = [*list_images(str(images), READ)]
    if images == folder:
        listed = [path for path in listed if not path.endswith(layouts.BESIDE)]
    elif images in folder.parents:
        listed = [path for path in listed if not (images / path).is_relative_to(folder)]
    pairs = {path: label_map_name(path, *suffixes) for path in listed}
    existing = {*list_images(str(folder), READ)}
    bare = [path for path, name in pairs.items() if name not in existing]
    unused = [name for name in existing - {*pairs.values()} if name.endswith(suffixes.maps)]
    notes = []
    if bare:
        notes.append(f'{len(bare):,} of {len(listed):,} images left out, without a map: {images / bare[0]}')
    if unused:
        notes.append(f'{len(unused):,} label maps left out, without an image: {folder / min(unused)}')
    return {path: name for path, name in pairs.items() if name in existing}, notes


def read_maps(images: Path, folder: Path, pairs: Mapping[str, str], read: Callable[[str, str], Pair | None]) -> Maps:
    """Reads images with their label maps by a `read_pair`."""
    found = Maps(images, folder, {}, {}, Counter(), [], defaultdict(list))
    left_out: dict[str, list[str]] = defaultdict(list)
    for path, name in with_bar(pairs.items(), len(pairs)):
        image = str(images / path)
        try:
            pair = read(image, str(folder / name))
        except UnreadableImageError as error:
            left_out['unreadable'].append(str(error))
            continue
        if pair is None:
            left_out['whose map has another size'].append(image)
            continue
        labels, kind = pair
        found.kinds[kind].append(image)
        numbers, counts = np.unique(labels, return_counts=True)
        found.pixels.update(dict(zip(numbers.tolist(), counts.tolist(), strict=True)))
        found.numbers[path] = {*numbers.tolist()}
        found.checksums[path] = crc32(labels.tobytes())  # not of the file, which may be copied or saved anew
    for why, cases in left_out.items():
        found.notes.append(f'{len(cases):,} of {len(pairs):,} images left out, {why}: {cases[0]}')
    return found


def read_pair(
    labels_of: Callable[[str, int, int], np.ndarray | None], by_bands: bool, max_pixels: int, image: str, file: str
) -> Pair | None:
    """Reads or draws, by `labels_of`, the label map of an image; None if it does not fit.

    The kind is the depth of bands; or how the map fits an image that EXIF turns: UPRIGHT, AS_STORED, EITHER; else ''.
    """
    if by_bands:
        values = read_bands(image, max_pixels)
        depth = 'floats' if values.dtype.kind == 'f' else f'{8 * values.dtype.itemsize} bits'
        labels = labels_of(file, *values.shape[:2])
        return None if labels is None or labels.shape != values.shape[:2] else (labels, depth)
    with unreadable(image, Exception), open_image(image, max_pixels) as opened:  # reads its header
        tag, stored = orientation(opened), opened.size[::-1]
    upright = stored[::-1] if tag in SIDEWAYS else stored
    labels = labels_of(file, *upright)
    if labels is None or labels.shape not in (stored, upright):
        return None
    if tag == 1:
        return labels, ''
    if stored == upright:
        return labels, EITHER
    return labels, UPRIGHT if labels.shape == upright else AS_STORED

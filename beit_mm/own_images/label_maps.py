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

from beit_mm.checkpoint.names import preview
from beit_mm.datasets import reading, segmentation_folder
from beit_mm.datasets.image_folder import BAND_EXTENSIONS, EXTENSIONS, list_images
from beit_mm.datasets.reading import SIDEWAYS, UnreadableImageError, open_image, orientation, read_bands, unreadable
from beit_mm.datasets.segmentation_folder import IGNORE_INDEX, IMAGES, MAPS, TRAINING
from beit_mm.errors import UserError
from beit_mm.own_images.images import VALIDATION, ImageList, Images, evenly, hold_out
from beit_mm.own_images.label_values import Meaning, meaning_of, read_legend, unlabelled
from beit_mm.terminal import with_bar

MIN_PAIRS = 10  # images with label maps that are needed to learn from
BESIDE = ('_mask.png', '-mask.png', '_label.png')  # endings of maps that lie beside their images
READ = (*EXTENSIONS, '.npy')  # endings of images, some of them with many bands
MAX_MEASURED = 100  # images that statistics of bands are taken from
UPRIGHT, AS_STORED, EITHER = 'upright', 'as stored', 'either'
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
    reading: dict[str, bool]  # `nearest_value` and `turn_maps` of SegmentationFolder

    def __str__(self) -> str:
        return super().__str__().replace('images', 'images with label maps', 1)

    def identity(self) -> list[Any]:
        colours, readings = ([self.colours] if self.colours else []), [name for name, on in self.reading.items() if on]
        return [*super().identity(), self.values, self.suffix, *colours, *readings]

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
            seg_map_suffix=self.suffix,
            classes=str(lists / 'classes.txt'),
            reduce_zero_label=reduced,
            label_values=None if usual else self.values,
            **self.reading,
        )


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
    legend = read_legend(root / 'classes.txt')
    read = partial(read_pair, by_bands=bands is not None, by_colour=legend.colours is not None, max_pixels=max_pixels)
    found = [read_maps(*pair, suffix, read) for pair in folders]
    notes = [note for maps in found for note in maps.notes]
    train, held_out = share_out(found, whole)
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
    meaning = meaning_of(legend, held, pixels, reduce_zero_label, suffix)
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
        suffix=suffix,
        values=meaning.values,
        notes=notes,
        colours=legend.colours,
        bands=measured,
        reading=dict(nearest_value=meaning.nearest, turn_maps=turn_maps),
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
    return suffix


def read_maps(images: Path, folder: Path, suffix: str, read: Callable) -> Maps:
    """Reads the label maps of a folder; `read` is a `read_pair`."""
    listed = [path for path in list_images(str(images), READ) if images != folder or not path.endswith(BESIDE)]
    maps = {path: os.path.splitext(path)[0] + suffix for path in listed}
    existing = {*list_images(str(folder))}
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
    unused = [name for name in existing - {*maps.values()} if name.endswith(suffix)]
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

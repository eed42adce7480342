"""Finds which folders hold images, label maps, classes and splits, by their names and by what lies in them."""

import os
import random
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from difflib import get_close_matches
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np

from beit_mm.checkpoint.names import preview
from beit_mm.datasets.image_folder import EXTENSIONS, LITTER, list_images, walk
from beit_mm.datasets.reading import UnreadableImageError, open_image, unreadable
from beit_mm.datasets.segmentation_folder import label_map_name, role_of
from beit_mm.engine.signals import LOCK
from beit_mm.errors import UserError
from beit_mm.files import quoted
from beit_mm.own_images.record import RECORD

MARKS = ('mask', 'label', 'labels', 'gt', 'seg', 'segmentation', 'annotation', 'anno', '1stHO')
# How the names of label maps that lie beside their images end
BESIDE = tuple(map(''.join, product('_-', MARKS, ('.png', '.bmp', '.tif', '.gif', '.npy'))))
READ = (*EXTENSIONS, '.npy')  # endings of images, some of them with many bands
LOSSY = ('.jpg', '.jpeg', '.webp')
OF_DATASETS = ('annotations', 'ann_dir', 'segmentationclass', 'gtfine')  # label maps, whatever lies beside them
SAME_NAMES = 0.8  # share of the files in a folder of label maps that have the name of an image
FEWER_COLOURS, MAX_COLOURS = 4, 256  # label maps have so many times fewer than photos, and at most so many
MAX_COMPARED, NUM_OPENED = 5, 8  # folders whose files are compared; files of each that are opened
DATE = r'(19|20)\d\d([-_.]?(0[1-9]|1[0-2])([-_.]?[0-3]\d)?)?'
PART = r'(.*[\W_])?(part|tile|video|clip|seq|sequence|scene)[\W_]?\d+'
NO_CLASSES = re.compile(f'{DATE}|{PART}', re.I)  # names of folders that the user is asked about
EXPECTED = 'expected images/a.jpg and annotations/a.png, or a.jpg and a_mask.png side by side'
NAMED, CLEAR, UNCLEAR = 'named', 'clear', 'unclear'  # how sure it is that folders hold images and label maps
Pair = tuple[Path, Path]  # folders of images and of their label maps


class MapFolders(NamedTuple):
    root: Path
    pairs: list[Pair]  # folders of images and of their maps: to learn from and, if any, held out
    notes: list[str]  # what was assumed


@dataclass
class ClassFolders:
    train: Path
    held_out: Path | None = None
    left_out: set[str] = field(default_factory=set)  # folders in them that are not classes
    notes: list[str] = field(default_factory=list)  # what was assumed
    question: str = ''  # what only the user can tell about the classes


class Suffixes(NamedTuple):
    images: str | None  # end of an image's name; None: the extension
    maps: str  # what replaces it in the name of the label map


def existing_folder(folder: str | Path) -> Path:
    if not str(folder):  # a variable of the shell without a value
        raise UserError("'' names no folder; expected a folder of images")
    root = Path(folder).expanduser().resolve()
    if (root / RECORD).is_file() and (root / LOCK).is_file():
        raise UserError(f'{quoted(str(root))} is the folder of a run; expected a folder of images')
    if root.is_dir():
        return root
    if root.exists():
        raise UserError(f'{quoted(str(root))} is a file; expected a folder of images')
    beside = {path.name.lower(): path for path in root.parent.glob('*/')}
    near = [quoted(str(beside[name])) for name in get_close_matches(root.name.lower(), beside)]
    if near:
        raise UserError(f'the folder {quoted(str(root))} does not exist; similar ones are {preview(near)}')
    raise UserError(f'the folder {quoted(str(root))} does not exist; expected a folder of images')


def children(folder: Path) -> dict[str, Path]:
    """The folders in a folder that hold images at any depth, by name."""
    with os.scandir(folder) as entries:
        names = sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith(LITTER))
    return {name: folder / name for name in names if any(are_images(files) for _, files in walk(str(folder / name)))}


def are_images(names: Iterable[str]) -> bool:
    return any(name.lower().endswith(READ) for name in names)


def only_child(folder: Path) -> Path | None:
    """The folder in a folder that holds all its images."""
    found = [*children(folder).values()]
    return found[0] if len(found) == 1 and not are_images(os.listdir(folder)) else None


def unwrapped(folder: Path) -> Path:
    """Descends while a folder holds nothing but a folder of folders, as in archives: data/data/<class>."""
    child = only_child(folder)
    return unwrapped(child) if child and children(child) else folder


def unpacked(folder: Path) -> Path:
    """Descends while a folder holds nothing at all but a folder of images, as in archives."""
    child, names = only_child(folder), [name for name in os.listdir(folder) if not name.startswith(LITTER)]
    return unpacked(child) if child and len(names) == 1 else folder


def folders_below(folder: Path) -> set[str]:
    return {*children(unwrapped(folder))}


def by_role(folder: Path) -> dict[tuple[str, str], Path]:
    return {role_of(name): path for name, path in reversed(children(folder).items())}


def splits_of(folder: Path) -> dict[str, Path]:
    """The folders that are called like `train`, `val` and `test`."""
    return {split: path for (split, kind), path in by_role(folder).items() if split and not kind}


def shown(names: Iterable[str]) -> str:
    return preview(map(quoted, sorted(names)))


def as_classes(names: Iterable[str]) -> str:
    return f'--classes {shlex.quote(",".join(sorted(names)))}'


# Class folders


def find_class_folders(folder: str | Path, chosen: Sequence[str] | None = None) -> ClassFolders:
    """Finds class folders; `chosen` are the names of classes, by default all folders that are not splits."""
    root = existing_folder(folder)
    found = class_folders(root)
    if not chosen:
        return found
    if not {*chosen} <= {*children(found.train)}:
        found = ClassFolders(unwrapped(root))
    present = {*children(found.train)}
    if unknown := {*chosen} - present:
        where = quoted(str(root))
        raise UserError(f'--classes: {where} has no folder {shown(unknown)} with images; it has {shown(present)}')
    if found.held_out:
        present |= {*children(found.held_out)}
    found.left_out, found.question = present - {*chosen}, ''
    if found.left_out:
        found.notes.append(f'left out, not in --classes: {shown(found.left_out)}')
    return found


def class_folders(folder: Path) -> ClassFolders:
    """The class folders in a folder, or in its `train`; `val` beside `train` or beside the classes is held out."""
    root = unwrapped(folder)
    splits = splits_of(root)
    others = {*children(root)} - {path.name for path in splits.values()}
    parts = {split: path for split, path in splits.items() if split != 'train' and folders_below(path) & others}
    if 'train' in splits and not parts and (len(splits) > 1 or not others):
        found = class_folders(splits['train'])
        found.notes += [f'not used: {shown(others)}'] if others else []
        return found
    found = ClassFolders(root, left_out={path.name for path in parts.values()})
    if parts:
        found.notes.append(f'parts of the data, not classes, because they have class folders: {shown(found.left_out)}')
    if not splits and role_of(folder.name) == ('train', ''):
        parts = splits_of(folder.parent)
    hold_out_part(found, parts)
    found.question = question_on(found, {path.name for path in splits.values()})
    return found


def hold_out_part(found: ClassFolders, parts: dict[str, Path]) -> None:
    """Holds out `val`, unless it has other folders than the part to learn from; a note names what is not used."""
    classes, val = {*children(found.train)}, parts.get('val')
    unused = {path.name for split, path in parts.items() if split != 'train'}
    if val and (not classes or folders_below(val) & classes):
        found.held_out = unwrapped(val)
    elif unused:
        found.notes.append(f'a tenth of the images is held out; not used: {shown(unused)}')


def question_on(found: ClassFolders, splits: set[str]) -> str:
    """Asks whether folders are classes, for example `test`, if nothing shows it; else ''."""
    names = {*children(found.train)} - found.left_out
    for name in sorted(names):
        for part in (found.train / name, *children(found.train / name).values()):
            if {('', 'images'), ('', 'maps')} <= by_role(part).keys():
                return (
                    f'{quoted(str(part))} has images and label maps of its own; give it as the folder, or put the '
                    'images of all parts into one images/ and their maps into one annotations/'
                )
    if len(names) > 1 and all(map(NO_CLASSES.fullmatch, names)):
        where = quoted(str(found.train))
        return f'{where}: {shown(names)} seem to be dates or parts; if they are classes, give {as_classes(names)}'
    unclear = (splits & names) - {name for part in found.left_out for name in folders_below(found.train / part)}
    rest = names - unclear
    otherwise = f'give {as_classes(rest)}' if len(rest) > 1 else 'sort the images into train/<class>/'
    if not unclear and len(names) > 1:
        inside = [folders_below(found.train / name) for name in names]
        if len(inside[0]) > 1 and all(each == inside[0] for each in inside):
            unclear, otherwise = names, 'give one of them as the folder of the images'
        else:
            unclear = {name for name in names if role_of(name) == ('', 'images')}
            otherwise = 'name the label maps: --maps FOLDER'
    if not unclear:
        return ''
    return (
        f'{quoted(str(found.train))}: {shown(unclear)} may be classes or parts of the data; if they are classes, give '
        f'{as_classes(names)}, otherwise {otherwise}'
    )


# Label maps


def find_map_folders(folder: str | Path, least: int = 1, maps: str | None = None) -> MapFolders | None:
    """Finds folders of images and of their label maps; None where there are no label maps.

    Args:
        folder: see docs/label_maps.md.
        least: fewer maps beside images, such as a_mask.png, do not count: they may be ordinary images.
        maps: the folder of label maps, relative to `folder` or to `train` and `val` in it; None: it is looked for.
    """
    root = unwrapped(existing_folder(folder))
    if maps is None and (pairs := pairs_of_splits(root)):
        return MapFolders(root, pairs, [])
    parts = class_folders(root)  # the same splits as of classes
    found = folders_in(parts.train, least, maps)
    if found is None:
        return None
    if parts.held_out:
        held_out = folders_in(parts.held_out, 1, maps)
        if held_out is None:
            found.notes.append(f'not used, without label maps: {quoted(parts.held_out.name)}')
        found.pairs[1:] = held_out.pairs[:1] if held_out else []
    return MapFolders(root, found.pairs, parts.notes + found.notes)


def pairs_of_splits(root: Path) -> list[Pair]:
    """Folders called like `train` and `train_masks`, `val` and `val_masks`."""
    roles = by_role(root)
    images = {split: roles.get((split, 'images'), roles.get((split, ''))) for split in ('train', 'val')}
    return [(path, roles[split, 'maps']) for split, path in images.items() if path and (split, 'maps') in roles]


def folders_in(folder: Path, least: int, maps: str | None) -> MapFolders | None:
    """The label maps in a folder without splits: those chosen, in a folder of their own, or beside the images."""
    folders = [path for name, path in children(folder).items() if not role_of(name)[0]]
    folders.sort(key=lambda path: role_of(path.name)[1] != 'images')
    folders += [folder] if are_images(os.listdir(folder)) else []
    if maps is None:
        return side_by_side(folder, folders) or same_folder(folder, least)
    chosen = folder / maps
    if not chosen.is_dir():
        where = quoted(str(folder))
        raise UserError(f'--maps: {where} has no folder {quoted(maps)}; it has {shown(children(folder))}')
    images = [path for path in folders if path != chosen] or [folder]
    images.sort(key=lambda path: (not have_same_names(path, chosen), not compare(path, chosen)))
    return MapFolders(folder, split_pairs(images[0], chosen), [])


def same_folder(folder: Path, least: int) -> MapFolders | None:
    """At least so many label maps that lie beside their images."""
    counts = count_suffixes(folder, maps_beside(folder))
    return MapFolders(folder, [(folder, folder)], []) if counts.total() >= least else None


def maps_beside(folder: Path) -> list[str]:
    return [name for name in list_images(str(folder), READ) if name.endswith(BESIDE)]


def side_by_side(root: Path, folders: list[Path]) -> MapFolders | None:
    """Folders called like `images` and `annotations`, or with the same file names and far fewer colours in one."""
    found = possible_pairs(folders)
    known = [pair for pair in found if pair[1].name.lower() in OF_DATASETS]
    if not found:
        return None
    pair = (known or [*found])[0]
    names = {path.name for path in folders if path != root}
    if not known and (len(found) > 1 or found[pair] == UNCLEAR):
        options = ' or '.join(sorted({f'--maps {shlex.quote(maps.name)}' for _, maps in found}))
        raise UserError(
            f'{quoted(str(root))} may hold images and label maps, or classes; give {options} for label maps, '
            f'{as_classes(names)} for classes (pretrain: the folder of the images)'
        )
    unused = names - {path.name for path in pair}
    notes = [f'in {quoted(root.name)} not used: {shown(unused)}'] if unused else []
    images, maps = (quoted(path.name) for path in pair)
    if found[pair] != NAMED:
        why = f'they have the file names of {images}, and few colours'
        notes.append(f'label maps are in {maps}: {why}; if these are classes, give {as_classes(names)}')
    return MapFolders(root, split_pairs(*pair), notes)


def possible_pairs(folders: list[Path]) -> dict[Pair, str]:
    """Pairs of folders that may hold images and their label maps: NAMED, which come first, CLEAR or UNCLEAR."""
    images, maps = ([path for path in folders if role_of(path.name)[1] == kind] for kind in ('images', 'maps'))
    found = {pair: NAMED for pair in product(images[:1], maps)}
    if len(folders) <= MAX_COMPARED:  # other folders may hold maps of the same images
        pairs = product(images[:1] if found else folders, folders)
        found |= {pair: compare(*pair) for pair in pairs if pair[0] != pair[1] and pair not in found}
    return {pair: what for pair, what in found.items() if what}


def split_pairs(images: Path, maps: Path) -> list[Pair]:
    """A folder of images and one of maps, or `train` and `val` in each."""
    splits, of_maps = splits_of(images), splits_of(maps)
    names = [name for name in ('train', 'val') if name in splits]
    for name in names:
        if name not in of_maps:
            raise UserError(f'{quoted(str(splits[name]))} has no label maps in {quoted(str(maps))}')
    if not names and not have_same_names(images, maps):
        images, maps = only_child(images) or images, only_child(maps) or maps
    return [(splits[name], of_maps[name]) for name in names] or [(images, maps)]


def compare(images: Path, maps: Path) -> str:
    """Whether files have the names and sizes of images and far fewer colours, as label maps have: CLEAR, UNCLEAR or ''.

    It is unclear if they are compressed with losses, or have too many colours for label maps.
    """
    if not have_same_names(images, maps):
        return ''
    ((suffixes, _),) = count_suffixes(images, some([*list_images(str(maps), READ)])).most_common(1)
    colours = []
    for name in some(list_images(str(images)))[:NUM_OPENED]:
        with suppress(UnreadableImageError, OSError):
            size, of_image = size_and_colours(images / name)
            size_of_map, of_map = size_and_colours(maps / label_map_name(name, *suffixes))
            if size != size_of_map:
                return ''
            colours.append((of_image, of_map))
    most, least = np.median(colours, axis=0) if colours else (0, 1)
    if least * FEWER_COLOURS > most:
        return ''
    return CLEAR if least <= MAX_COLOURS and not suffixes.maps.lower().endswith(LOSSY) else UNCLEAR


def size_and_colours(path: Path) -> tuple[tuple[int, int], int]:
    """The size of an image, and the number of its colours in a thumbnail."""
    with open_image(str(path)) as image, unreadable(str(path), Exception):
        pixels = np.asarray(image.convert('RGB').resize((128, 128), 0))  # 0: nearest, which makes no new colours
        return image.size, len(np.unique(pixels.reshape(-1, 3), axis=0))


# Names of files


def some(names: Sequence[str]) -> list[str]:
    """A random hundred, because the names of several kinds alternate."""
    return random.Random(0).sample(names, min(100, len(names)))


def have_same_names(images: Path, maps: Path) -> bool:
    """Whether most files of a folder of maps have the name of an image, perhaps with another ending."""
    names = some(list_images(str(maps), READ))
    return count_suffixes(images, names).total() >= SAME_NAMES * len(names) > 0


def count_suffixes(images: Path, maps: Sequence[str]) -> Counter[Suffixes]:
    """What follows the name of an image in the names of maps, with what it replaces there, and how often."""
    names = [*list_images(str(images), READ)]
    names = [name for name in names if not name.endswith(BESIDE)] or names
    shared = os.path.commonprefix([name[::-1] for name in names])[::-1]
    last_word = re.search(r'[-_][^-_/]*\.\w+$', shared)  # that all images end in, such as _leftImg8bit.png
    counts: Counter[Suffixes] = Counter()
    for ending in (None, last_word[0] if last_word else None):
        stems = {os.path.splitext(name)[0] if ending is None else name.removesuffix(ending) for name in names}
        for name in maps:
            cuts = [cut for cut in range(len(name)) if name[:cut] in stems]
            counts.update(Suffixes(ending, name[cut:]) for cut in cuts[-1:])  # after the longest stem
        if counts:
            break
    return counts

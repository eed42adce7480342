"""Finds which folders hold images, label maps, classes and splits, by their names and by what lies in them."""

import os
import random
import re
import shlex
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from difflib import get_close_matches
from itertools import permutations
from pathlib import Path
from typing import NamedTuple

import numpy as np

from beit_mm.checkpoint.names import preview
from beit_mm.datasets.image_folder import EXTENSIONS, LITTER, list_images, walk
from beit_mm.datasets.reading import UnreadableImageError, open_image, unreadable
from beit_mm.datasets.segmentation_folder import label_map_name, role_of
from beit_mm.errors import UserError
from beit_mm.files import quoted

BESIDE = ('_mask.png', '-mask.png', '_label.png')  # endings of maps that lie beside their images
READ = (*EXTENSIONS, '.npy')  # endings of images, some of them with many bands
LOSSY = ('.jpg', '.jpeg', '.webp')
OF_DATASETS = ('annotations', 'ann_dir', 'segmentationclass', 'gtfine')  # label maps, whatever lies beside them
SAME_NAMES = 0.8  # share of the files in a folder of label maps that have the name of an image
FEWER_COLOURS, MAX_COLOURS = 4, 256  # label maps have so many times fewer than photos, and at most so many
MAX_COMPARED, NUM_OPENED = 5, 8  # folders whose files are compared; files of each that are opened
DATE = r'(19|20)\d\d([-_.]?(0[1-9]|1[0-2])([-_.]?[0-3]\d)?)?'
PART = r'(.*[\W_])?(part|tile|video|clip|seq|sequence|scene)[\W_]?\d+'
NO_CLASSES = re.compile(f'{DATE}|{PART}', re.I)  # names of folders about which is asked
EXPECTED = 'expected images/a.jpg and annotations/a.png, or a.jpg and a_mask.png side by side'


class MapFolders(NamedTuple):
    root: Path
    pairs: list[tuple[Path, Path]]  # folders of images and of their maps: to learn from and, if any, held out
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
    root = Path(folder).expanduser().resolve()
    if root.is_dir():
        return root
    if root.exists():
        raise UserError(f'{quoted(str(root))} is a file; expected a folder of images')
    beside = {path.name.lower(): path for path in root.parent.glob('*/')}
    near = [quoted(str(beside[name])) for name in get_close_matches(root.name.lower(), beside)]
    raise UserError(f'there is no folder {quoted(str(root))}; similar ones: {preview(near)}')


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
        found.question = found.question or question_on(found)
        return found
    if not {*chosen} <= {*children(found.train)}:
        found = ClassFolders(unwrapped(root))
    present = {*children(found.train)}
    if unknown := {*chosen} - present:
        raise UserError(
            f'--classes: {quoted(str(root))} has no folder {shown(unknown)} with images; it has {shown(present)}'
        )
    if found.held_out:
        present |= {*children(found.held_out)}
    found.left_out, found.question = present - {*chosen}, ''
    found.notes += [f'left out, not in --classes: {shown(found.left_out)}'] if found.left_out else []
    return found


def class_folders(folder: Path) -> ClassFolders:
    """The class folders in a folder, or in its `train`; `val` beside `train` or beside the classes is held out."""
    root = unwrapped(folder)
    splits = splits_of(root)
    others = {*children(root)} - {path.name for path in splits.values()}
    parts = {name: path for name, path in splits.items() if name != 'train' and {*children(unwrapped(path))} & others}
    if 'train' in splits and not parts and (len(splits) > 1 or not others):
        found = class_folders(splits['train'])
        found.notes += [f'not used: {shown(others)}'] if others else []
        return found
    found = ClassFolders(root, left_out={path.name for path in parts.values()})
    if not splits and role_of(folder.name) == ('train', ''):
        parts = splits_of(folder.parent)
    if 'val' in parts and (not children(root) or {*children(unwrapped(parts['val']))} & {*children(root)}):
        found.held_out = unwrapped(parts['val'])
    elif {*parts} - {'train'}:
        unused = {path.name for split, path in parts.items() if split != 'train'}
        found.notes.append(f'a tenth of the images is held out; not used: {shown(unused)}')
    if found.left_out:
        found.notes.append(f'parts of the data, not classes, because they have class folders: {shown(found.left_out)}')
    inside = {name for path in parts.values() for name in children(unwrapped(path))}
    if unclear := {path.name for path in splits.values()} - found.left_out - inside:
        otherwise = as_classes(others) if len(others) > 1 else 'sort the images into train/<class>/'
        found.question = (
            f'{quoted(str(root))}: {shown(unclear)} may be a class or a part of the data; give '
            f'{as_classes(others | unclear)} for classes, otherwise {otherwise}'
        )
    return found


def question_on(found: ClassFolders) -> str:
    """What only the user can tell if the folders may be parts, dates, or images and maps; else ''."""
    folders = {name: path for name, path in children(found.train).items() if name not in found.left_out}
    where, classes = quoted(str(found.train)), as_classes(folders)
    for part in (*(inner for path in folders.values() for inner in children(path).values()), *folders.values()):
        roles = by_role(part)
        if {('', 'images'), ('', 'maps')} <= roles.keys():
            of_images, of_maps = roles['', 'images'].name, roles['', 'maps'].name
            where = shlex.quote(str(part.parent))
            return (
                f'{quoted(str(part))} has images and label maps of its own; put all together: cd {where}; for F in */; '
                f'do mkdir -p images annotations; mv "$F/{of_images}" "images/$F"; mv "$F/{of_maps}" "annotations/$F"; '
                'done; then give that folder for label maps, its images/ for classes'
            )
    inside = {*children(unwrapped(next(iter(folders.values()))))} if len(folders) > 1 else set()
    if len(inside) > 1 and all({*children(unwrapped(path))} == inside for path in folders.values()):
        return (
            f'{where}: {shown(folders)} all hold {shown(inside)}; give {classes} if the former are classes, or one of '
            'them as the folder of the images'
        )
    if len(folders) > 1 and all(map(NO_CLASSES.fullmatch, folders)):
        return f'{where}: {shown(folders)} seem to be dates or parts; give {classes} for classes'
    called = [name for name in folders if role_of(name) == ('', 'images')]
    if len(folders) > 1 and called:
        return f'{where}: {shown(called)} may be a class; give {classes} for classes, --maps FOLDER for label maps'
    return ''


# Label maps


def find_map_folders(folder: str | Path, least: int = 1, maps: str | None = None) -> MapFolders | None:
    """Finds folders of images and of their label maps; None where there are no label maps.

    Args:
        folder: see docs/label_maps.md.
        least: fewer maps beside images, such as a_mask.png, do not count: they may be ordinary images.
        maps: the folder of label maps, relative to `folder` or to `train` and `val` in it; None: it is looked for.
    """
    root = unwrapped(existing_folder(folder))
    if (pairs := pairs_of_splits(root)) and maps is None:
        return MapFolders(root, pairs, [])
    parts = class_folders(root)  # the same splits as of classes
    found = folders_in(parts.train, least, maps)
    if found is None:
        if maps is None:
            return None
        where = quoted(str(parts.train))
        raise UserError(f'--maps: {where} has no folder {quoted(maps)}; it has {shown(children(parts.train))}')
    if parts.held_out:
        held_out = folders_in(parts.held_out, 1, maps)
        if held_out is None:
            raise UserError(f'{quoted(str(parts.held_out))} has no label maps, unlike {quoted(str(parts.train))}')
        found.pairs[1:] = held_out.pairs[:1]
    return MapFolders(root, found.pairs, parts.notes + found.notes)


def pairs_of_splits(root: Path) -> list[tuple[Path, Path]]:
    """Folders called like `train` and `train_masks`, `val` and `val_masks`."""
    roles = by_role(root)
    images = {split: roles.get((split, 'images'), roles.get((split, ''))) for split in ('train', 'val')}
    return [(path, roles[split, 'maps']) for split, path in images.items() if path and (split, 'maps') in roles]


def folders_in(folder: Path, least: int, maps: str | None) -> MapFolders | None:
    """The label maps in a folder without splits: those chosen, in a folder of their own, or beside the images."""
    folders = [path for name, path in children(folder).items() if not role_of(name)[0]]
    folders.sort(key=lambda path: role_of(path.name)[1] != 'images')
    folders += [folder] if are_images(os.listdir(folder)) else []
    if maps is not None:
        chosen = folder / maps
        if not chosen.is_dir():
            return None
        images = [path for path in folders if path != chosen]
        images.sort(key=lambda path: (not have_same_names(path, chosen), fewer_colours(path, chosen) is False))
        return MapFolders(folder, split_pairs((images or [folder])[0], chosen), [])
    if found := side_by_side(folder, folders):
        return found
    names = list_images(str(folder), READ)
    stems = {os.path.splitext(name)[0] for name in names}
    beside = [name for name in names for end in BESIDE if name.endswith(end) and name[: -len(end)] in stems]
    return MapFolders(folder, [(folder, folder)], []) if len(beside) >= least else None


def side_by_side(root: Path, folders: list[Path]) -> MapFolders | None:
    """Folders called like `images` and `annotations`, or with the same file names and far fewer colours in one."""
    pairs = [*permutations(folders, 2)]
    named = [pair for pair in pairs if [role_of(path.name)[1] for path in pair] == ['images', 'maps']]
    compared = {pair: fewer_colours(*pair) for pair in pairs} if len(folders) <= MAX_COMPARED else {}
    alike = [pair for pair in pairs if pair in named or compared.get(pair, False) is not False]
    alike = [pair for pair in alike if not named or pair[0] == named[0][0]]  # others may be maps of the named images
    if not alike:
        return None
    known = [pair for pair in named if pair[1].name.lower() in OF_DATASETS]
    images, maps = pair = (known or alike)[0]
    names = {path.name for path in folders if path != root}
    is_clear = pair in named or compared[pair]
    if not known and not (is_clear and len(alike) == 1):
        options = ' or '.join(sorted({f'--maps {shlex.quote(maps.name)}' for _, maps in alike}))
        raise UserError(
            f'{quoted(str(root))} may hold images and label maps, or classes; give {options} for label maps, '
            f'{as_classes(names)} for classes (pretrain: the folder of the images)'
        )
    unused = names - {images.name, maps.name}
    notes = [f'in {quoted(root.name)} not used: {shown(unused)}'] if unused else []
    if pair not in named:
        why = f'the same file names as in {quoted(images.name)}, few colours'
        notes.append(f'label maps are in {quoted(maps.name)}: {why}; if these are classes, give {as_classes(names)}')
    return MapFolders(root, split_pairs(images, maps), notes)


def split_pairs(images: Path, maps: Path) -> list[tuple[Path, Path]]:
    """A folder of images and one of maps, or `train` and `val` in each."""
    splits, of_maps = splits_of(images), splits_of(maps)
    pairs = [(splits[name], of_maps.get(name, maps / splits[name].name)) for name in ('train', 'val') if name in splits]
    for part, of_part in pairs:
        if not of_part.is_dir():
            raise UserError(f'{quoted(str(part))} has no label maps; expected them in {quoted(str(of_part))}')
    if not pairs and not have_same_names(images, maps):
        images, maps = only_child(images) or images, only_child(maps) or maps
    return pairs or [(images, maps)]


def fewer_colours(images: Path, maps: Path) -> bool | None:
    """Whether files have the names and sizes of images and far fewer colours, as label maps have.

    None if they have, but are compressed with losses, or have too many for label maps.
    """
    if not have_same_names(images, maps):
        return False
    listed = {*list_images(str(maps))}
    ((suffixes, _),) = count_suffixes(images, some([*listed])).most_common(1)
    sizes, colours = [], []
    for name in some(list_images(str(images)))[:NUM_OPENED]:
        with suppress(UnreadableImageError, OSError):
            files = images / name, maps / label_map_name(name, *suffixes)
            of_image, of_map = map(size_and_colours, files)
            sizes.append(of_image[0] == of_map[0])
            colours.append((of_image[1], of_map[1]))
    if not colours or not all(sizes):
        return False
    most, least = map(statistics.median, zip(*colours, strict=True))
    if least * FEWER_COLOURS > most:
        return False
    return True if least <= MAX_COLOURS and not suffixes.maps.lower().endswith(LOSSY) else None


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
    names = some(list_images(str(maps)))
    return count_suffixes(images, names).total() >= SAME_NAMES * len(names) > 0


def count_suffixes(images: Path, maps: Sequence[str]) -> Counter[Suffixes]:
    """What follows the name of an image in the names of maps, with what it replaces there, and how often."""
    names = list_images(str(images), READ)
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

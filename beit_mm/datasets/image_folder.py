"""Datasets of images from a folder, from tar shards or from a list of files, with and without classes.

Shards are tar archives in webdataset's layout. Their index says where the bytes of each image lie, so images can be
read in any order. `tools/datasets/make_shards.py` writes the shards and the index.
"""

import math
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from mmengine.dataset import BaseDataset
from mmpretrain.datasets import ResizeEdge

from beit_mm.checkpoint.names import preview
from beit_mm.datasets import reading
from beit_mm.datasets.multi_crop import MultiCrop
from beit_mm.datasets.reading import LoadBands, LoadImage, MemberPath, UnreadableImageError, decoding_scale
from beit_mm.datasets.samplers import SampleKey, key_of, mixed_seed, seed_generators
from beit_mm.datasets.transforms import TwoViews
from beit_mm.errors import UserError, check_choice, warn
from beit_mm.files import quoted, unquoted
from beit_mm.registry import DATASETS

EXTENSIONS = tuple('.jpg .jpeg .jfif .mpo .png .apng .webp .gif .bmp .ppm .pgm .tif .tiff'.split())
HEIF_EXTENSIONS = ('.heic', '.heif')  # read only where pillow-heif is installed
if reading.HeifImageFile is not None:
    EXTENSIONS += HEIF_EXTENSIONS
BAND_EXTENSIONS = ('.tif', '.tiff', '.npy')  # for LoadBands
INDEX = 'shards.npz'
SUBSTITUTES = 10  # images tried in place of an unreadable one; if all fail, the images are not the cause


class Paths(Sequence[str]):
    """Many paths in one block of memory, which forked workers share; a string is made only on access."""

    def __init__(self, text: bytes) -> None:
        self.text = text  # the paths as bytes of the file system, each followed by a NUL
        self.ends = np.flatnonzero(np.frombuffer(text, np.uint8) == 0)
        self.starts = np.r_[0, self.ends + 1][:-1]

    @classmethod
    def of(cls, paths: Iterable[str]) -> 'Paths':
        return cls(b''.join(os.fsencode(path) + b'\0' for path in paths))

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, (slice, np.ndarray)):
            part = object.__new__(Paths)
            part.text, part.starts, part.ends = self.text, self.starts[index], self.ends[index]
            return part
        return os.fsdecode(self.text[self.starts[index] : self.ends[index]])


def list_images(folder: str, extensions: Sequence[str] = EXTENSIONS, subfolders: Sequence[str] = ('',)) -> Paths:
    """Lists all images below a folder, sorted, with paths relative to it; hidden files and folders are skipped.

    The extension decides what is an image; no file is opened. Links are followed, and each folder is searched once:
    where several paths lead to it, a path without links is preferred. `subfolders` are searched in turn.
    """
    unread = HEIF_EXTENSIONS if reading.HeifImageFile is None and '.jpg' in extensions else ()
    paths: list[str] = []
    left_out = 0
    for subfolder in subfolders:
        found = []
        for parent, names in walk(os.path.join(folder, subfolder)):
            below = os.path.relpath(parent, folder)
            prefix = '' if below == '.' else f'{below}/'
            found += [prefix + name for name in names if name.lower().endswith(tuple(extensions))]
            left_out += sum(name.lower().endswith(unread) for name in names)
        paths += sorted(found, key=os.fsencode)
    if left_out:
        warn(f'{quoted(folder)}: {left_out} HEIC images are left out; to read them, pip install pillow-heif')
    return Paths.of(paths)


def walk(folder: str) -> Iterator[tuple[str, list[str]]]:
    """Yields each folder from `folder` down once, with the names of its files; linked folders come last."""
    seen, tops = set(), [folder]
    for top in tops:
        for parent, folders, files in os.walk(top, onerror=raise_error):
            status = os.stat(parent)
            if (status.st_dev, status.st_ino) in seen:
                folders.clear()
                continue
            seen.add((status.st_dev, status.st_ino))
            folders[:] = sorted(name for name in folders if not name.startswith('.'))
            tops += filter(os.path.islink, (os.path.join(parent, name) for name in folders))
            yield parent, [name for name in files if not name.startswith('.')]


def raise_error(error: OSError) -> None:
    raise error  # by default os.walk ignores folders that it cannot list


@dataclass
class Samples(Sequence[dict]):
    """The data_list of a dataset: for each sample a dict with `img_path` and, where labels exist, `gt_label`."""

    folder: str
    paths: Sequence[str]  # relative to the folder, or Shards
    labels: np.ndarray | None = None  # int (N,)

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: Any) -> Any:
        labels = None if self.labels is None else self.labels[index]
        path = self.paths[index]
        if isinstance(index, slice):
            return Samples(self.folder, path, labels)
        sample = dict(img_path=path if isinstance(path, MemberPath) else os.path.join(self.folder, path))
        return sample if labels is None else dict(sample, gt_label=int(labels))


@dataclass
class Shards(Sequence[str]):
    """The images in a folder of shards: a sequence of MemberPath."""

    folder: str
    archives: Paths  # (S,) file names
    classes: tuple[str, ...]  # sorted names; empty where .cls files hold class numbers
    # one entry for each image:
    names: Paths  # (N,) names inside the archives
    shard: np.ndarray  # int (N,) index into `archives`
    offset: np.ndarray  # int (N,) first byte in the archive
    length: np.ndarray  # int (N,) bytes
    label: np.ndarray  # int (N,) class, -1 for none

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, (slice, np.ndarray)):
            columns = 'names', 'shard', 'offset', 'length', 'label'
            return replace(self, **{name: getattr(self, name)[index] for name in columns})
        archive = os.path.join(self.folder, self.archives[self.shard[index]])
        return MemberPath(f'{archive}/{self.names[index]}', archive, int(self.offset[index]), int(self.length[index]))

    def listed(self, names: Iterable[str], source: str) -> 'Shards':
        """Selects images by name, in the order of the list file `source`."""
        row_of = {name: row for row, name in enumerate(self.names)}
        if len(row_of) < len(self):
            raise UserError(f'{self.folder}: two images share a name; rename one, so that ann_file can select images')
        try:
            return self[np.array([row_of[name] for name in names], np.int64)]
        except KeyError as error:
            raise FileNotFoundError(f'{source} lists {error.args[0]!r}, which is not in {self.folder!r}') from None


def read_shards(folder: str) -> Shards | None:
    """Reads the index that `make_shards.py` wrote into a folder; None for a folder without an index."""
    path = os.path.join(folder, INDEX)
    if not os.path.isfile(path):
        return None
    rebuild = f'python tools/datasets/make_shards.py --index-only {folder}'
    try:
        with np.load(path, allow_pickle=False) as content:
            archives, classes, names = (Paths(content[name].tobytes()) for name in ('shards', 'classes', 'names'))
            columns = {name: content[name] for name in ('shard', 'offset', 'length', 'label')}
            sizes = content['sizes'].tolist()
    except Exception as error:  # numpy and zipfile raise nearly everything on damaged bytes
        raise UserError(f'{path} is not an index of shards ({type(error).__name__}); rebuild it: {rebuild}') from error
    for name, size in zip(archives, sizes, strict=True):
        archive = os.path.join(folder, name)
        if not os.path.isfile(archive):
            raise FileNotFoundError(f'{INDEX} lists {quoted(archive)}, which is missing; copy all archives')
        if os.path.getsize(archive) != size:
            advice = f'copy it again, or rebuild the index: {rebuild}'
            raise UserError(f'{quoted(archive)} is truncated or does not match {INDEX}; {advice}')
    return Shards(folder, archives, tuple(classes), names, **columns)


@DATASETS.register_module()
class UnlabeledImages(BaseDataset):
    """Images for pretraining. The random numbers of a sample depend on its SampleKey only (see datasets.samplers).

    Args:
        data_root: folder of images, searched to any depth, or folder of tar shards with their index.
        ann_file: list of images, relative to `data_root`: one path a line, `quoted`, relative to `data_prefix`; a label
            after the path is ignored. '': all images of the folder, sorted.
        data_prefix: folder of the images relative to `data_root`, as in mmpretrain, e.g. `dict(img_path='train')`.
        on_error: 'raise' (or 'error') ends the run at an unreadable image. 'skip' substitutes another image, always
            the same one for the same key, and names the file in `unreadable`. `test_mode=True` always raises.
        kwargs: as mmengine's BaseDataset: pipeline, indices, test_mode, lazy_init.

    Raises:
        UnreadableImageError: see `on_error`; with 'skip' when 10 substitutes cannot be read either.
    """

    EXPECTED = 'a folder of images'
    takes_keys = True  # samplers.read_samples passes SampleKeys instead of numbers

    def __init__(
        self, data_root: str = '', ann_file: str = '', data_prefix: str | dict = '', on_error: str = 'raise', **kwargs
    ) -> None:
        check_choice('on_error', on_error, ('raise', 'error', 'skip'))
        self.on_error = 'raise' if on_error == 'error' else on_error  # 'error' in configs up to 0.2.0
        data_prefix = data_prefix if isinstance(data_prefix, dict) else dict(img_path=data_prefix)
        if '://' in data_root:
            raise UserError(f'data_root is the URL {data_root}; expected a local folder of images')
        if kwargs.get('filter_cfg'):
            raise UserError('filter_cfg has no effect on these datasets; list the images to take in ann_file')
        super().__init__(ann_file=ann_file, data_root=data_root, data_prefix=data_prefix, **kwargs)
        scale_decoding(self.pipeline.transforms)

    def load_data_list(self) -> Sequence[dict]:
        folder = self.data_prefix['img_path']
        if not os.path.isdir(folder):
            raise FileNotFoundError(f'no folder {folder!r}; expected {self.EXPECTED}')
        paths, labels = self.find_images(folder, read_shards(folder))
        if not paths:
            raise self.no_images(self.ann_file or folder)
        return Samples(folder, paths, labels)

    def find_images(self, folder: str, shards: Shards | None) -> tuple[Sequence[str], np.ndarray | None]:
        """Finds the images, relative to the folder or in its shards, and their labels, int (N,)."""
        if self.ann_file:
            paths = Paths.of(split_label(line)[0] for line in read_lines(self.ann_file) if line)
            return shards.listed(paths, self.ann_file) if shards else paths, None
        return shards or list_images(folder, extensions_of(self.pipeline.transforms)), None

    def no_images(self, path: str) -> FileNotFoundError:
        extensions = ' '.join(extensions_of(self.pipeline.transforms))
        return FileNotFoundError(f'no images in {path!r}; expected files ending in {extensions}')

    def _serialize_data(self) -> tuple[np.ndarray, np.ndarray]:
        if not isinstance(self.data_list, Samples):  # a subclass has a list of dicts
            return super()._serialize_data()
        self.serialize_data = False
        return np.empty(0, np.uint8), np.empty(0, np.int64)

    def get_cat_ids(self, idx: int) -> list[int]:
        """Classes in an image, for mmengine's ClassBalancedDataset."""
        if 'gt_label' not in (info := self.get_data_info(idx)):
            needed = 'ClassBalancedDataset needs one class for each image; set class_weight=[...] of the loss instead'
            raise UserError(f'{type(self).__name__}: {needed}')
        return [int(info['gt_label'])]

    def __getitem__(self, key: SampleKey | int) -> dict:
        key = SampleKey(*key) if isinstance(key, tuple) else key_of(int(key))
        index, unreadable = key.index, ''
        for attempt in range(1, SUBSTITUTES + 2):
            info = self.get_data_info(index)
            info['unreadable'] = unreadable
            seed_generators(key)
            try:
                return self.pipeline(info)
            except UnreadableImageError as error:
                if self.on_error == 'raise' or self.test_mode:
                    raise
                last, unreadable = error, unreadable or error.path
            index = mixed_seed(*key, attempt) % len(self)
        raise UnreadableImageError(f'{last}; {SUBSTITUTES} substitutes could not be read either')


def scale_decoding(transforms: Sequence) -> None:
    """Lets LoadImage decode large JPEGs at the scale that the next transform needs.

    The next transform must be one of our crops, which draws its box from the size in the file's header, or mmpretrain's
    ResizeEdge. All other transforms get full images.
    """
    if len(transforms) < 2 or not isinstance(load := transforms[0], LoadImage) or not load.scaled:
        return
    if isinstance(step := transforms[1], TwoViews):
        if not any(isinstance(other, MultiCrop) for other in transforms):  # MultiCrop draws its own boxes
            load.choose_scale = step.choose_scale
    elif isinstance(step, ResizeEdge) and step.edge == 'short':
        load.choose_scale = partial(whole_scale, short_side=step.scale)


def whole_scale(results: dict, height: int, width: int, short_side: int) -> int:
    # must divide both sides, to keep their ratio
    return math.gcd(decoding_scale([min(height, width)], [short_side]), height, width)


def extensions_of(transforms: Sequence) -> tuple[str, ...]:
    """Extensions of the files that a pipeline reads."""
    return BAND_EXTENSIONS if any(isinstance(transform, LoadBands) for transform in transforms) else EXTENSIONS


def read_lines(path: str) -> list[str]:
    """Reads the lines of a file, stripped; bytes that are not UTF-8 are kept."""
    if not os.path.isfile(path):
        raise FileNotFoundError(f'no file {path!r}; expected a text file with one entry a line')
    with open(path, encoding='utf-8-sig', errors='surrogateescape') as file:
        lines = [line.strip() for line in file]
    if number := next((number for number, line in enumerate(lines, start=1) if '\0' in line), None):
        raise UserError(f'{path}, line {number} holds a NUL byte; expected text in UTF-8')
    return lines


def split_label(line: str) -> tuple[str, int | None]:
    """Splits a line of a list into path and label."""
    path, label = match.groups() if (match := re.fullmatch(r'(.*\S)\s+(-?\d+)', line)) else (line, None)
    return unquoted(path), None if label is None else int(label)


@DATASETS.register_module()
class ImageFolder(UnlabeledImages):
    """Images for classification, `<class>/**/<image>` below a folder; an annotation file is optional.

    LoadImage gives RGB, so set `to_rgb=False` in the data preprocessor.

    Args:
        data_root: folder of the class folders, or folder of tar shards with their index. In shards the class is the
            first folder of an image's name, or the number in the .cls file beside the image.
        classes: class names in the order of their labels, or a file with one name a line. None: the names of the
            folders, sorted. With `test_mode=True` a class may have no folder.
        kwargs: as UnlabeledImages. In `ann_file` a label follows each path, or the path begins with the class folder.
    """

    EXPECTED = 'a folder with one folder for each class'

    def __init__(self, data_root: str = '', classes: str | Sequence[str] | None = None, **kwargs) -> None:
        if isinstance(classes, str):
            classes = [unquoted(line) for line in read_lines(classes) if line]
        if classes is not None and len(set(classes)) < len(classes):
            raise UserError(f'classes holds a name twice; expected unique names: {preview(sorted(classes))}')
        metainfo = None if classes is None else dict(classes=tuple(classes))
        super().__init__(data_root, metainfo=metainfo, **kwargs)

    @property
    def CLASSES(self) -> tuple[str, ...]:  # noqa: N802
        # mmpretrain's tools use this name
        return self._metainfo['classes']

    def find_images(self, folder: str, shards: Shards | None) -> tuple[Sequence[str], np.ndarray]:
        if shards:
            folders = list(shards.classes)
        else:
            with os.scandir(folder) as entries:
                folders = sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith('.'))
        if 'classes' not in self._metainfo:
            if shards and not folders:  # .cls files hold class numbers
                folders = [str(number) for number in range(shards.label.max() + 1)]
            if not folders:
                raise FileNotFoundError(f'no class folders in {folder!r}; add one for each class, or set classes=...')
            self._metainfo['classes'] = tuple(folders)
        label_of = {name: label for label, name in enumerate(self.CLASSES)}
        if self.ann_file:
            paths, labels = self._read_list(label_of)
            return shards.listed(paths, self.ann_file) if shards else paths, labels
        if shards:
            return self._select(shards, label_of)
        names = self._present(folder, folders, label_of)
        paths = list_images(folder, extensions_of(self.pipeline.transforms), names)
        labels = np.array([label_of[path.split('/', 1)[0]] for path in paths], np.int64)
        if empty := {label_of[name] for name in names} - set(labels.tolist()):
            raise self.no_images(os.path.join(folder, self.CLASSES[min(empty)]))
        return paths, labels

    def _select(self, shards: Shards, label_of: dict[str, int]) -> tuple[Shards, np.ndarray]:
        """Selects the images of all classes in shards, class by class as in a folder, and their labels."""
        labels = shards.label
        if shards.classes:
            self._present(shards.folder, list(shards.classes), label_of)
            labels = np.array([label_of.get(name, -1) for name in shards.classes] + [-1])[labels]  # -1 stays -1
        elif (wrong := (labels < 0) | (labels >= len(label_of))).any():
            row = int(wrong.argmax())
            number = 'no .cls file' if labels[row] < 0 else f'class {labels[row]}'
            raise UserError(f'{shards[row]} has {number}; expected numbers from 0 to {len(label_of) - 1}')
        rows = np.flatnonzero(labels >= 0)
        rows = rows[np.argsort(labels[rows], kind='stable')]
        return shards[rows], labels[rows]

    def _present(self, folder: str, folders: list[str], label_of: dict[str, int]) -> list[str]:
        """Lists the classes that have a folder; warns about missing folders and about folders of no class."""
        if left_out := [name for name in folders if name not in label_of]:
            warn(f'{folder}: {len(left_out)} folders are skipped: not in classes ({preview(left_out)})')
        present = set(folders)
        for name in (name for name in label_of if name not in present):
            message = f'no folder {os.path.join(folder, name)!r} for class {name!r}'
            if not self.test_mode:
                raise FileNotFoundError(f'{message}; expected one folder for each class')
            warn(f'{message}; the class is not tested')
        names = [name for name in label_of if name in present]
        if not names:
            raise FileNotFoundError(f'{folder!r} has no folder of a class; expected {preview(self.CLASSES)}')
        return names

    def _read_list(self, label_of: dict[str, int]) -> tuple[Paths, np.ndarray]:
        """Reads paths and labels of `ann_file`; where a line has no label, the class folder gives it."""
        paths, labels = [], []
        for number, line in enumerate(read_lines(self.ann_file), start=1):
            if not line:
                continue
            path, label = split_label(line)
            folder_label = label_of.get(path.split('/')[0])
            label = folder_label if label is None else label
            where = f'{self.ann_file}, line {number}: {path!r}'
            if label is None:
                raise UserError(f'{where} has no label and is not in a class folder; add a label after the path')
            if not 0 <= label < len(label_of):
                last = len(label_of) - 1
                raise UserError(f'{where} has label {label}; there are {last + 1} classes, expected 0 to {last}')
            if folder_label not in (None, label):
                expected = f'expected {folder_label}, or classes=... in the order of the labels'
                raise UserError(f'{where} has label {label}, which is class {self.CLASSES[label]!r}; {expected}')
            paths.append(path)
            labels.append(label)
        return Paths.of(paths), np.array(labels)

"""Datasets of images, of a folder or a list of files, with and without classes."""

import json
import logging
import math
import os
import re
from collections.abc import Sequence
from functools import partial

import numpy as np
from mmengine.dataset import BaseDataset
from mmengine.logging import print_log
from mmpretrain.datasets import ResizeEdge

from beit_mm.checkpoint.names import first_names
from beit_mm.datasets.bands import LoadBands
from beit_mm.datasets.listing import BAND_EXTENSIONS, EXTENSIONS, Paths, Samples, Shards, list_images, read_shards
from beit_mm.datasets.multi_crop import MultiCrop
from beit_mm.datasets.reading import LoadImage, UnreadableImageError, decoding_scale
from beit_mm.datasets.samplers import SampleKey, sample_seed, seed_generators
from beit_mm.datasets.transforms import TwoViews
from beit_mm.registry import DATASETS
from beit_mm.terminal import UserError

SUBSTITUTES = 10  # images tried in place of an unreadable one; if all fail, it is not the images


@DATASETS.register_module()
class UnlabeledImages(BaseDataset):
    """Images for pretraining. What is drawn for a sample depends on its SampleKey only (see datasets.samplers).

    Args:
        data_root: folder of images, searched to any depth; or of tar shards with their index, see datasets.listing.
        ann_file: list of images, relative to `data_root`: one path a line, `quoted`, relative to `data_prefix`; a label
            after it is ignored. '' takes every image of the folder, in sorted order.
        data_prefix: folder of the images relative to `data_root`, as in mmpretrain, e.g. `dict(img_path='train')`.
        on_error: 'raise' (or 'error') ends the run at an unreadable image; 'skip' takes another in its place, always
            the same one for the same key, and names the file in `unreadable`. `test_mode=True` always raises.
        kwargs: as mmengine's BaseDataset: pipeline, indices, test_mode, lazy_init.

    Raises:
        UnreadableImageError: see `on_error`; with 'skip' when 10 substitutes cannot be read either.
    """

    EXPECTED = 'a folder of images'

    def __init__(
        self, data_root: str = '', ann_file: str = '', data_prefix: str | dict = '', on_error: str = 'raise', **kwargs
    ) -> None:
        if on_error not in ('raise', 'error', 'skip'):
            raise UserError(f"on_error is {on_error!r}; choose 'raise' or 'skip'")
        self.on_error = 'raise' if on_error == 'error' else on_error  # 'error' in configs up to 0.2.0
        data_prefix = data_prefix if isinstance(data_prefix, dict) else dict(img_path=data_prefix)
        if '://' in data_root:
            raise UserError(f'data_root is the address {data_root}; expected a local folder of images')
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
        """The images, relative to the folder or in its shards, and their labels, int (N,)."""
        if self.ann_file:
            paths = Paths.of(split_label(line)[0] for line in read_lines(self.ann_file) if line)
            return shards.listed(paths, self.ann_file) if shards else paths, None
        return shards or list_images(folder, extensions_of(self.pipeline.transforms)), None

    def no_images(self, path: str) -> FileNotFoundError:
        endings = ' '.join(extensions_of(self.pipeline.transforms))
        return FileNotFoundError(f'no images in {path!r}; expected files ending in {endings}')

    def _serialize_data(self) -> tuple[np.ndarray, np.ndarray]:
        if not isinstance(self.data_list, Samples):  # the dicts of a subclass
            return super()._serialize_data()
        self.serialize_data = False
        return np.empty(0, np.uint8), np.empty(0, np.int64)

    def __getitem__(self, key: SampleKey | int) -> dict:
        key = SampleKey(*key) if isinstance(key, tuple) else SampleKey(0, 0, int(key))
        index, broken = key.index, ''
        for attempt in range(1, SUBSTITUTES + 2):
            info = self.get_data_info(index)
            info['unreadable'] = broken
            seed_generators(key)
            try:
                return self.pipeline(info)
            except UnreadableImageError as error:
                if self.on_error == 'raise' or self.test_mode:
                    raise
                last, broken = error, broken or error.path
            index = sample_seed(key, attempt) % len(self)
        raise UnreadableImageError(f'{last}; {SUBSTITUTES} substitutes could not be read either')


def scale_decoding(transforms: Sequence) -> None:
    """Lets LoadImage decode large JPEGs no larger than the transform right behind it needs.

    That is one of our crops, which draws its box from the size in the file's header, or mmpretrain's ResizeEdge. All
    other transforms get full images.
    """
    if len(transforms) < 2 or not isinstance(load := transforms[0], LoadImage) or not load.scaled:
        return
    if isinstance(step := transforms[1], TwoViews):
        if not any(isinstance(other, MultiCrop) for other in transforms):  # which has boxes of its own
            load.choose_scale = step.choose_scale
    elif isinstance(step, ResizeEdge) and step.edge == 'short':
        load.choose_scale = partial(whole_scale, short_side=step.scale)


def whole_scale(results: dict, height: int, width: int, short_side: int) -> int:
    # for LoadImage and an image whose short side is resized; divides both sides, to keep their ratio
    return math.gcd(decoding_scale([min(height, width)], [short_side]), height, width)


def extensions_of(transforms: Sequence) -> tuple[str, ...]:
    """Endings of the files that a pipeline reads."""
    return BAND_EXTENSIONS if any(isinstance(transform, LoadBands) for transform in transforms) else EXTENSIONS


def read_lines(path: str) -> list[str]:
    """Lines of a file, stripped; bytes that are not UTF-8 are kept."""
    if not os.path.isfile(path):
        raise FileNotFoundError(f'no file {path!r}; expected a list with one entry a line')
    with open(path, encoding='utf-8-sig', errors='surrogateescape') as file:
        lines = [line.strip() for line in file]
    if number := next((number for number, line in enumerate(lines, start=1) if '\0' in line), None):
        raise UserError(f'{path}, line {number} holds a NUL byte; expected text in UTF-8')
    return lines


def quoted(name: str) -> str:
    """A name for a list with one name a line: a JSON string where spaces, line ends or other bytes need it."""
    plain = name.isprintable() and name == name.strip() and not name.startswith('"')
    return name if plain else json.dumps(name)


def unquoted(text: str) -> str:
    """The inverse of `quoted`."""
    try:
        name = os.fsdecode(os.fsencode(json.loads(text))) if text.startswith('"') else text
        return text if '\0' in name else name
    except ValueError:  # a name that begins with a quote
        return text


def split_label(line: str) -> tuple[str, int | None]:
    """Path and label of a line in a list."""
    path, label = match.groups() if (match := re.fullmatch(r'(.*\S)\s+(-?\d+)', line)) else (line, None)
    return unquoted(path), None if label is None else int(label)


@DATASETS.register_module()
class ImageFolder(UnlabeledImages):
    """Images for classification, `<class>/**/<image>` below a folder; no annotation file is needed.

    With LoadImage images are RGB, so the data preprocessor has `to_rgb=False`.

    Args:
        data_root: folder of the class folders; or of tar shards with their index, where the class is an image's first
            folder, or the number in the .cls file beside it.
        classes: names of the classes in the order of their labels, or a file with one name a line. None: the names of
            the folders, sorted. With `test_mode=True` a class may have no folder.
        kwargs: as UnlabeledImages. In `ann_file` a label follows each path, or the path begins with the class folder.
    """

    EXPECTED = 'a folder with one folder a class'

    def __init__(self, data_root: str = '', classes: str | Sequence[str] | None = None, **kwargs) -> None:
        if isinstance(classes, str):
            path, classes = classes, [unquoted(line) for line in read_lines(classes) if line]
            if not classes:
                raise UserError(f'no class names in {path!r}; expected one a line')
        if classes is not None and len(set(classes)) < len(classes):
            twice = next(name for name in classes if list(classes).count(name) > 1)
            raise UserError(f'classes holds {twice!r} twice; expected one name a class')
        metainfo = None if classes is None else dict(classes=tuple(classes))
        super().__init__(data_root, metainfo=metainfo, **kwargs)

    @property
    def CLASSES(self) -> tuple[str, ...]:  # noqa: N802
        # the name that mmpretrain's tools ask for
        return self._metainfo['classes']

    def get_cat_ids(self, index: int) -> list[int]:
        # what mmengine's ClassBalancedDataset asks for
        return [self.get_data_info(index)['gt_label']]

    def find_images(self, folder: str, shards: Shards | None) -> tuple[Sequence[str], np.ndarray]:
        if shards:
            folders = list(shards.classes)
        else:
            with os.scandir(folder) as entries:
                folders = sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith('.'))
        if 'classes' not in self._metainfo:
            if shards and not folders:  # numbered by .cls files
                folders = [str(number) for number in range(shards.label.max() + 1)]
            if not folders:
                raise FileNotFoundError(f'no class folders in {folder!r}; expected one folder a class, or classes=...')
            self._metainfo['classes'] = tuple(folders)
        labels = {name: label for label, name in enumerate(self.CLASSES)}
        if self.ann_file:
            paths, found = self._read_list(labels)
            return shards.listed(paths, self.ann_file) if shards else paths, found
        if shards:
            return self._select(shards, labels)
        names = self._present(folder, folders, labels)
        paths = list_images(folder, extensions_of(self.pipeline.transforms), names)
        found = np.array([labels[path.split('/', 1)[0]] for path in paths], np.int64)
        if empty := {labels[name] for name in names} - set(found.tolist()):
            raise self.no_images(os.path.join(folder, self.CLASSES[min(empty)]))
        return paths, found

    def _select(self, shards: Shards, labels: dict[str, int]) -> tuple[Shards, np.ndarray]:
        """The images of all classes in shards, class by class as in a folder, and their labels."""
        found = shards.label
        if shards.classes:
            self._present(shards.folder, list(shards.classes), labels)
            found = np.array([labels.get(name, -1) for name in shards.classes] + [-1])[found]  # -1 stays -1
        elif (wrong := (found < 0) | (found >= len(labels))).any():
            row = int(wrong.argmax())
            number = 'no .cls file' if found[row] < 0 else f'class {found[row]}'
            raise UserError(f'{shards[row]} has {number}; expected numbers from 0 to {len(labels) - 1}')
        rows = np.flatnonzero(found >= 0)
        rows = rows[np.argsort(found[rows], kind='stable')]
        return shards[rows], found[rows]

    def _present(self, folder: str, folders: list[str], labels: dict[str, int]) -> list[str]:
        """The classes that have a folder; warns of classes without one and of folders that are left out."""
        if left_out := [name for name in folders if name not in labels]:
            message = f'{folder}: {len(left_out)} folders are not in classes and left out ({first_names(left_out)})'
            print_log(message, logger='current', level=logging.WARNING)
        present = set(folders)
        for name in (name for name in labels if name not in present):
            message = f'no folder {os.path.join(folder, name)!r} for class {name!r}'
            if not self.test_mode:
                raise FileNotFoundError(f'{message}; expected one folder a class')
            print_log(f'{message}; the class is not tested', logger='current', level=logging.WARNING)
        names = [name for name in labels if name in present]
        if not names:
            raise FileNotFoundError(f'{folder!r} has none of the folders in classes ({first_names(self.CLASSES)})')
        return names

    def _read_list(self, labels: dict[str, int]) -> tuple[Paths, np.ndarray]:
        """The images of the list, and their labels: those in its lines, or else of their folders."""
        paths, found = [], []
        for number, line in enumerate(read_lines(self.ann_file), start=1):
            if not line:
                continue
            path, label = split_label(line)
            of_folder = labels.get(path.split('/')[0])
            label = of_folder if label is None else label
            where = f'{self.ann_file}, line {number}: {path!r}'
            if label is None:
                raise UserError(f'{where} has no label and lies in no class folder; expected a label after the path')
            if not 0 <= label < len(labels):
                last = len(labels) - 1
                raise UserError(f'{where} has label {label}; there are {last + 1} classes, expected 0 to {last}')
            if of_folder not in (None, label):
                expected = f'expected {of_folder}, or classes=... in the order of the labels'
                raise UserError(f'{where} has label {label}, which is class {self.CLASSES[label]!r}; {expected}')
            paths.append(path)
            found.append(label)
        return Paths.of(paths), np.array(found)

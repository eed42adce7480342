"""Images from a folder, tar shards or a list; another image replaces a broken one.

`tools/datasets/make_shards.py` writes the shards (tar archives) and an index of where each image's bytes are.
"""

import math
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from copy import copy
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
from beit_mm.files import quoted, size_of_file, unquoted
from beit_mm.registry import DATASETS

HEIF_EXTENSIONS = ('.heic', '.heif')  # read only where pillow-heif is installed
EXTENSIONS = tuple('.jpg .jpeg .jfif .mpo .png .apng .webp .gif .bmp .ppm .pgm .tif .tiff'.split())
EXTENSIONS += () if reading.HeifImageFile is None else HEIF_EXTENSIONS
BAND_EXTENSIONS = ('.tif', '.tiff', '.npy')  # for LoadBands
INDEX = 'shards.npz'
LITTER = ('.', '@eaDir', '#recycle', '$RECYCLE.BIN', '__MACOSX')  # beginnings of the names of folders that systems make
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
            part = copy(self)  # the text stays the same
            part.starts, part.ends = self.starts[index], self.ends[index]
            return part
        return os.fsdecode(self.text[self.starts[index] : self.ends[index]])


def list_images(folder: str, extensions: Sequence[str] = EXTENSIONS, subfolders: Sequence[str] = ('',)) -> Paths:
    """Lists the images below a folder, found by extension: sorted paths, relative to the folder.

    Hidden files and folders are skipped, links are followed, and each folder is searched once, `subfolders` in turn.
    """
    left_out_extensions = HEIF_EXTENSIONS if reading.HeifImageFile is None and '.jpg' in extensions else ()
    paths: list[str] = []
    left_out = 0
    for subfolder in subfolders:
        found = []
        for parent, names in walk(os.path.join(folder, subfolder)):
            below = os.path.relpath(parent, folder).replace(os.sep, '/')
            prefix = '' if below == '.' else f'{below}/'
            found += [prefix + name for name in names if name.lower().endswith(tuple(extensions))]
            left_out += sum(name.lower().endswith(left_out_extensions) for name in names)
        paths += sorted(found, key=os.fsencode)
    if left_out:
        images = '1 HEIC image is' if left_out == 1 else f'{left_out} HEIC images are'
        warn(f'{quoted(folder)}: {images} left out; to read HEIC, pip install pillow-heif')
    return Paths.of(paths)


def walk(folder: str) -> Iterator[tuple[str, list[str]]]:
    """Yields each folder from `folder` down once, with the names of its files, hidden ones left out."""
    seen = set()

    def fail(error: OSError) -> None:
        raise error  # by default os.walk ignores folders that it cannot list

    for parent, folders, files in os.walk(folder, onerror=fail, followlinks=True):
        status = os.stat(parent)
        identity = status.st_dev, status.st_ino
        if identity in seen:
            folders.clear()
            continue
        seen.add(identity)
        folders[:] = sorted(name for name in folders if not name.startswith(LITTER))
        yield parent, [name for name in files if not name.startswith('.')]


@dataclass
class Samples(Sequence[dict]):
    """The data_list of a dataset: a dict with `img_path` and, where labels exist, `gt_label` or `gt_score`."""

    folder: str
    paths: Paths  # relative to the folder, or in its archives
    labels: np.ndarray | None = None  # int (N,), in shards -1 for an image without one; or (N, classes) of 0 and 1
    archives: Paths | None = None  # file names of shards
    locations: np.ndarray | None = None  # int (N, 3): archive, first byte, number of bytes

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: Any) -> Any:
        labels = None if self.labels is None else self.labels[index]
        locations = None if self.locations is None else self.locations[index]
        path = self.paths[index]
        if isinstance(index, (slice, np.ndarray)):
            return replace(self, paths=path, labels=labels, locations=locations)
        if self.archives is None or locations is None:
            sample = dict(img_path=os.path.join(self.folder, path))
        else:
            shard, *byte_range = map(int, locations)
            archive = os.path.join(self.folder, self.archives[shard])
            sample = dict(img_path=MemberPath(f'{archive}/{path}', archive, *byte_range))
        if labels is None:
            return sample
        return dict(sample, gt_score=labels.tolist()) if labels.ndim else dict(sample, gt_label=int(labels))


def listed(paths: Paths, shards: Samples | None, folder: str, ann_file: str) -> Samples:
    """The images with these paths in shards or, if there are none, in a folder, in the order of the paths."""
    if not shards:
        return Samples(folder, paths)
    row_of = {path: row for row, path in enumerate(shards.paths)}
    if len(row_of) < len(shards):
        raise UserError(f'{folder}: two images share a name; ann_file cannot tell which one it lists')
    if missing := [quoted(path) for path in paths if path not in row_of]:
        known = quoted(shards.paths[0])
        raise UserError(f'{ann_file} lists {preview(missing)}; expected images in the shards {folder}, such as {known}')
    return shards[np.array([row_of[path] for path in paths], np.int64)]


def read_shards(folder: str) -> tuple[Samples | None, list[str]]:
    """Reads the index of a folder of shards: images, and class names (none if .cls files hold class numbers)."""
    path = os.path.join(folder, INDEX)
    if not os.path.isfile(path):
        return None, []
    command = f'python tools/datasets/make_shards.py --index-only {folder}'
    try:
        with np.load(path, allow_pickle=False) as content:
            archives, classes, names = (Paths(content[name].tobytes()) for name in ('shards', 'classes', 'names'))
            locations = np.stack([content[name] for name in ('shard', 'offset', 'length')], axis=1)
            labels, sizes = content['label'], content['sizes'].tolist()
    except Exception as error:  # numpy and zipfile can raise almost anything on damaged bytes
        raise UserError(f'{path} is not an index of shards ({type(error).__name__}); rebuild it: {command}') from error
    for name, size in zip(archives, sizes, strict=True):
        archive = os.path.join(folder, name)
        if not os.path.isfile(archive) or os.path.getsize(archive) != size:
            raise UserError(f'{quoted(archive)} is missing or does not match {INDEX}; copy it again or run {command}')
    return Samples(folder, names, labels, archives, locations), list(classes)


@DATASETS.register_module()
class UnlabeledImages(BaseDataset):
    """Images for pretraining. The random numbers of a sample depend only on its SampleKey (see datasets.samplers).

    A plain number always gives the same views. So a training loop without a Runner needs DataLoader(dataset,
    sampler=SeededSampler(dataset)), and set_epoch of this sampler before each epoch.

    Args:
        data_root: folder of images, searched to any depth, or folder of tar shards with their index.
        ann_file: file, relative to `data_root`, that lists images: one path per line, `quoted`, relative to
            `data_prefix`; a label after the path is ignored. '': all images of the folder, sorted.
        data_prefix: folder of the images relative to `data_root`, as in mmpretrain, e.g. `dict(img_path='train')`.
        on_error: 'raise' (or 'error') ends the run at an unreadable image. 'skip' substitutes another image, always
            the same one for the same key, and names the file in `unreadable`. `test_mode=True` always raises.
        kwargs: as in mmengine's BaseDataset.
    """

    takes_keys = True  # samplers.read_samples passes SampleKeys instead of numbers

    def __init__(
        self, data_root: str = '', ann_file: str = '', data_prefix: str | dict = '', on_error: str = 'raise', **kwargs
    ) -> None:
        check_choice('on_error', on_error, ('raise', 'error', 'skip'))
        self.on_error = 'raise' if on_error == 'error' else on_error  # configs up to 0.2.0 say 'error'
        data_prefix = data_prefix if isinstance(data_prefix, dict) else dict(img_path=data_prefix)
        if kwargs.get('filter_cfg'):
            raise UserError('filter_cfg has no effect on these datasets; list the images to take in ann_file')
        kwargs['serialize_data'] = False  # Samples are compact already
        if '://' in data_root:
            raise UserError(f'data_root is {data_root}; expected a local folder of images')
        super().__init__(ann_file=ann_file, data_root=data_root, data_prefix=data_prefix, **kwargs)
        scale_decoding(self.pipeline.transforms)

    def load_data_list(self) -> Samples:
        folder = self.data_prefix['img_path']
        if not os.path.isdir(folder):  # otherwise the images of a list would fail one by one
            raise FileNotFoundError(f'no folder {folder!r}; expected a folder of images')
        samples = self.find_images(folder)
        if not samples:
            raise self.no_images(self.ann_file or folder)
        return samples

    @property
    def extensions(self) -> tuple[str, ...]:
        return extensions_of(self.pipeline.transforms)

    def find_images(self, folder: str) -> Samples:
        shards, _ = read_shards(folder)
        if shards:
            shards = replace(shards, labels=None)
        if not self.ann_file:
            return shards or Samples(folder, list_images(folder, self.extensions))
        paths = Paths.of(path for _, path, _ in read_list(self.ann_file))
        return listed(paths, shards, folder, self.ann_file)

    def no_images(self, path: str) -> FileNotFoundError:
        return FileNotFoundError(f'no images in {path!r}; expected files ending in {" ".join(self.extensions)}')

    def __getitems__(self, keys: Sequence[SampleKey | int]) -> list[dict]:
        """Reads a batch for torch's DataLoader; a SeededSampler puts `read_samples` in place of this."""
        by_numbers = not all(isinstance(key, tuple) for key in keys)
        if by_numbers and not self.test_mode and reading.warns_here():
            warn(
                f'{type(self).__name__} is indexed by plain integers, so an image has the same views in all epochs; '
                'to train, give the DataLoader a SeededSampler and call its set_epoch; otherwise set test_mode=True'
            )
        return [self[key] for key in keys]

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
    """Lets LoadImage decode large JPEGs at the scale that the next transform, a TwoViews or ResizeEdge, needs."""
    load, step = [*transforms, None, None][:2]
    if not isinstance(load, LoadImage) or not load.scaled:
        return
    if isinstance(step, TwoViews):
        if not any(isinstance(other, MultiCrop) for other in transforms):  # MultiCrop draws its own boxes
            load.choose_scale = step.choose_scale
    elif isinstance(step, ResizeEdge) and step.edge == 'short':
        load.choose_scale = partial(whole_scale, short_side=step.scale)


def whole_scale(results: dict, height: int, width: int, short_side: int) -> int:
    # must divide both sides, to keep their ratio
    return math.gcd(decoding_scale([min(height, width)], [short_side]), height, width)


def extensions_of(transforms: Sequence) -> tuple[str, ...]:
    return BAND_EXTENSIONS if any(isinstance(transform, LoadBands) for transform in transforms) else EXTENSIONS


def read_lines(path: str) -> list[str]:
    """Reads the lines of a file, stripped; bytes that are not UTF-8 are kept."""
    size_of_file(path)
    with open(path, encoding='utf-8-sig', errors='surrogateescape') as file:
        lines = [line.strip() for line in file]
    if any('\0' in line for line in lines):  # UTF-16, as some editors write it
        raise UserError(f'{path} holds NUL bytes; expected text in UTF-8')
    return lines


def read_list(path: str) -> Iterator[tuple[int, str, int | None]]:
    """Yields line number, path and label (or None) for each line of a list of images that is not empty."""
    for number, line in enumerate(read_lines(path), start=1):
        if match := re.fullmatch(r'(.*\S)\s+(-?\d+)', line):
            yield number, unquoted(match[1]), int(match[2])
        elif line:
            yield number, unquoted(line), None


@DATASETS.register_module()
class ImageFolder(UnlabeledImages):
    """Images for classification, `<class>/**/<image>` below a folder.

    LoadImage gives RGB, so set `to_rgb=False` in the data preprocessor.

    Args:
        data_root: folder of the class folders, or folder of tar shards with their index.
        classes: class names in the order of their labels, or a file with one name per line. None: the names of
            the folders, sorted. With `test_mode=True` a class may have no folder.
        check_folders: whether a label in `ann_file` must be the one of the class folder, if both are given.
        kwargs: as UnlabeledImages. In `ann_file` a label follows each path, or the path begins with the class folder.
    """

    def __init__(
        self, data_root: str = '', classes: str | Sequence[str] | None = None, check_folders: bool = True, **kwargs
    ) -> None:
        self.check_folders = check_folders
        metainfo = dict(kwargs.pop('metainfo', None) or {})  # where mmpretrain's datasets take the names
        classes = metainfo.get('classes', classes)
        if isinstance(classes, str):
            classes = [unquoted(line) for line in read_lines(classes) if line]
        if classes is not None:
            metainfo['classes'] = tuple(classes)
        super().__init__(data_root, metainfo=metainfo, **kwargs)

    @property
    def CLASSES(self) -> tuple[str, ...]:  # noqa: N802
        # mmpretrain's tools use this name
        return self._metainfo['classes']

    def get_cat_ids(self, idx: int) -> list[int]:
        """Classes in an image, for mmengine's ClassBalancedDataset."""
        return [self.get_data_info(idx)['gt_label']]

    def find_images(self, folder: str) -> Samples:
        shards, folders = read_shards(folder)
        if not shards:
            with os.scandir(folder) as entries:
                folders = sorted(
                    entry.name for entry in entries if entry.is_dir() and not entry.name.startswith(LITTER)
                )
        if 'classes' not in self._metainfo:
            # .cls files hold class numbers
            names = range(shards.labels.max() + 1) if shards and not folders else folders
            if not names:
                raise FileNotFoundError(f'no class folders in {folder!r}; add one for each class, or set classes=...')
            self._metainfo['classes'] = tuple(map(str, names))
        label_of = {name: label for label, name in enumerate(self.CLASSES)}
        if self.ann_file:
            paths, labels = self._read_list(label_of)
            return replace(listed(paths, shards, folder, self.ann_file), labels=labels)
        if shards:
            return self._images_in_shards(shards, folders, label_of)
        return self._images_in_folders(folder, folders, label_of)

    def _images_in_folders(self, folder: str, folders: list[str], label_of: dict[str, int]) -> Samples:
        """Finds the images of all classes in their folders."""
        names = self._classes_with_folders(folder, folders, label_of)
        paths = list_images(folder, self.extensions, names)
        labels = np.array([label_of[path.split('/', 1)[0]] for path in paths], np.int64)
        if empty := {label_of[name] for name in names} - set(labels.tolist()):
            raise self.no_images(os.path.join(folder, self.CLASSES[min(empty)]))
        return Samples(folder, paths, labels)

    def _images_in_shards(self, shards: Samples, folders: list[str], label_of: dict[str, int]) -> Samples:
        """Selects the images of all classes, class by class as in a folder."""
        labels = np.asarray(shards.labels)
        if folders:
            self._classes_with_folders(shards.folder, folders, label_of)
            labels = np.array([label_of.get(name, -1) for name in folders] + [-1])[labels]  # -1 stays -1
        elif (wrong := (labels < 0) | (labels >= len(label_of))).any():
            row = int(wrong.argmax())
            raise UserError(
                f'{shards[row]["img_path"]} has class {labels[row]} in its .cls file (-1: no file); '
                f'expected numbers from 0 to {len(label_of) - 1}'
            )
        rows = np.flatnonzero(labels >= 0)
        rows = rows[np.argsort(labels[rows], kind='stable')]
        return replace(shards[rows], labels=labels[rows])

    def _classes_with_folders(self, folder: str, folders: list[str], label_of: dict[str, int]) -> list[str]:
        """Lists the classes that have a folder; warns about missing folders and about other folders."""
        if left_out := [name for name in folders if name not in label_of]:
            warn(f'{folder}: {len(left_out)} folders are skipped: not in classes ({preview(left_out)})')
        present = set(folders)
        names = [name for name in label_of if name in present]
        if missing := [name for name in label_of if name not in present]:
            message = f'{folder!r} has no folder for {len(missing)} classes ({preview(missing)})'
            if not names or not self.test_mode:
                raise FileNotFoundError(f'{message}; expected one for each class')
            warn(f'{message}, which are not tested')
        return names

    def _read_list(self, label_of: dict[str, int]) -> tuple[Paths, np.ndarray]:
        """Reads paths and labels of `ann_file`; where a line has no label, the class folder gives it."""
        paths, labels = [], []
        for number, path, label in read_list(self.ann_file):
            folder_label = label_of.get(path.split('/')[0])
            label = folder_label if label is None else label
            if label is None or not 0 <= label < len(label_of):
                raise UserError(
                    f'{self.ann_file}, line {number}: {path!r} has label {label}; '
                    f'expected a label from 0 to {len(label_of) - 1} after the path'
                )
            if self.check_folders and folder_label not in (None, label):
                raise UserError(
                    f'{self.ann_file}, line {number}: {path!r} has label {label}, which is class '
                    f'{self.CLASSES[label]!r}; expected {folder_label}, or classes=... in the order of the labels'
                )
            paths.append(path)
            labels.append(label)
        return Paths.of(paths), np.array(labels)


@DATASETS.register_module()
class MultiLabelFolder(ImageFolder):
    """An ImageFolder of images with any number of labels: in `ann_file` a digit for each class, 0 or 1, follows."""

    def get_cat_ids(self, idx: int) -> list[int]:
        return np.flatnonzero(self.get_data_info(idx)['gt_score']).tolist()

    def _read_list(self, label_of: dict[str, int]) -> tuple[Paths, np.ndarray]:
        paths, rows = [], []
        for number, path, label in read_list(self.ann_file):
            digits = str(label).zfill(len(label_of))  # it was read as a number
            if len(digits) > len(label_of) or {*digits} - {'0', '1'}:
                raise UserError(
                    f'{self.ann_file}, line {number}: {path!r} has label {label}; expected after the path '
                    f'{len(label_of)} digits, 0 or 1 for each class'
                )
            paths.append(path)
            rows.append([*map(int, digits)])
        return Paths.of(paths), np.array(rows, np.uint8).reshape(-1, len(label_of))

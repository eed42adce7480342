"""Images and label maps in two folders with the same file names."""

import colorsys
import json
import os
import re
from collections import Counter
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import numpy as np
from mmcv.transforms import BaseTransform
from PIL import Image
from torch.utils.data import Dataset

from beit_mm.datasets.image_folder import BAND_EXTENSIONS, EXTENSIONS, Samples, UnlabeledImages, list_images, read_lines
from beit_mm.datasets.nodata import NODATA_TAG, is_missing, tag_value
from beit_mm.datasets.reading import (
    MAX_PIXELS,
    UnreadableImageError,
    open_image,
    orientation,
    read_bands,
    turned,
    unreadable,
    warns_here,
)
from beit_mm.errors import UserError, warn
from beit_mm.files import quoted, unquoted
from beit_mm.registry import DATASETS, TRANSFORMS

MAPS = (*EXTENSIONS, '.npy')  # endings of label maps
IGNORE_INDEX = 255  # label of pixels that do not count, as in mmseg
NO_DATA = np.int64(-(2**31))  # in what `read_labels` returns: NaN, or the value in the map's GDAL_NODATA tag
# Pillow's modes
NUMBERS = ('1', 'L', 'P', 'I', 'I;16', 'I;16B', 'F')
COLOURS = ('1', 'L', 'LA', 'P', 'PA', 'RGB', 'RGBA')
# Words for splits, and for what folders hold, in their names: in lower case, without spaces, '_' and '-'
SPLITS = {
    '': '',
    'train': 'train training trainset trainval segtrain learn',
    'val': 'val validation valid dev segval',
    'test': 'test testing testset segtest holdout',
}
KINDS = {
    '': '',
    'images': 'images image imgs img imgdir jpegimages leftimg8bit photos photo inputs input',
    'maps': 'annotations annotation annots annot anndir masks mask labels label labelmaps gt gtfine groundtruth target '
    'targets segmentations segmentation segmentationclass',
}
ROLES = {
    word: (split, kind)
    for (split, splits), (kind, kinds) in product(SPLITS.items(), KINDS.items())
    for first, second in product(splits.split(' '), kinds.split(' '))
    for word in (first + second, second + first)
}
NUM_NAMED = 8  # most colours that a message names
COLOURED_NAME = re.compile(r'(.*\S)\s+(\d{1,3})\s+(\d{1,3})\s+(\d{1,3})')  # a line of classes.txt: `name R G B`
# Okabe and Ito's colours without black; each further one differs most from all before it, also to the red-green blind
SEEN_BY_ALL = (
    (230, 159, 0), (86, 180, 233), (0, 158, 115), (240, 228, 66), (0, 114, 178), (213, 94, 0), (204, 121, 167),
    (0, 0, 255), (204, 255, 204), (102, 102, 255), (102, 51, 0), (102, 255, 255), (0, 51, 153), (102, 51, 51),
    (102, 51, 102), (204, 255, 153), (102, 153, 255), (255, 51, 102), (0, 51, 204), (255, 153, 102),
)  # fmt: skip
WARNED: set[int] = set()  # colours that a message has named


@DATASETS.register_module()
class SegmentationFolder(UnlabeledImages):
    """Images and label maps with the same names, `images/**/x.jpg` and `annotations/**/x.png` below `data_root`.

    LoadImage gives RGB, so set `bgr_to_rgb=False` in the data preprocessor.

    Args:
        data_root: parent of the two folders.
        classes: class names in the order of their labels; or a file, relative to `data_root` or to the working
            directory, with one name per line or a table with a column `Name`, as ADE20K has; or a registered dataset
            (mmseg.ADE20KDataset). If each line of the file is `name R G B`, label maps hold these colours; pixels of
            other colours are ignored.
        reduce_zero_label: 0 in the label maps means unlabelled, and 1 is the first class.
        data_prefix: `dict(img_path=..., seg_map_path=...)` relative to `data_root`; without `seg_map_path` (or None)
            the images have no label maps.
        img_suffix: end of the images' names that `seg_map_suffix` replaces; None: the extension.
        seg_map_suffix: replaces it in the name of the label map, e.g. '_mask.png'.
        label_values: number of each class in the label maps, if not its index in `classes`; other numbers are ignored.
        label_map: class of each of `label_values`, where several of them are one class.
        nearest_value: numbers from 0 that no class has are read as the nearest of `label_values`: soft borders.
        turn_maps: label maps are as the image is stored, and are turned by the image's EXIF orientation.
        ann_file, on_error, kwargs: as in UnlabeledImages; an unreadable label map is treated as an unreadable image.
    """

    def __init__(
        self,
        data_root: str = '',
        classes: str | Sequence[str] = (),
        reduce_zero_label: bool = False,
        data_prefix: str | dict = '',
        img_suffix: str | None = None,
        seg_map_suffix: str = '.png',
        label_values: Sequence[int] | None = None,
        label_map: Sequence[int] | None = None,
        nearest_value: bool = False,
        turn_maps: bool = False,
        **kwargs,
    ) -> None:
        given = kwargs.pop('metainfo', None) or {}  # where mmseg's datasets take names and colours
        classes = given.get('classes', classes)
        names, palette, colours = tuple(classes), None, None
        if isinstance(classes, str):
            path = os.path.join(data_root, classes)
            source = path if os.path.isfile(path) else classes
            names, palette = named_classes(source)
            colours = palette if os.path.isfile(source) else None  # label maps of a registered dataset hold numbers
        if not 0 < len(names) < IGNORE_INDEX:
            raise UserError(f'classes has {len(names)} names; expected 1 to {IGNORE_INDEX - 1}')
        if [colours is not None, label_values is not None, reduce_zero_label].count(True) > 1:
            raise UserError('expected only one of colours in classes, label_values and reduce_zero_label=True')
        if label_values is not None and len({*label_values}) != len(label_map or names):
            raise UserError(f'label_values is {label_values}; expected {len(label_map or names)} different numbers')
        self.label_map = label_map and dict(enumerate(label_map))
        self.label_values = label_values if colours is None else colour_numbers(colours).tolist()
        self.by_colour = colours is not None
        self.img_suffix, self.seg_map_suffix = img_suffix, seg_map_suffix
        self.reading = dict(nearest_value=nearest_value, turn_maps=turn_maps)
        if isinstance(data_prefix, dict):  # None is how --cfg-options removes a key
            data_prefix = {name: folder for name, folder in data_prefix.items() if folder is not None}
        palette = given.get('palette') or palette or distinct_colours(len(names))
        metainfo = dict(given, classes=names, palette=palette, reduce_zero_label=reduce_zero_label)
        super().__init__(data_root, data_prefix=data_prefix, metainfo=metainfo, **kwargs)

    def load_data_list(self) -> Samples:
        if any(type(step).__name__ == 'LoadAnnotations' for step in self.pipeline.transforms):
            raise UserError("LoadAnnotations cannot read a SegmentationFolder; expected type='beit_mm.LoadAnnotation'")
        samples = super().load_data_list()
        if self.data_prefix.get('seg_map_path') is not None:
            self._check_label_maps([sample['img_path'] for sample in samples])
        return samples

    def _check_label_maps(self, images: list[str]) -> None:
        """Refuses images without a label map; warns about label maps without an image."""
        folder = self.data_prefix['seg_map_path']
        existing = {os.path.join(folder, name) for name in list_images(folder, MAPS)}
        expected = [self._label_map(image) for image in images]
        missing = [pair for pair in zip(expected, images, strict=True) if pair[0] not in existing]
        if missing:
            number, (path, image) = len(missing), missing[0]
            message = f'no label map {path!r} for {image!r}; {number} of {len(images)} images have none'
            if self.on_error == 'raise' or number == len(images):
                raise FileNotFoundError(message)
            warn(f'{message}, and count as unreadable')
        unused = [path for path in existing.difference(expected) if path.endswith(self.seg_map_suffix)]
        if unused and not self.ann_file:  # a list leaves some out
            folder = self.data_prefix['img_path']
            warn(f'{len(unused)} label maps have no image in {folder} and are left out, such as {min(unused)}')

    def get_data_info(self, idx: int) -> dict:
        sample = dict(super().get_data_info(idx), label_values=self.label_values, by_colour=self.by_colour)
        sample.update(
            self.reading,
            reduce_zero_label=self._metainfo['reduce_zero_label'],
            num_classes=len(self.label_map or self._metainfo['classes']),
            label_map=self.label_map,
        )
        if self.data_prefix.get('seg_map_path') is not None:
            sample['seg_map_path'] = self._label_map(sample['img_path'])
        return sample

    def _label_map(self, image: str) -> str:
        name = os.path.relpath(image, self.data_prefix['img_path'])
        folder = self.data_prefix['seg_map_path']
        return os.path.join(folder, label_map_name(name, self.img_suffix, self.seg_map_suffix))


def label_map_name(image: str, img_suffix: str | None, seg_map_suffix: str) -> str:
    """The name of an image's label map, see SegmentationFolder."""
    stem = os.path.splitext(image)[0] if img_suffix is None else image.removesuffix(img_suffix)
    return stem + seg_map_suffix


def role_of(name: str) -> tuple[str, str]:
    """What a folder's name says: its split (a key of SPLITS) and what it holds (of KINDS), such as `train_masks`."""
    return ROLES.get(re.sub(r'[\W_]|(png|jpg|20\d\d)$', '', name.lower()), ('', ''))


def check_images_alone(folder: Path) -> None:
    """Refuses a folder that has label maps beside its images, for callers that read each file as an image."""
    for part in (folder, *folder.glob('*/'), *folder.glob('*/*/')):
        roles = {role_of(path.name): path for path in part.glob('*') if path.is_dir()}
        for split in SPLITS:
            maps = roles.get((split, 'maps'))
            has_images = (split, 'images') in roles or (split and (split, '') in roles)
            if maps and has_images and list_images(str(maps)):
                raise UserError(
                    f'{quoted(str(maps))} has label maps, which would count as images; give the folder of the images'
                )


def named_classes(source: str) -> tuple[tuple[str, ...], list | None]:
    """Class names, and their colours if there are any, from a file or a registered dataset."""
    if os.path.isfile(source):
        return read_classes(source)
    dataset = DATASETS.get(source)
    if dataset is None or 'classes' not in dataset.METAINFO:
        raise UserError(f'classes is {source!r}; expected a file or a registered dataset that has classes')
    return tuple(dataset.METAINFO['classes']), dataset.METAINFO.get('palette')


def read_classes(path: str) -> tuple[tuple[str, ...], list[list[int]] | None]:
    """Class names in a file, and their colours if each line is `name R G B`."""
    lines = names_in_table([line for line in read_lines(path) if line], path)
    if not lines:
        raise UserError(f'{path} is empty; expected the name of a class in each line')
    matches = [match for line in lines if (match := COLOURED_NAME.fullmatch(line))]
    if not matches:
        return tuple(map(unquoted, lines)), None
    colours = [[int(level) for level in match.groups()[1:]] for match in matches]
    if len({*map(tuple, colours)}) < len(lines) or max(map(max, colours)) > 255:
        raise UserError(f'{path}: expected `name R G B` in each line, numbers from 0 to 255, each colour once')
    return tuple(unquoted(match[1]) for match in matches), colours


def names_in_table(lines: list[str], path: str) -> list[str]:
    """The column `Name` of a table with tabs, as ADE20K has it; lines without such a header stay as they are."""
    header, *rows = [line.split('\t') for line in lines] or [[]]
    if 'Name' not in header:
        return lines
    column = header.index('Name')
    if any(len(row) <= column for row in rows):
        raise UserError(f'{path}: expected {len(header)} columns, separated by tabs, in each line')
    return [row[column] for row in rows]


def class_line(name: str) -> str:
    """The name of a class as a line of classes.txt: also quoted if its end could be read as a colour."""
    return json.dumps(name) if COLOURED_NAME.fullmatch(name) else quoted(name)


def distinct_colours(number: int) -> list[list[int]]:
    """Colours [red, green, blue], 0-255, always the same; the first 20 differ for the red-green blind too."""
    golden_ratio = (5**0.5 - 1) / 2  # each step by this fraction of the colour circle lands in one of the largest gaps
    colours = [[*colour] for colour in SEEN_BY_ALL[:number]]
    for index in range(len(colours), number):
        saturation, value = (1, 0.5)[index // 3 % 2], (1, 0.75, 0.5)[index % 3]
        colour = colorsys.hsv_to_rgb(index * golden_ratio % 1, saturation, value)
        colours.append([round(255 * part) for part in colour])
    return colours


@TRANSFORMS.register_module()
class LoadAnnotation(BaseTransform):
    """Reads `seg_map_path` into `gt_seg_map`: uint8 (H, W), labels from 0, 255 where a pixel is ignored.

    Comes after LoadImage; a sample without `seg_map_path` stays unchanged. With `reduce_zero_label`, 0 in the file
    becomes 255, and 1 is subtracted from the other labels. Negative numbers, no data in the map, and pixels where no
    band of the image has data (LoadBands) become 255.
    """

    def transform(self, results: dict) -> dict:
        path = results.get('seg_map_path')
        if path is None:
            return results
        by_colour, reduced = results.get('by_colour', False), results.get('reduce_zero_label', False)
        height, width = results['ori_shape']
        # a higher max_pixels of LoadImage applies to the label map too
        max_pixels = max(MAX_PIXELS, height * width)
        turn = stored_orientation(results['img_path'], max_pixels) if results.get('turn_maps') else 1
        numbers = labels = read_labels(path, by_colour, max_pixels, turn)
        if labels.shape != (height, width):
            raise UserError(
                f'{path} is {labels.shape[1]} x {labels.shape[0]} pixels, its image {results["img_path"]} is '
                f'{width} x {height} after its EXIF orientation, if any; expected the same size'
            )
        if values := results.get('label_values'):
            labels = index_of(numbers, values, results.get('nearest_value', False))
            if by_colour:
                warn_unknown_colours(path, numbers[labels == IGNORE_INDEX])
        labels = np.where(labels < 0, IGNORE_INDEX, labels)
        check_range(path, labels, results.get('num_classes'), reduced)
        table = np.arange(256, dtype=np.uint8)
        if reduced:
            table[1:IGNORE_INDEX] -= 1
            table[0] = IGNORE_INDEX
        if label_map := results.get('label_map'):  # of mmseg's datasets whose metainfo chooses among their classes
            table = np.array([label_map.get(label, label) for label in table.tolist()], np.uint8)
        results['gt_seg_map'] = table[labels]
        if 'nodata' in results:
            results['gt_seg_map'][results['nodata']] = IGNORE_INDEX
        results['seg_fields'] = ['gt_seg_map']
        return results


def index_of(numbers: np.ndarray, values: Sequence[int], nearest: bool = False) -> np.ndarray:
    """Index in `values` of each number, uint8; IGNORE_INDEX for other numbers, or of the `nearest` value."""
    if nearest:
        table = np.abs(np.arange(256)[:, None] - values).argmin(axis=1)
        return np.where(numbers < 0, IGNORE_INDEX, table[numbers.clip(0, 255)]).astype(np.uint8)
    order = np.argsort(values)
    slots = np.searchsorted(np.sort(values), numbers).clip(max=len(order) - 1)
    return np.where(np.sort(values)[slots] == numbers, order[slots], IGNORE_INDEX).astype(np.uint8)


def colour_numbers(colours: np.ndarray | Sequence[Sequence[int]]) -> np.ndarray:
    """Encodes each colour (..., 3) as one number."""
    return np.asarray(colours, np.int32) @ np.array([1 << 16, 1 << 8, 1], np.int32)


def count_colours(counts: Counter[int]) -> str:
    """Lists the most frequent `colour_numbers` as R G B, with their counts."""
    WARNED.update(counts)
    named = [f'{n >> 16} {n >> 8 & 255} {n & 255} ({count:,} pixels)' for n, count in counts.most_common(NUM_NAMED)]
    return ', '.join(named) + (f' and {len(counts) - NUM_NAMED:,} more' if len(counts) > NUM_NAMED else '')


def warn_unknown_colours(path: str, numbers: np.ndarray) -> None:
    """Warns once about each colour that no class has, until NUM_NAMED of them are known."""
    if len(WARNED) >= NUM_NAMED or not warns_here():
        return
    if new := Counter(numbers[~np.isin(numbers, [*WARNED])].tolist()):
        warn(f'{path}: colours that no class has are ignored: {count_colours(new)}')


def read_labels(path: str, by_colour: bool = False, max_pixels: int = MAX_PIXELS, turn: int = 1) -> np.ndarray:
    """Reads the integers (H, W) of a gray or palette image, or its `colour_numbers`; `turn` is an EXIF orientation."""
    try:
        with open_image(path, max_pixels) as opened, unreadable(path, Exception):
            opened.load()
            has_pages = has_other_pages(opened)
            image, nodata = opened, tag_value(opened.tag_v2.get(NODATA_TAG)) if opened.format == 'TIFF' else []
    except UnreadableImageError:  # Pillow reads no TIFF of 64 bits, and no .npy
        values = read_bands(path, max_pixels) if path.lower().endswith(BAND_EXTENSIONS) else np.empty((0, 0, 0))
        if values.shape[2] != 1:
            raise
        image, nodata = Image.fromarray(np.ma.filled(values[..., 0].astype(np.float32), np.nan)), []
        has_pages = False
    if has_pages:
        raise UserError(f'{path} has several pages; expected one label map in a file')
    check_transparency(path, image, by_colour)
    image = turned(image, turn)
    if by_colour and image.mode in COLOURS:
        return colour_numbers(np.asarray(image.convert('RGB')))
    if not by_colour and image.mode in ('LA', 'RGB', 'RGBA'):
        pixels = np.asarray(image.convert('RGB'))
        if (pixels == pixels[..., :1]).all():
            return pixels[..., 0]
        colours = Counter(colour_numbers(pixels).ravel().tolist())
        raise UserError(
            f'{path} holds colours instead of numbers: {count_colours(colours)}; '
            'name the colours in classes.txt, `name R G B` in each line, e.g. `road 128 64 128`'
        )
    if by_colour or image.mode not in NUMBERS:
        raise UserError(f'{path} has mode {image.mode}; expected a gray or palette PNG, or colours of 8 bits')
    values = np.asarray(image)
    missing = is_missing(values, nodata)
    values = np.where(missing, NO_DATA, values.clip(NO_DATA, -NO_DATA)) if image.mode == 'F' else values
    numbers = values.astype(np.uint8 if image.mode in ('1', 'L', 'P') else np.int64)
    if (numbers != values).any():
        raise UserError(f'{path} holds {values[numbers != values][0]:g}; expected whole numbers')
    return np.where(missing, NO_DATA, numbers) if missing.any() else numbers


def has_other_pages(image: Image.Image) -> bool:
    """Whether a file that is open has a second page which is neither a smaller copy of the first nor its mask."""
    if getattr(image, 'n_frames', 1) == 1:
        return False
    size = image.size
    image.seek(1)
    kind = image.tag_v2.get(254, 0) if image.format == 'TIFF' else 0  # NewSubfileType: 1 a copy, 4 a mask, as GDAL has
    is_another = image.size == size and kind not in (1, 4, 5)
    image.seek(0)
    image.load()
    return is_another


def check_transparency(path: str, image: Image.Image, by_colour: bool) -> None:
    """Refuses a map whose transparent pixels would count as a class: they are not black, or everything is black."""
    if image.mode not in ('LA', 'RGBA') or image.getchannel('A').getextrema()[0] > 0:
        return
    is_opaque, values = np.asarray(image)[..., -1] > 0, colour_numbers(image.convert('RGB'))
    shown, hidden = values[is_opaque], np.unique(values[~is_opaque])
    if by_colour:  # a colour that only transparent pixels have is the user's choice
        hidden = hidden[np.isin(hidden, shown)]
    if hidden.any() or (hidden.size and not shown.any()):
        raise UserError(f'{path} has transparent pixels that would count as a class; save it without transparency')


def stored_orientation(path: str, max_pixels: int) -> int:
    """EXIF orientation of an image file, 1 to 8."""
    with unreadable(path, Exception), open_image(path, max_pixels) as image:
        return orientation(image)


def check_range(path: str, labels: np.ndarray, num_classes: int | None, reduced: bool) -> None:
    """Refuses labels, before `reduce_zero_label` is applied, that belong to no class."""
    lowest = int(reduced)  # 0 is accepted there too
    highest = IGNORE_INDEX - 1 if num_classes is None else num_classes - 1 + reduced
    wrong = labels[(labels != IGNORE_INDEX) & ((labels < 0) | (labels > highest))]
    if wrong.size:
        raise UserError(
            f'{path} holds label {wrong.max()}; expected {lowest} to {highest} or, for ignored pixels, {IGNORE_INDEX} '
            '(reduce_zero_label=True: 0 for unlabelled pixels too, classes from 1)'
        )


class Readable(Dataset):
    """Samples of a data set; None where an image cannot be read and the data set has `on_error='skip'`."""

    def __init__(self, dataset: SegmentationFolder):
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> dict | None:
        try:
            return self.dataset[index]
        except UnreadableImageError:
            if self.dataset.on_error == 'raise':
                raise
            return None

"""Datasets of images with a label for each pixel, in two folders of the same names, and the loading of labels."""

import colorsys
import os
import reprlib
from collections.abc import Sequence

import numpy as np
from mmcv.transforms import BaseTransform

from beit_mm.datasets.image_folder import UnlabeledImages, list_images, read_lines, unquoted
from beit_mm.datasets.reading import SIDEWAYS, open_image, orientation, unreadable
from beit_mm.registry import DATASETS, TRANSFORMS
from beit_mm.terminal import UserError

IGNORE_INDEX = 255  # label of pixels that count for nothing, mmseg's too


@DATASETS.register_module()
class SegmentationFolder(UnlabeledImages):
    """Images and annotations of the same names, `images/**/x.jpg` and `annotations/**/x.png` below `data_root`.

    With LoadImage images are RGB, so the data preprocessor has `bgr_to_rgb=False`.

    Args:
        data_root: folder of the two folders.
        classes: names of the classes in the order of their labels. Or a file, below `data_root` or not: one name a
            line, or a table with a column `Name`, as ADE20K's. Or a registered dataset, as 'mmseg.ADE20KDataset'.
        reduce_zero_label: 0 in the annotations marks unlabelled pixels, and 1 is the first class.
        data_prefix: `dict(img_path=..., seg_map_path=...)` relative to `data_root`; without `seg_map_path`, or with
            None, the images have no annotations, as those for a test server.
        seg_map_suffix: what stands in the name of an annotation for the ending of its image, as '_mask.png'.
        label_values: the number of each class in the annotations, instead of its place in `classes`; pixels with other
            numbers are ignored.
        ann_file, on_error, kwargs: as UnlabeledImages; an unreadable annotation counts as its image.
    """

    def __init__(
        self,
        data_root: str = '',
        classes: str | Sequence[str] = (),
        reduce_zero_label: bool = False,
        data_prefix: str | dict = '',
        seg_map_suffix: str = '.png',
        label_values: Sequence[int] | None = None,
        **kwargs,
    ) -> None:
        names, palette = tuple(classes), None
        if isinstance(classes, str):
            path = os.path.join(data_root, classes)
            names, palette = named_classes(path if os.path.isfile(path) else classes)
        if not 0 < len(names) < IGNORE_INDEX:
            expected = "their names, a file with them, or a registered dataset, as classes='mmseg.ADE20KDataset'"
            raise UserError(f'{len(names)} classes; expected 1 to {IGNORE_INDEX - 1}: {expected}')
        if label_values is not None and (len({*label_values}) != len(names) or reduce_zero_label):
            expected = f'expected {len(names)} different ones, one for each class, and reduce_zero_label=False'
            raise UserError(f'label_values is {label_values}; {expected}')
        self.seg_map_suffix, self.label_values = seg_map_suffix, label_values
        if isinstance(data_prefix, dict):  # a command line removes it by seg_map_path=None
            data_prefix = {name: folder for name, folder in data_prefix.items() if folder is not None}
        palette = palette or distinct_colours(len(names))
        metainfo = dict(classes=names, palette=palette, reduce_zero_label=reduce_zero_label)
        super().__init__(data_root, data_prefix=data_prefix, metainfo=metainfo, **kwargs)

    def load_data_list(self) -> list[dict]:
        meta = self._metainfo
        more = dict(reduce_zero_label=meta['reduce_zero_label'], num_classes=len(meta['classes']))
        samples = [dict(sample, **more, label_values=self.label_values) for sample in super().load_data_list()]
        images, annotations = self.data_prefix['img_path'], self.data_prefix.get('seg_map_path')
        if annotations is None:
            return samples
        if not os.path.isdir(annotations):
            expected = f'expected a folder of annotations, one for each image in {images!r}'
            raise FileNotFoundError(f'no folder {annotations!r}; {expected}')
        for sample in samples:
            name = os.path.splitext(os.path.relpath(sample['img_path'], images))[0] + self.seg_map_suffix
            sample['seg_map_path'] = os.path.join(annotations, name)
        existing = {os.path.join(annotations, name) for name in list_images(annotations)}
        if missing := [sample for sample in samples if sample['seg_map_path'] not in existing]:
            pair = f'{missing[0]["seg_map_path"]!r} for {missing[0]["img_path"]!r}'
            raise FileNotFoundError(f'no annotation {pair}; {len(missing)} of {len(samples)} images have none')
        return samples


def named_classes(source: str) -> tuple[tuple[str, ...], list | None]:
    """Names of the classes of a file or of a registered dataset, and their colours, if it has any."""
    if os.path.isfile(source):
        lines = [line for line in read_lines(source) if line]
        header = lines[0].split('\t') if lines else []
        if 'Name' in header:  # a table
            rows, column = [line.split('\t') for line in lines[1:]], header.index('Name')
            if short := next((row for row in rows if len(row) <= column), None):
                expected = f'expected {len(header)}, separated by tabs, as in its first line'
                raise UserError(f'{source} has a row of {len(short)} columns, {reprlib.repr(short[0])}; {expected}')
            lines = [row[column] for row in rows]
        return tuple(map(unquoted, lines)), None
    dataset = DATASETS.get(source)
    if dataset is None or 'classes' not in dataset.METAINFO:
        expected = 'no such file, in data_root or not, and no registered dataset with classes'
        raise UserError(f'classes is {source!r}; {expected}')
    return tuple(dataset.METAINFO['classes']), dataset.METAINFO.get('palette')


def distinct_colours(number: int) -> list[list[int]]:
    """Colours [red, green, blue] of 0-255, the same in every run."""
    golden_ratio = (5**0.5 - 1) / 2  # steps of this fraction of the colour circle fall into its largest gaps
    colours = []
    for index in range(number):
        saturation, value = (1, 0.5)[index // 3 % 2], (1, 0.75, 0.5)[index % 3]
        colour = colorsys.hsv_to_rgb(index * golden_ratio % 1, saturation, value)
        colours.append([round(255 * part) for part in colour])
    return colours


@TRANSFORMS.register_module()
class LoadAnnotation(BaseTransform):
    """Reads `seg_map_path` into `gt_seg_map`: uint8 (H, W), labels from 0, 255 where a pixel is ignored.

    Stands after LoadImage; a sample without `seg_map_path` is not changed. If its `reduce_zero_label` is true, 0 in the
    file becomes 255 and every other label one lower. An annotation is upright, as its image after EXIF orientation.

    Raises:
        UnreadableImageError: the file is missing or damaged.
    """

    def transform(self, results: dict) -> dict:
        path = results.get('seg_map_path')
        if path is None:
            return results
        labels = read_labels(path)
        check_size(path, labels, results['img_path'], tuple(results['ori_shape']))
        reduced = results.get('reduce_zero_label', False)
        if values := results.get('label_values'):
            labels = places(labels, values)
        check_range(path, labels, results.get('num_classes'), reduced)
        table = np.arange(256, dtype=np.uint8)
        if reduced:
            table[1:IGNORE_INDEX] -= 1
            table[0] = IGNORE_INDEX
        results['gt_seg_map'] = table[labels]
        results['seg_fields'] = ['gt_seg_map']
        return results


def places(numbers: np.ndarray, values: Sequence[int]) -> np.ndarray:
    """The place in `values`, uint8, of each of some numbers; IGNORE_INDEX of a number that is not in it."""
    order = np.argsort(values)
    nearest = np.searchsorted(np.sort(values), numbers).clip(max=len(order) - 1)
    return np.where(np.sort(values)[nearest] == numbers, order[nearest], IGNORE_INDEX).astype(np.uint8)


def read_labels(path: str) -> np.ndarray:
    """The integers (H, W) in a lossless image file, gray or with a palette."""
    with unreadable(path, Exception), open_image(path) as image:  # see reading.read_image
        image.load()
    if image.mode not in ('1', 'L', 'P', 'I', 'I;16'):
        raise UserError(f'{path}: an image of mode {image.mode}; expected one number a pixel, a gray or palette PNG')
    return np.asarray(image, dtype=np.uint8 if image.mode in ('1', 'L', 'P') else np.int64)


def check_size(path: str, labels: np.ndarray, image_path: str, size: tuple[int, int]) -> None:
    (height, width), advice = labels.shape, 'expected the same size'
    if (height, width) == size:
        return
    with open_image(image_path) as image:
        if (width, height) == size and orientation(image) in SIDEWAYS:
            advice = "the image's EXIF orientation turns it upright: turn the annotation likewise, or remove the tag"
    raise UserError(f'{path} is {width} x {height} pixels, its image {image_path} is {size[1]} x {size[0]}; {advice}')


def check_range(path: str, labels: np.ndarray, num_classes: int | None, reduced: bool) -> None:
    # labels as they are in the file
    limit = IGNORE_INDEX - 1 if num_classes is None else num_classes - 1 + reduced
    wrong = labels[(labels != IGNORE_INDEX) & ((labels < 0) | (labels > limit))]
    if not wrong.size:
        return
    label = wrong.min() if wrong.min() < 0 else wrong.max()
    count = '' if num_classes is None else f'the dataset has {num_classes} classes, '
    expected = f'expected {int(reduced)} to {limit}, {IGNORE_INDEX} for ignored'
    zero = '; where 0 marks unlabelled pixels and classes begin at 1, set reduce_zero_label=True'
    raise UserError(f'{path} holds label {label}; {count}{expected}{", 0 for unlabelled" if reduced else zero}')

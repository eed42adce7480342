"""Images with a label for each pixel: two folders of the same shape, ADE20K's layout."""
import colorsys
import os
from collections.abc import Sequence

from beit_mm.datasets.annotation import IGNORED
from beit_mm.datasets.image_folder import UnlabeledImages, list_images, read_lines
from beit_mm.registry import DATASETS

GOLDEN = (5**0.5 - 1) / 2  # steps of this share of the colour circle fall into its largest gaps


@DATASETS.register_module()
class SegmentationFolder(UnlabeledImages):
    """Images and annotations of the same names, `images/**/x.jpg` and `annotations/**/x.png` below `data_root`.

    What a transform draws for a sample, a library's too, depends on its SampleKey only, as in UnlabeledImages. With
    LoadImage images are RGB, so the data preprocessor has `bgr_to_rgb=False`. LoadAnnotation reads the labels.

    Args:
        data_root: Folder of the two folders.
        classes: Names of the classes in the order of their labels. Or a file, below `data_root` or not: one name a
            line, or a table with a column `Name`, as ADE20K's objectInfo150.txt. Or a registered dataset,
            'mmseg.ADE20KDataset', whose names and colours these are.
        palette: Colours of the classes, [red, green, blue] of 0-255 each. None: the registered dataset's, else any.
        reduce_zero_label: 0 in the annotations marks unlabelled pixels, and 1 is the first class.
        data_prefix: `dict(img_path=..., seg_map_path=...)` relative to `data_root`; without `seg_map_path`, or with
            None, the images have no annotations (a test server has them).
        seg_map_suffix: What stands in the place of a image's suffix.
        ann_file, on_error, kwargs: As UnlabeledImages.

    Raises:
        FileNotFoundError: A folder or list is missing, or a image's annotation is; names the first.
        ValueError: No classes, or too many of them, or not one colour for each.
        UnreadableImageError: As UnlabeledImages; annotations count as their images do.

    Differs from mmseg's BaseSegDataset in: reads what LoadImage reads, whatever its suffix; missing annotations are
    found at the start; sample keys; unreadable images by policy. Has no remapping of labels (`label_map`).
    """

    def __init__(self, data_root: str = '', classes: str | Sequence[str] = (), palette: Sequence | None = None,
                 reduce_zero_label: bool = False, ann_file: str = '', data_prefix: str | dict = '',
                 seg_map_suffix: str = '.png', **kwargs) -> None:
        if isinstance(classes, str):
            inside = os.path.join(data_root, classes)
            names, colours = named_classes(inside if os.path.isfile(inside) else classes)
        else:
            names, colours = tuple(classes), None
        palette = palette or colours or distinct_colours(len(names))
        if not 0 < len(names) < IGNORED:
            raise ValueError(f'{len(names)} classes; expected 1 to {IGNORED - 1}: their names, a file with them, or a '
                             "registered dataset, for example classes='mmseg.ADE20KDataset'")
        if len(palette) != len(names):
            raise ValueError(f'palette has {len(palette)} colours, classes has {len(names)} names; expected one for '
                             'each, or no palette')
        if isinstance(data_prefix, dict):  # seg_map_path=None is how a command line takes it away
            data_prefix = {name: folder for name, folder in data_prefix.items() if folder is not None}
        self.reduce_zero_label = reduce_zero_label
        self.seg_map_suffix = seg_map_suffix
        metainfo = dict(classes=names, palette=[list(map(int, colour)) for colour in palette],
                        reduce_zero_label=reduce_zero_label)
        super().__init__(data_root, ann_file, data_prefix, metainfo=metainfo, **kwargs)

    def load_data_list(self) -> list[dict]:
        """Samples with `img_path`, `seg_map_path`, `reduce_zero_label` and `num_classes`."""
        samples = super().load_data_list()
        for sample in samples:
            sample.update(reduce_zero_label=self.reduce_zero_label, num_classes=len(self._metainfo['classes']))
        images, annotations = self.data_prefix['img_path'], self.data_prefix.get('seg_map_path')
        if annotations is None:
            return samples
        if not os.path.isdir(annotations):
            raise FileNotFoundError(f'no folder {annotations!r}; expected a folder of annotations, one for each image '
                                    f'in {images!r}')
        there = set(list_images(annotations))
        missing = []
        for sample in samples:
            image = os.path.relpath(sample['img_path'], images)
            name = os.path.splitext(image)[0] + self.seg_map_suffix
            sample['seg_map_path'] = os.path.join(annotations, name)
            if name not in there:
                missing.append(sample)
        if missing:
            first = missing[0]
            raise FileNotFoundError(f'no annotation {first["seg_map_path"]!r} for {first["img_path"]!r}; {len(missing)}'
                                    f' of {len(samples)} images have none')
        return samples


def named_classes(source: str) -> tuple[tuple[str, ...], list | None]:
    """Names of the classes that a file or a registered dataset has, and their colours, if any.

    Raises:
        ValueError: there is neither, or the table has no column `Name`.
    """
    if os.path.isfile(source):
        return read_class_table(source), None
    dataset = DATASETS.get(source)
    if dataset is None or 'classes' not in dataset.METAINFO:
        raise ValueError(f'classes is {source!r}; no such file, in data_root or not, and no '
                         'registered dataset with classes of that name')
    return tuple(dataset.METAINFO['classes']), dataset.METAINFO.get('palette')


def read_class_table(path: str) -> tuple[str, ...]:
    """Names of the classes: the lines of a file or, where the first line is a header with `Name`, that column."""
    lines = [line for line in read_lines(path) if line]
    header = lines[0].split('\t') if lines else []
    if 'Name' in header:
        lines = [line.split('\t')[header.index('Name')] for line in lines[1:]]
    return tuple(lines)


def distinct_colours(number: int) -> list[list[int]]:
    """Colours (red, green, blue) of 0-255, the same in every run."""
    return [[round(255 * part) for part in colorsys.hsv_to_rgb(index * GOLDEN % 1, (1, 0.6)[index % 2], (1, 0.75)[
        index // 2 % 2])] for index in range(number)]

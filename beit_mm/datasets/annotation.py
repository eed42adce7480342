"""From an annotation file to a label for each pixel, and the transform that does it."""
import numpy as np
from mmcv.transforms import BaseTransform
from PIL import Image

from beit_mm.datasets.transforms import orientation, unreadable
from beit_mm.registry import TRANSFORMS

IGNORED = 255  # label of pixels that count for nothing, mmseg's too
LABEL_MODES = ('1', 'L', 'P', 'I', 'I;16')  # Pillow's: one number a pixel
SIDEWAYS = (5, 6, 7, 8)  # EXIF orientations that swap height and width


@TRANSFORMS.register_module()
class LoadAnnotation(BaseTransform):
    """Reads `seg_map_path` into `gt_seg_map`: uint8 (H, W), labels from 0, 255 where a pixel is ignored. Stands after
    LoadImage. A image that has no `seg_map_path` passes as it is.

    Where `reduce_zero_label` of the sample is true, 0 in the file becomes 255 and every other label one lower.
    An annotation belongs to the image as it is shown: upright, where its EXIF orientation turns it.

    Raises:
        UnreadableImageError: The file is missing or damaged.
        ValueError: More than one number a pixel; another size than the image's; a label that the sample's
            `num_classes` leaves no place for. The message begins with the file's path.

    Differs from mmseg's LoadAnnotations in: what is refused (there, labels above 255 wrap around, and another size ends
    in an error that names no file).
    """

    def transform(self, results: dict) -> dict:
        """Adds `gt_seg_map`."""
        path = results.get('seg_map_path')
        if path is None:
            return results
        labels = read_labels(path)
        if labels.shape != tuple(results['ori_shape']):
            raise ValueError(_wrong_size(path, labels.shape, results['img_path'], results['ori_shape']))
        reduced = results.get('reduce_zero_label', False)
        _check_range(path, labels, results.get('num_classes'), reduced)
        table = np.arange(256, dtype=np.uint8)
        if reduced:
            table[1:IGNORED] -= 1
            table[0] = IGNORED
        results['gt_seg_map'] = table[labels]
        results['seg_fields'] = ['gt_seg_map']
        return results


def read_labels(path: str) -> np.ndarray:
    """The numbers in an annotation file.

    Args:
        path: PNG or any other format without losses, gray or with a palette (its indices count).

    Returns:
        Unsigned or signed integers (H, W), as they are in the file.

    Raises:
        UnreadableImageError: The file cannot be read.
        ValueError: More than one number a pixel.
    """
    with unreadable(path, Exception):  # as of images: whatever is raised is the file's doing
        image = Image.open(path)
        image.load()
    if image.mode not in LABEL_MODES:
        raise ValueError(f'{path}: an image of mode {image.mode}; expected one number a pixel, a gray PNG or one with '
                         'a palette')
    return np.asarray(image, dtype=np.uint8 if image.mode in ('1', 'L', 'P') else np.int64)


def _wrong_size(path: str, found: tuple[int, int], image_path: str, expected: tuple[int, int]) -> str:
    with Image.open(image_path) as image:
        turned = found == tuple(expected)[::-1] and orientation(image) in SIDEWAYS
    advice = "; the image's EXIF orientation turns it upright: turn the annotation likewise, or remove the tag"
    return (f'{path} is {found[1]} x {found[0]} pixels, its image {image_path} is {expected[1]} x {expected[0]}'
            f'{advice if turned else "; expected the same size"}')


def _check_range(path: str, labels: np.ndarray, num_classes: int | None, reduced: bool) -> None:
    used = labels[labels != IGNORED]
    if not used.size:
        return
    lowest, highest = used.min(), used.max()
    limit = IGNORED - 1 if num_classes is None else num_classes - 1 + reduced
    if lowest < 0 or highest > limit:
        kinds = '' if num_classes is None else f'the dataset has {num_classes} classes, '
        zero = ', 0 for unlabelled' if reduced else (
            '; where 0 marks unlabelled pixels and classes begin at 1, set reduce_zero_label=True')
        raise ValueError(f'{path} holds label {lowest if lowest < 0 else highest}; {kinds}expected {int(reduced)} to '
                         f'{limit}, {IGNORED} for ignored{zero}')

"""DINO's crops of an image, and their augmentation."""

import random

import cv2
import numpy as np
from mmcv.transforms import BaseTransform

from beit_mm.datasets.transforms import CONTRAST, as_size, cut, draw_box, jitter_pixels, resize_bicubic
from beit_mm.registry import TRANSFORMS

FLIP_PROB = 0.5
JITTER_PROB = 0.8
GRAY_PROB = 0.2
BLUR_PROBS = dict(first=1.0, second=0.1, local=0.5)
SOLARIZE_PROB = 0.2  # for the second global crop


@TRANSFORMS.register_module()
class MultiCrop(BaseTransform):
    """Adds the crops that DINO compares, each with its own box, flip, colours and blur: uint8 RGB.

    `images` is the first global crop, unless an earlier transform has made it, and `second_images` is the second;
    `local_images` holds the `num_local` local crops.

    Args:
        size: side of a global crop in pixels, or (height, width).
        scale: smallest and largest area of its box as a fraction of the image area.
        local_size, local_scale: the same for a local crop.
        num_local: number of local crops of an image; 0 for none.
        blur_sigma: smallest and largest sigma of the blur in pixels; the default suits a size of 224.

    Source: facebookresearch/dino `main_dino.py`, DataAugmentationDINO. torchvision's own transforms are not used
    because they draw from torch's generator, which is not seeded for each sample.
    """

    def __init__(
        self,
        size: int | tuple[int, int] = 224,
        scale: tuple[float, float] = (0.4, 1.0),
        local_size: int | tuple[int, int] = 96,
        local_scale: tuple[float, float] = (0.05, 0.4),
        num_local: int = 8,
        blur_sigma: tuple[float, float] = (0.1, 2.0),
    ) -> None:
        self.size = as_size(size)
        self.local_size = as_size(local_size)
        self.scale, self.local_scale = scale, local_scale
        self.num_local, self.blur_sigma = num_local, blur_sigma

    def transform(self, results: dict) -> dict:
        image = results['img']
        if 'images' not in results:
            results['images'] = self._crop(image, 'first')
        results['second_images'] = self._crop(image, 'second')
        if self.num_local:
            results['local_images'] = np.stack([self._crop(image, 'local') for _ in range(self.num_local)])
        return results

    def _crop(self, image: np.ndarray, kind: str) -> np.ndarray:
        size, scale = (self.local_size, self.local_scale) if kind == 'local' else (self.size, self.scale)
        flip = random.random() < FLIP_PROB
        height, width = image.shape[:2]
        crop = resize_bicubic(cut(image, draw_box(height, width, scale, ratio=(3 / 4, 4 / 3))), size)
        if flip:
            crop = cv2.flip(crop, 1)
        if random.random() < JITTER_PROB:
            crop = jitter_with_hue(crop)
        if random.random() < GRAY_PROB:
            crop = cv2.cvtColor(cv2.cvtColor(crop, cv2.COLOR_RGB2GRAY), cv2.COLOR_GRAY2RGB)
        if random.random() < BLUR_PROBS[kind]:
            crop = cv2.GaussianBlur(crop, (0, 0), random.uniform(*self.blur_sigma))
        if kind == 'second' and random.random() < SOLARIZE_PROB:
            crop = np.minimum(crop, 255 - crop)  # inverts levels from 128 on
        return crop


def jitter_with_hue(image: np.ndarray) -> np.ndarray:
    """Changes brightness, contrast, saturation and hue of uint8 RGB (H, W, 3), in random order."""
    factors = [random.uniform(1 - strength, 1 + strength) for strength in (0.4, 0.4, 0.2)]
    shift = random.uniform(-0.1, 0.1)
    for operation in random.sample(range(4), 4):
        if operation == 3:  # hue, which jitter_pixels does not change
            image = shift_hue(image, shift)
        else:
            gray = cv2.mean(cv2.cvtColor(image, cv2.COLOR_RGB2GRAY))[0] if operation == CONTRAST else 0
            image = jitter_pixels(image, factors, int(gray + 0.5), [operation])
    return image


def shift_hue(image: np.ndarray, shift: float) -> np.ndarray:
    # image: uint8 RGB (H, W, 3); shift: in turns of the colour circle
    hsv = cv2.cvtColor(image, cv2.COLOR_RGB2HSV_FULL)
    hsv[..., 0] += np.uint8(int(shift * 255) % 256)  # wraps around
    return cv2.cvtColor(hsv, cv2.COLOR_HSV2RGB_FULL)

"""Colour jitter of both views after the crop."""
import random
from collections.abc import Sequence

import cv2
import numpy as np
from mmcv.transforms import BaseTransform

from beit_mm.functional.color_jitter import BRIGHTNESS, CONTRAST, LUMA
from beit_mm.registry import TRANSFORMS


@TRANSFORMS.register_module()
class TwoViewColorJitter(BaseTransform):
    """The same random brightness, contrast and saturation for both views, in random order.

    Placed after the crop it touches a third of the pixels; contrast still uses the gray mean of the
    whole photo (`img`), which is what makes the order of crop and jitter matter so little.

    Args:
        brightness, contrast, saturation: Factors are drawn uniformly from 1 - x to 1 + x.
        device: `cpu` applies them here; `model` only draws them and adds `jitter`, float32 (7,),
            which the data preprocessor applies on the model's device.

    Raises:
        ValueError: A number is outside 0 to 1, or the device is unknown.

    Source: unilm `beit/datasets.py` (torchvision's ColorJitter without hue).
    Differs from it in: after the crop; see functional.color_jitter.
    """

    def __init__(self, brightness: float = 0.4, contrast: float = 0.4, saturation: float = 0.4,
                 device: str = 'cpu') -> None:
        self.strengths = (brightness, contrast, saturation)
        if not all(0 <= strength <= 1 for strength in self.strengths):
            raise ValueError(
                f'brightness, contrast, saturation are {self.strengths}; expected 0 to 1 each')
        if device not in ('cpu', 'model'):
            raise ValueError(f"device is {device!r}; choose 'cpu' or 'model'")
        self.device = device

    def transform(self, results: dict) -> dict:
        factors = [random.uniform(1 - strength, 1 + strength) for strength in self.strengths]
        params = [*factors, gray_mean(results['img']), *random.sample(range(3), 3)]
        if self.device == 'model':
            results['jitter'] = np.array(params, np.float32)
        else:
            for view in ('images', 'targets'):
                if view in results:
                    results[view] = jitter_pixels(results[view], params)
        return results


def gray_mean(image: np.ndarray) -> float:
    """Mean gray level, 0-255, of a uint8 RGB image (H, W, 3), from at most 257 evenly spaced rows.

    Adds up columns in 16 bits, which 257 rows cannot overflow (257 * 255 = 65535): 0.02 ms for
    500x375, where `image.mean()` takes 2 ms. Leaving rows out shifts the mean of a photo by about
    0.1 level.
    """
    rows = image[::-(-len(image) // 257)]
    columns = np.add.reduce(rows.reshape(len(rows), -1), axis=0, dtype=np.uint16)
    return float(columns.reshape(-1, 3).mean(axis=0) @ LUMA) / len(rows)


def jitter_pixels(image: np.ndarray, params: Sequence[float]) -> np.ndarray:
    """Jitter one image as Pillow does, a quarter of the time.

    Args:
        image: uint8 (H, W, 3), RGB.
        params: The 7 numbers of functional.color_jitter.

    Returns:
        uint8 (H, W, 3).

    Source: Pillow's ImageEnhance, which torchvision's ColorJitter and unilm `beit/datasets.py` use.
    Differs from it in: contrast takes the given gray mean; with brightness before it, multiplied by
    that factor, which leaves out what brightness clips. Some pixels are 1 to 3 levels off, 0.002 on
    average.
    """
    brightness, contrast, saturation, gray, *order = params
    for operation in order:
        if operation == BRIGHTNESS:
            plain, factor = np.zeros_like(image), brightness
        elif operation == CONTRAST:
            brightened = order.index(BRIGHTNESS) < order.index(CONTRAST)
            level = min(255, int(gray * (brightness if brightened else 1) + 0.5))
            plain, factor = np.full_like(image, level), contrast
        else:
            plain, factor = cv2.cvtColor(image, cv2.COLOR_RGB2GRAY), saturation
            plain = cv2.cvtColor(plain, cv2.COLOR_GRAY2RGB)
        # Pillow cuts fractions off, cv2 rounds: 0.499 less makes the two agree
        image = cv2.addWeighted(image, factor, plain, 1 - factor, -0.499)
    return image

"""Random erasing: the box is drawn with the sample, the noise is filled in on the device."""
import math
import random

from mmcv.transforms import BaseTransform

from beit_mm.registry import TRANSFORMS


@TRANSFORMS.register_module()
class RandomErasing(BaseTransform):
    """Draws the box of an image that is to be erased and adds it as `erase_box`: (top, left, height, width) in pixels.

    ClassificationDataPreprocessor fills it with noise after normalisation. Stands after every transform that moves
    pixels, with `erase_box` among PackInputs' `meta_keys`. An image that stays whole gets no `erase_box`.

    Args:
        prob: Share of images with a box.
        area: Smallest and largest area of a box, as shares of the image.
        min_aspect: Smallest height / width of a box; the largest is its inverse.

    Raises:
        ValueError: A number outside its range.

    Source: timm `data/random_erasing.py`, mode `pixel`, one box; the released fine-tuning's.
    Differs from it in: nothing but where the noise is made. From mmpretrain's RandomErasing in: that one erases before
    normalisation, which makes its noise too bright and cut off at 0 and 255.
    """

    def __init__(self, prob: float = 0.25, area: tuple[float, float] = (0.02, 1 / 3), min_aspect: float = 0.3) -> None:
        if not (0 <= prob <= 1 and 0 < area[0] <= area[1] <= 1 and 0 < min_aspect <= 1):
            raise ValueError(f'prob is {prob}, area {area}, min_aspect {min_aspect}; expected 0 to 1 each, and area in '
                             'rising order')
        self.prob = prob
        self.area = tuple(area)
        self.max_log_aspect = -math.log(min_aspect)

    def transform(self, results: dict) -> dict:
        results.pop('erase_box', None)
        if random.random() > self.prob:
            return results
        height, width = results['img'].shape[:2]
        for _ in range(10):  # a long box of a large area may not fit
            area = random.uniform(*self.area) * height * width
            aspect = math.exp(random.uniform(-self.max_log_aspect, self.max_log_aspect))
            rows, columns = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
            if rows < height and columns < width:
                top, left = random.randint(0, height - rows), random.randint(0, width - columns)
                results['erase_box'] = (top, left, rows, columns)
                break
        return results

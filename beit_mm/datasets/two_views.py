"""Two views of the same crop: one for the backbone, one for the tokenizer, whose tokens are what is
predicted.

Both are resized straight from the decoded image and antialiased: resizing without (cv2) gives other
tokens.
"""
import math
import random

import numpy as np
import torch
from mmcv.transforms import BaseTransform

from beit_mm.registry import TRANSFORMS

from .resizing import resize_bicubic, resize_lanczos

Box = tuple[int, int, int, int]  # top, left, height, width in pixels
Size = int | tuple[int, int]  # side, or (height, width), in pixels


class TwoViews(BaseTransform):
    """Base of the two crops: from `img` (H, W, 3) to `images` (size) and `tokenizer_images` (second_size),
    uint8 RGB.

    Args:
        size: Side of the first view in pixels, or (height, width); bicubic.
        second_size: The same for the tokenizer's view, Lanczos; None: no second view.
    """

    def __init__(self, size: Size, second_size: Size | None) -> None:
        self.size = as_size(size)
        self.second_size = None if second_size is None else as_size(second_size)

    def add_views(self, results: dict, box: Box, flip: bool) -> dict:
        top, left, height, width = box
        crop = np.ascontiguousarray(results['img'][top:top + height, left:left + width])
        views = dict(images=resize_bicubic(crop, self.size))
        if self.second_size is not None:
            views['tokenizer_images'] = resize_lanczos(crop, self.second_size)
        if flip:  # by torch: numpy takes 15 times as long
            views = {key: torch.from_numpy(view).flip(1).numpy() for key, view in views.items()}
        results.update(views)
        return results


@TRANSFORMS.register_module()
class TwoViewRandomResizedCrop(TwoViews):
    """One random box and one coin for a horizontal flip; both views show the same.

    Args:
        size: Side of the first view in pixels, or (height, width); bicubic.
        second_size: The same for the tokenizer's view, Lanczos; 8 times the token grid for DALL-E.
            None: no second view.
        scale: Smallest and largest area of the box as a part of the image's.
        ratio: Smallest and largest width / height of the box.
        flip_prob: Probability of the flip.

    Raises:
        ValueError: A number is out of its range.

    Source: unilm `beit/transforms.py`, `beit/datasets.py`; the law of torchvision's
    RandomResizedCrop.
    Differs from them in: the flip is applied to the small views instead of the image, which gives
    the same pixels.
    Differs from mmpretrain's RandomResizedCropAndInterpolationWithTwoPic in: antialiased, the box
    can be the whole image.
    """

    def __init__(self, size: Size = 224, second_size: Size | None = 112,
                 scale: tuple[float, float] = (0.08, 1.0),
                 ratio: tuple[float, float] = (3 / 4, 4 / 3), flip_prob: float = 0.5) -> None:
        super().__init__(size, second_size)
        if not 0 < scale[0] <= scale[1] <= 1:
            raise ValueError(
                f'scale is {scale}; expected 0 < smallest <= largest <= 1, parts of the image')
        if not 0 < ratio[0] <= ratio[1]:
            raise ValueError(f'ratio is {ratio}; expected 0 < smallest <= largest, width / height')
        if not 0 <= flip_prob <= 1:
            raise ValueError(f'flip_prob is {flip_prob}; a probability lies between 0 and 1')
        self.scale = scale
        self.ratio = ratio
        self.flip_prob = flip_prob

    def transform(self, results: dict) -> dict:
        flip = random.random() < self.flip_prob
        box = draw_box(*results['img'].shape[:2], self.scale, self.ratio)
        return self.add_views(results, box, flip)


@TRANSFORMS.register_module()
class TwoViewCenterCrop(TwoViews):
    """The largest centred box of the first view's shape, resized to both sizes; for validation.

    Args:
        size: Side of the first view in pixels, or (height, width); bicubic.
        second_size: The same for the tokenizer's view, Lanczos; None: no second view.
    """

    def __init__(self, size: Size = 224, second_size: Size | None = 112) -> None:
        super().__init__(size, second_size)

    def transform(self, results: dict) -> dict:
        height, width = results['img'].shape[:2]
        box = center_box(height, width, self.size[1] / self.size[0], self.size[1] / self.size[0])
        return self.add_views(results, box, flip=False)


def draw_box(height: int, width: int, scale: tuple[float, float],
             ratio: tuple[float, float]) -> Box:
    """A random box: uniform area, log aspect and position; after 10 misfits a centred one."""
    log_ratio = math.log(ratio[0]), math.log(ratio[1])
    for _ in range(10):
        area = height * width * random.uniform(*scale)
        aspect = math.exp(random.uniform(*log_ratio))
        w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            return random.randint(0, height - h), random.randint(0, width - w), h, w
    return center_box(height, width, *ratio)


def center_box(height: int, width: int, min_ratio: float, max_ratio: float) -> Box:
    """The largest centred box whose width / height lies between the two."""
    h, w = height, width
    if w < h * min_ratio:
        h = max(1, round(w / min_ratio))
    elif w > h * max_ratio:
        w = max(1, round(h * max_ratio))
    return (height - h) // 2, (width - w) // 2, h, w


def as_size(size: Size) -> tuple[int, int]:
    height, width = (size, size) if isinstance(size, int) else size
    if height < 1 or width < 1:
        raise ValueError(f'size is {size}; a view has at least 1 pixel')
    return height, width

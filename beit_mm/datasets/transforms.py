"""Image transforms, which draw from `random` and `numpy.random`; the datasets seed these."""

import math
import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import lru_cache, partial

import cv2
import mmcv
import numpy as np
import torch
import torch.nn.functional as F
from mmcv.transforms import BaseTransform, CenterCrop
from mmpretrain.datasets import RandAugment as RandAugmentBGR
from PIL import Image
from torch import Tensor

from beit_mm.datasets.masking import masked_positions
from beit_mm.datasets.reading import decoding_scale, warns_here
from beit_mm.errors import UserError, check_choice, warn
from beit_mm.files import quoted
from beit_mm.registry import TRANSFORMS

Box = tuple[int, int, int, int]  # top, left, height, width in pixels
Span = tuple[float, float]  # the smallest and the largest value
Size = int | tuple[int, int]  # side, or (height, width), in pixels
LUMA = (0.299, 0.587, 0.114)  # shares of red, green and blue in gray (ITU-R 601)
MIN_ASPECT = 0.3  # smallest height / width of an erased box; the largest is its inverse
BRIGHTNESS, CONTRAST, SATURATION = range(3)  # operations of colour jitter
LOBES = 3  # of the Lanczos filter
WARNED: list[str] = []  # the file that `warn_other_scale` has named


class TwoViews(BaseTransform, ABC):
    """Base class of the crops: cuts a box from `img` (H, W, C) and resizes it to `images` and `tokenizer_images`.

    Images, uint8 or float32, 0-255, keep their type and channels.

    Args:
        size: side of `images` in pixels, or (height, width); bicubic.
        second_size: the same for `tokenizer_images`, Lanczos; None: no second view.
    """

    def __init__(self, size: Size = 224, second_size: Size | None = 112) -> None:
        self.size = as_size(size)
        self.second_size = None if second_size is None else as_size(second_size)

    @abstractmethod
    def draw(self, height: int, width: int) -> tuple[Box, bool]:
        """Draws the box in an image, and whether the views are flipped."""

    def drawn_crop(self, results: dict, height: int, width: int) -> tuple[Box, bool, int]:
        """The box and flip, drawn once for a sample, and the height of its image, which may be decoded smaller."""
        if 'drawn_crop' not in results:
            results['drawn_crop'] = *self.draw(height, width), height
        return results['drawn_crop']

    def choose_scale(self, results: dict, height: int, width: int) -> int:
        """For LoadImage, before it decodes: the divisor, 1 to 8, of an image's sides that the views allow."""
        box, *_ = self.drawn_crop(results, height, width)
        return decoding_scale(box[2:], np.maximum(self.size, self.second_size or 1).tolist())

    def transform(self, results: dict) -> dict:
        image = results['img']
        box, flip, height = self.drawn_crop(results, *image.shape[:2])
        del results['drawn_crop']
        scale = round(height / len(image))  # by which LoadImage has divided the sides
        if scale > 1:
            part = tuple(side / scale for side in box)
            bicubic = partial(resize_box, image, part, resample=Image.Resampling.BICUBIC)
            lanczos = partial(resize_box, image, part, resample=Image.Resampling.LANCZOS)
        else:
            pixels = cut(image, box)
            bicubic, lanczos = partial(resize_bicubic, pixels), partial(resize_lanczos, pixels)
        views = dict(images=bicubic(size=self.size))
        if self.second_size is not None:
            views['tokenizer_images'] = lanczos(size=self.second_size)
        if flip:  # with torch, because numpy takes 15 times as long
            views = {key: torch.from_numpy(view).flip(1).numpy() for key, view in views.items()}
        results.update(views)
        return results


@TRANSFORMS.register_module()
class TwoViewRandomResizedCrop(TwoViews):
    """One random box and one random horizontal flip for both views.

    Args:
        size, second_size: as in TwoViews.
        scale: smallest and largest area of the box as a fraction of the image area.
        ratio: smallest and largest width / height of the box.
        flip_prob: probability of the flip.
        clips: cut a box to the image, as MAE does, instead of drawing others until one fits, as torchvision.

    Source: microsoft/unilm `beit/transforms.py`, `beit/datasets.py`; facebookresearch/mae `util/crop.py`.
    """

    def __init__(
        self,
        size: Size = 224,
        second_size: Size | None = 112,
        scale: Span = (0.08, 1.0),
        ratio: Span = (3 / 4, 4 / 3),
        flip_prob: float = 0.5,
        clips: bool = False,
    ) -> None:
        super().__init__(size, second_size)
        self.scale, self.ratio, self.flip_prob, self.clips = scale, ratio, flip_prob, clips

    def draw(self, height: int, width: int) -> tuple[Box, bool]:
        flip = random.random() < self.flip_prob
        return draw_box(height, width, self.scale, self.ratio, self.clips), flip


@TRANSFORMS.register_module()
class RandomResizedCrop(TwoViewRandomResizedCrop):
    """The same crop for classification: a single view, which replaces `img`. Args: TwoViewRandomResizedCrop's."""

    def __init__(self, size: Size = 224, **options) -> None:
        super().__init__(size, second_size=None, **options)

    def transform(self, results: dict) -> dict:
        results = super().transform(results)
        results['img'] = image = results.pop('images')
        results['img_shape'] = image.shape[:2]
        return results


@TRANSFORMS.register_module()
class CenterCropDown(CenterCrop):
    """mmcv's CenterCrop for `img` (H, W, C) as in transformers: the middle of an odd rest is rounded down."""

    def transform(self, results: dict) -> dict:
        image, (width, height) = results['img'], self.crop_size
        top, left = (max(whole - part, 0) // 2 for whole, part in zip(image.shape, (height, width), strict=False))
        image = image[top : top + height, left : left + width]
        return dict(results, img=image, img_shape=image.shape[:2])


@TRANSFORMS.register_module()
class TwoViewCenterCrop(TwoViews):
    """The largest centred box with the aspect ratio of `size`, for validation. Args: as in TwoViews."""

    def draw(self, height: int, width: int) -> tuple[Box, bool]:
        ratio = self.size[1] / self.size[0]
        return center_box(height, width, ratio, ratio), False


@TRANSFORMS.register_module()
class ResizeToPatches(BaseTransform):
    """Resizes `img` (H, W, C) without cropping: the short side to about `short_side`, both to whole patches; bicubic.

    The long side is limited to 4 times `short_side`; both settings are in pixels.
    """

    def __init__(self, short_side: int, patch_size: int) -> None:
        self.short_side, self.patch_size = short_side, patch_size

    def transform(self, results: dict) -> dict:
        sides = results['img'].shape[:2]
        scale = min(self.short_side / min(sides), 4 * self.short_side / max(sides)) / self.patch_size
        height, width = (max(1, round(side * scale)) * self.patch_size for side in sides)
        results['img_shape'] = (height, width)
        results['img'] = resize_bicubic(np.ascontiguousarray(results['img']), (height, width))
        return results


@TRANSFORMS.register_module()
class ResizeToScale(BaseTransform):
    """Resizes an image and its label map to the scale at which a segmentor learned, however large the image is.

    Args:
        short_side: of the images of the training as the model saw them, in pixels.
        factor: by which those were resized; None: they had no common size, so every image gets `short_side`.
        within: an image whose short side differs from theirs by at most this factor gets `short_side`, any other one is
            resized by `factor`. With 1, `factor` holds for all.
    """

    def __init__(self, short_side: int, factor: float | None = None, within: float = 2.0) -> None:
        if short_side < 1 or within < 1 or (factor is not None and factor <= 0):
            raise UserError(f'{short_side=}, {factor=}, {within=}; expected factor above 0, others from 1')
        self.short_side, self.factor, self.within = short_side, factor, within

    def size_of(self, height: int, width: int) -> tuple[int, int]:
        """Height and width at which an image is seen, in pixels."""
        scale = self.short_side / min(height, width)
        if self.factor is not None and not 1 / self.within < scale / self.factor < self.within:
            scale = self.factor
        return max(1, int(height * scale + 0.5)), max(1, int(width * scale + 0.5))

    def transform(self, results: dict) -> dict:
        height, width = results['img'].shape[:2]
        self.warn_other_scale(results.get('img_path') or 'an image', height, width)
        resize_with_labels(results, self.size_of(height, width))
        return results

    def warn_other_scale(self, path: str, height: int, width: int) -> None:
        """Warns about the first image that is more than twice as large, or as small, as those of the training."""
        if WARNED or self.factor is None or not warns_here():
            return
        usual = self.short_side / self.factor
        if 0.5 < min(height, width) / usual < 2:
            return
        WARNED.append(path)
        warn(
            f'{quoted(path)}: {height} x {width} pixels, but the model learned from images with a short side of about '
            f'{usual:.0f}; such images keep the scale of the training, in windows (--short-side {self.short_side} of '
            'segment shrinks or enlarges them as a whole)'
        )


@TRANSFORMS.register_module()
class RandomCropAtScale(ResizeToScale):
    """Cuts a random box from an image and its label map and resizes it: a crop of the image at its scale.

    The same as mmcv's RandomResize and mmseg's RandomCrop, but the rest of a large image is not resized.

    Args:
        crop_size: (height, width) in pixels; an image that is smaller at its scale is taken whole.
        ratio_range: the scale is multiplied by a random number from this range.
        cat_max_ratio: up to 10 boxes are drawn until no class has more than this share of the labelled pixels.
        short_side, factor, within: see ResizeToScale.
    """

    def __init__(
        self,
        crop_size: tuple[int, int],
        short_side: int,
        factor: float | None = None,
        within: float = 2.0,
        ratio_range: tuple[float, float] = (1.0, 1.0),
        cat_max_ratio: float = 1.0,
    ) -> None:
        super().__init__(short_side, factor, within)
        self.crop_size, self.ratio_range, self.cat_max_ratio = crop_size, ratio_range, cat_max_ratio

    def transform(self, results: dict) -> dict:
        sides = results['img'].shape[:2]
        ratio = random.uniform(*self.ratio_range)
        seen = [max(1, int(side * ratio + 0.5)) for side in self.size_of(*sides)]
        size = min(seen[0], self.crop_size[0]), min(seen[1], self.crop_size[1])
        height, width = (max(1, round(new * old / all_)) for new, old, all_ in zip(size, sides, seen, strict=True))
        for _ in range(10):
            box = random.randint(0, sides[0] - height), random.randint(0, sides[1] - width), height, width
            if self.is_mixed(cut(results['gt_seg_map'], box)):
                break
        results.update(img=cut(results['img'], box), gt_seg_map=cut(results['gt_seg_map'], box))
        resize_with_labels(results, size)
        return results

    def is_mixed(self, labels: np.ndarray) -> bool:
        """Whether no class has more than the share `cat_max_ratio` of the labelled pixels."""
        counts = np.bincount(labels.ravel(), minlength=256)[:255]  # without ignored pixels
        return self.cat_max_ratio >= 1 or 0 < counts.max() < self.cat_max_ratio * counts.sum()


def resize_with_labels(results: dict, size: tuple[int, int]) -> None:
    """Resizes `img`, bilinearly, and its label map, if any, to `size` (height, width), by OpenCV as mmseg does."""
    sides = results['img'].shape[:2]
    if size != sides:
        results['img'] = mmcv.imresize(results['img'], size[::-1])
        for name in results.get('seg_fields', ()):
            results[name] = mmcv.imresize(results[name], size[::-1], interpolation='nearest')
    results['img_shape'] = size


def cut(image: np.ndarray, box: Box) -> np.ndarray:
    """Cuts the pixels of a box out, as a contiguous array."""
    top, left, height, width = box
    return np.ascontiguousarray(image[top : top + height, left : left + width])


def draw_box(height: int, width: int, scale: Span, ratio: Span, clips: bool = False) -> Box:
    """Draws a box: area, log aspect and position are uniform; after 10 boxes that do not fit, a centred box."""
    log_ratio = math.log(ratio[0]), math.log(ratio[1])
    for _ in range(10):
        area = height * width * random.uniform(*scale)
        aspect = math.exp(random.uniform(*log_ratio))
        w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if clips:
            w, h = min(w, width), min(h, height)
        if 0 < w <= width and 0 < h <= height:
            return random.randint(0, height - h), random.randint(0, width - w), h, w
    return center_box(height, width, *ratio)


def center_box(height: int, width: int, min_ratio: float, max_ratio: float) -> Box:
    """The largest centred box whose width / height lies between the two ratios."""
    h, w = height, width
    if w < h * min_ratio:
        h = max(1, round(w / min_ratio))
    elif w > h * max_ratio:
        w = max(1, round(h * max_ratio))
    return (height - h) // 2, (width - w) // 2, h, w


def as_size(size: Size) -> tuple[int, int]:
    """(height, width) from one side or both."""
    height, width = (size, size) if isinstance(size, int) else size
    return height, width


@TRANSFORMS.register_module()
class TwoViewColorJitter(BaseTransform):
    """Changes brightness, contrast and saturation of both views by the same random factors, in random order.

    Comes after the crop; contrast still uses the mean gray of the whole image, `img`.

    Args:
        brightness, contrast, saturation: factors are drawn uniformly from 1 - x to 1 + x.
        device: 'cpu' applies them here; 'model' only adds `jitter`, float32 (7,), and leaves the rest to jitter_images.

    Source: microsoft/unilm `beit/datasets.py` (torchvision's ColorJitter without hue).
    """

    def __init__(self, brightness: float = 0.4, contrast: float = 0.4, saturation: float = 0.4, device: str = 'cpu'):
        self.strengths = (brightness, contrast, saturation)
        check_choice('device', device, ('cpu', 'model'))
        self.device = device

    def transform(self, results: dict) -> dict:
        factors = [random.uniform(1 - strength, 1 + strength) for strength in self.strengths]
        order = random.sample(range(3), 3)
        level = contrast_level(results['img'], factors, order)
        if self.device == 'model':
            results['jitter'] = np.array([*factors, level, *order], np.float32)
            return results
        for view in {'images', 'tokenizer_images'} & results.keys():
            results[view] = jitter_pixels(results[view], factors, level, order)
        return results


def contrast_level(image: np.ndarray, factors: Sequence[float], order: Sequence[int]) -> int:
    """Mean gray, 0-255, of an image after the operations that precede contrast."""
    rows = np.ascontiguousarray(image[:: -(-len(image) // 64)])  # about 64 rows: an error of 0.3 levels on average
    rows = jitter_pixels(rows, factors, 0, order[: order.index(CONTRAST)])
    return int(cv2.mean(cv2.cvtColor(rows, cv2.COLOR_RGB2GRAY))[0] + 0.5)


def jitter_pixels(image: np.ndarray, factors: Sequence[float], level: int, order: Sequence[int]) -> np.ndarray:
    """Jitters uint8 RGB (H, W, 3) like Pillow's ImageEnhance; contrast blends with the gray `level`, 0-255."""
    for operation in order:
        if operation == BRIGHTNESS:
            base = np.zeros_like(image)
        elif operation == CONTRAST:
            base = np.full_like(image, level)
        else:
            base = cv2.cvtColor(cv2.cvtColor(image, cv2.COLOR_RGB2GRAY), cv2.COLOR_GRAY2RGB)
        # Pillow truncates, cv2 rounds: subtracting 0.499 makes them agree
        image = cv2.addWeighted(image, factors[operation], base, 1 - factors[operation], -0.499)
    return image


def jitter_images(images: Tensor, params: Tensor) -> Tensor:
    """As jitter_pixels, unrounded, for float (B, 3, H, W), 0-255; `params` (B, 7): 3 factors, level, 3 operations."""
    factors, level, order = params[:, :3], params[:, 3].view(-1, 1, 1, 1), params[:, 4:].long()
    for operation in order.T:
        factor = factors.gather(1, operation[:, None]).view(-1, 1, 1, 1)
        operation = operation.view(-1, 1, 1, 1)
        base = torch.where(operation == CONTRAST, level, 0)  # 0 is black, for brightness
        luma = sum(weight * channel for weight, channel in zip(LUMA, images.split(1, dim=1), strict=True))  # B, 1, H, W
        base = torch.where(operation == SATURATION, luma, base)
        images = (base + factor * (images - base)).clamp(0, 255)
    return images


@TRANSFORMS.register_module()
class RandAugment(RandAugmentBGR):
    """mmpretrain's RandAugment for RGB instead of BGR; `pad_val` in `hparams` is a gray level, or (R, G, B)."""

    def __init__(self, *args, hparams: dict | None = None, **kwargs) -> None:
        hparams = dict(hparams or dict(pad_val=128))
        if not np.isscalar(hparams.get('pad_val', 0)):
            hparams['pad_val'] = list(hparams['pad_val'])[::-1]
        super().__init__(*args, hparams=hparams, **kwargs)

    def transform(self, results: dict) -> dict:
        results['img'] = cv2.cvtColor(results['img'], cv2.COLOR_RGB2BGR)  # [..., ::-1] takes ten times as long
        results = super().transform(results)
        results['img'] = cv2.cvtColor(results['img'], cv2.COLOR_BGR2RGB)
        return results


@TRANSFORMS.register_module()
class RandomErasing(BaseTransform):
    """Adds `erase_box`, (top, left, height, width) in pixels, to some images; the data preprocessor fills it.

    Comes after all transforms that move pixels; `erase_box` must be among PackInputs' `meta_keys`.

    Args:
        prob: probability of a box.
        area: smallest and largest area of a box as a fraction of the image area.

    Source: timm `data/random_erasing.py`, mode `pixel`, one box, as in the released fine-tuning.
    """

    def __init__(self, prob: float = 0.25, area: tuple[float, float] = (0.02, 1 / 3)) -> None:
        self.prob, self.area = prob, tuple(area)

    def transform(self, results: dict) -> dict:
        results.pop('erase_box', None)
        if random.random() > self.prob:
            return results
        height, width = results['img'].shape[:2]
        for _ in range(10):  # a large, long box may not fit
            area = random.uniform(*self.area) * height * width
            aspect = math.exp(random.uniform(math.log(MIN_ASPECT), -math.log(MIN_ASPECT)))
            rows, columns = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
            if rows < height and columns < width:
                top, left = random.randint(0, height - rows), random.randint(0, width - columns)
                results['erase_box'] = (top, left, rows, columns)
                break
        return results


@TRANSFORMS.register_module()
class PackViews(BaseTransform):
    """Packs what earlier transforms have made as `dict(inputs=dict(...))` of tensors, with `positions` for a `mask`."""

    KEYS = ('images', 'tokenizer_images', 'mask', 'positions', 'jitter', 'second_images', 'local_images')

    def transform(self, results: dict) -> dict:
        if 'mask' in results:
            results['mask'] = results['mask'].astype(bool)  # mmpretrain makes masks of integers
            if (num_slots := results.get('num_slots')) is not None:
                results['positions'] = masked_positions(results['mask'], num_slots)
        inputs = {key: torch.from_numpy(np.ascontiguousarray(results[key])) for key in self.KEYS if key in results}
        return dict(inputs=dict(inputs, unreadable=results.get('unreadable', '')))


# Antialiased resizing with Pillow's filters, four times (bicubic) and twice (Lanczos) as fast as Pillow.


def resize_bicubic(image: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Resizes (H, W, C), uint8 or float32, 0-255, to `size` (height, width); contiguous."""
    # permuted after the batch axis is added, so that torch sees channels_last and the result needs no copy
    channels_first = torch.from_numpy(image)[None].permute(0, 3, 1, 2)
    resized = F.interpolate(channels_first, size=size, mode='bicubic', antialias=True)
    if image.dtype != np.uint8:
        resized.clamp_(0, 255)  # the filter overshoots at edges
    return np.ascontiguousarray(resized[0].permute(1, 2, 0).numpy())


def resize_lanczos(image: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """As resize_bicubic, with a Lanczos filter of 3 lobes."""
    resized = _lanczos_transposed(_lanczos_transposed(image, size[1]), size[0])
    return resized if image.dtype == np.uint8 else resized.clip(0, 255, out=resized)


def resize_box(image: np.ndarray, box: Sequence[float], size: tuple[int, int], resample: int) -> np.ndarray:
    """Cuts a box with fractional (top, left, height, width) from uint8 RGB (H, W, 3) and resizes it, with Pillow."""
    top, left, height, width = box
    y, x = int(top), int(left)
    crop = Image.fromarray(np.ascontiguousarray(image[y : math.ceil(top + height), x : math.ceil(left + width)]))
    return np.array(crop.resize(size[::-1], resample, (left - x, top - y, left - x + width, top - y + height)))


def _lanczos_transposed(image: np.ndarray, new_width: int) -> np.ndarray:
    """Filters the rows of (H, W, C) by a product with a banded matrix: (new_width, H, C)."""
    image = cv2.transpose(image) if image.shape[2] == 3 else np.ascontiguousarray(image.transpose(1, 0, 2))
    width, height, channels = image.shape
    pixels = torch.from_numpy(image).float().view(width, height * channels)
    bands_of = cached_bands if width <= 1000 else lanczos_bands
    filtered = torch.cat([band @ pixels[i:j] for i, j, band in bands_of(width, new_width)])
    if image.dtype == np.uint8:
        filtered = filtered.round_().clamp_(0, 255).byte()
    return filtered.view(new_width, height, channels).numpy()


def lanczos_bands(length: int, new_length: int) -> list[tuple[int, int, torch.Tensor]]:
    """For each block of output pixels: first input pixel, last + 1, and weights (outputs, inputs)."""
    scale = length / new_length
    stretch = max(scale, 1.0)
    center = (np.arange(new_length) + 0.5) * scale
    first = np.maximum((center - LOBES * stretch + 0.5).astype(int), 0)
    last = np.minimum((center + LOBES * stretch + 0.5).astype(int), length)
    bands = []
    for start in range(0, new_length, 16):  # in blocks of 16 the band is nearly dense, so a product is fast
        block = slice(start, start + 16)
        inputs = np.arange(first[block][0], last[block][-1])
        x = (inputs + 0.5 - center[block, None]) / stretch
        weights = np.sinc(x) * np.sinc(x / LOBES)
        weights *= (inputs >= first[block, None]) & (inputs < last[block, None])
        weights /= weights.sum(axis=1, keepdims=True)
        bands.append((int(inputs[0]), int(inputs[-1]) + 1, torch.from_numpy(weights).float()))
    return bands


# At most 41 MB in each process that resizes, when all lengths up to 1000 have occurred.
cached_bands = lru_cache(maxsize=1024)(lanczos_bands)

"""Transforms of images: reading any file, two views of one crop, jitter, augmentation, packing.

What is random is drawn from `random` and `numpy.random`, which the datasets seed for each sample.
"""

import math
import os
import random
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import BinaryIO

import cv2
import numpy as np
import torch
from mmcv.transforms import BaseTransform
from mmpretrain.datasets import RandAugment as RandAugmentBGR
from PIL import Image, TiffImagePlugin, UnidentifiedImageError, WebPImagePlugin  # noqa: F401  (fill Image.OPEN)
from torch import Tensor
from torchvision.io import ImageReadMode, decode_jpeg, decode_png

from beit_mm.datasets.resize import resize_bicubic, resize_lanczos
from beit_mm.registry import TRANSFORMS

Image.preinit()  # registers the plugins of the other formats
FORMATS = ('JPEG', 'PNG', 'WEBP', 'GIF', 'BMP', 'PPM', 'TIFF')  # that JPEG opens MPO too is Pillow's doing
MAX_PIXELS = 178_956_970  # beyond it Pillow takes an image for a decompression bomb
MAX_BYTES_PER_PIXEL = 16  # four channels of 32 bits; a larger file cannot be an image of so many pixels
MAX_WHOLE = 2**24  # bytes that a JPEG or PNG file may have beside its pixels to be read at once
LARGE_PNG = 2**26  # pixels; fewer are left to Pillow, which takes no offence at slightly wrong files
PNG_ORIENTATIONS = (b'eXIf', b'iTXt', b'Raw profile type')  # chunks with EXIF may stand behind the pixels
MAX_SCANS = 100  # of a JPEG; progressive ones have about 10, and each goes over all pixels
SCAN = b'\xff\xda\0'  # marks one; the length that follows is below 256
PIECE = 2**20  # bytes searched at a time
STRIP = 2**20  # pixels converted at a time
ESCAPES = {'\\': r'\\', '\n': r'\n', '\r': r'\r', '\t': r'\t'}
ORIENTATION_TAG = 0x0112
UPRIGHT = {  # EXIF orientation -> what turns the stored pixels upright
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
SIDEWAYS = (5, 6, 7, 8)  # EXIF orientations that swap height and width
FROM_THE_END = (3, 4, 6, 7)  # and those that show the first row last
Box = tuple[int, int, int, int]  # top, left, height, width in pixels
Size = int | tuple[int, int]  # side, or (height, width), in pixels
LUMA = (0.299, 0.587, 0.114)  # red, green, blue in gray (ITU-R 601)
MIN_ASPECT = 0.3  # smallest height / width of an erased box; the largest is its inverse
BRIGHTNESS, CONTRAST, SATURATION = range(3)  # operations of colour jitter


class UnreadableImageError(OSError):
    """An image file is missing, truncated, broken or too large; the message begins with its `path`."""

    path = ''


@TRANSFORMS.register_module()
class LoadImage(BaseTransform):
    """Reads `img_path` into `img`: uint8 array (H, W, 3), **RGB**, upright.

    Gray and CMYK become RGB, 16 bit is scaled to 8 (not clipped), transparency is laid on white, of an animation the
    first frame is taken, EXIF orientation is applied. An `img` that is there already is taken as the **BGR** array
    (H, W, 3) that OpenMMLab's own inferencers hand over.

    Args:
        max_pixels: largest width x height of a file that is read; beyond it nothing but its header is.

    Raises:
        UnreadableImageError: the file cannot be read; the message names it.
        ValueError: `max_pixels` is below 1.
    """

    def __init__(self, max_pixels: int = MAX_PIXELS) -> None:
        if max_pixels < 1:
            raise ValueError(f'max_pixels is {max_pixels}; expected the width x height of the largest image')
        self.max_pixels = max_pixels

    def transform(self, results: dict) -> dict:
        if 'img' in results:
            results['img'] = image = np.ascontiguousarray(results['img'][..., ::-1])
        else:
            results['img'] = image = read_image(results['img_path'], self.max_pixels)
        results['img_shape'] = results['ori_shape'] = image.shape[:2]
        return results


def read_image(path: str, max_pixels: int = MAX_PIXELS) -> np.ndarray:
    """The pixels of an image file: uint8 array (H, W, 3), RGB, upright. Raises UnreadableImageError."""
    # Decoders of broken files raise nearly everything, struct.error, SyntaxError, TypeError. None of it may end a run
    # that skips unreadable images.
    with unreadable(path, Exception), open_image(path, max_pixels) as image:
        # torchvision gives the same pixels as Pillow, without its detour over four bytes a pixel
        if is_large_plain_png(image) and (data := content(image)) is not None:
            if not any(note in data for note in PNG_ORIENTATIONS):
                return decode(decode_png, data)
        tag = orientation(image)
        if image.format == 'JPEG' and image.mode == 'RGB' and (data := content(image)) is not None:
            pixels = decode(decode_jpeg, data)
            if tag not in UPRIGHT:
                return pixels
            rows = max(1, STRIP // image.width)
            tops = range(0, image.height, rows)
            return upright(((top, Image.fromarray(pixels[top : top + rows])) for top in tops), image.size, tag)
        image.load()  # decodes; some formats learn of their palette or transparency only here
    # On decoded pixels only these are the file's fault: a mode that has no way to RGB, too many pixels for the memory.
    # Any other error is a mistake in this code, and skipping images would hide it.
    with unreadable(path, OSError, ValueError, MemoryError):
        return rgb_array(image, tag)


@contextmanager
def unreadable(path: str, *errors: type[Exception]) -> Iterator[None]:
    """Turns `errors` into UnreadableImageError with the path."""
    try:
        yield
    except errors as error:
        reason = f'{type(error).__name__}: {error}'
        if isinstance(error, UnidentifiedImageError):
            reason = 'unknown format'
        elif isinstance(error, OSError):
            reason = error.strerror or str(error)
        failure = UnreadableImageError(f'{readable(path)}: cannot be read as an image ({readable(reason)})')
        failure.path = path
        raise failure from error


def readable(text: str) -> str:
    r"""A file's name in one line that can be printed: the bytes of all else stand as \xff, a backslash as two.

    `printf %b` of bash gives the name back.
    """
    if text.isprintable() and '\\' not in text:
        return text
    return ''.join(
        char if char.isprintable() and char != '\\' else ESCAPES.get(char) or escape_bytes(char) for char in text
    )


def escape_bytes(char: str) -> str:
    """The bytes of a character in a file name, each as a backslash, x and two hexadecimal digits."""
    return ''.join(f'\\x{byte:02x}' for byte in char.encode('utf-8', 'surrogateescape'))


@contextmanager
def open_image(path: str, max_pixels: int = MAX_PIXELS) -> Iterator[Image.Image]:
    """The image in a file, closed behind it, of which only the header is read yet.

    Pillow's Image.open tries formats that hand the file to a program (PostScript to Ghostscript), and warns of large
    images, or refuses them, by a limit of the whole process; the plugins that it calls are called here directly.

    Raises:
        OSError: no regular file, which could make a reader wait for ever; another format than FORMATS; too large.
    """
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError('a folder, pipe, socket or device; expected a regular file')
    # not blocking, for a pipe may have taken the file's place since
    with open(path, 'rb', opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)) as file:
        if os.fstat(file.fileno()).st_size > MAX_BYTES_PER_PIXEL * max_pixels:
            raise OSError(f'more than {MAX_BYTES_PER_PIXEL} bytes for each of {max_pixels:,} pixels, see max_pixels')
        start = file.read(16)
        try:
            factory = next(opens for opens, accepts in map(Image.OPEN.get, FORMATS) if accepts(start) is True)
        except StopIteration:
            raise UnidentifiedImageError from None
        file.seek(0)
        image = factory(file, path)
        if image.width * image.height > max_pixels:
            raise OSError(f'{image.width} x {image.height} pixels, more than max_pixels={max_pixels:,} of LoadImage')
        if image.format in ('JPEG', 'MPO') and has_many_scans(file):
            raise OSError(f'a JPEG of more than {MAX_SCANS} scans')
        yield image


def has_many_scans(file: BinaryIO) -> bool:
    """Whether a JPEG has more than MAX_SCANS; its place in the file stays.

    A scan of some bytes costs a pass over all pixels. Where the first has all components of a file that is not
    progressive, decoders stop behind it, and nothing is searched.
    """
    place = file.tell()
    try:
        return not is_one_scan(file) and count_scans(file) > MAX_SCANS
    finally:
        file.seek(place)


def is_one_scan(file: BinaryIO) -> bool:
    """Goes through a JPEG's headers, as decoders do, to its first scan."""
    file.seek(2)
    progressive, components = True, 0
    while byte := file.read(1):
        if byte != b'\xff':
            continue
        while byte == b'\xff':
            byte = file.read(1)
        marker = byte[0] if byte else 0
        if marker in (0, 1) or 0xD0 <= marker <= 0xD8:  # no header
            continue
        header = file.read(8)
        if len(header) < 8:
            break
        if marker == 0xDA:
            return not progressive and header[2] == components
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            progressive, components = bool(marker & 2), header[7]
        file.seek(max(int.from_bytes(header[:2], 'big'), 2) - 8, os.SEEK_CUR)
    return False


def count_scans(file: BinaryIO) -> int:
    """Scans of a JPEG, as far as MAX_SCANS is not passed by far."""
    file.seek(0)
    scans, tail = 0, b''
    while scans <= MAX_SCANS and (piece := file.read(PIECE)):
        scans += (tail + piece).count(SCAN)
        tail = piece[1 - len(SCAN) :]
    return scans


def content(image: Image.Image) -> bytearray | None:
    """The whole file of an image that was opened; None if it is far too large for what decodes files as a whole."""
    if os.fstat(image.fp.fileno()).st_size > MAX_WHOLE + 4 * image.width * image.height:
        return None
    image.fp.seek(0)
    return bytearray(image.fp.read())


def decode(decoder: Callable[..., Tensor], data: bytearray) -> np.ndarray:
    """Pixels (H, W, 3) by one of torchvision's decoders."""
    return decoder(torch.frombuffer(data, dtype=torch.uint8), mode=ImageReadMode.RGB).permute(1, 2, 0).numpy()


def is_large_plain_png(image: Image.Image) -> bool:
    """A PNG of many pixels of 3 x 8 bits without transparency, as far as its header says."""
    many = image.width * image.height > LARGE_PNG
    return many and image.format == 'PNG' and 'transparency' not in image.info and image.tile[0][3] == 'RGB'


def orientation(image: Image.Image) -> int:
    """EXIF orientation 1 to 8; 1 where there is none or the tag cannot be parsed."""
    try:
        return image.getexif().get(ORIENTATION_TAG, 1)
    except Exception:  # a broken EXIF block does not make the pixels unreadable
        return 1


def rgb_array(image: Image.Image, tag: int = 1) -> np.ndarray:
    """Pixels of a decoded image: uint8 (H, W, 3), RGB, transparency on white, turned upright by its EXIF orientation.

    A large image is converted strip by strip, so that it stands in memory only once beside what is returned.
    """
    if image.mode[0] in 'IF':
        levels = deep_levels(image)
        return upright(((top, deep_gray_to_rgb(strip, *levels)) for top, strip in strips(image)), image.size, tag)
    return upright(((top, to_rgb(strip)) for top, strip in strips(image)), image.size, tag)


def upright(parts: Iterable[tuple[int, Image.Image]], size: tuple[int, int], tag: int) -> np.ndarray:
    """Strips of an RGB image, each with its first row, put together and turned: uint8 (H, W, 3).

    Args:
        parts: row and strip.
        size: (width, height) of the image as it is stored, in pixels.
        tag: its EXIF orientation.
    """
    width, height = size
    pixels = np.empty((width, height, 3) if tag in SIDEWAYS else (height, width, 3), np.uint8)
    for top, strip in parts:
        first = height - top - strip.height if tag in FROM_THE_END else top
        place = slice(first, first + strip.height)
        turned = strip.transpose(UPRIGHT[tag]) if tag in UPRIGHT else strip
        pixels[(slice(None), place) if tag in SIDEWAYS else place] = np.asarray(turned)
    return pixels


def strips(image: Image.Image) -> Iterator[tuple[int, Image.Image]]:
    """First row and pixels of each strip of an image, of at most STRIP pixels; a small image is one strip."""
    rows = max(1, STRIP // image.width)
    if rows >= image.height:
        yield 0, image
        return
    for top in range(0, image.height, rows):
        yield top, image.crop((0, top, image.width, min(top + rows, image.height)))


def to_rgb(image: Image.Image) -> Image.Image:
    """The first frame as an 8-bit RGB image, transparency laid on white."""
    if image.mode[0] in 'IF':
        return deep_gray_to_rgb(image, *deep_levels(image))
    if not image.has_transparency_data:
        return image.convert('RGB')
    image = image.convert('RGBA')
    return Image.alpha_composite(Image.new('RGBA', image.size, 'white'), image).convert('RGB')


def deep_levels(image: Image.Image) -> tuple[float, float]:
    """What is black and what is white in gray of more than 8 bits: 0 and 65535, or of 32 bits and floats its range."""
    # Pillow gives 16 bits of PGM, and older Pillow those of PNG, in the mode of 32 bits, 'I'.
    if image.mode.startswith('I;16') or (image.mode == 'I' and image.format in ('PNG', 'PPM')):
        return 0, 65535
    ranges = [(values.min(), values.max()) for values in (deep_values(strip) for _, strip in strips(image))]
    return min(low for low, _ in ranges), max(high for _, high in ranges)


def deep_values(image: Image.Image) -> np.ndarray:
    """Gray of more than 8 bits as float64 (H, W), all finite."""
    return np.nan_to_num(np.asarray(image).astype(np.float64))


def deep_gray_to_rgb(image: Image.Image, low: float, high: float) -> Image.Image:
    """Scales gray of more than 8 bits from `low`-`high` to 0-255."""
    values = deep_values(image)
    gray = np.rint((values - low) * (255 / max(high - low, 1e-12))).astype(np.uint8)
    if 'transparency' in image.info:
        gray[values == image.info['transparency']] = 255
    return Image.fromarray(gray).convert('RGB')


class TwoViews(BaseTransform):
    """Base of the two crops: from `img` (H, W, 3) to `images` (size) and `tokenizer_images` (second_size), uint8 RGB.

    Args:
        size: side of the first view in pixels, or (height, width); bicubic.
        second_size: of the tokenizer's view, Lanczos; 8 times the token grid for DALL-E. None: no second view.
    """

    def __init__(self, size: Size = 224, second_size: Size | None = 112) -> None:
        self.size = as_size(size)
        self.second_size = None if second_size is None else as_size(second_size)

    def add_views(self, results: dict, box: Box, flip: bool) -> dict:
        top, left, height, width = box
        crop = np.ascontiguousarray(results['img'][top : top + height, left : left + width])
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
        size, second_size: as TwoViews.
        scale: smallest and largest area of the box as a part of the image's.
        ratio: smallest and largest width / height of the box.
        flip_prob: probability of the flip.

    Raises:
        ValueError: a number is out of its range.

    Source: microsoft/unilm `beit/transforms.py`, `beit/datasets.py`; the law of torchvision's RandomResizedCrop.
    """

    def __init__(
        self,
        size: Size = 224,
        second_size: Size | None = 112,
        scale: tuple[float, float] = (0.08, 1.0),
        ratio: tuple[float, float] = (3 / 4, 4 / 3),
        flip_prob: float = 0.5,
    ) -> None:
        super().__init__(size, second_size)
        if not 0 < scale[0] <= scale[1] <= 1:
            raise ValueError(f'scale is {scale}; expected 0 < smallest <= largest <= 1, parts of the image')
        if not 0 < ratio[0] <= ratio[1]:
            raise ValueError(f'ratio is {ratio}; expected 0 < smallest <= largest, width / height')
        if not 0 <= flip_prob <= 1:
            raise ValueError(f'flip_prob is {flip_prob}; a probability lies between 0 and 1')
        self.scale = scale
        self.ratio = ratio
        self.flip_prob = flip_prob

    def transform(self, results: dict) -> dict:
        flip = random.random() < self.flip_prob
        height, width = results['img'].shape[:2]
        return self.add_views(results, draw_box(height, width, self.scale, self.ratio), flip)


@TRANSFORMS.register_module()
class TwoViewCenterCrop(TwoViews):
    """The largest centred box of the first view's shape, resized to both sizes; for validation. Args as TwoViews."""

    def transform(self, results: dict) -> dict:
        height, width = results['img'].shape[:2]
        ratio = self.size[1] / self.size[0]
        box = center_box(height, width, ratio, ratio)
        return self.add_views(results, box, flip=False)


def draw_box(height: int, width: int, scale: tuple[float, float], ratio: tuple[float, float]) -> Box:
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
    """(height, width) of a side, or of both; raises ValueError where there is no pixel."""
    height, width = (size, size) if isinstance(size, int) else size
    if height < 1 or width < 1:
        raise ValueError(f'size is {size}; a view has at least 1 pixel')
    return height, width


@TRANSFORMS.register_module()
class TwoViewColorJitter(BaseTransform):
    """The same random brightness, contrast and saturation for both views, in random order.

    Stands after the crop, where there are fewer pixels; contrast still uses the mean gray of the whole image (`img`).

    Args:
        brightness, contrast, saturation: factors are drawn uniformly from 1 - x to 1 + x.
        device: 'cpu' applies them here; 'model' only draws them and adds `jitter`, float32 (7,), which the data
            preprocessor applies on the model's device (jitter_images).

    Raises:
        ValueError: a number is outside 0 to 1, or the device is unknown.

    Source: microsoft/unilm `beit/datasets.py` (torchvision's ColorJitter without hue).
    """

    def __init__(
        self, brightness: float = 0.4, contrast: float = 0.4, saturation: float = 0.4, device: str = 'cpu'
    ) -> None:
        self.strengths = (brightness, contrast, saturation)
        if not all(0 <= strength <= 1 for strength in self.strengths):
            raise ValueError(f'brightness, contrast, saturation are {self.strengths}; expected 0 to 1 each')
        if device not in ('cpu', 'model'):
            raise ValueError(f"device is {device!r}; choose 'cpu' or 'model'")
        self.device = device

    def transform(self, results: dict) -> dict:
        factors = [random.uniform(1 - strength, 1 + strength) for strength in self.strengths]
        order = random.sample(range(3), 3)
        level = contrast_level(results['img'], factors, order)
        if self.device == 'model':
            results['jitter'] = np.array([*factors, level, *order], np.float32)
        else:
            for view in ('images', 'tokenizer_images'):
                if view in results:
                    results[view] = jitter_pixels(results[view], factors, level, order)
        return results


def contrast_level(image: np.ndarray, factors: Sequence[float], order: Sequence[int]) -> int:
    """Mean gray, 0-255, of an image (see jitter_pixels) after the operations that come before contrast.

    About 64 evenly spaced rows are enough: 0.3 levels off on average.
    """
    rows = np.ascontiguousarray(image[:: -(-len(image) // 64)])
    rows = jitter_pixels(rows, factors, 0, order[: order.index(CONTRAST)])
    return int(cv2.mean(cv2.cvtColor(rows, cv2.COLOR_RGB2GRAY))[0] + 0.5)


def jitter_pixels(image: np.ndarray, factors: Sequence[float], level: int, order: Sequence[int]) -> np.ndarray:
    """Jitters one image as Pillow's ImageEnhance does, in less time; a few pixels differ by 1 to 3 levels.

    Args:
        image: uint8 (H, W, 3), RGB.
        factors: of brightness, contrast, saturation.
        level: gray level that contrast blends with, 0-255.
        order: the operations to do: 0 brightness, 1 contrast, 2 saturation.
    """
    for operation in order:
        if operation == BRIGHTNESS:
            base = np.zeros_like(image)
        elif operation == CONTRAST:
            base = np.full_like(image, level)
        else:
            base = cv2.cvtColor(cv2.cvtColor(image, cv2.COLOR_RGB2GRAY), cv2.COLOR_GRAY2RGB)
        # Pillow cuts fractions off, cv2 rounds: 0.499 less makes the two agree
        image = cv2.addWeighted(image, factors[operation], base, 1 - factors[operation], -0.499)
    return image


def jitter_images(images: Tensor, params: Tensor) -> Tensor:
    """Jitters a batch on its device, every image with its own factors and order.

    Args:
        images: float (B, 3, H, W), RGB, 0-255.
        params: float (B, 7): factors of brightness, contrast and saturation, gray level for contrast (0-255), order
            of the operations (see jitter_pixels).

    Returns:
        float (B, 3, H, W), 0-255, clamped after each operation. Fractions of levels are kept, where jitter_pixels cuts
        them off.
    """
    factors, level, order = params[:, :3], params[:, 3].view(-1, 1, 1, 1), params[:, 4:].long()
    luma = images.new_tensor(LUMA).view(1, 3, 1, 1)
    for operation in order.T:
        factor = factors.gather(1, operation[:, None]).view(-1, 1, 1, 1)
        operation = operation.view(-1, 1, 1, 1)
        base = torch.where(operation == CONTRAST, level, 0)  # 0: black, for brightness
        base = torch.where(operation == SATURATION, (images * luma).sum(1, keepdim=True), base)
        images = (base + factor * (images - base)).clamp(0, 255)
    return images


@TRANSFORMS.register_module()
class RandAugment(RandAugmentBGR):
    """mmpretrain's RandAugment for the RGB images of LoadImage: it weighs the channels as those of a BGR image.

    Args: as mmpretrain's. `pad_val` in `hparams` is a gray value, or three of R, G, B.
    """

    def __init__(self, *args, hparams: dict | None = None, **kwargs) -> None:
        hparams = dict(hparams or dict(pad_val=128))
        if not np.isscalar(hparams.get('pad_val', 0)):
            hparams['pad_val'] = list(hparams['pad_val'])[::-1]
        super().__init__(*args, hparams=hparams, **kwargs)

    def transform(self, results: dict) -> dict:
        results['img'] = np.ascontiguousarray(results['img'][..., ::-1])
        results = super().transform(results)
        results['img'] = np.ascontiguousarray(results['img'][..., ::-1])
        return results


@TRANSFORMS.register_module()
class RandomErasing(BaseTransform):
    """Draws the box of an image that is to be erased and adds it as `erase_box`: (top, left, height, width) in pixels.

    ClassificationDataPreprocessor fills it with noise after normalisation. Stands after every transform that moves
    pixels, with `erase_box` among PackInputs' `meta_keys`. An image that stays whole gets no `erase_box`.

    Args:
        prob: probability of a box.
        area: smallest and largest area of a box as a part of the image's.

    Raises:
        ValueError: a number outside its range.

    Source: timm `data/random_erasing.py`, mode `pixel`, one box; the released fine-tuning's.
    """

    def __init__(self, prob: float = 0.25, area: tuple[float, float] = (0.02, 1 / 3)) -> None:
        if not (0 <= prob <= 1 and 0 < area[0] <= area[1] <= 1):
            raise ValueError(f'prob is {prob}, area {area}; expected 0 to 1 each, and area in rising order')
        self.prob = prob
        self.area = tuple(area)

    def transform(self, results: dict) -> dict:
        results.pop('erase_box', None)
        if random.random() > self.prob:
            return results
        height, width = results['img'].shape[:2]
        for _ in range(10):  # a long box of a large area may not fit
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
    """Keeps what the model takes, as `dict(inputs=dict(...))` of tensors that a collate function can stack.

    Returns:
        images: uint8 (H, W, 3), RGB; tokenizer_images: uint8 (h, w, 3), RGB; mask: bool (rows, columns), True = masked;
        jitter: float32 (7,), see TwoViewColorJitter; each only if a transform before made it.
        unreadable: str, path of a file in whose place this one stands because that cannot be read, else ''.
    """

    def transform(self, results: dict) -> dict:
        inputs = {
            key: torch.from_numpy(np.ascontiguousarray(results[key]))
            for key in ('images', 'tokenizer_images', 'mask', 'jitter')
            if key in results
        }
        return dict(inputs=dict(inputs, unreadable=results.get('unreadable', '')))

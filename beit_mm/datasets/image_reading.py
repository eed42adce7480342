"""From an image file of any kind to RGB pixels, and the transform that does it."""
import io
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from mmcv.transforms import BaseTransform
from PIL import Image, UnidentifiedImageError
from torchvision.io import ImageReadMode, decode_jpeg

from beit_mm.registry import TRANSFORMS

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


class UnreadableImageError(OSError):
    """An image file that is missing, truncated, broken or a decompression bomb; the message begins
    with its path."""


@TRANSFORMS.register_module()
class LoadImage(BaseTransform):
    """Reads `img_path` into `img`: uint8 array (H, W, 3), **RGB**, upright.

    Gray and CMYK become RGB, 16 bit is scaled to 8 (not clipped), transparency is laid on white, of
    an animation the first frame is taken, EXIF orientation is applied.

    Raises:
        UnreadableImageError: The file cannot be read; the message names it.

    Differs from mmcv's LoadImageFromFile in: RGB, not BGR; what is listed above; nothing unreadable
    passes silently.
    """

    def transform(self, results: dict) -> dict:
        results['img'] = image = read_image(results['img_path'])
        results['img_shape'] = results['ori_shape'] = image.shape[:2]
        return results


def read_image(path: str) -> np.ndarray:
    """Read an image file.

    Args:
        path: Any format that Pillow knows.

    Returns:
        uint8 array (H, W, 3), RGB, upright.

    Raises:
        UnreadableImageError: The file cannot be read.
    """
    # Libraries at work on the bytes of strangers raise nearly everything, struct.error, SyntaxError,
    # TypeError: whatever it is, it is the file's doing, and must not end a run that skips.
    with unreadable(path, Exception):
        with open(path, 'rb') as file:
            data = file.read()
        image = Image.open(io.BytesIO(data))  # reads the header only; refuses decompression bombs
        turn = UPRIGHT.get(orientation(image))
        if image.format == 'JPEG' and image.mode == 'RGB' and turn is None:
            # the same pixels as Pillow's, without its detour over four bytes a pixel
            data = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            return decode_jpeg(data, mode=ImageReadMode.RGB).permute(1, 2, 0).numpy()
        image.load()  # decodes; some formats learn of their palette or transparency only here
    # Our own code at work on decoded pixels: a mode that has no way to RGB, or too many pixels for
    # the memory. Any other error is a mistake of ours, and skipping images would hide it.
    with unreadable(path, OSError, ValueError, MemoryError):
        image = to_rgb(image)
        return np.array(image if turn is None else image.transpose(turn))


@contextmanager
def unreadable(path: str, *errors: type[Exception]) -> Iterator[None]:
    """Turns `errors` into UnreadableImageError with the path."""
    try:
        yield
    except errors as error:
        unknown = isinstance(error, UnidentifiedImageError)
        reason = 'unknown format' if unknown else f'{type(error).__name__}: {error}'
        raise UnreadableImageError(f'{path}: cannot be read as an image ({reason})') from error


def orientation(image: Image.Image) -> int:
    """EXIF orientation 1 to 8; 1 where there is none or the tag cannot be parsed."""
    try:
        return image.getexif().get(ORIENTATION_TAG, 1)
    except Exception:  # a broken EXIF block does not make the pixels unreadable
        return 1


def to_rgb(image: Image.Image) -> Image.Image:
    """The first frame as an 8-bit RGB image, transparency laid on white."""
    if image.mode[0] in 'IF':
        return deep_gray_to_rgb(image)
    if not image.has_transparency_data:
        return image.convert('RGB')
    image = image.convert('RGBA')
    return Image.alpha_composite(Image.new('RGBA', image.size, 'white'), image).convert('RGB')


def deep_gray_to_rgb(image: Image.Image) -> Image.Image:
    """Gray of 16 bits: 0 to 65535 becomes 0 to 255. Of 32 bits, signed, or float, which have no
    fixed white: its own range does.

    Pillow gives 16 bits of PGM, and older Pillow those of PNG, in the mode of 32 bits, 'I'.
    """
    values = np.nan_to_num(np.asarray(image).astype(np.float64))
    sixteen_bits = image.mode.startswith('I;16') or (image.mode == 'I' and image.format in ('PNG', 'PPM'))
    low, high = (0, 65535) if sixteen_bits else (values.min(), values.max())
    gray = np.rint((values - low) * (255 / max(high - low, 1e-12))).astype(np.uint8)
    if 'transparency' in image.info:
        gray[values == image.info['transparency']] = 255
    return Image.fromarray(gray).convert('RGB')

"""Reading image files that nobody has looked at: every mode, orientation and damage, within limits of memory."""

import io
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import BinaryIO

import numpy as np
import torch
from mmcv.transforms import BaseTransform
from PIL import Image, TiffImagePlugin, UnidentifiedImageError, WebPImagePlugin  # noqa: F401  (fill Image.OPEN)
from torch import Tensor

from beit_mm.registry import TRANSFORMS
from beit_mm.terminal import UserError

try:  # torchvision's are deprecated from 0.29 in favour of these, which give the same pixels but turn them upright
    from torchcodec.decoders import ImageReadMode, decode_jpeg, decode_png

    UPRIGHT_DECODED = True
except (ImportError, OSError, RuntimeError):  # not installed, before 0.16, made for another torch
    from torchvision.io import ImageReadMode, decode_jpeg, decode_png

    UPRIGHT_DECODED = False

try:  # called directly: its register_heif_opener would change what Pillow opens for everybody
    from pillow_heif import HeifImageFile
except ImportError:
    HeifImageFile = None

Image.preinit()  # registers the plugins of the other formats
FORMATS = ('JPEG', 'PNG', 'WEBP', 'GIF', 'BMP', 'PPM', 'TIFF')  # that JPEG opens MPO too is Pillow's doing
HEIF_BRANDS = (b'heic', b'heix', b'heim', b'heis', b'hevc', b'hevx', b'mif1', b'msf1')  # of .heic files, bytes 8 to 12
MAX_PIXELS = 178_956_970  # beyond it Pillow takes an image for a decompression bomb
MAX_ASPECT = 50  # long side / short side; a resizing to a short side would make far more pixels than there are
MAX_BYTES_PER_PIXEL = 16  # four channels of 32 bits; a larger file cannot be an image of so many pixels
MAX_WHOLE = 2**24  # bytes that a JPEG or PNG file may have beside its pixels to be read at once
LARGE_JPEG = 2**20  # pixels; smaller ones are decoded in full whatever is made of them
SCALES = (8, 4, 2)  # at a fraction 1/k of its sides a JPEG is decoded in about 1/k of the time
MARGIN = 2  # times the wanted size that is decoded at least: 1 level from full decoding on average
LARGE_PNG = 2**26  # pixels; fewer are left to Pillow, which takes no offence at slightly wrong files
PNG_ORIENTATIONS = (b'eXIf', b'iTXt', b'Raw profile type')  # chunks with EXIF may stand behind the pixels
MAX_SCANS = 100  # of a JPEG; progressive ones have about 10, and each goes over all pixels
SCAN = b'\xff\xda\0'  # marks one; the length that follows is below 256
PIECE = 2**20  # bytes searched at a time
MAX_ARCHIVES = 256  # held open at once by a process, which may open 1024 files
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


class UnreadableImageError(OSError):
    """An image file is missing, truncated, broken or too large; the message begins with its `path`."""

    path = ''


class MemberPath(str):
    """The path of an image inside a tar archive, `ARCHIVE/NAME`: a string that knows where the image's bytes lie.

    Whatever reads an image file reads it from the archive instead; in messages and lists it is like other paths.

    Args:
        path: the string.
        archive: path of the archive, which is not compressed.
        offset, length: of the image's bytes in it.
    """

    archive: str
    offset: int
    length: int

    def __new__(cls, path: str, archive: str, offset: int, length: int) -> 'MemberPath':
        self = super().__new__(cls, path)
        self.archive, self.offset, self.length = archive, offset, length
        return self

    def __reduce__(self) -> tuple:  # of strings only the text would be copied and sent to other processes
        return MemberPath, (str(self), self.archive, self.offset, self.length)


# mmseg's inferencers look for the second name and put one of the others in its place:
# dict(type='LoadImageFromFile', _scope_='beit_mm') is this class, whatever they make of it.
@TRANSFORMS.register_module(name=['LoadImage', 'LoadImageFromFile', 'LoadImageFromNDArray', 'InferencerLoader'])
class LoadImage(BaseTransform):
    """Reads `img_path` into `img`: uint8 array (H, W, 3), **RGB**, upright.

    Gray and CMYK become RGB, 16 bit is scaled to 8 (not clipped), transparency is laid on white, of an animation the
    first frame is taken, EXIF orientation is applied. An `img` that is there already is taken as the **BGR** array
    (H, W, 3) that OpenMMLab's own inferencers hand over.

    A JPEG of more than a megapixel is decoded at 1/2, 1/4 or 1/8 of its size where the crop or ResizeEdge behind it,
    in a dataset's pipeline or an inferencer's, makes something half as large of it at most: see `scale_decoding`.

    Args:
        max_pixels: largest width x height of a file that is read; beyond it nothing but its header is.
        scaled: False decodes every file in full.

    Raises:
        UnreadableImageError: the file cannot be read, or has a side 50 times as long as the other; names it.
        ValueError: `max_pixels` is below 1.
    """

    def __init__(self, max_pixels: int = MAX_PIXELS, scaled: bool = True) -> None:
        if max_pixels < 1:
            raise UserError(f'max_pixels is {max_pixels}; expected the width x height of the largest image')
        self.max_pixels = max_pixels
        self.scaled = scaled
        # set by scale_decoding: (results, height, width) -> 1, 2, 4 or 8
        self.choose_scale: Callable[[dict, int, int], int] | None = None

    def transform(self, results: dict | str | np.ndarray) -> dict:
        if not isinstance(results, dict):  # from mmseg's MMSegInferencer
            results = dict(img_path=results) if isinstance(results, str) else dict(img=results)
        if 'img' in results:
            results['img'] = image = np.ascontiguousarray(results['img'][..., ::-1])
        else:
            choose_scale = self.choose_scale and partial(self.choose_scale, results)
            results['img'] = image = read_image(results['img_path'], self.max_pixels, choose_scale)
        check_aspect(results.get('img_path') or 'an array', image)
        results['img_shape'] = results['ori_shape'] = image.shape[:2]
        return results


def check_aspect(path: str, image: np.ndarray) -> None:
    """Raises UnreadableImageError for an image (H, W, C) that is hardly more than a line."""
    height, width = image.shape[:2]
    if max(height, width) > MAX_ASPECT * min(height, width):
        with unreadable(path, OSError):
            raise OSError(f'{width} x {height} pixels; expected a long side of at most {MAX_ASPECT} short ones')


def decoding_scale(sides: Sequence[int], wanted: Sequence[int]) -> int:
    """The largest k at which a k-th of the sides is still MARGIN times what is wanted, in pixels; else 1."""
    fits = (k for k in SCALES if all(side >= MARGIN * k * size for side, size in zip(sides, wanted, strict=True)))
    return next(fits, 1)


def read_image(
    path: str, max_pixels: int = MAX_PIXELS, choose_scale: Callable[[int, int], int] | None = None
) -> np.ndarray:
    """The pixels of an image file: uint8 array (H, W, 3), RGB, upright.

    Args:
        path: of the file.
        max_pixels: as LoadImage.
        choose_scale: asked for a large JPEG, by its upright height and width: which part of its sides is needed, as 1,
            2, 4 or 8. The array is (ceil(H / k), ceil(W / k), 3) for this k or a smaller one.

    Raises:
        UnreadableImageError: the file cannot be read.
    """
    # Decoders of broken files raise nearly everything, struct.error, SyntaxError, TypeError. None of it may end a run
    # that skips unreadable images.
    with unreadable(path, Exception), open_image(path, max_pixels) as image:
        # torch's decoders give the same pixels as Pillow, without its detour over four bytes a pixel
        if is_large_plain_png(image) and (data := content(image)) is not None:
            if not any(note in data for note in PNG_ORIENTATIONS):
                return decode(decode_png, data)
        tag, scale = orientation(image), 1
        if choose_scale and image.format in ('JPEG', 'MPO') and image.width * image.height > LARGE_JPEG:
            scale = choose_scale(*(image.size if tag in SIDEWAYS else image.size[::-1]))
            while tag in UPRIGHT and (image.width % scale or image.height % scale):
                scale //= 2  # what the last pixel lacks must lie at the end of the upright sides
        if scale > 1:
            image.draft('RGB', (image.width // scale, image.height // scale))
        elif image.format == 'JPEG' and image.mode == 'RGB' and (data := content(image)) is not None:
            pixels = decode(decode_jpeg, data)
            if tag not in UPRIGHT or UPRIGHT_DECODED:
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
        elif str(error) == 'unknown pixel mode':  # of Pillow's TIFF reader
            reason = 'its bands are no RGB; docs/many_bands.md and LoadBands are for images of many bands'
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
def open_file(path: str, max_pixels: int) -> Iterator[BinaryIO]:
    """A file, or what stands for one in an archive, that may be an image of so many pixels, closed behind it.

    Raises:
        OSError: no regular file, which could make a reader wait for ever; too large.
    """
    if isinstance(path, MemberPath):
        check_bytes(path.length, max_pixels)
        yield io.BytesIO(read_member(path))
        return
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError('a folder, pipe, socket or device; expected a regular file')
    with open(path, 'rb', opener=open_at_once) as file:
        check_bytes(os.fstat(file.fileno()).st_size, max_pixels)
        yield file


def open_at_once(path: str, flags: int) -> int:
    """An opener that does not wait for the other end of a pipe, which may have taken a file's place."""
    return os.open(path, flags | os.O_NONBLOCK)


def check_bytes(size: int, max_pixels: int) -> None:
    """Raises OSError for a file of more bytes than an image of so many pixels can have."""
    if size > MAX_BYTES_PER_PIXEL * max_pixels:
        raise OSError(f'more than {MAX_BYTES_PER_PIXEL} bytes for each of {max_pixels:,} pixels, see max_pixels')


def read_member(path: MemberPath) -> bytes:
    """The bytes of an image in a tar archive.

    Forked processes and threads share a descriptor without harm: pread moves no position.

    Raises:
        OSError: no such archive, or it ends before the image.
    """
    file, pieces, missing = open_archive(path.archive), [], path.length
    while missing and (piece := os.pread(file.fileno(), missing, path.offset + path.length - missing)):
        pieces.append(piece)
        missing -= len(piece)
    if missing:
        raise OSError('the archive ends before it; copy the archive again')
    return b''.join(pieces)


@lru_cache(MAX_ARCHIVES)
def open_archive(path: str) -> BinaryIO:
    """An archive, which is closed when others have taken its place here and nobody reads from it."""
    return open(path, 'rb', buffering=0, opener=open_at_once)  # type: ignore[return-value]


@contextmanager
def open_image(path: str, max_pixels: int = MAX_PIXELS) -> Iterator[Image.Image]:
    """The image in a file, closed behind it, of which only the header is read yet.

    Pillow's Image.open tries formats that hand the file to a program (PostScript to Ghostscript), and warns of large
    images, or refuses them, by a limit of the whole process; the plugins that it calls are called here directly.

    Raises:
        OSError: as open_file; another format than FORMATS; too large.
    """
    with open_file(path, max_pixels) as file:
        start = file.read(16)
        try:
            factory = next(opens for opens, accepts in map(Image.OPEN.get, FORMATS) if accepts(start) is True)
        except StopIteration:
            if start[4:8] != b'ftyp' or start[8:12] not in HEIF_BRANDS:
                raise UnidentifiedImageError from None
            if (factory := HeifImageFile) is None:
                raise OSError('HEIC; pip install pillow-heif to have it read, or convert it') from None
        file.seek(0)
        image = factory(file, '' if isinstance(path, MemberPath) else path)
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
    if image.fp.seek(0, os.SEEK_END) > MAX_WHOLE + 4 * image.width * image.height:
        return None
    image.fp.seek(0)
    return bytearray(image.fp.read())


def decode(decoder: Callable[..., Tensor], data: bytearray) -> np.ndarray:
    """Pixels (H, W, 3) by one of torchcodec's or torchvision's decoders."""
    pixels = decoder(torch.frombuffer(data, dtype=torch.uint8), mode=ImageReadMode.RGB).permute(1, 2, 0)
    return np.ascontiguousarray(pixels.numpy())  # turned ones are views


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

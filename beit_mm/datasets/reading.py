"""Reads untrusted image files of any mode, orientation, damage or number of bands.

LoadImage gives RGB. LoadBands is for the images of satellites, microscopes, scanners, in .tif and .npy files.
"""

import io
import os
import random
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from itertools import islice
from typing import Any, BinaryIO

import numpy as np
import torch
from mmcv.transforms import BaseTransform
from PIL import Image, ImageOps, TiffImagePlugin, UnidentifiedImageError, WebPImagePlugin  # noqa: F401  (fill Image.OPEN)

from beit_mm.errors import UserError, warn
from beit_mm.files import quoted
from beit_mm.registry import TRANSFORMS

try:  # torchvision's is deprecated from 0.29 in favour of this one, which gives the same pixels
    from torchcodec.decoders import ImageReadMode, decode_jpeg
except (ImportError, OSError, RuntimeError):  # not installed, before 0.16, made for another torch
    from torchvision.io import ImageReadMode, decode_jpeg

try:  # called directly: its register_heif_opener would change what Pillow opens for everybody
    from pillow_heif import HeifImageFile
except ImportError:
    HeifImageFile = None

try:
    from tifffile import TiffFile
except ImportError:
    TiffFile = None

Image.preinit()  # registers the plugins of the other formats
FORMATS = ('JPEG', 'PNG', 'WEBP', 'GIF', 'BMP', 'PPM', 'TIFF')  # JPEG opens MPO too
HEIF_BRANDS = (b'heic', b'heix', b'heim', b'heis', b'hevc', b'hevx', b'mif1', b'msf1')  # of .heic files, bytes 8 to 12
MAX_PIXELS = 178_956_970  # Pillow's limit for decompression bombs
MAX_BYTES_PER_PIXEL = 16  # four channels of 32 bits: a larger file cannot be an image of so many pixels
MARGIN = 2  # decode at least twice the wanted size: then pixels differ by 1 level on average from full decoding
ORIENTATION_TAG, SAMPLES_TAG = 0x0112, 277
SIDEWAYS = (5, 6, 7, 8)  # EXIF orientations that swap height and width
MAX_BANDS = 16
SAMPLED = 10_000  # pixels of an image that statistics of its bands are taken from
# Tag numbers of none, LZW, Deflate (two), PackBits, LZMA, Zstandard; JPEG and its like have sizes of their own
COMPRESSIONS = (1, 5, 8, 32946, 32773, 34925, 50000)
TOLD: list[str] = []  # the file that `tell_hidden_bands` has warned of


class UnreadableImageError(OSError):
    """An image file is missing, truncated, broken or too large; the message begins with its `path`."""

    path = ''


class MemberPath(str):
    """The path of an image inside a tar archive, `ARCHIVE/NAME`, which also says where the image's bytes lie."""

    archive: str  # path; it is not compressed
    offset: int  # of the image's bytes in the archive
    length: int  # of the image in bytes

    def __new__(cls, path: str, archive: str, offset: int, length: int) -> 'MemberPath':
        self = super().__new__(cls, path)
        self.archive, self.offset, self.length = archive, offset, length
        return self

    def __reduce__(self) -> tuple:  # pickling and copying would keep the text only
        return MemberPath, (str(self), self.archive, self.offset, self.length)


# mmseg's inferencers look for LoadImageFromFile and replace it by one of the last two names.
@TRANSFORMS.register_module(name=['LoadImage', 'LoadImageFromFile', 'LoadImageFromNDArray', 'InferencerLoader'])
class LoadImage(BaseTransform):
    """Reads `img_path` into `img`: uint8 array (H, W, 3), **RGB**, upright.

    Gray and CMYK become RGB, 16 bits are scaled to 8 (not clipped), transparency is laid on white, of an animation the
    first frame is taken, EXIF orientation is applied. An `img` that is there already is taken as the **BGR** array
    (H, W, 3) that OpenMMLab's own inferencers hand over.

    Args:
        max_pixels: largest width x height of a file that is read, and of its label map; of a larger one only the
            header is.
        scaled: decode a JPEG of more than a megapixel at 1/2, 1/4 or 1/8 of its size where the crop or ResizeEdge
            behind it needs no more, see `scale_decoding`.
        cache_bytes: memory for images decoded to at most a megapixel, in each process that reads: the first ones that
            fit are kept, a large JPEG at each scale that was needed, so that a small set is decoded once. The pixels
            are the same.

    Raises:
        UnreadableImageError: the file cannot be read, or has a side more than 50 times as long as the other; names it.
    """

    def __init__(self, max_pixels: int = MAX_PIXELS, scaled: bool = True, cache_bytes: int = 0) -> None:
        self.max_pixels, self.scaled = max_pixels, scaled
        self.free_bytes = self.cache_bytes = cache_bytes
        self.cache: dict[tuple[str, int], np.ndarray] = {}  # by path and scale
        self.sizes: dict[str, tuple[int, int]] = {}  # height and width of large JPEGs: their scale is chosen anew
        # set by scale_decoding: (results, height, width) -> 1, 2, 4 or 8
        self.choose_scale: Callable[[dict, int, int], int] | None = None

    def transform(self, results: dict | str | np.ndarray) -> dict:
        if not isinstance(results, dict):  # from mmseg's MMSegInferencer
            results = dict(img_path=results) if isinstance(results, str) else dict(img=results)
        if 'img' in results:
            results['img'] = image = np.ascontiguousarray(results['img'][..., ::-1])
        else:
            results['img'] = image = self.read(results['img_path'], results)
        check_aspect(results.get('img_path') or 'an array', image)
        results['img_shape'] = results['ori_shape'] = image.shape[:2]
        return results

    def read(self, path: str, results: dict) -> np.ndarray:
        choose_scale = self.choose_scale and partial(self.choose_scale, results)
        scale = choose_scale(*self.sizes[path]) if choose_scale and path in self.sizes else None
        if (kept := self.cache.get((path, scale or 1))) is not None:
            return kept.copy()

        def choose(height: int, width: int) -> int:
            nonlocal scale
            if self.cache_bytes:
                self.sizes[path] = height, width
            scale = scale or choose_scale(height, width)  # once: it may draw a box
            return scale

        image = read_image(path, self.max_pixels, choose_scale and choose)
        if image.nbytes <= min(self.free_bytes, 3 * 2**20):
            self.cache[path, scale or 1] = image.copy()
            self.free_bytes -= image.nbytes
        return image


def check_aspect(path: str, image: np.ndarray) -> None:
    """Raises UnreadableImageError for a long image (H, W, C), which a resized short side would make far larger."""
    height, width = image.shape[:2]
    if max(height, width) > 50 * min(height, width):
        with unreadable(path, OSError):
            raise OSError(f'{width} x {height} pixels; expected a long side of at most 50 short ones')


def decoding_scale(sides: Sequence[int], wanted: Sequence[int]) -> int:
    """The largest k of 8, 4, 2 at which sides / k is at least MARGIN times the wanted size, in pixels; else 1.

    At 1/k of its sides a JPEG is decoded in about 1/k of the time.
    """
    fits = (k for k in (8, 4, 2) if all(side >= MARGIN * k * size for side, size in zip(sides, wanted, strict=True)))
    return next(fits, 1)


def read_image(
    path: str, max_pixels: int = MAX_PIXELS, choose_scale: Callable[[int, int], int] | None = None
) -> np.ndarray:
    """The pixels of an image file: uint8 array (H, W, 3), RGB, upright.

    Args:
        path, max_pixels: as LoadImage.
        choose_scale: called with the upright height and width of a JPEG of more than a megapixel, returns the scale k,
            1, 2, 4 or 8, that is small enough. The array is (ceil(H / k), ceil(W / k), 3) for this k or a smaller one.
    """
    # decoders of broken files raise nearly everything: struct.error, SyntaxError, TypeError
    with unreadable(path, Exception), open_image(path, max_pixels) as image:
        tag, scale = orientation(image), 1
        if choose_scale and image.format in ('JPEG', 'MPO') and image.width * image.height > 2**20:
            scale = choose_scale(*(image.size if tag in SIDEWAYS else image.size[::-1]))
            while tag != 1 and (image.width % scale or image.height % scale):
                scale //= 2  # else the last pixel, which stands for fewer, could become the first
        if scale > 1:
            image.draft('RGB', (image.width // scale, image.height // scale))
        elif image.format == 'JPEG' and image.mode == 'RGB' and tag == 1:
            # the same pixels as Pillow's, without its detour over four bytes a pixel
            image.fp.seek(0)
            data = torch.frombuffer(bytearray(image.fp.read()), dtype=torch.uint8)
            return np.ascontiguousarray(decode_jpeg(data, mode=ImageReadMode.RGB).permute(1, 2, 0).numpy())
        image.load()  # decodes; some formats learn of their palette or transparency only here
        if image.format == 'TIFF':
            tell_hidden_bands(path, image)
    # a mode without conversion to RGB, too little memory; any other error is a mistake in this code
    with unreadable(path, OSError, ValueError, MemoryError):
        return rgb_array(image)


def tell_hidden_bands(path: str, image: Image.Image) -> None:
    """Warns once of a TIFF that holds more than its RGB shows; only one of the loading processes does."""
    worker = torch.utils.data.get_worker_info()
    if TOLD or (worker is not None and worker.id):
        return
    samples, hidden = image.tag_v2.get(SAMPLES_TAG, 1), ''
    if image.mode == 'RGBA' and image.getchannel('A').getextrema()[0] < 255:
        hidden = 'the fourth band is marked as transparency and laid on white'
    elif samples > len(image.getbands()):
        hidden = f'of {samples} bands {len(image.getbands())} are read'
    if hidden:
        TOLD.append(path)
        warn(f'{quoted(path)}: {hidden}; finetune --bands all, or LoadBands in a config, reads all (docs/data.md)')


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
            reason = 'its bands are not RGB; docs/data.md and LoadBands are for images of many bands'
        elif isinstance(error, OSError):
            reason = error.strerror or str(error)
        failure = UnreadableImageError(f'{quoted(path)}: cannot be read as an image ({quoted(reason)})')
        failure.path = path
        raise failure from error


@contextmanager
def open_file(path: str, max_pixels: int) -> Iterator[BinaryIO]:
    """A file, or an image in an archive, that may be an image of so many pixels; closed when the block ends."""
    if isinstance(path, MemberPath):
        check_bytes(path.length, max_pixels)
        # forked processes and threads share the descriptor without harm: pread moves no position
        content = os.pread(open_archive(path.archive).fileno(), path.length, path.offset)
        if len(content) < path.length:
            raise OSError('the archive ends before it; copy the archive again')
        yield io.BytesIO(content)
        return
    if not stat.S_ISREG(os.stat(path).st_mode):  # which could make a reader wait for ever
        raise OSError('a folder, pipe, socket or device; expected a regular file')
    with open(path, 'rb') as file:
        check_bytes(os.fstat(file.fileno()).st_size, max_pixels)
        yield file


def check_bytes(size: int, max_pixels: int) -> None:
    if size > MAX_BYTES_PER_PIXEL * max_pixels:
        raise OSError(f'more than {MAX_BYTES_PER_PIXEL} bytes for each of {max_pixels:,} pixels, see max_pixels')


# A process may open 1024 files. An archive is closed when it leaves the cache and nobody reads from it.
open_archive = lru_cache(256)(partial(open, mode='rb', buffering=0))


@contextmanager
def open_image(path: str, max_pixels: int = MAX_PIXELS) -> Iterator[Image.Image]:
    """The image in a file, of which only the header is read yet; the file is closed when the block ends."""
    # Pillow's plugins are called directly: Image.open also tries formats that start a program (Ghostscript), and warns
    # of large images, or refuses them, by a limit for the process.
    with open_file(path, max_pixels) as file:
        start = file.read(16)
        factory = next((opens for opens, accepts in map(Image.OPEN.get, FORMATS) if accepts(start) is True), None)
        if factory is None:
            if start[4:8] != b'ftyp' or start[8:12] not in HEIF_BRANDS:
                raise UnidentifiedImageError
            if (factory := HeifImageFile) is None:
                raise OSError('HEIC; pip install pillow-heif to have it read, or convert it')
        file.seek(0)
        image = factory(file, '' if isinstance(path, MemberPath) else path)
        if image.width * image.height > max_pixels:
            size = f'{image.width} x {image.height} pixels'
            raise OSError(f'{size}, more than max_pixels={max_pixels:,} of LoadImage (segment --max-pixels)')
        yield image


def orientation(image: Image.Image) -> int:
    """EXIF orientation 1 to 8; 1 where there is none."""
    try:
        tag = image.getexif().get(ORIENTATION_TAG)
    except Exception:  # a broken EXIF block does not make the pixels unreadable
        return 1
    return int(tag) if tag in range(1, 9) else 1


def rgb_array(image: Image.Image) -> np.ndarray:
    """Pixels of a decoded image: uint8 (H, W, 3), RGB, upright, transparency on white."""
    rgb = to_rgb(image)
    if (tag := orientation(image)) != 1:
        exif = Image.Exif()
        exif[ORIENTATION_TAG] = tag
        rgb.info = dict(exif=exif.tobytes())  # exif_transpose writes it anew, which fails for some broken ones
        rgb = ImageOps.exif_transpose(rgb)
    return np.array(rgb)


def to_rgb(image: Image.Image) -> Image.Image:
    if image.mode[0] in 'IF':
        return deep_gray_to_rgb(image)
    if not image.has_transparency_data:
        return image.convert('RGB')
    image = image.convert('RGBA')
    return Image.alpha_composite(Image.new('RGBA', image.size, 'white'), image).convert('RGB')


def deep_gray_to_rgb(image: Image.Image) -> Image.Image:
    """Scales gray of more than 8 bits to 0-255: 16 bits from 0 to 65535, 32 bits and floats from their own range."""
    values = np.nan_to_num(np.asarray(image).astype(np.float64))
    low, high = values.min(), values.max()
    # Pillow gives 16 bits of PGM, and older Pillow those of PNG, in the mode of 32 bits, 'I'.
    if image.mode.startswith('I;16') or (image.mode == 'I' and image.format in ('PNG', 'PPM')):
        low, high = 0, 65535
    gray = np.rint((values - low) * (255 / max(high - low, 1e-12))).astype(np.uint8)
    if 'transparency' in image.info:
        gray[values == image.info['transparency']] = 255
    return Image.fromarray(gray).convert('RGB')


@TRANSFORMS.register_module()
class LoadBands(BaseTransform):
    """Reads `img_path`, a .tif or .npy file, into `img`: (H, W, C), uint8 or float32, 0-255, for any number of bands C.

    An `img` that is there already, (H, W, C), takes the place of the file's values.

    Args:
        bands: bands of the file, counted from 0, in the order that the model sees; None: all.
        low, high: values in the file that become 0 and 255: a number for all bands, or one for each band. Values beyond
            them become 0 or 255, NaN becomes 0; the result is float32. None: the files hold uint8, which is not
            changed. `tools/datasets/band_statistics.py` finds them.
        max_pixels: as LoadImage.

    Raises:
        UnreadableImageError: the file cannot be read, or has other bands or values than these settings say; names it.
    """

    def __init__(
        self,
        bands: Sequence[int] | None = None,
        low: float | Sequence[float] | None = None,
        high: float | Sequence[float] | None = None,
        max_pixels: int = MAX_PIXELS,
    ) -> None:
        if (low is None) != (high is None):
            raise UserError(f'low is {low}, high is {high}; expected both or neither')
        lengths = {len(value) for value in (bands, low, high) if isinstance(value, Sequence)}
        if len(lengths) > 1 or lengths - {*range(1, MAX_BANDS + 1)}:
            raise UserError(f'bands={bands}, low={low}, high={high}; expected as many in each, 1 to {MAX_BANDS} bands')
        if low is not None and not np.all(np.less(low, high)):
            raise UserError(f'low is {low}, high is {high}; expected low < high, the values that become 0 and 255')
        self.bands = None if bands is None else list(bands)
        self.low, self.high = (None if value is None else np.float32(value) for value in (low, high))
        self.num_bands = lengths.pop() if lengths else None  # None: as many as a file has
        self.max_pixels = max_pixels

    def transform(self, results: dict) -> dict:
        if 'img' in results:
            image = self.scale(results['img'])
        else:
            values = read_bands(results['img_path'], self.max_pixels)
            with unreadable(results['img_path'], ValueError, MemoryError):
                image = self.scale(values)
        check_aspect(results.get('img_path') or 'an array', image)
        results.update(img=image)
        results['img_shape'] = results['ori_shape'] = image.shape[:2]
        return results

    def scale(self, values: np.ndarray) -> np.ndarray:
        """Takes the bands of an array (H, W) or (H, W, C) and brings them to 0-255, see LoadBands."""
        values = check_bands(values)
        if self.bands is not None:
            if max(self.bands) >= values.shape[2]:
                raise UserError(f'{values.shape[2]} bands, counted from 0; bands={self.bands} takes others')
            values = values[..., self.bands]
        if values.shape[2] != (self.num_bands or values.shape[2]) or values.shape[2] > MAX_BANDS:
            expected = self.num_bands or f'1 to {MAX_BANDS}'
            raise UserError(f'{values.shape[2]} bands; expected {expected}, or the ones to take: bands=[0, 1, ...]')
        if self.low is None or self.high is None:
            if values.dtype != np.uint8:
                advice = 'low=... and high=... that become 0 and 255: tools/datasets/band_statistics.py finds them'
                raise UserError(f'values of type {values.dtype}; expected uint8, or {advice}')
            return np.ascontiguousarray(values)
        height, width, count = values.shape
        # by rows: numpy takes four times as long over an axis as short as the bands
        low, factor = (np.tile(np.broadcast_to(x, count), width) for x in (self.low, 255 / (self.high - self.low)))
        with np.errstate(over='ignore'):  # of what stands for "no data"
            scaled = np.array(values, np.float32, order='C').reshape(height, width * count)
            scaled -= low
            scaled *= factor
        np.fmax(scaled, 0, out=scaled)  # of NaN too
        return np.fmin(scaled, 255, out=scaled).reshape(height, width, count)

    @staticmethod
    def as_rgb(image: np.ndarray) -> np.ndarray:
        """Bands 1 to 3 of an image (H, W, C), 0-255, to look at: uint8 (H, W, 3); of fewer the first, in gray."""
        first = image[..., :3] if image.shape[2] > 2 else image[..., [0, 0, 0]]
        return first.astype(np.uint8, copy=False)


def band_statistics(
    paths: Sequence[str], bands: Sequence[int] | None = None, percentiles: tuple[float, float] = (1, 99)
) -> dict[str, Any]:
    """`low` and `high` of each band, those percentiles, and `mean` and `std` of what LoadBands makes with these."""
    generator, sampled, number = random.Random(0), [], None
    for path in paths:
        values = read_bands(path)
        with unreadable(path, IndexError):
            values = values if bands is None else values[..., list(bands)]
        values = values.reshape(-1, values.shape[2])
        if number not in (None, values.shape[1]):
            raise UserError(f'{path} has {values.shape[1]} bands, files before it {number}; name the ones to take')
        number = values.shape[1]
        rows = generator.sample(range(len(values)), min(SAMPLED, len(values)))
        sampled.append(values[rows].astype(np.float64))
    pixels = np.concatenate(sampled)
    pixels[~np.isfinite(pixels)] = np.nan
    low, high = np.nanpercentile(pixels, percentiles, axis=0)
    if not (low < high).all():
        band = int(np.flatnonzero(~(low < high))[0])
        raise UserError(f'band {band} is {low[band]:g} nearly everywhere; name the bands to take, or wider percentiles')
    low, high = ([float(f'{value:.6g}') for value in values] for values in (low, high))
    scaled = LoadBands(low=low, high=high).scale(pixels[None])
    mean, std = scaled.mean(axis=(0, 1), dtype=np.float64), scaled.std(axis=(0, 1), dtype=np.float64)
    return dict(low=low, high=high, mean=mean.round(2).tolist(), std=std.round(2).tolist())


def check_bands(values: np.ndarray) -> np.ndarray:
    """An array of numbers as (H, W, C)."""
    if values.dtype.kind not in 'uif':
        raise UserError(f'values of type {values.dtype}; expected integers or floating-point numbers')
    if values.ndim == 2:
        values = values[..., None]
    if values.ndim != 3 or not values.size:
        raise UserError(f'an array of shape {values.shape}; expected (height, width, bands), not empty')
    return values


def read_bands(path: str, max_pixels: int = MAX_PIXELS) -> np.ndarray:
    """The values of a .tif or .npy file: (H, W, C)."""
    if TiffFile is None and path.lower().endswith(('.tif', '.tiff')):
        raise UserError("images of many bands in .tif files are read by tifffile: pip install 'beit_mm[bands]'")
    # Decoders of broken files raise nearly everything, see read_image.
    with unreadable(path, Exception), open_file(path, max_pixels) as file:
        start = file.read(6)
        file.seek(0)
        if start == b'\x93NUMPY':
            values = check_bands(np.load(file, allow_pickle=False))
            check_size(values.shape, values.dtype, max_pixels)
            return values.astype(values.dtype.newbyteorder('='), copy=False)
        if not start.startswith((b'II*\0', b'MM\0*', b'II+\0', b'MM\0+')):
            raise OSError('neither .tif nor .npy; LoadImage reads other images')
        return read_tif(file, max_pixels)


def read_tif(file: BinaryIO, max_pixels: int) -> np.ndarray:
    """The bands of a .tif file (H, W, C): all of its first page, or the pages like the first if each has one band.

    Other pages, such as overviews and masks, are left out, and files that its metadata names are not opened.
    """
    with TiffFile(file) as content:
        # 256 pages are searched: a page a band, with overviews
        pages = [page for page in islice(content.pages, 256) if not page.subfiletype]
        if not pages:
            raise OSError('no page with an image')
        first = pages[0]
        pages = [page for page in pages if (page.shaped, page.dtype) == (first.shaped, first.dtype)]
        planes, depth, height, width, bands = first.shaped
        if planes * bands > 1:
            pages = [first]
        if depth != 1 or first.dtype is None or first.compression not in COMPRESSIONS:
            expected = 'none, LZW, Deflate, PackBits, LZMA or Zstandard, 8 to 64 bits, depth 1'
            stored = f'compression {first.compression}, {first.bitspersample} bits, depth {depth}'
            raise OSError(f'{stored}; expected {expected}')
        if not any(size for page in pages for size in page.databytecounts):
            raise OSError('none of its blocks of pixels is stored')  # a few bytes would take all memory
        check_size((height, width, planes * bands * len(pages)), first.dtype, max_pixels)
        arrays = [page.asarray().reshape(planes, height, width, bands) for page in pages]
        values = np.concatenate([array.transpose(1, 2, 0, 3).reshape(height, width, -1) for array in arrays], axis=2)
    return check_bands(values)


def check_size(shape: Sequence[int], dtype: np.dtype, max_pixels: int) -> None:
    height, width, bands = shape
    if height * width > max_pixels:
        raise OSError(f'{width} x {height} pixels, more than max_pixels={max_pixels:,} of LoadBands')
    total = height * width * bands * max(dtype.itemsize, 4)  # LoadBands makes float32 of them
    if total > MAX_BYTES_PER_PIXEL * max_pixels:
        raise OSError(f'{total:,} bytes in memory, more than {MAX_BYTES_PER_PIXEL} for each of {max_pixels:,} pixels')

"""Reads untrusted image files: LoadImage as RGB, LoadBands with any number of bands."""

import io
import os
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import lru_cache, partial
from itertools import islice
from typing import Any, BinaryIO

import numpy as np
import torch
from mmcv.transforms import BaseTransform
from PIL import Image, ImageOps, TiffImagePlugin, WebPImagePlugin  # noqa: F401  (fill Image.OPEN)

from beit_mm.datasets.nodata import NODATA_TAG, find_nodata, is_missing, tag_value
from beit_mm.errors import UserError, warn
from beit_mm.files import quoted, size_of_file
from beit_mm.registry import TRANSFORMS

try:  # torchvision 0.29 deprecates its own in favour of this one, which gives the same pixels
    from torchcodec.decoders import ImageReadMode, decode_jpeg
except (ImportError, OSError, RuntimeError):  # not installed, older than 0.16, or built for another torch
    from torchvision.io import ImageReadMode, decode_jpeg

try:  # called directly, because its register_heif_opener would change Pillow for the whole process
    from pillow_heif import HeifImageFile
except ImportError:
    HeifImageFile = None

try:
    from tifffile import TiffFile
except ImportError:
    TiffFile = None

Image.preinit()  # registers the plugins of the other formats
FORMATS = ('JPEG', 'PNG', 'WEBP', 'GIF', 'BMP', 'PPM', 'TIFF')  # JPEG opens MPO too
HEIF_BRANDS = (b'heic', b'heix', b'heim', b'heis', b'hevc', b'hevx', b'mif1', b'msf1')  # bytes 8 to 12 of .heic files
ONE_MEGAPIXEL = 2**20
MAX_PIXELS = 178_956_970  # Pillow's limit for decompression bombs
MAX_BYTES_PER_PIXEL = 16  # four channels of 32 bits
MAX_ASPECT = 50  # resizing the short side of a longer image could use up all memory
MARGIN = 2  # decode to at least twice the wanted size: then pixels differ by 1 level on average from full decoding
ORIENTATION_TAG, BITS_TAG, SAMPLES_TAG = 0x0112, 258, 277
SIDEWAYS = (5, 6, 7, 8)  # EXIF orientations that swap height and width
MAX_BANDS = 16
MOST_DARK = 63  # of 255: an image of 16 bits whose highest value is at most this usually has 12 or 14
SAMPLED = 10_000  # pixels of an image that are used for statistics of the bands
# TIFF's numbers for none, LZW, Deflate (two), PackBits, LZMA, Zstandard; not JPEG: nothing checks the size inside it
COMPRESSIONS = (1, 5, 8, 32946, 32773, 34925, 50000)
# Pillow's errors for a TIFF whose bands are not RGB: with up to six, the next two if each band is a plane; with more
MANY_BANDS = (
    'unknown pixel mode',
    'unknown raw mode for given image mode',
    'string index out of range',
    'Invalid value for samples per pixel',
)
READ_ALL_BANDS = 'to read all, use LoadBands in a config or, for label maps, finetune --bands all (docs/data.md)'
WARNED: list[str] = []  # the file that `warn_loss` has named


class UnreadableImageError(OSError):
    """An image file is missing, truncated, broken or too large; the message begins with its `path`."""

    path = ''


class MemberPath(str):
    """The path of an image inside a tar archive, `ARCHIVE/NAME`, with the position of the image's bytes."""

    archive: str  # path of an uncompressed archive
    offset: int  # first byte of the image
    length: int  # number of bytes of the image

    def __new__(cls, path: str, archive: str, offset: int, length: int) -> 'MemberPath':
        self = super().__new__(cls, path)
        self.archive, self.offset, self.length = archive, offset, length
        return self

    def __reduce__(self) -> tuple:  # by default, pickling and copying keep only the text
        return MemberPath, (str(self), self.archive, self.offset, self.length)


# mmseg's inferencers look for LoadImageFromFile and replace it with one of the last two names.
@TRANSFORMS.register_module(name=['LoadImage', 'LoadImageFromFile', 'LoadImageFromNDArray', 'InferencerLoader'])
class LoadImage(BaseTransform):
    """Reads `img_path` into `img`: uint8 array (H, W, 3), **RGB**, upright.

    Gray and CMYK become RGB, 16 bits are scaled to 8 (not clipped), transparency becomes white, the first frame of an
    animation is used, EXIF orientation is applied. If `img` is there already, it must be the **BGR** array (H, W, 3)
    that OpenMMLab's own inferencers pass.

    Args:
        max_pixels: largest width x height of an image or label map; a larger file is refused once its header is read.
        scaled: decode a JPEG of more than a megapixel at 1/2, 1/4 or 1/8 of its size where the next transform needs no
            more, see `scale_decoding`.
        cache_bytes: memory in each reading process for the first decoded images that fit.

    Raises:
        UnreadableImageError: the file cannot be read, or one side is more than 50 times as long as the other.
    """

    def __init__(self, max_pixels: int = MAX_PIXELS, scaled: bool = True, cache_bytes: int = 0) -> None:
        self.max_pixels, self.scaled = max_pixels, scaled
        self.free_bytes = cache_bytes
        self.cache: dict[tuple[str, int], np.ndarray] = {}  # images by path and scale of decoding
        self.sizes: dict[str, tuple[int, int] | None] = {}  # `reducible_size` of the files in the cache
        # set by scale_decoding: (results, height, width) -> 1, 2, 4 or 8
        self.choose_scale: Callable[[dict, int, int], int] | None = None

    def transform(self, results: dict | str | np.ndarray) -> dict:
        if not isinstance(results, dict):  # from mmseg's MMSegInferencer
            results = dict(img_path=results) if isinstance(results, str) else dict(img=results)
        if 'img' in results:
            return with_image(results, np.ascontiguousarray(results['img'][..., ::-1]))
        return with_image(results, self.read(results['img_path'], results))

    def read(self, path: str, results: dict) -> np.ndarray:
        """Reads a file as small as the next transform allows, or takes it from the cache."""
        if path in self.sizes:
            scale = self.wanted_scale(results, self.sizes[path])
            if (path, scale) in self.cache:
                return self.cache[path, scale].copy()
        with open_image(path, self.max_pixels) as file:
            size = reducible_size(file)
            scale = self.wanted_scale(results, size)
            image = decode(path, file, scale)
        if image.nbytes <= self.free_bytes:
            self.sizes[path], self.cache[path, scale] = size, image.copy()
            self.free_bytes -= image.nbytes
        return image

    def wanted_scale(self, results: dict, size: tuple[int, int] | None) -> int:
        return 1 if size is None or self.choose_scale is None else self.choose_scale(results, *size)


def with_image(results: dict, image: np.ndarray) -> dict:
    """Adds an image (H, W, C) to the results of a pipeline; UnreadableImageError if it is too long and narrow."""
    height, width = image.shape[:2]
    with unreadable(results.get('img_path') or 'array', OSError):
        if max(height, width) > MAX_ASPECT * min(height, width):
            raise OSError(f'{width} x {height} pixels; expected one side to be at most {MAX_ASPECT} times the other')
    results.update(img=image, img_shape=(height, width), ori_shape=(height, width))
    return results


def check_size(max_pixels: int, num_bytes: int, height: int = 0, width: int = 0) -> None:
    if height * width > max_pixels:
        raise OSError(f'{width} x {height} pixels, more than max_pixels={max_pixels:,} (segment --max-pixels)')
    if num_bytes > MAX_BYTES_PER_PIXEL * max_pixels:
        raise OSError(f'{num_bytes:,} bytes; expected at most {MAX_BYTES_PER_PIXEL} for each of {max_pixels=:,}')


def decoding_scale(sides: Sequence[int], wanted: Sequence[int]) -> int:
    """Largest k of 8, 4, 2 for which sides / k are at least MARGIN times the wanted sizes, in pixels; else 1."""
    ratio = min(side / size for side, size in zip(sides, wanted, strict=True))
    return next((k for k in (8, 4, 2) if ratio >= MARGIN * k), 1)


def read_image(path: str, max_pixels: int = MAX_PIXELS) -> np.ndarray:
    """Reads an image file into a uint8 array (H, W, 3), RGB, upright."""
    with open_image(path, max_pixels) as image:
        return decode(path, image)


def reducible_size(image: Image.Image) -> tuple[int, int] | None:
    """Height and width, upright, of a JPEG of more than a megapixel, which may be decoded smaller; else None."""
    if image.format not in ('JPEG', 'MPO') or image.width * image.height <= ONE_MEGAPIXEL:
        return None
    return image.size if orientation(image) in SIDEWAYS else image.size[::-1]


def decode(path: str, image: Image.Image, scale: int = 1) -> np.ndarray:
    """Decodes an opened image to uint8 (H, W, 3), RGB, upright; a JPEG with its sides divided by up to `scale`."""
    with unreadable(path, Exception):  # whatever a decoder raises, see open_image
        tag = orientation(image)
        while tag != 1 and (image.width % scale or image.height % scale):
            scale //= 2  # else the last row or column covers fewer pixels, and a rotation moves it to the front
        if scale > 1:
            image.draft('RGB', (image.width // scale, image.height // scale))
        elif image.format == 'JPEG' and image.mode == 'RGB' and tag == 1:
            # gives the same pixels as Pillow, which takes a detour through four bytes per pixel
            image.fp.seek(0)
            data = torch.frombuffer(bytearray(image.fp.read()), dtype=torch.uint8)
            return np.ascontiguousarray(decode_jpeg(data, mode=ImageReadMode.RGB).permute(1, 2, 0).numpy())
        image.load()  # decodes; some formats read their palette or transparency only here
        warn_loss(path, image)
    with unreadable(path, OSError, ValueError, MemoryError):  # any other error is a bug
        return rgb_array(image)


def warn_loss(path: str, image: Image.Image) -> None:
    """Warns about the first image that loses something when it is read as RGB."""
    if WARNED or not warns_here():
        return
    if loss := loss_as_rgb(image):
        WARNED.append(path)
        warn(f'{quoted(path)}: {loss}')


def loss_as_rgb(image: Image.Image) -> str | None:
    """What is lost, bands or most of 12 or 14 bits that are stored in 16, and the cure; None if nothing is."""
    tags = image.tag_v2 if image.format == 'TIFF' else {}
    read, stored = len(image.getbands()), tags.get(SAMPLES_TAG, 1)
    if image.mode == 'RGBA' and tags and image.getchannel('A').getextrema()[0] < 255:
        return f'its fourth band is marked as transparency and blended with white; {READ_ALL_BANDS}'
    if stored > read:
        return f'only {read} of its {stored} bands are read; {READ_ALL_BANDS}'
    deep_gray = is_deep_gray(image)
    if not deep_gray and max(tags.get(BITS_TAG, (8,))) != 16:
        return None
    highest = int(np.asarray(image).max()) >> (8 if deep_gray else 0)  # Pillow reads the high bytes of RGB
    if highest > MOST_DARK:
        return None
    cure = READ_ALL_BANDS if tags else 'scale them to 0 to 65,535'
    return f'its values use little of their 16 bits: all become levels 0 to {highest} of 255; {cure}'


def warns_here() -> bool:
    """Whether this is the process that warns about files: the first data worker, or the only process."""
    worker = torch.utils.data.get_worker_info()
    return worker is None or worker.id == 0


@contextmanager
def unreadable(path: str, *errors: type[Exception]) -> Iterator[None]:
    """Turns `errors` into UnreadableImageError with the path."""
    try:
        yield
    except UnreadableImageError:  # which has a path
        raise
    except errors as error:
        reason = f'{type(error).__name__}: {error}'
        if str(error) in MANY_BANDS:
            reason = 'its bands are not RGB; read images of many bands with LoadBands, see docs/data.md'
        elif isinstance(error, OSError | UserError):
            reason = getattr(error, 'strerror', None) or str(error)
        failure = UnreadableImageError(f'{quoted(path)}: cannot be read as an image ({quoted(reason)})')
        failure.path = path
        raise failure from error


def open_file(path: str, max_pixels: int) -> BinaryIO:
    """Opens a file, or an image in an archive, after checking its size."""
    if isinstance(path, MemberPath):
        check_size(max_pixels, path.length)
        if not hasattr(os, 'pread'):  # on Windows
            with open(path.archive, 'rb') as archive:
                archive.seek(path.offset)
                return io.BytesIO(archive.read(path.length))
        # pread does not move the file position, so forked processes and threads can share the descriptor
        return io.BytesIO(os.pread(open_archive(path.archive).fileno(), path.length, path.offset))
    check_size(max_pixels, size_of_file(path))
    return open(path, 'rb')


# A process may have 1024 files open; an archive is closed once it has left the cache and nothing is reading it.
open_archive = lru_cache(256)(partial(open, mode='rb', buffering=0))


@contextmanager
def open_image(path: str, max_pixels: int = MAX_PIXELS) -> Iterator[Image.Image]:
    """Opens an image file and reads its header; UnreadableImageError if that fails."""
    with ExitStack() as stack:
        # on broken files decoders can raise almost anything: struct.error, SyntaxError, TypeError
        with unreadable(path, Exception):
            file = stack.enter_context(open_file(path, max_pixels))
            image = plugin_of(file)(file, '' if isinstance(path, MemberPath) else path)
            check_size(max_pixels, 0, image.height, image.width)
        yield image


def plugin_of(file: BinaryIO) -> Callable[[BinaryIO, str], Image.Image]:
    """The plugin of Pillow or pillow-heif that reads a file, by its first bytes."""
    # Plugins are called directly: Image.open also tries formats that start a program (Ghostscript), and its limit for
    # large images, beyond which it warns or fails, applies to the whole process.
    start = file.read(16)
    file.seek(0)
    for plugin, accepts in map(Image.OPEN.get, FORMATS):
        if accepts(start) is True:
            return plugin
    if start[4:8] != b'ftyp' or start[8:12] not in HEIF_BRANDS:
        raise OSError('unknown format')
    if HeifImageFile is None:
        raise OSError('HEIC; pip install pillow-heif to read it, or convert it')
    return HeifImageFile


def orientation(image: Image.Image) -> int:
    """EXIF orientation, 1 to 8; 1 if the image has none."""
    try:
        tag = image.getexif().get(ORIENTATION_TAG)
    except Exception:  # a broken EXIF block does not make the pixels unreadable
        return 1
    return int(tag) if tag in range(1, 9) else 1


def rgb_array(image: Image.Image) -> np.ndarray:
    """Converts a decoded image to uint8 (H, W, 3), RGB, upright, on white where it is transparent."""
    if image.mode[0] in 'IF':
        rgb = deep_gray_to_rgb(image)
    elif image.has_transparency_data:
        transparent = image.convert('RGBA')
        rgb = Image.alpha_composite(Image.new('RGBA', image.size, 'white'), transparent).convert('RGB')
    else:
        rgb = image.convert('RGB')
    return np.array(turned(rgb, orientation(image)))


def turned(image: Image.Image, tag: int) -> Image.Image:
    """Turns or mirrors a decoded image as an EXIF orientation of 1 to 8 says."""
    if tag == 1:
        return image
    exif = Image.Exif()
    exif[ORIENTATION_TAG] = tag
    image.info = dict(exif=exif.tobytes())  # exif_transpose rewrites the EXIF block, which fails on broken ones
    return ImageOps.exif_transpose(image)


def is_deep_gray(image: Image.Image) -> bool:
    """Whether an image has one channel of 16 bits."""
    # Pillow reads 16-bit PGM, and older Pillow 16-bit PNG, in the mode for 32 bits, 'I'.
    return image.mode.startswith('I;16') or (image.mode == 'I' and image.format in ('PNG', 'PPM'))


def deep_gray_to_rgb(image: Image.Image) -> Image.Image:
    """Scales 16 bits from 0-65535 to 0-255, 32 bits and floats from the image's range."""
    values = np.nan_to_num(np.asarray(image).astype(np.float64))
    low, high = (0, 65535) if is_deep_gray(image) else (values.min(), values.max())
    gray = np.rint((values - low) * (255 / max(high - low, 1e-12))).astype(np.uint8)
    if 'transparency' in image.info:
        gray[values == image.info['transparency']] = 255
    return Image.fromarray(gray).convert('RGB')


@TRANSFORMS.register_module()
class LoadBands(BaseTransform):
    """Makes `img`, (H, W, C) with C bands, 0-255, from `img_path`, a .tif or .npy file, or from a given `img`.

    NaN, infinity, `nodata` and the value in a .tif file's GDAL_NODATA tag become 0. `nodata`, bool (H, W), shows where
    that is so in all bands; LoadAnnotation ignores these pixels.

    Args:
        bands: bands of the file, counted from 0, in the order that the model sees; None: all.
        low, high: values in the file that become 0 and 255, for all bands or for each; the result is float32. None: the
            files hold uint8, which stays as it is. `tools/datasets/band_statistics.py` prints both.
        max_pixels: as in LoadImage.
        nodata: values of pixels that were not measured, whatever the file's tag says.

    Raises:
        UnreadableImageError: the file cannot be read, or its bands or values do not fit these settings.
    """

    def __init__(
        self,
        bands: Sequence[int] | None = None,
        low: float | Sequence[float] | None = None,
        high: float | Sequence[float] | None = None,
        max_pixels: int = MAX_PIXELS,
        nodata: float | Sequence[float] = (),
    ) -> None:
        lengths = {len(value) for value in (bands, low, high) if isinstance(value, Sequence)}
        fits = len(lengths) <= 1 and lengths <= {*range(1, MAX_BANDS + 1)}
        limits = [value for value in (low, high) if value is not None]
        in_order = fits and np.all(np.less(*limits)) if len(limits) == 2 else not limits
        if not fits or not in_order:
            raise UserError(
                f'{bands=}, {low=}, {high=}; expected equal lengths, 1 to {MAX_BANDS}, and low < high, both or neither'
            )
        self.bands = None if bands is None else list(bands)
        self.low, self.high = (None if value is None else np.float32(value) for value in (low, high))
        self.num_bands = lengths.pop() if lengths else None  # None: any number
        self.max_pixels = max_pixels
        self.nodata: list[float] = np.atleast_1d(nodata).tolist()

    def transform(self, results: dict) -> dict:
        if 'img' in results:
            image, results['nodata'] = self.scale(results['img'])
        else:
            values = read_bands(results['img_path'], self.max_pixels)
            with unreadable(results['img_path'], ValueError, MemoryError):
                image, results['nodata'] = self.scale(values)
        return with_image(results, image)

    def scale(self, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Selects the bands of an array (H, W) or (H, W, C) and scales them to 0-255, see LoadBands.

        Returns:
            The bands (H, W, C), and where none of them holds data, bool (H, W).
        """
        values = self.select(check_bands(values))
        missing = is_missing(values, self.nodata)  # H, W, C
        if self.low is None or self.high is None:
            if values.dtype != np.uint8:
                raise UserError(
                    f'values of type {values.dtype}; expected uint8, or low and high of LoadBands, '
                    'which become 0 and 255: tools/datasets/band_statistics.py prints them'
                )
            return np.where(missing, np.uint8(0), values), np.all(missing, axis=2)
        height, width, count = values.shape
        # along whole rows, because numpy takes four times as long along an axis as short as that of the bands
        low, factor = (np.tile(np.broadcast_to(x, count), width) for x in (self.low, 255 / (self.high - self.low)))
        with np.errstate(over='ignore'):  # a value that means "no data" can be huge
            scaled = np.array(values, np.float32, order='C').reshape(height, width * count)
            scaled -= low
            scaled *= factor
        np.clip(scaled, 0, 255, out=scaled)
        scaled[missing.reshape(scaled.shape)] = 0  # not the mean, which a loader does not know
        return scaled.reshape(height, width, count), np.all(missing, axis=2)

    def select(self, values: np.ndarray) -> np.ndarray:
        """The bands, in their order, of an array (H, W, C)."""
        number = values.shape[2]
        if self.bands is not None:
            if max(self.bands) >= number:
                raise UserError(
                    f'{number} bands; expected at least {max(self.bands) + 1} for LoadBands(bands={self.bands})'
                )
            return values[..., self.bands]
        if number > MAX_BANDS or self.num_bands not in (None, number):
            raise UserError(f'{number} bands; expected {self.num_bands or f"1 to {MAX_BANDS}"} for these LoadBands')
        return values

    @staticmethod
    def as_rgb(image: np.ndarray) -> np.ndarray:
        """Shows an image (H, W, C), 0-255, as uint8 (H, W, 3): its first three bands, or the first in gray."""
        first = image[..., :3] if image.shape[2] > 2 else image[..., [0, 0, 0]]
        return first.astype(np.uint8, copy=False)


def band_statistics(
    paths: Sequence[str], bands: Sequence[int] | None = None, percentiles: tuple[float, float] = (1, 99)
) -> dict[str, Any]:
    """For each band its percentiles `low` and `high`, and `mean` and `std` of the values that LoadBands makes of it.

    No data is left out; `nodata` and `notes` are what `find_nodata` finds.
    """
    generator, sampled, chosen = random.Random(0), [], [*(bands or ())]
    for path in paths:
        values = read_bands(path)
        stored = [*range(values.shape[2])]
        chosen = chosen or stored  # all of the first file
        if not {*chosen} <= {*stored}:
            raise UserError(f'{path} has {len(stored)} bands, counted from 0; there are no bands {chosen}')
        if not bands and chosen != stored:
            raise UserError(f'{path} has {len(stored)} bands, earlier files {len(chosen)}; choose the bands to use')
        dtype, values = values.dtype, values[..., chosen].reshape(-1, len(chosen))
        rows = generator.sample(range(len(values)), min(SAMPLED, len(values)))
        sampled.append(np.where(is_missing(values[rows]), np.nan, values[rows].astype(np.float64)))
    pixels = np.concatenate(sampled)
    nodata, notes = find_nodata(pixels, dtype)
    pixels[is_missing(pixels, nodata)] = np.nan
    low, high = np.nanpercentile(pixels, percentiles, axis=0)
    if not (low < high).all():
        column = int(np.flatnonzero(~(low < high))[0])
        raise UserError(f'band {chosen[column]} is {low[column]:g} nearly everywhere; omit it or widen the percentiles')
    low, high = ([float(f'{value:.6g}') for value in values] for values in (low, high))
    (scaled,), _ = LoadBands(low=low, high=high).scale(pixels[None])
    measured = np.isfinite(pixels)
    mean, std = (of(scaled, axis=0, dtype=np.float64, where=measured).round(2).tolist() for of in (np.mean, np.std))
    return dict(low=low, high=high, mean=mean, std=std, nodata=nodata, notes=notes)


def check_bands(values: np.ndarray) -> np.ndarray:
    """Returns an array of numbers as (H, W, C)."""
    if values.ndim == 2:
        values = values[..., None]
    if values.ndim != 3 or not values.size or values.dtype.kind not in 'uif':
        raise UserError(f'array {values.shape} of {values.dtype}; expected integers or floats (height, width, bands)')
    return values


def read_bands(path: str, max_pixels: int = MAX_PIXELS) -> np.ndarray:
    """Reads the values of a .tif or .npy file: (H, W, C)."""
    if TiffFile is None and path.lower().endswith(('.tif', '.tiff')):
        raise UserError(f"{path}: reading .tif files of many bands needs tifffile: pip install 'beit_mm[bands]'")
    # on broken files decoders can raise almost anything, see open_image
    with unreadable(path, Exception), open_file(path, max_pixels) as file:
        start = file.read(6)
        file.seek(0)
        if start == b'\x93NUMPY':
            values = check_bands(np.load(file, allow_pickle=False))
            check_bands_size(values.shape, values.dtype, max_pixels)
            return values.astype(values.dtype.newbyteorder('='), copy=False)
        return read_tif(file, max_pixels)


def read_tif(file: BinaryIO, max_pixels: int) -> np.ndarray:
    """Reads a .tif file (H, W, C): its first page, or if that has one band, all pages like it, without overviews."""
    with TiffFile(file) as content:
        # 256 pages are enough for one page per band, with overviews
        pages = [page for page in islice(content.pages, 256) if not page.subfiletype]
        first = pages[0]
        planes, depth, height, width, bands = first.shaped
        if planes * bands > 1:
            pages = [first]
        pages = [page for page in pages if (page.shaped, page.dtype) == (first.shaped, first.dtype)]
        if depth != 1 or first.dtype is None or first.compression not in COMPRESSIONS:
            raise OSError(
                f'compression {first.compression}, {first.bitspersample} bits, depth {depth}; '
                'expected none, LZW, Deflate, PackBits, LZMA or Zstandard, 8 to 64 bits, depth 1'
            )
        if not any(size for page in pages for size in page.databytecounts):
            raise OSError('it stores no pixels')  # a file of a few bytes could otherwise take all memory
        check_bands_size((height, width, planes * bands * len(pages)), first.dtype, max_pixels)
        arrays = [page.asarray().reshape(planes, height, width, bands) for page in pages]
        values = np.concatenate([array.transpose(1, 2, 0, 3).reshape(height, width, -1) for array in arrays], axis=2)
        nodata = tag_value(first.tags.valueof(NODATA_TAG))
    values = check_bands(values)
    return np.ma.masked_array(values, is_missing(values, nodata)) if nodata else values


def check_bands_size(shape: Sequence[int], dtype: np.dtype, max_pixels: int) -> None:
    height, width, bands = shape
    check_size(max_pixels, height * width * bands * max(dtype.itemsize, 4), height, width)  # LoadBands makes float32

"""Reads images of any number of bands from .tif and .npy files, of satellites, microscopes, scanners.

LoadBands brings all of them to 0-255: uint8 if the file holds uint8, else float32.
"""

from collections.abc import Sequence
from itertools import islice
from typing import BinaryIO

import numpy as np
from mmcv.transforms import BaseTransform

from beit_mm.datasets.reading import MAX_BYTES_PER_PIXEL, MAX_PIXELS, check_aspect, open_file, unreadable
from beit_mm.registry import TRANSFORMS
from beit_mm.terminal import UserError

try:
    from tifffile import TiffFile
except ImportError:
    TiffFile = None

MAX_BANDS = 16
# Tag numbers of none, LZW, Deflate (two), PackBits, LZMA, Zstandard; JPEG and its like have sizes of their own
COMPRESSIONS = (1, 5, 8, 32946, 32773, 34925, 50000)


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
        if bands is not None and not all(isinstance(band, int) and band >= 0 for band in bands):
            raise UserError(f'bands is {bands}; expected numbers of bands, counted from 0')
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
        results['img'] = image
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
        if self.low is None:
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
    # Decoders of broken files raise nearly everything, see reading.read_image.
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

"""Images of any number of bands, from .tif and .npy files: satellites', microscopes', scanners'.

Behind LoadBands every image has one scale, 0-255, whatever its file holds; uint8 where the file does, else float32.
"""

import io
import os
import random
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from mmcv.transforms import BaseTransform
from numpy.lib import format as npy
from PIL.TiffImagePlugin import ImageFileDirectory_v2, TiffImageFile

from beit_mm.datasets.reading import MAX_BYTES_PER_PIXEL, MAX_PIXELS, check_aspect, open_file, unreadable
from beit_mm.registry import TRANSFORMS
from beit_mm.terminal import UserError

MAX_BANDS = 16
MAX_PAGES = 256  # of a .tif that are looked at
TIFF_STARTS = (b'II*\0', b'MM\0*', b'II+\0')
NPY_START = b'\x93NUMPY'
NPY_HEADERS = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
UNCOMPRESSED = 1
COMPRESSIONS = {1: '', 5: 'LZW', 8: 'Deflate', 32946: '', 32773: 'PackBits', 34925: 'LZMA', 50000: 'Zstandard'}
NEW_SUBFILE_TYPE = 254  # tag of overviews and masks
TAG_TYPES = {1: 'u1', 3: 'u2', 4: 'u4', 13: 'u4', 16: 'u8'}  # of whole numbers
DTYPES = {  # bits and format (1 whole, 2 with sign, 3 floating-point)
    **{(8 * size, 1): f'u{size}' for size in (1, 2, 4)},
    **{(8 * size, 2): f'i{size}' for size in (1, 2, 4)},
    **{(8 * size, 3): f'f{size}' for size in (2, 4, 8)},
}
SAMPLED = 10_000  # pixels of an image that its statistics are taken from


@TRANSFORMS.register_module()
class LoadBands(BaseTransform):
    """Reads `img_path`, a .tif or .npy file, into `img`: (H, W, C), uint8 or float32, 0-255, for any number of bands C.

    An `img` that is there already, (H, W, C), takes the place of the file's values.

    Args:
        bands: which bands of the file, counted from 0, in the order that the model sees; None: all.
        low, high: values in the file that become 0 and 255: a number for all bands, or one for each that is taken.
            What lies beyond them becomes 0 or 255, NaN becomes 0; the result is float32. None: the files hold uint8,
            which stays as it is. `tools/datasets/band_statistics.py` finds them.
        max_pixels: as LoadImage.

    Raises:
        UnreadableImageError: the file cannot be read, or has other bands or values than these settings say; names it.
        ValueError: settings that do not fit each other.
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
        if max_pixels < 1:
            raise UserError(f'max_pixels is {max_pixels}; expected the width x height of the largest image')
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
        """Takes the bands of an array (H, W) or (H, W, C) and brings them to 0-255, see LoadBands.

        Raises:
            ValueError: other bands or another type of numbers than the settings say.
        """
        values = check_bands(values)
        if self.bands is not None:
            if max(self.bands) >= values.shape[2]:
                raise UserError(f'{values.shape[2]} bands, counted from 0; bands={self.bands} takes others')
            values = values[..., self.bands]
        if values.shape[2] != (self.num_bands or values.shape[2]) or values.shape[2] > MAX_BANDS:
            raise UserError(
                f'{values.shape[2]} bands; expected {self.num_bands or f"1 to {MAX_BANDS}"}, or the ones to take: '
                'bands=[0, 1, ...]'
            )
        if self.low is None:
            if values.dtype != np.uint8:
                raise UserError(
                    f'values of type {values.dtype}; expected uint8, or low=... and high=... that become 0 and 255: '
                    'tools/datasets/band_statistics.py finds them'
                )
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
    """An array of numbers as (H, W, C); raises ValueError for another."""
    if values.dtype.kind not in 'uif':
        raise UserError(f'values of type {values.dtype}; expected integers or floating-point numbers')
    if values.ndim == 2:
        values = values[..., None]
    if values.ndim != 3 or not values.size:
        raise UserError(f'an array of shape {values.shape}; expected (height, width, bands), not empty')
    return values


def read_bands(path: str, max_pixels: int = MAX_PIXELS) -> np.ndarray:
    """The values of a .tif or .npy file, as they are: (H, W, C).

    Raises:
        UnreadableImageError: the file cannot be read.
    """
    # Decoders of broken files raise nearly everything, see reading.read_image.
    with unreadable(path, Exception), open_file(path, max_pixels) as file:
        start = file.read(len(NPY_START))
        file.seek(0)
        if start == NPY_START:
            return check_bands(read_npy(file, max_pixels))
        if not start.startswith(TIFF_STARTS):
            raise OSError('neither .tif nor .npy; LoadImage reads other images')
        return read_tif(file, max_pixels)


def read_npy(file: BinaryIO, max_pixels: int) -> np.ndarray:
    """The array in a .npy file; objects, which are pickled and would run code, are refused."""
    version = npy.read_magic(file)
    if version not in NPY_HEADERS:
        raise OSError(f'.npy of version {version}; expected plain numbers, version 1 or 2')
    shape, columns_first, dtype = NPY_HEADERS[version](file)
    if dtype.hasobject or dtype.names is not None:
        raise OSError('holds Python objects or records; expected an array of numbers (height, width, bands)')
    check_size(shape[:2], shape[2:], dtype, max_pixels)
    count = int(np.prod(shape, dtype=np.int64))
    start = file.tell()
    promised, there = count * dtype.itemsize, file.seek(0, os.SEEK_END) - start
    if promised != there:  # before memory is taken for it
        raise OSError(f'{there:,} bytes of values; by its header there are {promised:,}')
    file.seek(start)
    values = np.empty(count, dtype)
    file.readinto(values.view(np.uint8))  # type: ignore[attr-defined]
    values = values.reshape(shape, order='F' if columns_first else 'C')
    return values.astype(dtype.newbyteorder('='), copy=False)


def check_size(sides: Sequence[int], bands: Sequence[int], dtype: np.dtype, max_pixels: int) -> None:
    """Raises OSError for an image that is larger than max_pixels allows."""
    if len(sides) == 2 and min(sides) > 0 and sides[0] * sides[1] > max_pixels:
        raise OSError(f'{sides[1]} x {sides[0]} pixels, more than max_pixels={max_pixels:,} of LoadBands')
    total = max(dtype.itemsize, np.dtype(np.float32).itemsize)  # LoadBands makes float32 of them
    for side in (*sides, *bands):
        total *= int(side)
    if total > MAX_BYTES_PER_PIXEL * max_pixels:
        raise OSError(f'{total:,} bytes in memory, more than {MAX_BYTES_PER_PIXEL} for each of {max_pixels:,} pixels')


def band_statistics(
    paths: Sequence[str], bands: Sequence[int] | None = None, percentiles: tuple[float, float] = (1, 99)
) -> dict[str, Any]:
    """What a config of images with many bands says of their values.

    Args:
        paths: .tif or .npy files; some hundred drawn at random are enough.
        bands: as LoadBands.
        percentiles: of the values of a band, that become 0 and 255.

    Returns:
        low, high: lists, a number for each band. mean, std: the same of the values that LoadBands makes with these,
        0-255. images: number of files.

    Raises:
        UnreadableImageError: a file cannot be read.
        ValueError: files of different bands, or a band that is the same everywhere.
    """
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
    return dict(low=low, high=high, mean=mean.round(2).tolist(), std=std.round(2).tolist(), images=len(paths))


# --- .tif files: Pillow reads their tags and, by libtiff, unpacks; it has no modes for so many bands ----------------


class Kind(NamedTuple):
    """What pages have in common that are bands of one image: sides in pixels, bands of each pixel, type in the file."""

    height: int
    width: int
    bands: int
    dtype: np.dtype


@dataclass
class Page:
    """One image in a .tif file.

    Attributes:
        kind: its sides, bands and type.
        planar: band after band is stored, not pixel after pixel.
        compression, predictor: the tags' numbers.
        block: rows and columns of pixels that are packed together: a tile, or a strip of all columns.
        tiled: the last blocks are as large as the others.
        offsets, sizes: where the blocks lie, in bytes; row by row, and band after band where planar.
    """

    kind: Kind
    planar: bool
    compression: int
    predictor: int
    block: tuple[int, int]
    tiled: bool
    offsets: np.ndarray
    sizes: np.ndarray


def read_tif(file: BinaryIO, max_pixels: int) -> np.ndarray:
    """The bands of a .tif file (H, W, C): those of its first page or, where that has one, the pages of its size.

    Pages of other sizes, such as overviews, are left out.
    """
    kind, count, stored = None, 0, False
    for page in tif_pages(file):  # none is kept: a small file can have many, with long lists of blocks
        kind = kind or page.kind
        if page.kind == kind:
            count += 1
            stored |= bool(page.sizes.any())
        if kind.bands > 1:
            break
    if kind is None:
        raise OSError('no page with an image')
    if not stored:  # a few bytes would ask for all the memory that there may be
        raise OSError('none of its blocks of pixels is stored')
    bands = kind.bands * count
    check_size((kind.height, kind.width), (bands,), kind.dtype, max_pixels)
    values = np.zeros((kind.height, kind.width, bands), kind.dtype.newbyteorder('='))
    same = (page for page in tif_pages(file) if page.kind == kind)
    for band, page in zip(range(0, bands, kind.bands), same, strict=False):
        read_page(file, page, values[..., band : band + kind.bands], MAX_BYTES_PER_PIXEL * max_pixels)
    return values


def tif_pages(file: BinaryIO) -> Iterator[Page]:
    """The pages of a .tif file, at most MAX_PAGES, without overviews and masks."""
    file.seek(0)
    header = file.read(8)
    directory = ImageFileDirectory_v2(header + file.read(8) if header[2] == 43 else header)
    offset = directory.next
    for _ in range(MAX_PAGES):
        if not offset:
            break
        file.seek(offset)
        directory.load(file)
        offset = directory.next
        byteorder = '<' if header[:2] == b'II' else '>'
        if not numbers(directory, byteorder, NEW_SUBFILE_TYPE, 0)[0]:
            yield page_of(directory, byteorder)


def numbers(directory: ImageFileDirectory_v2, byteorder: str, tag: int, default: int | None = None) -> np.ndarray:
    """The whole numbers of a tag, as they lie in the file: Pillow would make a Python object of each.

    Raises:
        OSError: the tag is missing and has no default, or holds no whole numbers.
    """
    kind = TAG_TYPES.get(directory.tagtype.get(tag, 4))
    if kind is None:
        raise OSError(f'tag {tag} is of type {directory.tagtype[tag]}; expected whole numbers')
    data = directory._tagdata.get(tag)
    if data is not None:
        return np.frombuffer(data, byteorder + kind)
    if default is None:
        raise OSError(f'no tag {tag}')
    return np.array([default])


def page_of(directory: ImageFileDirectory_v2, byteorder: str) -> Page:
    """What a page's tags say; raises OSError for what is not read here."""

    def number(tag: int, default: int | None = None) -> int:
        return int(numbers(directory, byteorder, tag, default)[0])

    height, width, bands = number(257), number(256), number(277, 1)
    bits, formats = (numbers(directory, byteorder, tag, 1) for tag in (258, 339))
    if max(len(bits), len(formats)) > max(bands, 1):
        raise OSError(f'types of {max(len(bits), len(formats))} bands; expected {bands}')
    kinds = set(zip_longest(bits.tolist(), formats[: len(bits)].tolist(), fillvalue=int(formats[0])))
    compression, predictor = number(259, 1), number(317, 1)
    if len(kinds) > 1 or (kind := next(iter(kinds))) not in DTYPES or number(266, 1) != 1:
        raise OSError(f'values of (bits, format) {sorted(kinds)}; expected 8, 16 or 32 bits, the same in all bands')
    if compression not in COMPRESSIONS or predictor not in (1, 2, 3):
        names = ', '.join(filter(None, COMPRESSIONS.values()))
        raise OSError(f'compression {compression}, predictor {predictor}; expected none, or {names}')
    tiled = 322 in directory
    block = (number(323), number(322)) if tiled else (min(number(278, height), height), width)
    if min(height, width, bands, *block) < 1:
        raise OSError(f'{width} x {height} pixels of {bands} bands in blocks of {block}; expected at least 1')
    planar = number(284, 1) == 2
    blocks = (bands if planar else 1) * -(-height // block[0]) * -(-width // block[1])
    offsets, sizes = (numbers(directory, byteorder, tag) for tag in ((324, 325) if tiled else (273, 279)))
    if not len(offsets) == len(sizes) == blocks:
        raise OSError(f'{len(offsets)} offsets and {len(sizes)} sizes of blocks; by its header there are {blocks}')
    page = Kind(height, width, bands, np.dtype(byteorder + DTYPES[kind]))
    return Page(page, planar, compression, predictor, block, tiled, offsets, sizes)


def read_page(file: BinaryIO, page: Page, values: np.ndarray, max_bytes: int) -> None:
    """Puts the values of a page into `values`: zeros (height, width, bands), in this machine's byte order."""
    page_height, page_width, page_bands, dtype = page.kind
    bands = 1 if page.planar else page_bands
    rows, columns = page.block
    if rows * columns * bands * dtype.itemsize > max_bytes:
        raise OSError(f'blocks of {columns} x {rows} pixels, {bands} bands each: too large')
    down, across = -(-page_height // rows), -(-page_width // columns)
    for index in np.flatnonzero(page.sizes).tolist():  # of the others nothing was measured
        offset, size = int(page.offsets[index]), int(page.sizes[index])
        plane, top, left = index // (down * across), index // across % down * rows, index % across * columns
        height = rows if page.tiled else min(rows, page_height - top)
        unpacked = height * columns * bands * dtype.itemsize
        file.seek(offset)
        data = file.read(min(size, max_bytes))
        if len(data) < size:
            raise OSError('truncated')
        if page.compression != UNCOMPRESSED:
            data = unpack(data, unpacked, page.compression)
        block = np.frombuffer(data, np.uint8, unpacked).reshape(height, columns * bands * dtype.itemsize)
        block = unpredict(block, page, bands).reshape(height, columns, bands)
        part = values[top : top + rows, left : left + columns, plane : plane + bands]
        part[:] = block[: part.shape[0], : part.shape[1]]


def unpack(data: bytes, length: int, compression: int) -> bytes:
    """Unpacks a block to `length` bytes and no more: libtiff does it, for a gray image of one row."""
    tags = {256: length, 257: 1, 258: 8, 259: compression, 262: 1, 273: 8, 277: 1, 278: 1, 279: len(data)}
    entries = (struct.pack('<HHII', tag, 4, 1, value) for tag, value in tags.items())
    directory = struct.pack('<H', len(tags)) + b''.join(entries)
    content = b'II*\0' + struct.pack('<I', 8 + len(data)) + data + directory + bytes(4)
    return TiffImageFile(io.BytesIO(content)).tobytes()


def unpredict(block: np.ndarray, page: Page, bands: int) -> np.ndarray:
    """Values (rows, columns * bands) of unpacked bytes (rows, bytes): sums up differences to the pixel before.

    Predictor 2 has differences of whole numbers, 3 those of the bytes of floating-point numbers, highest bytes first.
    """
    if page.predictor == 1:
        return block.view(page.kind.dtype)
    width = page.kind.dtype.itemsize
    if page.predictor == 2:
        whole = page.kind.dtype.str[0] + f'u{width}'
        pixels = block.view(whole).reshape(len(block), -1, bands)
        native = np.dtype(f'u{width}')
        sums = pixels.cumsum(axis=1, dtype=native).reshape(len(block), -1)
        return sums.view(page.kind.dtype.newbyteorder('='))
    sums = block.reshape(len(block), -1, bands).cumsum(axis=1, dtype=np.uint8).reshape(len(block), width, -1)
    return np.ascontiguousarray(sums.transpose(0, 2, 1)).reshape(len(block), -1).view(f'>f{width}')

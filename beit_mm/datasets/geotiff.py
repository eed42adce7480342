"""TIFF files through GDAL: images too large to be decoded whole, and the georeference that label maps keep."""

import contextlib
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mmcv.image import rescale_size
from mmcv.transforms import Resize
from PIL import Image

from beit_mm.datasets.reading import LoadBands, LoadImage, open_image, orientation, rgb_array, unreadable
from beit_mm.errors import warn

try:
    import rasterio
    from rasterio.enums import Resampling
    from rasterio.windows import Window
except ImportError:
    rasterio = None

LARGE = 2**27  # values, pixels times bands, from which a TIFF is read in blocks
MAX_MOSAIC = 2**31  # pixels; label and probability take three bytes each
GEOREFERENCE_TAGS = {33550, 33922, 34264}  # size of a pixel, tie points, matrix
WORLD_FILES = ('.wld', '.jgw', '.pgw', '.tfw', '.bpw', '.gfw')


def is_tiff(path: Any) -> bool:
    return isinstance(path, str | Path) and Path(path).suffix.lower() in ('.tif', '.tiff') and Path(path).is_file()


def open_tiff(path: str | Path) -> Any:
    """Opens a TIFF with GDAL, which would otherwise also read any format, and the files beside it."""
    with rasterio.Env(GDAL_DISABLE_READDIR_ON_OPEN='EMPTY_DIR'):
        return rasterio.open(Path(path).absolute(), driver='GTiff', sharing=False)


class Mosaic:
    """A TIFF that is read by windows, for `loader`, of `size` (height, width), which the network sees as `seen`."""

    def __init__(self, path: str, loader: LoadImage | LoadBands, steps: Sequence) -> None:
        self.path, self.loader, self.file = path, loader, open_tiff(path)
        self.size: tuple[int, int] = self.file.shape
        self.seen: Any = size_seen(steps, self.size)

    @classmethod
    def open(cls, path: Any, loader: Any, steps: Sequence) -> 'Mosaic | None':
        """Opens a TIFF that is too large to be decoded whole; None for any other.

        None also where windows could be prepared in another way than by `loader` and the following `steps`.
        """
        if rasterio is None or not is_tiff(path):
            return None
        with contextlib.suppress(OSError):  # reading it whole will say what is wrong
            mosaic = cls(str(path), loader, steps)
            pixels = math.prod(mosaic.size)
            is_large = pixels > loader.max_pixels or pixels * mosaic.file.count > LARGE
            if is_large and pixels <= MAX_MOSAIC and mosaic.can_be_cut():
                return mosaic
        return None

    def can_be_cut(self) -> bool:
        """Whether windows of pixels are those that the loader gives."""
        if self.seen is None or not isinstance(self.loader, LoadImage):
            return self.seen is not None and isinstance(self.loader, LoadBands)
        with open_image(self.path, MAX_MOSAIC) as image:
            is_plain = image.mode in ('L', 'RGB', 'RGBA') and orientation(image) == 1
        return is_plain and {*self.file.dtypes} == {'uint8'}

    def read(self, rows: slice, columns: slice, **options: Any) -> np.ndarray:
        """A window (h, w, C), 0-255; `options` are those of rasterio's `read`."""
        with unreadable(self.path, Exception):
            values = self.file.read(window=Window.from_slices(rows, columns), **options).transpose(1, 2, 0)
            if isinstance(self.loader, LoadBands):
                return self.loader.scale(values)
            return rgb_array(Image.fromarray(values[..., 0] if values.shape[2] == 1 else np.ascontiguousarray(values)))

    def read_seen(self, rows: slice, columns: slice) -> torch.Tensor | None:
        """A window (C, h, w) of what the network sees; None if it has no data."""
        y, x = (length / length_seen for length, length_seen in zip(self.size, self.seen, strict=True))
        window = slice(rows.start * y, rows.stop * y), slice(columns.start * x, columns.stop * x)
        shape = rows.stop - rows.start, columns.stop - columns.start
        with unreadable(self.path, Exception):
            if not self.file.dataset_mask(window=Window.from_slices(*window), out_shape=shape).any():
                return None
        pixels = self.read(*window, out_shape=(self.file.count, *shape), resampling=Resampling.bilinear)
        return torch.from_numpy(pixels.transpose(2, 0, 1).copy())

    def preview(self, step: int) -> np.ndarray:
        """One of `step` pixels in each direction, uint8 (h, w, 3)."""
        height, width = self.size
        shape = self.file.count, math.ceil(height / step), math.ceil(width / step)
        return LoadBands.as_rgb(self.read(slice(0, height), slice(0, width), out_shape=shape))


def size_seen(steps: Sequence, size: tuple[int, int]) -> tuple[int, int] | None:
    """The height and width to which steps of a pipeline resize an image; None if they do more than that."""
    for step in steps:
        if hasattr(step, 'size_of'):
            size = step.size_of(*size)
        elif isinstance(step, Resize) and step.scale and step.keep_ratio:
            size = rescale_size(size[::-1], step.scale)[::-1]
        elif type(step).__name__ != 'PackSegInputs':
            return None
    return size


class Georeference:
    """Where the pixels of a GeoTIFF lie: `grid` has crs and transform, or ground control points."""

    def __init__(self, path: str, grid: dict[str, Any]) -> None:
        self.path, self.grid = path, grid

    @classmethod
    def of(cls, path: Any, size: tuple[int, int]) -> 'Georeference | None':
        """The georeference of an image of `size` (height, width), if it has one."""
        if not is_tiff(path):
            return None
        if rasterio is None:
            with contextlib.suppress(OSError), open_image(path, MAX_MOSAIC) as image:
                if not GEOREFERENCE_TAGS.isdisjoint(image.tag_v2):
                    warn("Label maps are written as PNG, without georeference; pip install 'beit_mm[geo]' keeps it.")
            return None
        with contextlib.suppress(OSError), open_tiff(path) as file:
            gcps, crs = file.gcps
            grid = dict(crs=crs, gcps=gcps) if gcps else dict(crs=file.crs, transform=file.transform)
            if (gcps or file.crs or not file.transform.is_identity) and file.shape == size:
                return cls(path, grid)
        return None

    def hide_no_data(self, labels: np.ndarray, no_label: int, confidence: np.ndarray) -> None:
        """Sets labels to `no_label` and their probability to 0 where the image has no data."""
        with open_tiff(self.path) as file:
            for _, window in file.block_windows(1):
                part, no_data = window.toslices(), file.dataset_mask(window=window) == 0
                labels[part][no_data], confidence[part][no_data] = no_label, 0

    def write(
        self, path: Path, values: np.ndarray, no_data: int | None, scale: float, colours: np.ndarray | None
    ) -> None:
        """Writes a map (H, W) on the same grid; `scale` and `colours` (N, 3) tell other programs what numbers mean."""
        layout = dict(tiled=True, blockxsize=512, blockysize=512, compress='deflate', bigtiff='if_safer')
        height, width = values.shape
        options = dict(self.grid, **layout, dtype=values.dtype, nodata=no_data)
        with rasterio.open(path, 'w', 'GTiff', width, height, 1, **options) as file:
            file.write(values, 1)
            file.scales = (scale,)
            if colours is not None:
                file.write_colormap(1, dict(enumerate(map(tuple, colours.tolist()))))


def copy_world_file(image: Path, png: Path) -> None:
    """Copies the world file beside an image, such as a.jgw of a.jpg, as that of a PNG of the same size."""
    names = [image.with_suffix(suffix) for suffix in WORLD_FILES]
    for path in (*names, *(name.with_suffix(name.suffix.upper()) for name in names)):
        if path.is_file():
            shutil.copyfile(path, png.with_suffix('.pgw'))

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

from beit_mm.datasets.reading import LoadBands, LoadImage, open_image, rgb_array, unreadable
from beit_mm.datasets.transforms import ResizeToScale
from beit_mm.errors import warn

try:
    import rasterio
    from rasterio.enums import Resampling
    from rasterio.windows import Window
except ImportError:
    rasterio = None

LARGE = 2**27  # values, pixels times bands, from which a TIFF is read in windows
MAX_MOSAIC = 2**31  # pixels; label and probability take three bytes each
USUAL_KINDS = ('gray',), ('red', 'green', 'blue'), ('red', 'green', 'blue', 'alpha')  # GDAL's names of bands
GEOREFERENCE_TAGS = {33550, 33922, 34264}  # size of a pixel, tie points, matrix
WORLD_FILES = ('.wld', '.jgw', '.pgw', '.tfw', '.bpw', '.gfw')


def is_tiff(path: Any) -> bool:
    return isinstance(path, str | Path) and Path(path).suffix.lower() in ('.tif', '.tiff') and Path(path).is_file()


def open_tiff(path: str | Path) -> Any:
    # GDAL would otherwise open any format, and read the files beside this one
    with rasterio.Env(GDAL_DISABLE_READDIR_ON_OPEN='EMPTY_DIR'):
        return rasterio.open(Path(path).absolute(), driver='GTiff', sharing=False)


class Mosaic:
    """A TIFF of `size` that is read in windows of the size `seen`, to which a pipeline resizes it: (height, width)."""

    def __init__(self, path: str, loader: Any, steps: Sequence) -> None:
        self.path, self.loader = path, loader
        with open_tiff(path) as file:  # closed after each window: else GDAL's cache takes a share of all memory
            self.size: tuple[int, int] = file.shape
            self.count, self.dtypes = file.count, {*file.dtypes}
            self.kinds = tuple(kind.name for kind in file.colorinterp)
        self.seen: Any = size_seen(steps, self.size)
        for step in steps:
            if isinstance(step, ResizeToScale):
                step.warn_other_scale(path, *self.size)

    @classmethod
    def open(cls, path: Any, loader: Any, steps: Sequence) -> 'Mosaic | None':
        """Opens a TIFF that is too large to be decoded whole; None for others, and where windows would differ."""
        if rasterio is None or not is_tiff(path) or not isinstance(loader, LoadImage | LoadBands):
            return None
        with contextlib.suppress(OSError):  # decoding it whole says what is wrong
            mosaic = cls(str(path), loader, steps)
            is_usual = isinstance(loader, LoadBands) or (mosaic.kinds in USUAL_KINDS and mosaic.dtypes == {'uint8'})
            pixels, limit = math.prod(mosaic.size), min(loader.max_pixels, LARGE // mosaic.count)
            if is_usual and mosaic.seen and limit < pixels <= MAX_MOSAIC:
                return mosaic
        return None

    def read(self, rows: slice, columns: slice, shape: tuple[int, int], **options: Any) -> np.ndarray:
        """Pixels of the file, resized to `shape`: (h, w, C), 0-255, as the loader gives them."""
        window = Window.from_slices(rows, columns)
        with unreadable(self.path, Exception), open_tiff(self.path) as file:
            values = file.read(window=window, out_shape=(self.count, *shape), **options).transpose(1, 2, 0)
            if isinstance(self.loader, LoadBands):
                return self.loader.scale(values)[0]
            return rgb_array(Image.fromarray(values[..., 0] if values.shape[2] == 1 else np.ascontiguousarray(values)))

    def read_seen(self, rows: slice, columns: slice) -> torch.Tensor | None:
        """A window (C, h, w) of what the network sees; None if it has no data."""
        (y, x), shape = np.divide(self.size, self.seen), (rows.stop - rows.start, columns.stop - columns.start)
        window = slice(rows.start * y, rows.stop * y), slice(columns.start * x, columns.stop * x)
        with unreadable(self.path, Exception), open_tiff(self.path) as file:
            if not file.dataset_mask(window=Window.from_slices(*window), out_shape=shape).any():
                return None
        pixels = self.read(*window, shape, resampling=Resampling.bilinear)
        return torch.from_numpy(pixels.transpose(2, 0, 1).copy())

    def preview(self, step: int) -> np.ndarray:
        """One of `step` pixels in each direction, uint8 (h, w, 3)."""
        height, width = self.size
        shape = math.ceil(height / step), math.ceil(width / step)
        return LoadBands.as_rgb(self.read(slice(0, height), slice(0, width), shape))


def size_seen(steps: Sequence, size: tuple[int, int]) -> tuple[int, int] | None:
    """The height and width to which steps of a pipeline resize an image; None if they do anything else."""
    for step in steps:
        if isinstance(step, ResizeToScale):
            size = step.size_of(*size)
        elif isinstance(step, Resize) and step.scale and step.keep_ratio:
            size = rescale_size(size[::-1], step.scale)[::-1]
        elif type(step).__name__ != 'PackSegInputs':
            return None
    return size


class Place:
    """Where an image lies: its maps become GeoTIFFs on the same grid, or else PNGs, with its world file.

    Args:
        path: of the image; None for an array.
        size: height and width of its maps.
    """

    def __init__(self, path: str | None, size: tuple[int, int]) -> None:
        self.path, self.grid = path or '', {}  # of rasterio's profile
        if not is_tiff(path):
            return
        with contextlib.suppress(OSError):
            if rasterio is None:
                with open_image(self.path, MAX_MOSAIC) as image:
                    if not GEOREFERENCE_TAGS.isdisjoint(image.tag_v2):
                        warn("Label maps are PNG files without georeference; pip install 'beit_mm[geo]' keeps it.")
                return
            with open_tiff(self.path) as file:
                if file.shape == size and (file.crs or not file.transform.is_identity):
                    self.grid = dict(crs=file.crs, transform=file.transform)

    def hide_no_data(self, labels: np.ndarray, no_label: int, confidence: np.ndarray) -> None:
        """Where a GeoTIFF has no data, sets labels to `no_label` and their probability to 0."""
        if not self.grid:
            return
        with open_tiff(self.path) as file:
            for _, window in file.block_windows(1):
                part, no_data = window.toslices(), file.dataset_mask(window=window) == 0
                labels[part][no_data], confidence[part][no_data] = no_label, 0

    def write(
        self, png: Path, values: np.ndarray, no_data: int, colours: np.ndarray | None = None, scale: float = 1
    ) -> str:
        """Writes a map (H, W); `colours` (N, 3) and `scale` tell other programs what its numbers mean.

        Returns:
            The file, `png` or the same with .tif.
        """
        height, width = values.shape
        if self.grid:
            tif = png.with_suffix('.tif')
            layout = dict(tiled=True, blockxsize=512, blockysize=512, compress='deflate', bigtiff='if_safer')
            options = dict(self.grid, **layout, dtype=values.dtype, nodata=no_data)
            with rasterio.open(tif, 'w', 'GTiff', width, height, 1, **options) as file:
                file.write(values, 1)
                file.scales = (scale,)
                if colours is not None:
                    file.write_colormap(1, dict(enumerate(map(tuple, colours.tolist()))))
            return str(tif)
        picture = Image.fromarray(values)
        if colours is not None:
            picture.putpalette(colours.tobytes())
        picture.save(png)
        for suffix in (*WORLD_FILES, *map(str.upper, WORLD_FILES)):
            if self.path and Path(self.path).with_suffix(suffix).is_file():
                shutil.copyfile(Path(self.path).with_suffix(suffix), png.with_suffix('.pgw'))
        return str(png)

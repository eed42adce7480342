"""TIFF files through GDAL: images too large to be decoded whole, and the georeference that label maps keep."""

import contextlib
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image

from beit_mm.datasets.reading import LoadBands, LoadImage, open_image, rgb_array, unreadable
from beit_mm.errors import warn
from beit_mm.files import unlinked

try:
    import rasterio
    from rasterio.enums import Resampling
    from rasterio.windows import Window
except ImportError:
    rasterio = None

LARGE = 2**27  # values, pixels times bands, from which a TIFF is read in windows
MAX_MOSAIC = 2**31  # pixels; label and probability take three bytes each
USUAL_KINDS = ('gray',), ('red', 'green', 'blue'), ('red', 'green', 'blue', 'alpha')  # GDAL's names of bands
TIE_POINTS_TAG, MATRIX_TAG = 33922, 34264  # one of them is in every GeoTIFF
WORLD_FILES = ('.wld', '.jgw', '.pgw', '.tfw', '.bpw', '.gfw')


def is_tiff(path: Any) -> bool:
    return isinstance(path, str | Path) and Path(path).suffix.lower() in ('.tif', '.tiff') and Path(path).is_file()


def open_tiff(path: str | Path) -> Any:
    # GDAL would otherwise open any format, and read the files beside this one
    with rasterio.Env(GDAL_DISABLE_READDIR_ON_OPEN='EMPTY_DIR'):
        return rasterio.open(Path(path).absolute(), driver='GTiff', sharing=False)


class Mosaic(NamedTuple):
    """A TIFF that is too large to be decoded whole, and is read in windows instead."""

    path: str
    loader: LoadImage | LoadBands
    size: tuple[int, int]  # height and width
    seen: tuple[int, int]  # height and width to which the pipeline resizes it

    @classmethod
    def open(cls, path: Any, loader: Any, steps: Sequence) -> 'Mosaic | None':
        """Opens a large TIFF for the steps after its loader; None for others, and where windows would differ."""
        if rasterio is None or not is_tiff(path) or not isinstance(loader, LoadImage | LoadBands):
            return None
        if [type(step).__name__ for step in steps] != ['ResizeToScale', 'PackSegInputs']:
            return None
        with contextlib.suppress(OSError), open_tiff(path) as file:  # decoding it whole says what is wrong
            kinds = tuple(kind.name for kind in file.colorinterp)
            is_usual = isinstance(loader, LoadBands) or (kinds in USUAL_KINDS and {*file.dtypes} == {'uint8'})
            is_large = min(loader.max_pixels, LARGE // file.count) < math.prod(file.shape) <= MAX_MOSAIC
            if is_usual and is_large:
                steps[0].warn_other_scale(path, *file.shape)
                return cls(str(path), loader, file.shape, steps[0].size_of(*file.shape))
        return None

    def read(self, rows: slice, columns: slice, shape: tuple[int, int]) -> np.ndarray | None:
        """A part of the file, resized to `shape`, as the loader gives it: (h, w, C), 0-255; None if it has no data."""
        window = Window.from_slices(rows, columns)
        # opened for each window: else GDAL's cache takes a share of all memory
        with unreadable(self.path, Exception), open_tiff(self.path) as file:
            if not file.dataset_mask(window=window, out_shape=shape).any():
                return None
            options = dict(out_shape=(file.count, *shape), resampling=Resampling.bilinear, masked=True)
            values = file.read(window=window, **options).transpose(1, 2, 0)
            if isinstance(self.loader, LoadBands):
                return self.loader.scale(values)[0]
            pixels = np.ascontiguousarray(values.data)
            return rgb_array(Image.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels))

    def read_seen(self, rows: slice, columns: slice) -> torch.Tensor | None:
        """A window (C, h, w) of what the network sees; None if it has no data."""
        y, x = np.divide(self.size, self.seen)
        window = slice(rows.start * y, rows.stop * y), slice(columns.start * x, columns.stop * x)
        pixels = self.read(*window, (rows.stop - rows.start, columns.stop - columns.start))
        return None if pixels is None else torch.from_numpy(pixels.transpose(2, 0, 1).copy())

    def preview(self, step: int) -> np.ndarray:
        """The whole image, its sides divided by `step`: uint8 (h, w, 3)."""
        shape = math.ceil(self.size[0] / step), math.ceil(self.size[1] / step)
        image = self.read(slice(0, self.size[0]), slice(0, self.size[1]), shape)
        return np.zeros((*shape, 3), np.uint8) if image is None else LoadBands.as_rgb(image)


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
                    if TIE_POINTS_TAG in image.tag_v2 or MATRIX_TAG in image.tag_v2:
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
        """Writes a map (H, W) to `png`, or to the same with .tif; returns the path.

        `colours` (N, 3) and `scale` tell other programs what its numbers mean.
        """
        height, width = values.shape
        if self.grid:
            tif = str(unlinked(png.with_suffix('.tif')))
            layout = dict(tiled=True, blockxsize=512, blockysize=512, compress='deflate', bigtiff='if_safer')
            options = dict(self.grid, **layout, dtype=values.dtype, nodata=no_data)
            with rasterio.open(tif, 'w', 'GTiff', width, height, 1, **options) as file:
                file.write(values, 1)
                file.scales = (scale,)
                if colours is not None:
                    file.write_colormap(1, dict(enumerate(map(tuple, colours.tolist()))))
            return tif
        picture = Image.fromarray(values)
        if colours is not None:
            picture.putpalette(colours.tobytes())
        picture.save(unlinked(png))
        for suffix in (*WORLD_FILES, *map(str.upper, WORLD_FILES)):
            if self.path and Path(self.path).with_suffix(suffix).is_file():
                shutil.copyfile(Path(self.path).with_suffix(suffix), unlinked(png.with_suffix('.pgw')))
        return str(png)

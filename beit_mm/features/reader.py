"""Images of any source, prepared as a test pipeline does."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
from mmcv.transforms import BaseTransform
from PIL import Image

from beit_mm.datasets.bands import LoadBands
from beit_mm.datasets.listing import EXTENSIONS, list_images
from beit_mm.datasets.reading import LoadImage, UnreadableImageError, check_aspect, rgb_array, unreadable
from beit_mm.terminal import UserError

ImageInput: TypeAlias = str | Path | np.ndarray | Image.Image
Device: TypeAlias = str | torch.device | None
CROP_RATIO = 0.875  # of our configs' test pipelines
WHOLE = 384  # pixels: from this size on they take all of an image


class FoundPath(str):
    """The path of an image file that was found: taken as it is, even if the file is gone by then."""


class ImageReader:
    """Reads and prepares images: `_load` is the first transform of a test pipeline, `_prepare` the others."""

    _load: BaseTransform
    _prepare: Callable[[dict], dict]
    _reads_rgb: bool  # arrays go to `_prepare` as RGB, not as BGR

    def _read(self, source: ImageInput, on_error: str) -> dict:
        """What the test pipeline makes of an image; dict(path=..., error=...) of one that is skipped."""
        try:
            return self._sample(source)
        except UnreadableImageError as error:
            if on_error == 'raise':
                raise
            return dict(path=_path(source), error=str(error))

    def _sample(self, source: ImageInput) -> dict:
        sample = self._loaded(source)
        check_aspect(_path(source) or 'an array', sample['img'])  # whatever has loaded it
        return self._prepared(sample)

    def _prepared(self, sample: dict) -> dict:
        return self._prepare(sample)

    def _loaded(self, source: ImageInput) -> dict:
        if isinstance(source, (str, Path)):
            ours = isinstance(self._load, (LoadImage, LoadBands))
            with nullcontext() if ours else unreadable(str(source), Exception):
                return self._load(dict(img_path=str(source)))
        if isinstance(self._load, LoadBands):
            return self._load(dict(img=np.asarray(source)))
        if isinstance(source, Image.Image):
            source = pixels(source)
        if source.ndim != 3 or source.shape[2] != 3 or source.dtype != np.uint8 or not source.size:
            raise UserError(
                f'an array of {source.dtype} {source.shape}; expected uint8 (height, width, 3), RGB, not empty'
            )
        image = np.ascontiguousarray(source if self._reads_rgb else source[..., ::-1])
        return dict(img=image, img_shape=image.shape[:2], ori_shape=image.shape[:2])


def check_on_error(on_error: str) -> None:
    """Raises ValueError for another policy than 'raise' and 'skip'."""
    if on_error not in ('raise', 'skip'):
        raise UserError(f"on_error is {on_error!r}; choose 'raise' or 'skip'")


def iterate_images(
    sources: ImageInput | Sequence[ImageInput], extensions: Sequence[str] = EXTENSIONS
) -> Iterator[ImageInput]:
    """Files, arrays and images, folders (their files with one of the extensions) and lists taken apart."""
    if isinstance(sources, (list, tuple, Iterator)):
        for source in sources:
            yield from iterate_images(source, extensions)
    elif isinstance(sources, (np.ndarray, Image.Image, FoundPath)):
        yield sources
    elif not isinstance(sources, (str, Path)):
        raise UserError(
            f'an image of type {type(sources).__name__}; expected a file or folder (str or Path), an '
            'array, a PIL image, or a list of these'
        )
    elif os.path.isdir(path := os.path.expanduser(sources)):
        names = list_images(path, extensions)
        if not names:
            raise FileNotFoundError(f'no images in {str(sources)!r}')
        yield from (FoundPath(Path(path, name)) for name in names)
    elif os.path.lexists(path):  # of a link that leads nowhere reading says so
        yield FoundPath(Path(path))
    else:
        raise FileNotFoundError(f'no file or folder {str(sources)!r}; expected images')


def pixels(image: Image.Image) -> np.ndarray:
    """The pixels that the image's file would be read as: uint8 (H, W, 3), RGB, upright."""
    image.load()  # some formats learn of their palette or transparency only here
    return rgb_array(image)


def _path(image: ImageInput) -> str | None:
    return str(image) if isinstance(image, (str, Path)) else None


def usual_preparation(size: Sequence[int], backend: str) -> list[dict]:
    """What follows the loading of an image where no config says so: the middle of it, in a size (height, width)."""
    edge = max(size) if max(size) >= WHOLE else round(max(size) / CROP_RATIO)
    return [
        dict(type='ResizeEdge', scale=edge, edge='short', backend=backend, interpolation='bicubic'),
        dict(type='CenterCrop', crop_size=tuple(size[::-1])),
        dict(type='PackInputs'),
    ]

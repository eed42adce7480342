"""What the inferencers take for sources: files, folders, arrays, PIL images and lists of these."""
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from mmengine.dataset import Compose
from PIL import Image

from beit_mm.datasets.image_reading import UPRIGHT, orientation, to_rgb
from beit_mm.datasets.images import list_images
from beit_mm.registry import TRANSFORMS

ImageInput = str | Path | np.ndarray | Image.Image
LOADERS = ('LoadImage', 'LoadImageFromFile')


class Preparation:
    """A test pipeline, for a source that is no file too.

    Args:
        pipeline: transforms as configs name them, one of `LOADERS` first. Call with the default scope set in which
            they are named.

    Raises:
        ValueError: it begins with something else.
    """

    def __init__(self, pipeline: Sequence[dict]):
        load, *prepare = pipeline
        if load['type'].split('.')[-1] not in LOADERS:
            raise ValueError(f'the test pipeline begins with {load["type"]}; expected one of {LOADERS}')
        self.rgb = load['type'].endswith('LoadImage')
        self.load = TRANSFORMS.build(load)
        self.prepare = Compose([TRANSFORMS.build(transform) for transform in prepare])

    def __call__(self, source: ImageInput) -> dict:
        """The sample of a file, an array uint8 (H, W, 3), **RGB**, or a PIL image.

        Raises:
            UnreadableImageError: a file that is no source; names it.
            ValueError: another array.
        """
        if isinstance(source, (str, Path)):
            return self.prepare(self.load(dict(img_path=str(source))))
        if isinstance(source, Image.Image):
            source = pixels(source)
        if source.ndim != 3 or source.shape[2] != 3 or source.dtype != np.uint8 or not source.size:
            raise ValueError(f'an array of {source.dtype} {source.shape}; expected uint8 (height, width, 3), RGB, '
                             'not empty')
        image = np.ascontiguousarray(source if self.rgb else source[..., ::-1])
        return self.prepare(dict(img=image, img_shape=image.shape[:2], ori_shape=image.shape[:2]))


def iterate_images(sources: ImageInput | Sequence[ImageInput]) -> Iterator[ImageInput]:
    """Files, arrays and images, folders and lists taken apart.

    Raises:
        FileNotFoundError: no such file, or a folder without sources.
        TypeError: something else than sources.
    """
    if isinstance(sources, (str, Path)):
        if not Path(sources).exists():
            raise FileNotFoundError(f'no file or folder {str(sources)!r}; expected sources')
        if not Path(sources).is_dir():
            yield sources
            return
        if not (names := list_images(str(sources))):
            raise FileNotFoundError(f'no sources in {str(sources)!r}')
        yield from (str(Path(sources, name)) for name in names)
    elif isinstance(sources, (np.ndarray, Image.Image)):
        yield sources
    elif isinstance(sources, Iterable) and not isinstance(sources, (bytes, bytearray, torch.Tensor)):
        for source in sources:
            yield from iterate_images(source)
    else:
        raise TypeError(f'a source of type {type(sources).__name__}; expected a file or folder (str or Path), an array, '
                        'a PIL image, or a list of these')


def pixels(image: Image.Image) -> np.ndarray:
    """The pixels that the image's file would be read as: uint8 (H, W, 3), RGB, upright."""
    image.load()  # some formats learn of their palette or transparency only here
    turn = UPRIGHT.get(orientation(image))
    image = to_rgb(image)
    return np.array(image if turn is None else image.transpose(turn))


def path_of(source: ImageInput) -> str | None:
    """The file of a source, None of an array or image."""
    return str(source) if isinstance(source, (str, Path)) else None

"""What the inferencers take for photos: files, folders, arrays, PIL images and lists of these."""
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from mmengine.dataset import Compose
from PIL import Image

from beit_mm.datasets.photo_reading import UPRIGHT, orientation, to_rgb
from beit_mm.datasets.photos import list_photos
from beit_mm.registry import TRANSFORMS

Photo = str | Path | np.ndarray | Image.Image
LOADERS = ('LoadPhoto', 'LoadImageFromFile')


class Preparation:
    """A test pipeline, for a photo that is no file too.

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
        self.rgb = load['type'].endswith('LoadPhoto')
        self.load = TRANSFORMS.build(load)
        self.prepare = Compose([TRANSFORMS.build(transform) for transform in prepare])

    def __call__(self, photo: Photo) -> dict:
        """The sample of a file, an array uint8 (H, W, 3), **RGB**, or a PIL image.

        Raises:
            UnreadableImageError: a file that is no photo; names it.
            ValueError: another array.
        """
        if isinstance(photo, (str, Path)):
            return self.prepare(self.load(dict(img_path=str(photo))))
        if isinstance(photo, Image.Image):
            photo = pixels(photo)
        if photo.ndim != 3 or photo.shape[2] != 3 or photo.dtype != np.uint8 or not photo.size:
            raise ValueError(f'an array of {photo.dtype} {photo.shape}; expected uint8 (height, width, 3), RGB, '
                             'not empty')
        image = np.ascontiguousarray(photo if self.rgb else photo[..., ::-1])
        return self.prepare(dict(img=image, img_shape=image.shape[:2], ori_shape=image.shape[:2]))


def each_photo(photos: Photo | Sequence[Photo]) -> Iterator[Photo]:
    """Files, arrays and images, folders and lists taken apart.

    Raises:
        FileNotFoundError: no such file, or a folder without photos.
        TypeError: something else than photos.
    """
    if isinstance(photos, (str, Path)):
        if not Path(photos).exists():
            raise FileNotFoundError(f'no file or folder {str(photos)!r}; expected photos')
        if not Path(photos).is_dir():
            yield photos
            return
        if not (names := list_photos(str(photos))):
            raise FileNotFoundError(f'no photos in {str(photos)!r}')
        yield from (str(Path(photos, name)) for name in names)
    elif isinstance(photos, (np.ndarray, Image.Image)):
        yield photos
    elif isinstance(photos, Iterable) and not isinstance(photos, (bytes, bytearray, torch.Tensor)):
        for photo in photos:
            yield from each_photo(photo)
    else:
        raise TypeError(f'a photo of type {type(photos).__name__}; expected a file or folder (str or Path), an array, '
                        'a PIL image, or a list of these')


def pixels(image: Image.Image) -> np.ndarray:
    """The pixels that the image's file would be read as: uint8 (H, W, 3), RGB, upright."""
    image.load()  # some formats learn of their palette or transparency only here
    turn = UPRIGHT.get(orientation(image))
    image = to_rgb(image)
    return np.array(image if turn is None else image.transpose(turn))


def path_of(photo: Photo) -> str | None:
    """The file of a photo, None of an array or image."""
    return str(photo) if isinstance(photo, (str, Path)) else None

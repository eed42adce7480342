"""At which scale a segmentor sees images: by their sizes and those of the objects in their label maps."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import cv2
import numpy as np

from beit_mm.datasets.reading import UnreadableImageError
from beit_mm.datasets.segmentation_folder import SegmentationFolder
from beit_mm.files import quoted
from beit_mm.own_images.images import ImageList, evenly, write_lists
from beit_mm.own_images.label_maps import LabelMaps

MAX_MEASURED = 30  # label maps whose objects are measured
MOST_PIXELS = 50_000_000  # of these maps together
# At the recipe's size an object may be as small as one patch: what a smaller one needs costs the others their context.
# CamVid, whose poles are 8.5 pixels wide at a short side of 160, learned 44.1 mIoU there and 38.1 at 360 in 540 steps.
# Where objects are smaller, the scale is raised until they are two patches wide.
LOST_PATCHES, MIN_PATCHES = 1, 2
MIN_PIXELS = 4  # smaller objects are specks


@dataclass(frozen=True)
class Sizes:
    """Sizes of images with label maps, and of the objects in the maps, in pixels."""

    images: list[tuple[int, int]]  # height and width of each
    objects: dict[
        str, float
    ]  # class -> side of a square as large as its objects: half of its pixels are in larger ones

    @property
    def short_side(self) -> int:
        """The median short side of the images."""
        return int(np.median([min(size) for size in self.images]))

    @property
    def is_common(self) -> bool:
        """Whether nine of ten images are within a factor of two of the median."""
        ratios = np.array([min(size) for size in self.images]) / self.short_side
        return bool(((ratios > 0.5) & (ratios < 2)).mean() >= 0.9)

    @property
    def smallest(self) -> tuple[str, float]:
        """The class with the smallest objects, and their side; ('', inf) without any."""
        return min(self.objects.items(), key=lambda item: item[1], default=('', float('inf')))


@dataclass(frozen=True)
class Scale:
    """The arguments of ResizeToScale; `text` says for the user how images are seen."""

    short_side: int
    factor: float | None
    within: float
    image_size: tuple[int, int]  # median height and width of the images, not resized
    text: str

    @property
    def arguments(self) -> dict[str, Any]:
        return dict(short_side=self.short_side, factor=self.factor, within=self.within)


def measure(images: LabelMaps) -> Sizes:
    """Measures some of the images to learn from, evenly spread."""
    sizes, areas = [], defaultdict(list)
    chosen = ImageList(images.train.root, dict(evenly(images.train.names.items(), MAX_MEASURED)))
    images = replace(images, train=chosen, held_out=ImageList(images.held_out.root, {}))
    load = images.bands['load'] if images.bands else dict(type='beit_mm.LoadImage')
    with TemporaryDirectory() as lists:
        write_lists(images, Path(lists))
        steps = [load, dict(type='beit_mm.LoadAnnotation')]
        dataset = SegmentationFolder(**images.dataset(Path(lists), 'train'), pipeline=steps, test_mode=True)
        for index in range(len(dataset)):
            try:
                labels = dataset[index]['gt_seg_map']
            except UnreadableImageError:
                continue
            sizes.append(labels.shape)
            for label in np.unique(labels[labels < len(images.classes)]).tolist():
                areas[images.classes[label]] += areas_of_objects(labels == label)
            if sum(height * width for height, width in sizes) > MOST_PIXELS:
                break
    return Sizes(sizes, {name: half_of_pixels(of_class) for name, of_class in areas.items()})


def areas_of_objects(mask: np.ndarray) -> list[int]:
    """The areas of the connected components of a mask, bool (H, W), in pixels."""
    _, _, stats, _ = cv2.connectedComponentsWithStats(mask.astype(np.uint8))
    areas = stats[1:, cv2.CC_STAT_AREA].tolist()
    return [area for area in areas if area >= MIN_PIXELS] or areas


def half_of_pixels(areas: Iterable[int]) -> float:
    """The side of a square as large as the object that holds the median pixel of all objects."""
    ordered = np.sort([*areas])
    pixels = ordered.cumsum()
    return float(ordered[np.searchsorted(pixels, pixels[-1] / 2)] ** 0.5)


def choose_scale(sizes: Sizes, usual: int, patch: int, short_side: int | None, full_size: bool) -> Scale:
    """The scale that the call asks for; else the recipe's, or a larger one if objects would be lost at that.

    Args:
        usual: short side in the recipe, in pixels.
        patch: side of a patch in pixels.
        short_side, full_size: of the call.
    """
    stored, (name, side) = sizes.short_side, sizes.smallest
    wanted = usual
    if side * usual / stored < LOST_PATCHES * patch:
        wanted = max(usual, min(stored, round(stored * MIN_PATCHES * patch / side)))
    found = short_side or (stored if full_size else wanted)
    whole = full_size or (short_side is None and usual < stored and found > 0.8 * stored)
    object_text = f'; the median object of {quoted(name)} is {side:.0f} pixels wide' if name else ''
    image_size = tuple(np.median(sizes.images, axis=0).astype(int).tolist())
    images_text = 'images of about {} x {}'.format(*image_size)
    if whole:
        return Scale(stored, 1.0, 1.0, image_size, f'{images_text}, seen at full size{object_text}')
    factor = found / stored
    seen = f'{"shrunk" if factor < 1 else "enlarged"} {max(factor, 1 / factor):.1f} times'
    text = f'{images_text}, {seen} to a short side of {found}{object_text}'
    if not sizes.is_common:
        return Scale(
            found, None, 2.0, image_size, f'images of many sizes, all brought to a short side of {found}{object_text}'
        )
    return Scale(found, factor, 2.0, image_size, text)

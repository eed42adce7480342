"""At which scale a segmentor sees images: by their sizes and those of the objects in their label maps."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from math import inf
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import cv2
import numpy as np

from beit_mm.apis.stored_config import LIMITS
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


class Sizes(NamedTuple):
    """Sizes of images with label maps, and of the objects in the maps, in pixels."""

    images: list[tuple[int, int]]  # height and width of each
    objects: dict[str, float]  # class -> `half_of_pixels` of its objects
    pixels: Counter[str]  # class -> how many pixels it has in these images


class Scale(NamedTuple):
    """The arguments of ResizeToScale; `text` says for the user how images are seen."""

    short_side: int
    factor: float | None
    within: float
    image_size: tuple[int, int]  # median height and width of the images, not resized
    text: str

    @property
    def arguments(self) -> dict[str, Any]:
        return dict(short_side=self.short_side, factor=self.factor, within=self.within)


def plain_dataset(images: LabelMaps, lists: Path, name: str) -> SegmentationFolder:
    """The images and label maps of a list, at their size."""
    load = images.bands['load'] if images.bands else dict(type='beit_mm.LoadImage')
    steps = [load, dict(type='beit_mm.LoadAnnotation')]
    return SegmentationFolder(**images.dataset(lists, name), pipeline=steps, test_mode=True)


def some_samples(images: LabelMaps, number: int) -> Iterator[dict[str, Any]]:
    """Reads some images to learn from and their label maps, evenly spread, except unreadable ones."""
    chosen = ImageList(images.train.root, dict(evenly(images.train.names.items(), number)))
    images = replace(images, train=chosen, held_out=ImageList(images.held_out.root, {}))
    with TemporaryDirectory() as lists:
        write_lists(images, Path(lists))
        dataset = plain_dataset(images, Path(lists), 'train')
        for index in range(len(dataset)):
            with suppress(UnreadableImageError):
                yield dataset[index]


def measure(images: LabelMaps) -> Sizes:
    """Measures some of the images to learn from."""
    sizes, pixels, areas = [], Counter[str](), defaultdict(list)
    for sample in some_samples(images, MAX_MEASURED):
        labels = sample['gt_seg_map']
        sizes.append(labels.shape)
        for label in np.unique(labels[labels < len(images.classes)]).tolist():
            mask, name = labels == label, images.classes[label]
            pixels[name] += int(mask.sum())
            areas[name] += areas_of_objects(mask)
        if sum(height * width for height, width in sizes) > MOST_PIXELS:
            break
    return Sizes(sizes, {name: half_of_pixels(of_class) for name, of_class in areas.items()}, pixels)


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
    sides = np.array([min(size) for size in sizes.images])
    stored = int(np.median(sides))
    is_common = ((sides > stored / 2) & (sides < 2 * stored)).mean() >= 0.9
    name, side = min(sizes.objects.items(), key=lambda item: item[1], default=('', inf))
    wanted = usual
    if side * usual / stored < LOST_PATCHES * patch:
        wanted = max(usual, min(stored, round(stored * MIN_PATCHES * patch / side)))
    found = short_side or (stored if full_size else wanted)
    is_common &= found / stored <= LIMITS['factor']  # else the run's own weights could not be rebuilt
    is_whole = full_size or (short_side is None and usual < stored and found > 0.8 * stored)
    height, width = np.median(sizes.images, axis=0).astype(int).tolist()
    ratio = found / stored
    change = f'shrunk {1 / ratio:.1f} times' if ratio < 1 else f'enlarged {ratio:.1f} times'
    seen = f'images of about {width} x {height}, {change} to a short side of {found}'
    if is_whole:
        found, ratio = min(stored, LIMITS['short_side']), 1.0
        seen = f'images of about {width} x {height}, seen at full size'
    elif not is_common:
        seen = f'images of about {width} x {height}, all brought to a short side of {found}, whatever their size'
    objects = f'; a typical object of {quoted(name)} is {side:.0f} pixels wide' if name else ''
    return Scale(
        short_side=found,
        factor=ratio if is_whole or is_common else None,
        within=1.0 if is_whole else 2.0,
        image_size=(height, width),
        text=seen + objects,
    )

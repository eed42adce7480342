"""Polygons and boxes in files of COCO, YOLO, labelme and Pascal VOC, drawn as label maps.

The readers are our own because supervision, the library for these formats, reads all shapes of a data set at once, with
a boolean mask of the image's size for each; here an image's shapes are drawn one by one.
"""

import json
import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple
from xml.etree import ElementTree

import cv2
import numpy as np
import yaml

from beit_mm.checkpoint.names import preview
from beit_mm.datasets.image_folder import list_images, read_lines
from beit_mm.datasets.reading import MAX_PIXELS, ONE_MEGAPIXEL
from beit_mm.datasets.segmentation_folder import IGNORE_INDEX, SPLITS, role_of
from beit_mm.errors import UserError, warn
from beit_mm.files import quoted
from beit_mm.own_images.images import evenly

SPLIT_OF = {word: split for split, words in SPLITS.items() for word in words.split()}
BACKGROUND, IGNORED = 'background', '__ignore__'  # names of classes; the latter is labelme's
CLASSES, LISTS = 'classes.txt', ('.json', '.csv', '.tsv')
FINE = 5  # small outlines are drawn on a grid of so many points for each side of a pixel
FARTHEST = 1 << 20  # coordinate on that grid; OpenCV's numbers would overflow
DAMAGE = (KeyError, IndexError, TypeError, ValueError, AttributeError, ElementTree.ParseError)


class Shape(NamedTuple):
    """An object in an image."""

    name: str  # of its class
    outlines: Sequence[np.ndarray] = ()  # of its parts: float32 (N, 2), x and y in pixels
    is_box: bool = False
    mask: np.ndarray | None = None  # in place of outlines

    @property
    def area(self) -> float:
        return float(sum(map(cv2.contourArea, self.outlines)) if self.mask is None else self.mask.sum())


Shapes = tuple[list[Shape], tuple[int, int] | None]  # of an image; the width and height that they are for, if stated
Reader = Callable[[Any, int, int], Shapes]  # takes what a Source has, and the image's width and height


class Source(NamedTuple):
    """Where the shapes of an image stand."""

    file: str  # relative to the folder
    content: Any  # what the format's reader takes


@dataclass
class Annotations:
    """The shapes of the images below a folder."""

    root: Path
    format: str
    sources: dict[str, Source]  # of each image, by its path relative to `root`
    read: Reader
    classes: list[str]  # background first
    parts: list[list[str]]  # images to learn from and, if files or folders say which, to hold out
    notes: list[str]  # for the user

    def draw(self, image: str, height: int, width: int) -> np.ndarray | None:
        """The label map uint8 (H, W) of an image, small shapes over large ones; None if they are for another size."""
        shapes, size = self.read(self.sources[image].content, width, height)
        masks = [shape.mask.shape for shape in shapes if shape.mask is not None]
        if {size or (width, height), *(shape[::-1] for shape in masks)} != {(width, height)}:
            return None
        labels = np.zeros((height, width), np.uint8)
        for shape in sorted(shapes, key=lambda shape: -shape.area):
            if not shape.area > 0:
                break
            label = IGNORE_INDEX if shape.name == IGNORED else self.classes.index(shape.name)
            if shape.mask is not None:
                labels[shape.mask] = label
            for outline in shape.outlines:
                fill(labels, outline, label)
        return labels


class Files:
    """The files below a folder, by their paths relative to it."""

    def __init__(self, root: Path) -> None:
        self.root, self.images = root, [*list_images(str(root))]
        self.named: dict[str, list[str]] = defaultdict(list)  # name without its ending -> images
        for image in self.images:
            self.named[PurePosixPath(image).stem].append(image)

    @property
    def have_maps(self) -> bool:
        """Whether images lie in a folder for label maps."""
        folders = {folder for image in self.images for folder in os.path.dirname(image).split('/')}
        return any(role_of(folder)[1] == 'maps' for folder in folders)

    def ending(self, *endings: str) -> list[str]:
        return [*list_images(str(self.root), endings)]

    def image_of(self, name: str, file: str = '') -> str | None:
        """The image that a file names, with any ending; of several the one whose path shares most words with both."""
        path = PurePosixPath(name.replace('\\', '/'))
        named = self.named.get(path.name) or self.named.get(path.stem, [])
        found = [image for image in named if len({split_of(image), split_of(file)} - {''}) < 2]
        words = {*words_of(f'{name}/{file}')}
        shared = [len(words & {*words_of(image)}) for image in found]
        best = [image for image, number in zip(found, shared, strict=True) if number == max(shared)]
        return best[0] if len(best) == 1 else None


def shared_out(splits: Mapping[str, str]) -> tuple[list[list[str]], list[str]]:
    """Images to learn from and, if any has the split 'val', to hold out; and a note on those of a test set."""
    groups: dict[str, list[str]] = defaultdict(list)
    for image, split in splits.items():
        groups[split or 'train'].append(image)
    test = groups.pop('test', []) if len(groups) > 1 else []
    notes = [f'{len(test):,} images of the test set are left alone'] if test else []
    return [groups[name] for name in ('train', 'val', 'test') if name in groups], notes


def split_of(path: str) -> str:
    """'train', 'val' or 'test' where a folder, or the name of a list of images, says so ('train2017' too); else ''."""
    named = path if path.endswith(LISTS) else os.path.dirname(path)
    words = [word.rstrip('0123456789') for word in words_of(named)]
    return next((SPLIT_OF[word] for word in words if word in SPLIT_OF), '')


def words_of(path: str) -> list[str]:
    return re.split(r'[\W_]+', path.lower())


def find_annotations(root: Path) -> Annotations | None:
    """Finds the polygons and boxes of the images below a folder; None if there are none, or label maps."""
    files = Files(root)
    if files.have_maps:
        return None
    found, lost, categories = sources_in_coco(files)
    if found or lost:
        return annotations_of(files, 'COCO', found, lost, read_coco, categories)
    names = yolo_names(files)
    readers: dict[str, tuple[str, Reader]] = dict(
        labelme=('.json', read_labelme), VOC=('.xml', read_voc), YOLO=('.txt', partial(read_yolo, names))
    )
    for format, (ending, read) in readers.items():
        found, lost = sources_beside(files, ending)
        if not any(holds_shapes(read, source) for source in evenly(found.values(), 100)):
            continue
        if format == 'YOLO':  # where images without a file have no objects
            found = {image: Source('', '') for image in files.images} | found
        return annotations_of(files, format, found, lost, read, names if format == 'YOLO' else ())
    return None


def sources_beside(files: Files, ending: str) -> tuple[dict[str, Source], list[str]]:
    """The files that have an image of their name, and others in the same folders."""
    found: dict[str, Source] = {}
    lost = []
    for file in files.ending(ending):
        image = files.image_of(file, file)
        if image is None or image in found:
            lost.append(file)
        else:
            found[image] = Source(file, str(files.root / file))
    folders = {os.path.dirname(source.file) for source in found.values()}
    return found, [file for file in lost if os.path.dirname(file) in folders and os.path.basename(file) != CLASSES]


def holds_shapes(read: Reader, source: Source) -> bool:
    with suppress(*DAMAGE):
        return bool(read(source.content, 1, 1)[0])
    return False


def sources_in_coco(files: Files) -> tuple[dict[str, Source], list[str], list[str]]:
    """The images in COCO's files, names of images that are not there, and the names of the categories."""
    found: dict[str, Source] = {}
    categories: dict[str, None] = {}
    lost = []
    listed = [file for file in files.ending('.json') if not files.image_of(PurePosixPath(file).stem, file)]
    # beside these may lie the captions and key points of the same images
    for file in [file for file in listed if 'instances' in os.path.basename(file)] or listed:
        try:
            content = json.loads((files.root / file).read_bytes())
        except ValueError as error:
            warn(f'{quoted(file)} is left out: {error}')
            continue
        if not isinstance(content, dict) or not {'images', 'annotations', 'categories'} <= content.keys():
            continue
        with well_formed(file, 'COCO'):
            names = {category['id']: str(category['name']) for category in content['categories']}
            categories |= dict.fromkeys(names.values())
            objects = defaultdict(list)
            for each in content['annotations']:
                objects[each['image_id']].append(each)
            entries = [(str(each['file_name']), each, objects[each['id']]) for each in content['images']]
        for name, *described in entries:
            image = files.image_of(name, file)
            if image is None:
                lost.append(name)
                continue
            if image in found:
                raise UserError(f'{quoted(found[image].file)} and {quoted(file)} both have {quoted(image)}; keep one')
            found[image] = Source(file, (*described, names))
    return found, lost, [*categories]


@contextmanager
def well_formed(file: str, format: str) -> Iterator[None]:
    """Names the file whose content cannot be read."""
    try:
        yield
    except UserError:
        raise
    except DAMAGE as error:
        raise UserError(f'{quoted(file)} is damaged as {format}: {error!r}; repair or remove it') from error


def yolo_names(files: Files) -> list[str]:
    """The names of YOLO's classes, if a file has them."""
    for file in files.ending('.yaml', '.yml'):
        content = None
        with suppress(yaml.YAMLError):  # of something else
            content = yaml.safe_load((files.root / file).read_bytes())
        if isinstance(content, dict) and content.get('names'):
            names = content['names']
            return [str(names[key]) for key in sorted(names)] if isinstance(names, dict) else [*map(str, names)]
    for file in files.ending(CLASSES, 'obj.names'):
        return [*filter(None, read_lines(str(files.root / file)))]
    return []


def annotations_of(
    files: Files, format: str, sources: dict[str, Source], lost: list[str], read: Reader, order: Sequence[str] = ()
) -> Annotations:
    """Reads all shapes once, for the classes, in their given or sorted order, and for the notes."""
    stems = Counter(os.path.splitext(image)[0] for image in sources)
    if twice := [image for image in sources if stems[os.path.splitext(image)[0]] > 1]:
        raise UserError(
            f'{preview(map(quoted, twice))} in {files.root} differ only in their endings; rename or remove some'
        )
    counts: Counter[str] = Counter()
    boxes = empty = bare = 0
    for source in sources.values():
        with well_formed(source.file, format):
            shapes, _ = read(source.content, 1, 1)
        drawn = [shape for shape in shapes if shape.area > 0]
        counts.update(shape.name for shape in drawn)
        boxes += sum(shape.is_box for shape in drawn)
        empty += len(shapes) - len(drawn)
        bare += not drawn
    used = {*counts} - {BACKGROUND, IGNORED}
    classes = [BACKGROUND, *[name for name in order if name in used], *sorted(used - {*order})]
    if not 1 < len(classes) < IGNORE_INDEX:
        raise UserError(
            f'{len(sources):,} images of {files.root} have shapes of {len(used)} classes in files of {format}, '
            f'{len(lost):,} other names are not found; expected 1 to {IGNORE_INDEX - 2} classes'
        )
    parts, notes = shared_out({image: split_of(source.file) or split_of(image) for image, source in sources.items()})
    found = {
        f'boxes: {boxes:,} are filled whole, so borders are coarse': boxes,
        f'{bare:,} images have no shapes: all background': bare,
        f'{empty:,} shapes without an area left out (points, lines, ...)': empty,
        f'{len(lost):,} annotations left out, without an image of their name: {preview(map(quoted, lost))}': lost,
    }
    notes += [note for note, number in found.items() if number]
    return Annotations(files.root, format, sources, read, classes, parts, notes)


def read_coco(content: tuple[dict, list[dict], dict[int, str]], width: int, height: int) -> Shapes:
    entry, objects, names = content
    shapes = []
    for each in objects:
        name = IGNORED if each.get('iscrowd') or each.get('ignore') else names[each['category_id']]
        parts = each.get('segmentation')
        if isinstance(parts, dict):
            shapes.append(Shape(name, mask=mask_of(parts)))
        elif parts:
            shapes.append(Shape(name, [outline_of(part) for part in parts]))
        else:
            left, top, across, down = each['bbox']
            shapes.append(box_of(name, left, top, left + across, top + down))
    return shapes, size_of(entry.get('width'), entry.get('height'))


def read_labelme(file: str, width: int, height: int) -> Shapes:
    content, shapes = json.loads(Path(file).read_bytes()), []
    for each in content['shapes']:
        kind, points = each.get('shape_type', 'polygon'), outline_of(each['points'])
        name = BACKGROUND if each['label'] == '_background_' else str(each['label'])
        if kind == 'rectangle':
            shapes.append(box_of(name, *points.min(axis=0), *points.max(axis=0)))
        elif kind == 'circle':
            angles = np.linspace(0, 2 * np.pi, 100)
            around = np.hypot(*(points[1] - points[0])) * np.stack([np.cos(angles), np.sin(angles)], axis=1)
            shapes.append(Shape(name, [outline_of(points[0] + around)]))
        else:  # points and lines have no area
            shapes.append(Shape(name, [points] if kind == 'polygon' else []))
    return shapes, size_of(content.get('imageWidth'), content.get('imageHeight'))


def read_voc(file: str, width: int, height: int) -> Shapes:
    """Reads boxes, from their first to their last pixel, counted from 1."""
    root, shapes = ElementTree.parse(file).getroot(), []
    for each in root.findall('object'):
        left, top, right, bottom = (
            float(each.findtext(f'bndbox/{side}', '')) for side in ('xmin', 'ymin', 'xmax', 'ymax')
        )
        shapes.append(box_of(each.findtext('name', ''), left - 1, top - 1, right, bottom))
    return shapes, size_of(root.findtext('size/width'), root.findtext('size/height'))


def read_yolo(names: Sequence[str], file: str, width: int, height: int) -> Shapes:
    """Reads boxes, or outlines of three points and more, in shares of the image's sides."""
    shapes = []
    for line in filter(None, read_lines(file) if file else []):
        number, *values = map(float, line.split())
        if max(values) > 2:
            raise ValueError(f'{max(values)} is not a share of a side')
        name = names[int(number)] if number < len(names) else str(int(number))
        if len(values) % 2 or len(values) == 4:  # after a box may come its confidence, or key points
            x, y, across, down = np.array(values[:4]) * [width, height, width, height]
            shapes.append(box_of(name, x - across / 2, y - down / 2, x + across / 2, y + down / 2))
        else:
            shapes.append(Shape(name, [outline_of(values) * np.float32([width, height])]))
    return shapes, None


def size_of(width: Any, height: Any) -> tuple[int, int] | None:
    return (int(width), int(height)) if int(width or 0) and int(height or 0) else None


def outline_of(numbers: Any) -> np.ndarray:
    points = np.array(numbers, np.float32).reshape(-1, 2)
    if not np.isfinite(points).all():
        raise ValueError(f'a point is {points[~np.isfinite(points)][0]}')
    return points


def box_of(name: str, left: float, top: float, right: float, bottom: float) -> Shape:
    return Shape(name, [outline_of([left, top, right, top, right, bottom, left, bottom])], is_box=True)


def mask_of(run_lengths: dict[str, Any]) -> np.ndarray:
    """The pixels (H, W) of COCO's run lengths, which go down the columns and begin with pixels outside.

    Not by pycocotools: where it and transformers 5 are installed, mmpretrain cannot be imported.
    """
    (height, width), counts = run_lengths['size'], run_lengths['counts']
    counts = numbers_of(counts) if isinstance(counts, str) else counts
    if min(counts) < 0 or sum(counts) != height * width or height * width > MAX_PIXELS:
        raise ValueError(f'run lengths of {sum(counts)} pixels for {height} x {width}')
    return np.repeat(np.arange(len(counts)) % 2 == 1, counts).reshape(width, height).T


def numbers_of(text: str) -> list[int]:
    """COCO's compressed run lengths: five bits a character, lowest first; from the fourth number on differences."""
    numbers: list[int] = []
    number = shift = 0
    for byte in text.encode():
        number |= (byte - 48 & 31) << shift
        shift += 5
        if byte - 48 & 32:  # more bits follow
            continue
        number -= (byte - 48 & 16) << (shift - 4)  # its highest bit is the sign
        numbers.append(number + (numbers[-2] if len(numbers) > 2 else 0))
        number = shift = 0
    return numbers


def fill(labels: np.ndarray, outline: np.ndarray, label: int) -> None:
    """Labels the pixels whose centres an outline holds; on their own grid OpenCV would add half a pixel all around."""
    sides = labels.shape[::-1]
    left, top = np.clip(np.floor(outline.min(axis=0)), 0, sides).astype(int)
    right, bottom = np.clip(np.ceil(outline.max(axis=0)), 0, sides).astype(int)
    if right <= left or bottom <= top:
        return
    fine = FINE if (right - left) * (bottom - top) < ONE_MEGAPIXEL else 1
    grid = np.zeros((fine * (bottom - top), fine * (right - left)), np.uint8)
    corners = np.clip((outline - [left, top]) * fine - 0.5, -FARTHEST, FARTHEST)
    cv2.fillPoly(grid, [corners.round().astype(np.int32)], 1)
    labels[top:bottom, left:right][grid[fine // 2 :: fine, fine // 2 :: fine] > 0] = label

"""Polygons and boxes in files of COCO, YOLO, labelme and others (see FORMATS), drawn as label maps.

The readers are our own because supervision, the library for these formats, holds a boolean mask of the image's size for
each shape of a data set.
"""

import csv
import json
import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import takewhile
from operator import eq
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

SPLIT_OF = {word: split for split, words in SPLITS.items() for word in words.split()}
BACKGROUND, IGNORED = 'background', '__ignore__'  # names of classes; the latter is labelme's
UNNAMED = 'object'  # class of shapes without a name
SHARES = (1, 1)  # size of an image whose shapes are in shares of its sides
FINE = 5  # small outlines are drawn on a grid of so many points for each side of a pixel
UPLOADED = re.compile('[0-9a-f]{8}-')  # what Label Studio puts before the names of images
MAX_SHOWN = 100  # characters of a damaged item
FARTHEST = 1 << 20  # coordinate on that grid; OpenCV's numbers would overflow
DAMAGE = (KeyError, IndexError, TypeError, ValueError, AttributeError, RecursionError, ElementTree.ParseError)


class Shape(NamedTuple):
    """An object in an image."""

    name: str  # of its class
    area: float
    outlines: Sequence[np.ndarray] = ()  # of its parts: float32 (N, 2), x and y
    is_box: bool = False
    run_lengths: dict[str, Any] | None = None  # COCO's, in place of outlines


Size = tuple[int, int] | None  # width and height that shapes are for; None: not said
Entry = tuple[str, list[Shape], Size]  # of an image in a file: its name ('': the file's), its shapes


class Annotation(NamedTuple):
    """What a file says about an image."""

    file: str  # relative to the folder
    split: str  # 'train', 'val', 'test' or ''
    shapes: list[Shape]
    size: Size


Found = dict[str, Annotation]  # by image, relative to the folder


@dataclass
class Annotations:
    """The shapes of the images below a folder."""

    root: Path
    format: str
    of: dict[str, Annotation]  # each image, by its path relative to `root`
    classes: list[str]  # background first
    parts: list[list[str]]  # images to learn from and, if files or folders say which, to hold out
    notes: list[str]  # for the user

    def draw(self, image: str, height: int, width: int) -> np.ndarray | None:
        """The label map uint8 (H, W) of an image, small shapes over large ones; None if they are for another size."""
        _, _, shapes, size = self.of[image]
        if size not in (None, SHARES, (width, height)):
            return None
        scale = np.float32([width, height] if size == SHARES else [1, 1])
        labels = np.zeros((height, width), np.uint8)
        drawn = [shape for shape in shapes if shape.area]
        for shape in sorted(drawn, key=lambda shape: -shape.area):
            label = IGNORE_INDEX if shape.name == IGNORED else self.classes.index(shape.name)
            if shape.run_lengths:
                mask = mask_of(shape.run_lengths)
                if mask.shape != labels.shape:
                    return None
                labels[mask] = label
            for outline in shape.outlines:
                fill(labels, outline * scale, label)
        return labels


class Files:
    """The files below a folder, by their paths relative to it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.splits = {image: split_of(os.path.dirname(image)) for image in list_images(str(root))}  # of all images
        self.named: dict[str, list[str]] = defaultdict(list)  # name without its ending -> images
        for image in self.splits:
            self.named[PurePosixPath(image).stem].append(image)
            self.named[PurePosixPath(image).name].append(image)
        self.folders = {folder for image in self.splits for folder in os.path.dirname(image).split('/')}
        self.have_maps = any(role_of(folder)[1] == 'maps' for folder in self.folders)  # beside the images

    def ending(self, *endings: str) -> list[str]:
        """Files, not pipes, with these endings."""
        return [file for file in list_images(str(self.root), endings) if (self.root / file).is_file()]

    def has_beside(self, file: str) -> bool:
        """Whether a file is named like an image, in its folder or another."""
        folder, name = os.path.split(file)
        return self.image_of(name, folder) is not None

    def image_of(self, name: str, place: str) -> str | None:
        """The image of a name in a list or folder; of several, the one whose path is most like both."""
        path, split = PurePosixPath(name.replace('\\', '/')), split_of(place)
        keys = path.name, path.stem, UPLOADED.sub('', path.name, 1)
        named = next((self.named[key] for key in keys if key in self.named), [])
        found = [image for image in named if len({self.splits[image], split} - {''}) < 2]
        for exact in map(str, (PurePosixPath(place).parent / path, path)):
            if exact in found:
                return exact
        shared = {image: likeness(f'{place}/{path}', image) for image in found}
        highest = max(shared.values(), default=None)
        best = [image for image in found if shared[image] == highest]
        return best[0] if len(best) == 1 else None


def likeness(*paths: str) -> tuple[int, int]:
    """How many words two paths share, and how many folders and names, without endings, from both ends on."""
    (first, one), (second, other) = map(parts_of_path, paths)
    ends = [*takewhile(bool, map(eq, one, other)), *takewhile(bool, map(eq, one[::-1], other[::-1]))]
    return sum(min(number, second[word]) for word, number in first.items() if word in second), len(ends)


@lru_cache(2**16)  # of many files with the same name, each is compared with all the others
def parts_of_path(path: str) -> tuple[Counter[str], list[str]]:
    """Its words, with how often each occurs (1/1.png is not 2/1.png), and its folders and name."""
    return Counter(words_of(path)), os.path.splitext(path)[0].split('/')


def split_of(path: str) -> str:
    """'train', 'val' or 'test' where the name of a folder or list says so ('train2017' too); else ''."""
    words = [word.rstrip('0123456789') for word in words_of(path)]
    return next((SPLIT_OF[word] for word in words if word in SPLIT_OF), '')


def words_of(path: str) -> list[str]:
    return re.split(r'[\W_]+', path.lower())


def shared_out(splits: Mapping[str, str]) -> tuple[list[list[str]], list[str]]:
    """Images to learn from and, if any has the split 'val', to hold out; and a note on those of a test set."""
    groups: dict[str, list[str]] = defaultdict(list)
    for image, split in splits.items():
        groups[split or 'train'].append(image)
    test = groups.pop('test', []) if len(groups) > 1 else []
    notes = [f'{len(test):,} images of the test set are left alone'] if test else []
    return [groups[name] for name in ('train', 'val', 'test') if name in groups], notes


def find_annotations(root: Path) -> Annotations | None:
    """Finds the polygons and boxes of the images below a folder; None if there are none, or label maps."""
    files = Files(root)
    if files.have_maps:
        return None
    for format in FORMATS:
        found, lost, bad = read_all(files, format)
        if found and format == 'YOLO':  # where images without a file have no objects
            found = {image: Annotation('', split, [], None) for image, split in files.splits.items()} | found
        if found or lost:
            return annotations_of(files, format, found, lost, bad)
    return None


def read_all(files: Files, format: str) -> tuple[Found, list[str], list[Exception]]:
    """The images in files of a format, names without an image, and errors in entries; nothing if no file has shapes."""
    ending, read, parts_of = FORMATS[format]
    if format == 'YOLO':
        read = partial(read_yolo, yolo_names(files))
    listed = [file for file in files.ending(ending) if files.has_beside(file) != bool(parts_of)]
    if format == 'COCO':  # beside its instances may lie the captions and key points of the same images
        listed = [file for file in listed if 'instances' in os.path.basename(file)] or listed
    found: Found = {}
    lost, bad, refusal, has_shapes = [], [], '', False
    for file in listed:
        entries, errors = read_file(files.root / file, read, parts_of or (lambda path: [path]))
        if asked := [error for error in errors if format == 'VIA' and isinstance(error, UserError)]:
            raise UserError(f'{quoted(file)}: {asked[0]}')
        if entries:
            bad += errors
        elif errors:
            refusal = f'{quoted(file)} is damaged as {format}: {reason(errors[0])}; repair or remove it'
        folder, own_name = os.path.split(file)
        for name, shapes, size in entries:
            place = file if name else folder
            image = files.image_of(name or own_name, place)
            has_shapes |= bool(shapes)
            if image is None:
                lost.append(name)
            elif image in found:
                refusal = f'{quoted(found[image].file)} and {quoted(file)} both have {quoted(image)}; keep one'
            else:
                found[image] = Annotation(file, split_of(place) or files.splits[image], shapes, size)
    if refusal and (has_shapes or format == 'COCO'):
        raise UserError(refusal)
    if refusal and ending == '.xml':  # other JSON, texts and tables are usual beside images
        warn(refusal)
    return (found, lost, bad) if has_shapes else ({}, [], [])


def read_file(file: Path, read: 'Reader', parts_of: 'Parts') -> tuple[list[Entry], list[Exception]]:
    """Reads a file part by part; returns the entries, and the errors of the parts that cannot be read."""
    entries: list[Entry] = []
    errors: list[Exception] = []
    try:
        parts = [*parts_of(file)]
    except DAMAGE as error:
        return [], [error]
    for part in parts:
        try:
            entries.extend(read(part))
        except DAMAGE as error:
            errors.append(error)
    return entries, errors


def annotations_of(files: Files, format: str, found: Found, lost: list[str], bad: list[Exception]) -> Annotations:
    """Annotations with their classes, and notes on what is left out."""
    shapes = [shape for each in found.values() for shape in each.shapes]
    drawn = [shape for shape in shapes if shape.area]
    classes = [BACKGROUND, *sorted({shape.name for shape in drawn} - {BACKGROUND, IGNORED})]
    if not 1 < len(classes) < IGNORE_INDEX:
        raise UserError(
            f'{len(found):,} images of {files.root} have shapes of {len(classes) - 1} classes in files of {format}, '
            f'{len(lost):,} other names are not found; expected 1 to {IGNORE_INDEX - 2} classes'
        )
    areas = [sum(shape.area for shape in each.shapes) for each in found.values()]
    stems = Counter(os.path.splitext(image)[0] for image in found)
    if twice := [image for image in found if stems[os.path.splitext(image)[0]] > 1]:
        raise UserError(
            f'{preview(map(quoted, twice))} in {files.root} differ only in their endings; rename or remove some'
        )
    parts, notes = shared_out({image: each.split for image, each in found.items()})
    numbers = {
        'boxes are filled whole, so borders are coarse': sum(shape.is_box for shape in drawn),
        'images have no shapes: all background': areas.count(0),
        f'shapes without the name of a class are called {UNNAMED}': [shape.name for shape in drawn].count(UNNAMED),
        'shapes left out, which are not polygons or boxes with an area': len(shapes) - len(drawn),
        'shapes are of crowds or to be ignored; their pixels are unlabelled': [s.name for s in shapes].count(IGNORED),
        'images left out, without annotations': len(files.splits) - len(found),
        f'annotations left out, without an image of their name: {preview(map(quoted, lost))}': len(lost),
        f'entries left out, which are damaged as {format}: {preview(map(reason, bad), 1)}': len(bad),
    }
    notes += [f'{number:,} {what}' for what, number in numbers.items() if number]
    return Annotations(files.root, format, found, classes, parts, notes)


def read_coco(file: Path) -> list[Entry]:
    try:
        content = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        warn(f'{quoted(str(file))} is left out: {error}')
        return []
    if not isinstance(content, dict) or not {'images', 'annotations', 'categories'} <= content.keys():
        return []
    names = {category['id']: str(category['name']) for category in content['categories']}
    shapes = defaultdict(list)
    for each in content['annotations']:
        try:
            shapes[each['image_id']].append(coco_shape(each, names))
        except DAMAGE as error:
            raise ValueError(f'{reason(error)} in {quoted(str(each)[:MAX_SHOWN])}') from error
    return [
        (str(each['file_name']), shapes[each['id']], size_of(each, 'width', 'height')) for each in content['images']
    ]


def reason(error: Exception) -> str:
    return f'no {error}' if isinstance(error, KeyError) else str(error)


def coco_shape(annotation: dict[str, Any], names: Mapping[Any, str]) -> Shape:
    category, parts = annotation['category_id'], annotation.get('segmentation')
    is_ignored = annotation.get('iscrowd') or annotation.get('ignore')
    name = IGNORED if is_ignored else names.get(category)
    if name is None:
        raise ValueError(f'no category {category}')
    if not parts and 'bbox' not in annotation:
        raise ValueError('neither segmentation nor bbox; if images have labels as wholes, list them in a table')
    if isinstance(parts, dict):
        return Shape(name, mask_of(parts).sum(), run_lengths=parts)
    return shape_of(name, *parts) if parts else box_at(name, *annotation['bbox'])


def read_labelme(file: Path) -> list[Entry]:
    content, shapes = json.loads(file.read_bytes()), []
    for each in content['shapes']:
        name = BACKGROUND if each['label'] == '_background_' else str(each['label'])
        shapes.append(shape_of_kind(each.get('shape_type', 'polygon'), name, each['points']))
    return [('', shapes, size_of(content, 'imageWidth', 'imageHeight'))]


def root_of(file: Path) -> ElementTree.Element:
    """Parses XML; ValueError if it declares entities, a few of which can stand for gigabytes of text."""
    content = file.read_bytes()
    if b'<!ENTITY' in content.replace(b'\0', b''):  # in UTF-16 every other byte is 0
        raise ValueError('it declares entities')
    return ElementTree.fromstring(content)


def read_voc(file: Path) -> list[Entry]:
    """Reads boxes, from their first to their last pixel, counted from 1."""
    root, shapes = root_of(file), []
    for each in root.findall('object'):
        left, top, *others = (float(each.findtext(f'bndbox/{side}', '')) for side in ('xmin', 'ymin', 'xmax', 'ymax'))
        shapes.append(box_of(each.findtext('name', ''), left - 1, top - 1, *others))
    size = {side: root.findtext(f'size/{side}') for side in ('width', 'height')}
    return [('', shapes, size_of(size, 'width', 'height'))]


def images_of_via(file: Path) -> Iterable[dict[str, Any]]:
    content = json.loads(file.read_bytes())
    return content.get('_via_img_metadata', content).values()


def read_via(image: dict[str, Any]) -> Iterator[Entry]:
    """Reads VGG's Image Annotator, whose regions have a dict of attributes in place of a name."""
    shapes, regions = [], image['regions']
    for region in regions.values() if isinstance(regions, dict) else regions:
        attributes, of = region['region_attributes'], region['shape_attributes']
        value = next(iter(attributes.values()), '')
        if len(attributes) > 1 or isinstance(value, dict):
            raise UserError(f'regions have {preview(attributes)}; keep the class alone, and as text, not check boxes')
        name = str(value or UNNAMED)
        if of['name'] == 'rect':
            shapes.append(box_at(name, of['x'], of['y'], of['width'], of['height']))
        else:
            points = zip(of.get('all_points_x', ()), of.get('all_points_y', ()), strict=True)
            shapes.append(shape_of_kind(of['name'], name, [*points]))
    yield image['filename'], shapes, None


def read_supervisely(file: Path) -> Iterator[Entry]:
    content, shapes = json.loads(file.read_bytes()), []
    for each in content['objects']:
        points = each.get('points', {})
        kind = 'with holes' if points.get('interior') else each['geometryType']
        shapes.append(shape_of_kind(kind, each['classTitle'], points.get('exterior', ())))
    yield '', shapes, size_of(content['size'], 'width', 'height')


def read_label_studio(task: dict[str, Any]) -> Iterator[Entry]:
    """Reads coordinates in percent of an image's sides; nothing if an image was skipped or has yet to be annotated."""
    annotations = [each for each in task['annotations'] if not each.get('was_cancelled')]
    shapes = []
    for result in (result for each in annotations for result in each['result']):
        kind, of = result['type'], result['value']
        if kind == 'rectanglelabels' and not of.get('rotation'):
            shapes.append(box_at(of[kind][0], *(of[side] / 100 for side in ('x', 'y', 'width', 'height'))))
        elif kind.endswith('labels'):
            points = np.array(of.get('points', ())) / 100
            shapes.append(shape_of_kind('polygon' if kind == 'polygonlabels' else kind, of[kind][0], points))
    if annotations:
        yield task['data']['image'], shapes, SHARES


def read_createml(image: dict[str, Any]) -> Iterator[Entry]:
    """Reads boxes by their centres."""
    shapes = []
    for one in image['annotations']:
        x, y, width, height = (one['coordinates'][side] for side in ('x', 'y', 'width', 'height'))
        shapes.append(box_at(str(one['label']), x - width / 2, y - height / 2, width, height))
    yield image['image'], shapes, None


def read_cvat(image: ElementTree.Element) -> Iterator[Entry]:
    shapes = []
    for each in image.findall('*[@label]'):
        name, values = each.attrib['label'], each.attrib
        if each.tag == 'box' and not float(values.get('rotation', 0)):
            shapes.append(box_of(name, *(float(values[side]) for side in ('xtl', 'ytl', 'xbr', 'ybr'))))
        elif each.tag != 'tag':  # of the whole image
            shapes.append(shape_of_kind(each.tag, name, re.findall('[^;,]+', values.get('points', ''))))
    yield image.attrib['name'], shapes, size_of(image.attrib, 'width', 'height')


def rows_of_images(file: Path) -> Iterable[list[dict[str, str]]]:
    rows = defaultdict(list)
    for row in csv.DictReader(read_lines(str(file))):
        rows[row['filename']].append(row)
    return rows.values()


def read_box_table(rows: list[dict[str, str]]) -> Iterator[Entry]:
    """Reads TensorFlow's table of boxes, one a row, for one image."""
    shapes = []
    for row in rows:
        shapes.append(box_of(row['class'], *(float(row[side]) for side in ('xmin', 'ymin', 'xmax', 'ymax'))))
    yield rows[0]['filename'], shapes, size_of(rows[0], 'width', 'height')


def read_dota(file: Path) -> Iterator[Entry]:
    """Reads lines of four corners, a class and a difficulty, below a header such as `gsd:0.14`."""
    rows = [line.split() for line in read_lines(str(file)) if line and ':' not in line]
    yield '', [shape_of(row[8], row[:8]) for row in rows], None


def yolo_names(files: Files) -> dict[int, str]:
    """The names of YOLO's classes by their numbers, if a file has them."""
    for file in files.ending('.yaml', '.yml'):
        content: Any = None
        with suppress(yaml.YAMLError):  # of something else
            content = yaml.safe_load((files.root / file).read_bytes())
        names = content.get('names') if isinstance(content, dict) else None
        if not isinstance(names, (dict, list)):
            continue
        if 'kpt_shape' in content:
            raise UserError(f'{quoted(file)}: key points are not read; export boxes or polygons for YOLO')
        return names if isinstance(names, dict) else dict(enumerate(names))
    for file in files.ending('classes.txt', 'obj.names'):
        return dict(enumerate(filter(None, read_lines(str(files.root / file)))))
    return {}


def read_yolo(names: dict[int, str], file: Path) -> list[Entry]:
    """Reads boxes, or outlines of three points and more."""
    shapes = []
    for line in filter(None, read_lines(str(file))):
        number, *values = map(float, line.split())
        if number < 0 or len(values) < 4 or max(values) > 2:
            raise ValueError(f'{line!r} is not a class with shares of the sides')
        name = str(names.get(int(number), int(number)))
        if len(values) % 2 or len(values) == 4:  # after a box may come its confidence
            x, y, width, height = values[:4]
            shapes.append(box_of(name, x - width / 2, y - height / 2, x + width / 2, y + height / 2))
        else:
            shapes.append(shape_of(name, values))
    return [('', shapes, SHARES)]


Reader = Callable[[Any], Iterable[Entry]]  # of a part of a file
Parts = Callable[[Path], Iterable[Any]]
# Ending, reader, parts of a file of many images (None: each has a file named like it); in the order of the search
FORMATS: dict[str, tuple[str, Reader, Parts | None]] = {
    'COCO': ('.json', read_coco, lambda file: [file]),
    'labelme': ('.json', read_labelme, None),
    'VOC': ('.xml', read_voc, None),
    'YOLO': ('.txt', partial(read_yolo, {}), None),
    'VIA': ('.json', read_via, images_of_via),
    'Supervisely': ('.json', read_supervisely, None),
    'Label Studio': ('.json', read_label_studio, lambda file: json.loads(file.read_bytes())),
    'CreateML': ('.json', read_createml, lambda file: json.loads(file.read_bytes())),
    'CVAT': ('.xml', read_cvat, lambda file: root_of(file).iter('image')),
    'DOTA': ('.txt', read_dota, None),
    'TensorFlow': ('.csv', read_box_table, rows_of_images),
}


def size_of(content: Mapping[str, Any], width: str, height: str) -> Size:
    size = int(content.get(width) or 0), int(content.get(height) or 0)
    return size if all(size) else None


def outline_of(numbers: Any) -> np.ndarray:
    points = np.array(numbers, np.float32).reshape(-1, 2)
    if not np.isfinite(points).all():
        raise ValueError(f'a point is {points[~np.isfinite(points)][0]}')
    return points


def shape_of(name: str, *parts: Any, is_box: bool = False) -> Shape:
    outlines = [outline_of(part) for part in parts]
    return Shape(name, sum(map(cv2.contourArea, outlines)), outlines, is_box)


def shape_of_kind(kind: str, name: str, points: Any) -> Shape:
    """A polygon, or a rectangle by two corners; without an area if it is something else."""
    if kind == 'rectangle':
        corners = outline_of(points)
        return box_of(name, *corners.min(axis=0), *corners.max(axis=0))
    return shape_of(name, points) if kind == 'polygon' else Shape(name, 0)


def box_of(name: str, left: float, top: float, right: float, bottom: float) -> Shape:
    return shape_of(name, [left, top, right, top, right, bottom, left, bottom], is_box=True)


def box_at(name: str, left: float, top: float, width: float, height: float) -> Shape:
    return box_of(name, left, top, left + width, top + height)


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

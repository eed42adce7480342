"""Looks at a folder of images before anything is trained: what is understood, and what may be wrong with it."""

import json
import shlex
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from os.path import relpath
from pathlib import Path
from typing import NamedTuple

import cv2
import numpy as np
from PIL import Image, ImageOps

from beit_mm.apis.inference import overlay
from beit_mm.checkpoint.names import preview
from beit_mm.datasets import reading
from beit_mm.datasets.image_folder import BAND_EXTENSIONS, walk
from beit_mm.datasets.reading import LoadBands, UnreadableImageError, open_image, unreadable
from beit_mm.datasets.segmentation_folder import IGNORE_INDEX, SegmentationFolder
from beit_mm.errors import UserError
from beit_mm.files import file_sha256, quoted
from beit_mm.own_images.images import FEW, Images, evenly, find_images, split_folder, training_folder, write_lists
from beit_mm.own_images.label_maps import READ, LabelMaps, find_label_maps, loses_as_rgb
from beit_mm.own_images.report import Heading, Part, Picture, write_page
from beit_mm.pictures import SIDE, with_legend
from beit_mm.terminal import quiet, say, with_bar

try:
    from imagehash import phash
except ImportError:
    phash = None

# Of the 64 bits of a perceptual hash. Of 300 photos of Caltech-101, 99.7 % stay within it at JPEG quality 20, all at
# half the size, 94 % a fifth brighter. Of its 8 million pairs of photos 44 lie within it, all of one photo or sign; of
# the 42 pairs at distance 8, many show different things.
MAX_DISTANCE = 4
NO_PHASH = "only equal files are found; for images that look alike: pip install 'beit_mm[look]'"
TILE = (SIDE, SIDE)  # width and height of a picture on the page
ROWS = 256  # images that are compared with all others at once
MIN_SIDE = 32  # pixels; smaller images hold little
ODD_RATIO = 4  # between the sides of an image and the median
MAX_MAPS, MAX_IMAGES, MAX_PAIRS = 50, 24, 6  # label maps that are measured; images, and pairs of a kind, that are drawn
OTHER_CLASS = 'images look like one of another class: one of the two is in the wrong folder'
OTHER_PART = 'images look like one on the other side of the split: held-out results will be too good'
REPEATED = 'images look like another one'


class Seen(NamedTuple):
    """An image that was read."""

    path: str
    name: str  # relative to the folder, for the user
    size: tuple[int, int]  # width and height in pixels, as stored
    stored: str  # 'colour', 'gray', '16-bit gray', or its bands
    faults: list[str]
    bits: np.ndarray  # float32 (64,), -1 or 1; few differ between images that look alike


@dataclass
class Facts:
    """What a folder holds."""

    folder: Path
    images: Images
    refusal: str  # of `finetune`; '' without
    places: dict[str, tuple[str, bool]]  # path of each image: its class, and whether it is held out
    seen: list[Seen]
    broken: list[str]  # why some images cannot be read


class Finding(NamedTuple):
    """What may be wrong."""

    text: str  # follows the number of names
    names: list[str]
    pairs: Sequence[tuple[str, str]] = ()  # paths to draw, for each name


def look(images: str | Path, out: str | Path = 'look.html') -> Path:
    """Shows what a folder of images holds, and what may be wrong with it, before anything is trained.

    Args:
        images: folder of images, as for `finetune` and `pretrain`.
        out: page for a browser, complete in one file.

    Returns:
        The page.
    """
    with quiet():
        facts = gather(Path(images).expanduser().resolve())
        findings = [finding for check in CHECKS for finding in check(facts) if finding.names]
        classes, pictures = survey_maps(facts.images) if isinstance(facts.images, LabelMaps) else survey_images(facts)
    refusal = f'finetune refuses this folder: {facts.refusal}' if facts.refusal else ''
    understood, following = described(facts), commands(facts)
    found = [(f'{len(each.names):,}', each.text, preview(each.names)) for each in findings]
    parts: list[Part] = [refusal, Heading('What was understood'), [('what', 'found'), *understood]]
    parts += [Heading('What may be wrong'), [('number', 'what', 'which'), *found] if found else 'Nothing was found.']
    for each in findings:
        parts += [
            Picture(side_by_side(*pair), name) for name, pair in zip(each.names, each.pairs[:MAX_PAIRS], strict=False)
        ]
    parts += [Heading('What to run'), *following, Heading('Some of the images'), *pictures, Heading('Classes'), classes]
    write_page(Path(out), f'What {facts.folder} holds', parts)
    lines = [*understood, *(('found', f'{number} {text}: {names}') for number, text, names in found)]
    for subject, line in [('refused', facts.refusal), *lines, *(('next', command) for command in following)]:
        if line:
            say(f'{subject:<11} {line}')
    return Path(out)


def gather(folder: Path) -> Facts:
    """Reads every image of a folder once."""
    images, refusal = find(folder)
    places = {}
    for part in (images.held_out, images.train):
        places |= {str(part.root / path): (name, part is not images.train) for path, name in part.names.items()}
    with ThreadPoolExecutor() as pool:
        answers = [*with_bar(pool.map(partial(examine, folder), places), len(places))]
    seen = [answer for answer in answers if isinstance(answer, Seen)]
    return Facts(folder, images, refusal, places, seen, [answer for answer in answers if isinstance(answer, str)])


def find(folder: Path) -> tuple[Images, str]:
    """What a training would learn from, and why it refuses to, if it does."""
    refusal = ''
    for reduce_zero_label, whole in ((None, False), (False, True)):  # the second shows what the first refuses
        try:
            if maps := find_label_maps(folder, reduce_zero_label, whole):
                return maps, refusal
        except UserError as error:
            refusal = refusal or str(error)
    train, held_out = split_folder(training_folder(folder))
    if refusal:  # folders of images and of maps, which are not classes
        return Images(train, held_out, []), refusal
    try:
        return find_images(folder), ''
    except UserError as error:
        classes = sorted({*train.names.values()})
        return Images(train, held_out, [] if '' in classes or len(classes) == 1 else classes), str(error)


# Images


def examine(folder: Path, path: str) -> Seen | str:
    """What the checks need of an image; a message if it cannot be read."""
    try:
        image, size, stored, faults = read_small(path)
        digest = file_sha256(path)
    except (UnreadableImageError, UserError) as error:
        return str(error).replace(f'{folder}/', '')
    is_flat = all(low == high for low, high in image.getextrema())
    common = {
        'images of a single colour': is_flat,
        f'images with a side below {MIN_SIDE} pixels': min(size) < MIN_SIDE,
        'images too long and narrow to be read': max(size) > reading.MAX_ASPECT * min(size),
    }
    faults += [text for text, holds in common.items() if holds]
    bits = np.unpackbits(np.frombuffer(bytes.fromhex(digest[:16]), np.uint8))  # of equal files
    if phash and not is_flat:
        bits = phash(image).hash.ravel()
    return Seen(path, quoted(relpath(path, folder)), size, stored, faults, np.where(bits, 1, -1).astype(np.float32))


def read_small(path: str) -> tuple[Image.Image, tuple[int, int], str, list[str]]:
    """An image as RGB, reduced but no smaller than SIDE; width and height, kind and faults of the file."""
    if path.lower().endswith(BAND_EXTENSIONS) and loses_as_rgb(path):
        values = reading.read_bands(path)
        height, width, bands = values.shape
        return stretched(values), (width, height), f'{bands} bands of {values.dtype}', []
    with open_image(path) as file, unreadable(path, Exception):
        size, faults, content = file.size, [], file.format.replace('MPO', 'JPEG')
        if reading.orientation(file) != 1:
            faults.append('images are turned by EXIF, and read upright')
        if Image.EXTENSION.get(Path(path).suffix.lower(), content).replace('MPO', 'JPEG') != content:
            faults.append('images have another format than their extension says')
        file.draft(None, (SIDE, SIDE))
        pixels = reading.rgb_array(file)
        stored = 'gray' if (pixels == pixels[..., :1]).all() else 'colour'
        return Image.fromarray(pixels), size, '16-bit gray' if reading.is_deep_gray(file) else stored, faults


def stretched(values: np.ndarray) -> Image.Image:
    """Bands (H, W, C) as RGB: the first three, of which percentiles 1 and 99 become black and white."""
    step = max(1, min(values.shape[:2]) // SIDE)
    small = np.nan_to_num(values[::step, ::step].astype(np.float32))
    low, high = np.percentile(small, (1, 99), axis=(0, 1))
    return Image.fromarray(LoadBands.as_rgb(((small - low) / np.maximum(high - low, 1e-6)).clip(0, 1) * 255))


def side_by_side(path: str, other: str) -> Image.Image:
    """Two images that look alike, the other in the size of the first."""
    first = ImageOps.contain(read_small(path)[0], TILE)
    return Image.fromarray(np.hstack([first, ImageOps.pad(read_small(other)[0], first.size, color='white')]))


# What was understood


def described(facts: Facts) -> list[tuple[str, str]]:
    """What was understood of a folder, by subject."""
    images, names = facts.images, [Path(name) for _, files in walk(str(facts.folder)) for name in files]
    kind, classes = 'images without classes', ''
    if isinstance(images, LabelMaps):
        kind, classes = 'images with label maps', preview(images.classes)
    elif images.classes:
        kind, classes = 'images in class folders', preview(f'{name} ({n:,})' for name, n in images.learned.items())
    is_split = images.held_out.root != images.train.root
    others = Counter(name.suffix.lower() or str(name) for name in names if not name.suffix.lower().endswith(READ))
    lines = [
        ('kind', kind),
        ('images', str(images)),
        ('held out', quoted(relpath(images.held_out.root, facts.folder)) if is_split else 'a tenth of each folder'),
        ('classes', classes),
        *(('note', note) for note in getattr(images, 'notes', [])),
        ('sizes', sizes([each.size for each in facts.seen])),
        ('stored as', counted(Counter(each.stored for each in facts.seen))),
        ('other files', counted(others)),
        ('note', '' if phash else NO_PHASH),
    ]
    return [(subject, text) for subject, text in lines if text]


def counted(things: Counter[str]) -> str:
    return ', '.join(f'{number:,} {thing}' for thing, number in things.most_common())


def sizes(found: Sequence[tuple[int, int]]) -> str:
    """The smallest, the largest and the median of sizes (width, height)."""
    by_area = sorted(found, key=lambda size: size[0] * size[1]) or [(0, 0)]
    smallest, median, largest = (f'{w} x {h}' for w, h in (by_area[0], by_area[len(by_area) // 2], by_area[-1]))
    return f'all {median}' if smallest == largest else f'{smallest} to {largest}, median {median}'


def commands(facts: Facts) -> list[str]:
    """The commands that may follow."""
    folder, use = shlex.quote(str(facts.folder)), 'segment' if isinstance(facts.images, LabelMaps) else 'classify'
    asked = [option for option in ('--reduce-zero-label', '--keep-zero-label') if option in facts.refusal]
    if asked:
        return [f'beit-mm finetune {folder} {option} --out run --minutes 15' for option in asked]
    if not facts.images.classes:
        return [] if facts.refusal else [f'beit-mm pretrain {folder} --out run --minutes 60']
    if facts.refusal:  # too few to learn from
        return [f'beit-mm {use} demo new_images/ --labelled {folder}']
    return [f'beit-mm finetune {folder} --out run --minutes 15', f'beit-mm {use} run new_images/']


def survey_images(facts: Facts) -> tuple[Part, list[Picture]]:
    """A table of the classes, and some images of each."""
    images, of_class = facts.images, defaultdict(list)
    for each in facts.seen:
        of_class[facts.places[each.path][0] if images.classes else ''].append(each)
    names = evenly(of_class, MAX_IMAGES // 2)
    chosen = [(name or each.name, each) for name in names for each in evenly(of_class[name], MAX_IMAGES // len(names))]
    tiles = [
        Picture(ImageOps.pad(read_small(each.path)[0], (SIDE, SIDE), color='white'), name) for name, each in chosen
    ]
    held_out = Counter(images.held_out.names.values())
    rows = [(quoted(name), f'{images.learned[name]:,}', f'{held_out[name]:,}') for name in images.classes]
    return [('class', 'images to learn from', 'held out'), *rows] if rows else 'None.', tiles


def survey_maps(images: LabelMaps) -> tuple[Part, list[Picture]]:
    """A table of the classes in some label maps, and some images beside their maps."""
    load = images.bands['load'] if images.bands else dict(type='beit_mm.LoadImage')
    sides: dict[int, list[float]] = defaultdict(list)
    pixels, pictures = np.zeros(IGNORE_INDEX + 1, int), []
    with tempfile.TemporaryDirectory() as lists:
        write_lists(images, Path(lists))
        pipeline = [load, dict(type='beit_mm.LoadAnnotation')]
        dataset = SegmentationFolder(**images.dataset(Path(lists), 'train'), pipeline=pipeline, test_mode=True)
    palette, measured = dataset.metainfo['palette'], evenly(range(len(dataset)), MAX_MAPS)
    for index in measured:
        with suppress(UnreadableImageError):
            sample = dataset[index]
            labels = sample['gt_seg_map']
            pixels += np.bincount(labels.ravel(), minlength=len(pixels))
            for label, found in object_sizes(labels).items():
                sides[label] += found
            if index in evenly(measured, MAX_PAIRS):
                name = quoted(Path(sample['img_path']).name)
                pictures.append(Picture(beside_map(LoadBands.as_rgb(sample['img']), labels, palette), name))
    legend = [*zip(images.classes, palette, strict=True)]
    pictures.append(Picture(with_legend(Image.new('RGB', (2 * SIDE, 1), 'white'), legend), 'Classes in these pictures'))
    rows = [('class', 'in the maps', 'share of pixels, %', 'half of it in objects above, pixels')]
    for label, (name, value) in enumerate(zip(images.classes, images.colours or images.values, strict=True)):
        areas = np.sort(sides[label]) ** 2
        typical = np.sqrt(areas[np.searchsorted(areas.cumsum(), areas.sum() / 2)]) if len(areas) else 0
        rows.append((quoted(name), f'{value}', f'{100 * pixels[label] / pixels.sum():.2f}', f'{typical:.0f}'))
    return rows, pictures


def object_sizes(labels: np.ndarray) -> dict[int, list[float]]:
    """For each class in a label map, the side in pixels of a square as large as each connected component."""
    found = {}
    for label in set(np.unique(labels).tolist()) - {IGNORE_INDEX}:
        areas = cv2.connectedComponentsWithStats((labels == label).astype(np.uint8))[2][1:, cv2.CC_STAT_AREA]
        found[label] = np.sqrt(areas).tolist()
    return found


def beside_map(image: np.ndarray, labels: np.ndarray, palette: Sequence[Sequence[int]]) -> Image.Image:
    """An image (H, W, 3), and the same under the colours of its labels (H, W)."""
    known = np.where(labels < len(palette), labels.astype(np.int16), -1)
    tiles = [Image.fromarray(image), overlay(image, known, palette)]
    return Image.fromarray(np.hstack([ImageOps.contain(each, (2 * SIDE, 2 * SIDE)) for each in tiles]))


# What may be wrong


def broken_files(facts: Facts) -> Iterator[Finding]:
    yield Finding('files cannot be read as images', facts.broken)


def odd_files(facts: Facts) -> Iterator[Finding]:
    """Images with faults of their own, and those unlike most others."""
    found, middle = defaultdict(list), np.median([each.size for each in facts.seen] or [(1, 1)], axis=0)
    usual = max(Counter(each.stored for each in facts.seen).items(), key=lambda item: item[1], default=('', 0))[0]
    for each in facts.seen:
        faults, ratio = [*each.faults], each.size / middle
        if each.stored != usual:
            faults.append(f'images are {each.stored}, most are {usual}')
        if max(ratio.max(), 1 / ratio.min()) > ODD_RATIO:
            faults.append(f'images differ from the median size by more than a factor of {ODD_RATIO}')
        for fault in faults:
            found[fault].append(each.name)
    yield from (Finding(fault, names) for fault, names in found.items())


def odd_classes(facts: Facts) -> Iterator[Finding]:
    """Names of classes that are hard to tell apart, and class folders with few images."""
    images, alike = facts.images, defaultdict(list)
    for name in images.classes:
        alike[' '.join(name.casefold().split())].append(json.dumps(name))
    yield Finding('class names differ only in case or spaces', [' = '.join(n) for n in alike.values() if len(n) > 1])
    if images.classes and not isinstance(images, LabelMaps):
        few = [f'{quoted(name)} ({number})' for name, number in images.learned.items() if number < FEW]
        yield Finding(f'classes have fewer than {FEW} images to learn from', few)


def lookalikes(facts: Facts) -> Iterator[Finding]:
    """Images that look alike, the closest first: each image with the closest earlier one of each kind."""
    seen, found = facts.seen, defaultdict(list)
    bits = np.array([each.bits for each in seen]).reshape(-1, 64)
    classes, held_out = (np.array([facts.places[each.path][part] for each in seen]) for part in (0, 1))
    for first in range(0, len(seen), ROWS):
        rows = np.arange(first, min(first + ROWS, len(seen)))
        distance = 32 - bits[rows] @ bits.T / 2
        distance[np.arange(len(seen)) >= rows[:, None]] = 64  # each pair once
        other_class, other_part = (column[rows, None] != column for column in (classes, held_out))
        kinds = {OTHER_CLASS: other_class, OTHER_PART: other_part & ~other_class}
        for text, included in (kinds | {REPEATED: ~(other_class | other_part)}).items():
            candidates = np.where(included, distance, 64)
            nearest, closest = candidates.argmin(axis=1), candidates.min(axis=1)
            for row in np.flatnonzero(closest <= MAX_DISTANCE):
                found[text].append((closest[row], seen[nearest[row]], seen[rows[row]]))
    for text, pairs in found.items():
        pairs.sort(key=lambda pair: pair[0])
        names = [f'{one.name} = {other.name}' for _, one, other in pairs]
        yield Finding(text, names, [(one.path, other.path) for _, one, other in pairs])


CHECKS = (lookalikes, broken_files, odd_files, odd_classes)

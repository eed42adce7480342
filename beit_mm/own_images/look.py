"""Looks at a folder of images before anything is trained: what is understood, and what may be wrong with it."""

import shlex
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from os.path import relpath
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageOps

from beit_mm.apis.inference import overlay
from beit_mm.checkpoint.names import preview
from beit_mm.datasets import reading
from beit_mm.datasets.image_folder import walk
from beit_mm.datasets.reading import LoadBands, UnreadableImageError, open_image, unreadable
from beit_mm.datasets.segmentation_folder import distinct_colours
from beit_mm.errors import UserError, check_no_folder
from beit_mm.files import file_sha256, quoted
from beit_mm.own_images.images import FEW, MIN_IMAGES, Images, TaggedImages, evenly, find_images, split
from beit_mm.own_images.label_maps import MIN_PAIRS, LabelMaps, find_label_maps
from beit_mm.own_images.layouts import READ, existing_folder, find_class_folders
from beit_mm.own_images.mistakes import TABLE
from beit_mm.own_images.report import Heading, Part, Picture, write_page
from beit_mm.own_images.scale import measure, some_samples
from beit_mm.own_images.tables import find_table
from beit_mm.pictures import SIDE, with_legend
from beit_mm.registry import TRANSFORMS
from beit_mm.terminal import quiet, say, with_bar

try:
    from imagehash import phash
except ImportError:
    phash = None

# Of the 64 bits of a perceptual hash. Of 300 photos of Caltech-101, 99.7 % stay within it at JPEG quality 20, all at
# half the size, 94 % a fifth brighter. Of its 8 million pairs of photos 44 lie within it, all of one photo or sign; of
# the 42 pairs at distance 8, many show different things.
MAX_DISTANCE = 4
ROWS = 256  # images that are compared with all others at once
TILE = (SIDE, SIDE)  # width and height of a picture on the page
MIN_SIDE, MAX_RATIO = 32, 4  # pixels of an image; of its sides to the median
MAX_IMAGES, MAX_PAIRS = 24, 6  # images, and pairs of a kind, that are drawn
HEADERS = 100  # images whose size is read for the plan of a run
REPAIR = 'first repair or remove the files that cannot be read: they are more than the others'
NO_PHASH = "only equal files are found, not images that look alike: pip install 'beit_mm[look]'"
LOOKALIKES = (
    'images that look like one of another class, so one of the two is in the wrong folder',
    'images that look like one on the other side of the split, so held-out results will be too good',
    'images that look like another one',
)


class Seen(NamedTuple):
    """An image that was read."""

    path: str
    load: LoadBands | None  # what reads it
    name: str  # relative to the folder, for the user
    of_class: str
    is_held_out: bool
    size: tuple[int, int]  # width and height in pixels, as stored
    stored: str  # 'colour', 'gray', '16-bit gray', or its bands
    faults: list[str]
    bits: np.ndarray  # float32 (64,), -1 or 1; few differ between images that look alike

    @property
    def image(self) -> Image.Image:
        return read_small(self.path, self.load)[0]


class Finding(NamedTuple):
    """What may be wrong."""

    text: str
    names: list[str]  # of files or classes
    pictures: Sequence[Picture] = ()


def look(images: str | Path, out: str | Path = 'look.html') -> Path:
    """Shows what a folder of images holds, and what may be wrong with it, before anything is trained.

    Args:
        images: folder of images, as for `finetune` and `pretrain`.
        out: page for a browser, complete in one file.

    Returns:
        The page.
    """
    folder = existing_folder(images)
    check_no_folder('--out', out)
    with quiet():
        found, refusal = find(folder)
        seen, broken = examine_all(folder, found)
        findings = [Finding('files that cannot be read', broken), *lookalikes(seen)]
        findings += [*odd_files(seen), *odd_classes(found)]
        table, pictures = survey_maps(found) if isinstance(found, LabelMaps) else survey_images(found, seen)
    findings = [each for each in findings if each.names]
    understood = described(folder, found, seen)
    following = commands(folder, found, refusal) if len(broken) <= len(seen) else [REPAIR]
    rows = [(each.text, f'{len(each.names):,}', ', '.join(each.names)) for each in findings]
    parts: list[Part] = [f'finetune refuses this folder: {refusal}' if refusal else '']
    parts += [Heading('What was understood'), [('what', 'found'), *understood]]
    parts += [Heading('What may be wrong'), [('what', 'number', 'which'), *rows] if rows else 'Nothing was found.']
    for each in findings:
        parts += [f'{each.text}:', *each.pictures] if each.pictures else []
    parts += [Heading('What to run'), *following] if following else []
    parts += [Heading('Some of the images'), *pictures, table]
    write_page(Path(out), f'What {folder} holds', parts)
    lines = [('refused', refusal)] if refusal else []
    lines += [*understood, *(('found', f'{what}: {len(names):,} ({preview(names)})') for what, names, _ in findings)]
    for subject, text in [*lines, *(('next', command) for command in following)]:
        say(f'{subject:<11} {text}')
    return Path(out)


def find(folder: Path) -> tuple[Images, str]:
    """What a training would learn from, and why it refuses to, if it does."""
    refusal = ''
    for zero, whole in ((None, False), (False, False), (False, True)):  # the last two show what the first refuses
        try:
            if maps := find_label_maps(folder, zero, whole):
                return maps, refusal
        except (UserError, OSError) as error:
            refusal = refusal or str(error)
    if refusal:  # folders of images and of maps are not classes
        return Images(*split(find_class_folders(folder)), []), refusal
    try:
        return find_table(folder) or find_images(folder), ''
    except UserError as error:
        folders = find_class_folders(folder)
        train, held_out = split(folders)
        names = sorted({*train.names.values()})
        are_classes = len(names) > 1 and '' not in names and not folders.question
        return Images(train, held_out, names if are_classes else []), str(error)


def examine_all(folder: Path, images: Images) -> tuple[list[Seen], list[str]]:
    """Reads each image once; also returns why some cannot be read."""
    load = TRANSFORMS.build(images.bands['load']) if isinstance(images, LabelMaps) and images.bands else None
    class_of = {}
    for part in (images.held_out, images.train):
        class_of |= {part.root / path: name if images.classes else '' for path, name in part.names.items()}
    train = {images.train.root / path for path in images.train.names}

    def read(path: Path) -> Seen | str:
        try:
            return examine(str(path), load, quoted(relpath(path, folder)), class_of[path], path not in train)
        except UnreadableImageError as error:
            return str(error).replace(f'{folder}/', '')

    with ThreadPoolExecutor() as pool:
        found = [*with_bar(pool.map(read, class_of), len(class_of))]
    return [each for each in found if isinstance(each, Seen)], [each for each in found if isinstance(each, str)]


def examine(path: str, load: LoadBands | None, name: str, of_class: str, is_held_out: bool) -> Seen:
    """What the checks need of an image."""
    image, size, stored, faults = read_small(path, load)
    is_flat = all(low == high for low, high in image.getextrema())
    if is_flat:
        faults.append('images of a single colour')
    if min(size) < MIN_SIDE:
        faults.append(f'images with a side below {MIN_SIDE} pixels')
    if phash and not is_flat:
        bits = phash(image).hash.ravel()
    else:  # the same only for equal files
        bits = np.unpackbits(np.frombuffer(bytes.fromhex(file_sha256(path)[:16]), np.uint8))
    bits = np.where(bits, 1, -1).astype(np.float32)
    return Seen(path, load, name, of_class, is_held_out, size, stored, faults, bits)


def read_small(path: str, load: LoadBands | None) -> tuple[Image.Image, tuple[int, int], str, list[str]]:
    """An image as RGB, reduced but no smaller than SIDE; width and height, kind and faults of the file."""
    if load:
        bands = load.transform(dict(img_path=path))['img'].clip(0, 255)
        height, width, number = bands.shape
        return Image.fromarray(LoadBands.as_rgb(bands)), (width, height), f'{number} bands', []
    with open_image(path) as file, unreadable(path, Exception):
        size, faults, content = file.size, [], file.format.replace('MPO', 'JPEG')
        if reading.orientation(file) != 1:
            faults.append('images turned by EXIF, which are read upright')
        if Image.EXTENSION.get(Path(path).suffix.lower(), content).replace('MPO', 'JPEG') != content:
            faults.append('images of another format than their extension says')
        file.draft(None, TILE)
        pixels = reading.with_image(dict(img_path=path), reading.rgb_array(file))['img']  # refuses what training does
        stored = 'gray' if (pixels == pixels[..., :1]).all() else 'colour'
        return Image.fromarray(pixels), size, '16-bit gray' if reading.is_deep_gray(file) else stored, faults


# What was understood


def described(folder: Path, images: Images, seen: Sequence[Seen]) -> list[tuple[str, str]]:
    """What was understood of a folder, by subject."""
    kind = 'images with classes' if images.classes else 'images without classes'
    is_split = images.held_out.root != images.train.root
    others = [Path(name) for _, files in walk(str(folder)) for name in files if not name.lower().endswith(READ)]
    lines = [
        ('kind', 'images with label maps' if isinstance(images, LabelMaps) else kind),
        ('images', str(images)),
        ('held out', quoted(relpath(images.held_out.root, folder)) if is_split else ''),
        ('classes', images.named_classes() if images.classes else ''),
        *(('note', note) for note in images.notes),
        ('sizes', sizes([each.size for each in seen])),
        ('stored in', counted(each.stored for each in seen)),
        ('other files', counted(name.suffix.lower() or str(name) for name in others)),
        ('note', '' if phash else NO_PHASH),
    ]
    return [(subject, text) for subject, text in lines if text]


def counted(things: Iterable[str]) -> str:
    return ', '.join(f'{thing} ({number:,})' for thing, number in Counter(things).most_common())


def sizes(found: Sequence[tuple[int, int]]) -> str:
    """The smallest, the largest and the median of sizes (width, height); '' without any."""
    by_area = sorted(found, key=lambda size: size[0] * size[1])
    if not by_area:
        return ''
    smallest, median, largest = (f'{w} x {h}' for w, h in (by_area[0], by_area[len(by_area) // 2], by_area[-1]))
    return f'all {median}' if smallest == largest else f'{smallest} to {largest}, median {median}'


def sizes_of(images: Images) -> str:
    """The sizes of some images to learn from, by their headers alone: for the plan of a run."""
    found = []
    for path in evenly(images.train.names, HEADERS):
        with suppress(UnreadableImageError), open_image(str(images.train.root / path)) as file:
            found.append(file.size)
    return f'{sizes(found)} pixels; beit-mm look shows more' if found else ''


def commands(folder: Path, images: Images, refusal: str) -> list[str]:
    """The commands that may follow, and where their results are."""
    where, has_maps = shlex.quote(str(folder)), isinstance(images, LabelMaps)
    if has_maps and len(images.train.names) < MIN_PAIRS:
        return [f'beit-mm segment demo new_images/ --labelled {where}']
    options = [option for option in ('--reduce-zero-label', '--keep-zero-label') if option in refusal]
    if refusal and (options or images.classes or has_maps):
        return [f'beit-mm finetune {where} {option} --out run' for option in options]
    if not images.classes and len(images.train.names) < MIN_IMAGES:
        return []
    if not images.classes:
        return [f'beit-mm pretrain {where} --out run --minutes 60']
    use = f'beit-mm {"segment" if has_maps else "classify"} run new_images/'
    has_suspects = not isinstance(images, TaggedImages)
    results = 'run/report.html then says how good it is' + f', run/{TABLE} which labels may be wrong' * has_suspects
    return [f'beit-mm finetune {where} --out run --minutes 15', results, use]


def survey_images(images: Images, seen: Sequence[Seen]) -> tuple[Part, list[Picture]]:
    """A table of the classes, and some images of each."""
    groups, held_out = defaultdict(list), Counter(images.held_out.names.values())
    for each in seen:
        groups[each.of_class].append(each)
    names = evenly(groups, MAX_IMAGES // 2)
    drawn = [(name or each.name, each) for name in names for each in evenly(groups[name], MAX_IMAGES // len(names))]
    rows = [(name, f'{images.learned[name]:,}', f'{held_out[name]:,}') for name in images.classes]
    pictures = [Picture(ImageOps.pad(each.image, TILE, color='white'), caption) for caption, each in drawn]
    return [('class', 'images to learn from', 'held out'), *rows] if rows else '', pictures


def survey_maps(images: LabelMaps) -> tuple[Part, list[Picture]]:
    """A table of the classes in some label maps, and some images beside their maps."""
    palette = np.array(images.colours or distinct_colours(len(images.classes)))
    pictures = []
    for sample in some_samples(images, MAX_PAIRS):
        image, labels = LoadBands.as_rgb(sample['img']), sample['gt_seg_map'].astype(np.int16)
        labels[labels >= len(palette)] = -1
        pair = side_by_side([Image.fromarray(image), overlay(image, labels, palette)], 2 * SIDE)
        pictures.append(Picture(pair, Path(sample['img_path']).name))
    legend = with_legend(Image.new('RGB', (2 * SIDE, 1), 'white'), [*zip(images.classes, palette, strict=True)])
    measured = measure(images)
    all_pixels = max(1, sum(height * width for height, width in measured.images))
    rows = [('class', 'in the maps', f'% of pixels in {len(measured.images)} maps', 'typical object, pixels')]
    for name, value in zip(images.classes, images.colours or images.values, strict=True):
        share, side = 100 * measured.pixels[name] / all_pixels, measured.objects.get(name, 0)
        rows.append((name, str(value), f'{share:.2f}', f'{side:.0f}'))
    return rows, [*pictures, Picture(legend, 'Classes in these pictures')]


def side_by_side(images: Sequence[Image.Image], side: int) -> Image.Image:
    """Images in a row, in the size of the first, reduced to `side` pixels."""
    first, *others = images
    first = ImageOps.contain(first, (side, side))
    return Image.fromarray(np.hstack([first, *(ImageOps.pad(each, first.size, color='white') for each in others)]))


# What may be wrong


def odd_files(seen: Sequence[Seen]) -> Iterator[Finding]:
    """Images with faults of their own, and those unlike most others."""
    found: dict[str, list[str]] = defaultdict(list)
    if not seen:
        return
    middle = np.median([each.size for each in seen], axis=0)
    ((usual, _),) = Counter(each.stored for each in seen).most_common(1)
    for each in seen:
        ratio = each.size / middle
        for fault in each.faults:
            found[fault].append(each.name)
        if each.stored != usual:
            found[f'images in {each.stored}, while most are in {usual}'].append(each.name)
        if max(ratio.max(), 1 / ratio.min()) > MAX_RATIO:
            found[f'images with a side above {MAX_RATIO} times or below 1/{MAX_RATIO} of the median'].append(each.name)
    yield from (Finding(fault, names) for fault, names in found.items())


def odd_classes(images: Images) -> Iterator[Finding]:
    """Names of classes that are hard to tell apart, and class folders with few images."""
    alike: dict[str, list[str]] = defaultdict(list)
    for name in images.classes:
        alike[' '.join(name.casefold().split())].append(repr(name))
    yield Finding('class names that differ only in case or spaces', [' = '.join(n) for n in alike.values() if n[1:]])
    if images.classes and not isinstance(images, LabelMaps):
        few = [f'{quoted(name)} ({number})' for name, number in images.learned.items() if number < FEW]
        yield Finding(f'classes with fewer than {FEW} images to learn from', few)


def lookalikes(seen: Sequence[Seen]) -> Iterator[Finding]:
    """Images that look alike, the closest first: each image with the closest earlier one of each kind."""
    found: dict[str, list[tuple[float, Seen, Seen]]] = defaultdict(list)
    bits = np.array([each.bits for each in seen]).reshape(-1, 64)
    classes, held_out = np.array([each.of_class for each in seen]), np.array([each.is_held_out for each in seen])
    for first in range(0, len(seen), ROWS):
        rows = np.arange(first, min(first + ROWS, len(seen)))
        distance = 32 - bits[rows] @ bits.T / 2
        distance[np.arange(len(seen)) >= rows[:, None]] = 64  # each pair once
        other_class, other_part = (column[rows, None] != column for column in (classes, held_out))
        kinds = np.where(other_class, 0, np.where(other_part, 1, 2))
        for kind, text in enumerate(LOOKALIKES):
            candidates = np.where(kinds == kind, distance, 64)
            nearest, closest = candidates.argmin(axis=1), candidates.min(axis=1)
            for row in np.flatnonzero(closest <= MAX_DISTANCE):
                found[text].append((closest[row], seen[nearest[row]], seen[rows[row]]))
    for text in LOOKALIKES:
        pairs = [(one, other) for _, one, other in sorted(found[text], key=lambda pair: pair[0])]
        names = [f'{one.name} = {other.name}' for one, other in pairs]
        tiles = [side_by_side([each.image for each in pair], SIDE) for pair in pairs[:MAX_PAIRS]]
        yield Finding(text, names, [*map(Picture, tiles, names)])

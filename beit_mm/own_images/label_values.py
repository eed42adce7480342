"""What the numbers or colours in label maps mean: classes.txt, masks, unlabelled pixels."""

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from beit_mm.checkpoint.names import preview
from beit_mm.datasets import segmentation_folder
from beit_mm.datasets.image_folder import read_lines
from beit_mm.datasets.segmentation_folder import IGNORE_INDEX, NO_DATA
from beit_mm.errors import UserError
from beit_mm.own_images.layouts import LOSSY
from beit_mm.terminal import without_output

TRAIN_IDS, IDS = '_labelTrainIds.png', '_labelIds.png'  # of Cityscapes; where both are there, the first is learned from
CITYSCAPES_IDS = (7, 8, 11, 12, 13, 17, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 31, 32, 33)  # in _labelIds.png
MIN_CONTRAST, MIN_SHADES = 64, 8  # of masks with soft borders, see `soft_ends`
NUMBERED_NAME = re.compile(r'(\d+)\s*[:=,\t]\s*(\S.*)')  # 7: tree
NAMES = 'classes.txt', 'class_names.txt'  # the latter is labelme's
LEGENDS = '*class_dict*.csv', 'label*.txt', '*/_classes.csv'  # of Kaggle, CamVid and CVAT, Roboflow
NO_CLASS = 'unlabelled unlabeled void ignore ignored unannotated'.split()  # names of pixels without a class
WHOLE_NUMBER = re.compile(r'(?<![\w.])\d+(?![\w.])')


class Legend(NamedTuple):
    """What classes.txt says: names, and the colours or the numbers of the classes, if it gives them."""

    names: list[str] | None = None
    colours: list[list[int]] | None = None
    numbers: list[int] | None = None
    source: str = 'classes.txt'


class Meaning(NamedTuple):
    """What the numbers in label maps stand for."""

    classes: list[str]
    values: list[int]  # the number of each class; other numbers are unlabelled
    text: str  # the same for the user
    nearest: bool = False  # other numbers from 0 stand for the nearest of `values`

    def without_unlabelled(self, kept_names: Collection[str] = ()) -> 'Meaning':
        """The classes without those of NO_CLASS that are not among `kept_names`, as long as two are left."""
        pairs = [*zip(self.classes, self.values, strict=True)]
        kept = [(name, value) for name, value in pairs if name.lower().strip('_') not in NO_CLASS or name in kept_names]
        if len(kept) < 2 or kept == pairs:
            return self
        classes, values = map(list, zip(*kept, strict=True))
        left_out = preview(name for name in self.classes if name not in classes)
        text = f'{self.text}; {left_out} is not learned, as its name says (to learn it, rename it)'
        return Meaning(classes, values, text, self.nearest)


def read_legend(root: Path, mode: str, shown: set[tuple[int, ...]]) -> Legend:
    """Reads a classes.txt: names, also with colours or numbers, or `segment`'s table; without it, another legend.

    Args:
        root: folder of images and label maps.
        mode: Pillow's, of a label map.
        shown: the colours that the palette of this map gives its pixels.
    """
    listed = {file.name.lower(): file for file in root.glob('*.txt') if file.is_file()}
    path = next((listed[name] for name in NAMES if name in listed), None)
    if path is None:
        files = [file for pattern in LEGENDS for file in sorted(root.glob(pattern))]
        by_colour = [found for file in files if (found := read_other_legend(file, True))]
        if mode in ('RGB', 'RGBA'):
            return next(iter(by_colour), Legend())
        for found in by_colour:  # a palette may have most of its colours from a legend
            if 2 * len(shown & {*map(tuple, found.colours or ())}) > len(shown):
                return found
        return next((found for file in files if (found := read_other_legend(file, False))), Legend())
    names, colours = segmentation_folder.named_classes(str(path))
    if colours is None and (numbered := numbered_names(names)):
        return numbered
    header, *rows = [line.split('\t') for line in read_lines(str(path)) if line]
    if not {'Number', 'Name'} <= {*header}:
        return Legend([*names], colours, source=path.name)
    try:
        numbers = np.array([int(row[header.index('Number')]) for row in rows], np.int64)
        return Legend([*names], colours, numbers.tolist())
    except (IndexError, ValueError, OverflowError) as error:
        raise UserError(f'{path}: expected a whole number in column Number of each line ({error})') from None


def numbered_names(names: Sequence[str]) -> Legend | None:
    """The classes of lines such as `7: tree`; None if not all lines have a number of their own."""
    matches = [match for name in names if (match := NUMBERED_NAME.fullmatch(name))]
    of = {int(match[1]): match[2] for match in matches}
    if len(of) < len(names):
        return None
    numbers = sorted(of)
    ordered = [of[number] for number in numbers]
    if numbers in ([*range(len(of))], [*range(1, len(of) + 1)]):  # as names without numbers, in this order
        return Legend(ordered)
    return Legend(ordered, None, numbers)


def read_other_legend(path: Path, by_colour: bool) -> Legend | None:
    """Reads lines such as `road,128,64,128`, `128 64 128<tab>road` or `7, road`; None if not all are like that."""
    names, numbers = [], []
    for line in read_lines(str(path)):
        found = [*map(int, WHOLE_NUMBER.findall(line))]
        if found and not line.startswith('#'):
            numbers.append(found)
            names.append(WHOLE_NUMBER.sub('', line).strip(' \t,:;"'))
    num_unique = min(len({*names} - {''}), len({*map(tuple, numbers)}))
    if not 1 < num_unique == len(names) or {*map(len, numbers)} != {3 if by_colour else 1}:
        return None
    if by_colour:
        return Legend(names, numbers, source=path.name)
    return Legend(names, numbers=[number for (number,) in numbers], source=path.name)


def meaning_of(
    legend: Legend, held: Mapping[str, set[int]], pixels: Counter[int], reduce_zero_label: bool | None, suffix: str
) -> Meaning:
    """The classes of all maps, by the colours or numbers of classes.txt, or by the order of its names.

    Args:
        legend: what classes.txt says.
        held: numbers in the map of each image.
        pixels: how many pixels have each number or, with colours in classes.txt, `colour_numbers`.
        reduce_zero_label: see `find_label_maps`.
        suffix: the ending of the maps' names.
    """
    stated = 'colours' if legend.colours else 'numbers' if legend.numbers else ''
    if stated and reduce_zero_label is not None:
        raise UserError(f'{legend.source} has {stated}; leave out --reduce-zero-label and --keep-zero-label')
    lossy = suffix.lower().endswith(LOSSY)
    ends = None if stated else soft_ends(pixels, legend.names, lossy)
    if lossy and not ends:
        raise UserError(f'label maps end in {suffix}, whose compression changes numbers; save them as PNG')
    if legend.names and legend.colours:
        return meaning_of_colours(pixels, legend.names, legend.colours, legend.source)
    if legend.names and legend.numbers:
        text = f'{len(legend.names)} classes of {legend.source}, with its numbers'
        return Meaning(legend.names, legend.numbers, text)
    if not ends:
        return meaning_of_numbers(held, legend.names, reduce_zero_label)
    if reduce_zero_label:
        raise UserError(f'masks of {ends[0]} and {ends[1]} with soft borders; leave out --reduce-zero-label')
    masks = meaning_of_masks(ends, legend.names or [])
    text = f'{masks.text}, and shades between them (soft borders) are the nearer of the two'
    return Meaning(masks.classes, masks.values, text, nearest=True)


def meaning_of_dataset(folder: str, suffix: str, occurring: set[int], listed: Collection[str] = ()) -> Meaning | None:
    """The classes of PASCAL VOC and Cityscapes, by the names of their folder and files, if the numbers fit.

    If names of classes are `listed` beside the maps, some must be among them.
    """
    if '_gtFine_' not in suffix and folder != 'SegmentationClass':
        return None
    name = 'CityscapesDataset' if '_gtFine_' in suffix else 'PascalVOCDataset'
    with without_output():  # mmseg's import prints
        classes = [*segmentation_folder.named_classes(f'mmseg.{name}')[0]]
    if listed and not {*listed} & {*classes[1:]}:  # all have a background
        return None
    values = [*CITYSCAPES_IDS] if suffix.endswith(IDS) else [*range(len(classes))]
    if suffix.endswith(IDS) or occurring <= {*values, IGNORE_INDEX}:
        return Meaning(classes, values, f"{len(classes)} classes of mmseg's {name}")
    return None


def meaning_of_colours(pixels: Counter[int], names: list[str], colours: list[list[int]], source: str) -> Meaning:
    """The classes of label maps by colour; `pixels` counts the `colour_numbers`."""
    values = segmentation_folder.colour_numbers(colours).tolist()
    others = Counter({number: count for number, count in pixels.items() if number not in values})
    text = f'{len(names)} classes of {source}, by colour'
    if others:
        text += f'; colours that no class has: {segmentation_folder.count_colours(others)}'
    return Meaning(names, values, text)


def meaning_of_numbers(
    held: Mapping[str, set[int]], names: list[str] | None, reduce_zero_label: bool | None
) -> Meaning:
    """The classes of label maps with numbers. `names` come from classes.txt."""
    occurring = sorted(number for number in set().union(*held.values()) if number >= 0)
    numbers = [number for number in occurring if number != IGNORE_INDEX]
    if not numbers:
        return Meaning([], [], f'every pixel is {IGNORE_INDEX} or negative, which marks ignored pixels')
    are_masks = numbers == [0, 1] or occurring == [0, IGNORE_INDEX]
    if are_masks and not reduce_zero_label and len(names or ()) < 3:
        if reduce_zero_label is None:
            check_masks(held)
        return meaning_of_masks([0, 1 if 1 in numbers else IGNORE_INDEX], names or [])
    if names is not None:
        return meaning_of_names(held, occurring, names, reduce_zero_label)
    numbers = occurring if is_gray_scale(occurring) else numbers
    first = int(zero_is_unlabelled(numbers, names, reduce_zero_label))
    values = [number for number in numbers if number >= first]
    return Meaning([*map(str, values)], values, f'{len(values)} classes, named by their numbers (no classes.txt)')


def meaning_of_names(
    held: Mapping[str, set[int]], occurring: Sequence[int], names: list[str], reduce_zero_label: bool | None
) -> Meaning:
    """The classes that classes.txt names, by their order; `occurring` are the sorted numbers in all maps."""
    if is_gray_scale(occurring) and len(occurring) - len(names) in (0, 1):
        first = int(zero_is_unlabelled(range(len(occurring)), names, reduce_zero_label))
        values = [*occurring[first:]]
    else:
        numbers = [number for number in occurring if number != IGNORE_INDEX]
        if numbers[-1] > len(names) - (reduce_zero_label is False):
            image = next(path for path, found in held.items() if numbers[-1] in found)
            raise UserError(
                f'the label map of {image} contains {numbers[-1]}, but classes.txt names {len(names)} classes; '
                f'expected 0 to {len(names) - 1}, or 1 to {len(names)}, and {IGNORE_INDEX} for ignored pixels'
            )
        first = int(zero_is_unlabelled(numbers, names, reduce_zero_label))
        highest = [image for image, found in held.items() if len(names) in found]
        if first and reduce_zero_label is None and 0 in numbers and len(highest) == 1 < len(held) / 10:
            raise UserError(
                f'of {len(held):,} label maps only that of {highest[0]} holds {len(names)}, the number of names; mend '
                f'it if it is a slip and 0 is {names[0]!r}, or give --reduce-zero-label if 0 marks unlabelled pixels'
            )
        values = [*range(first, first + len(names))]
    if len(values) != len(names):
        raise UserError(
            f'classes.txt names {len(names)} classes, label maps contain {preview(map(str, values))} as classes; leave '
            'out --reduce-zero-label and --keep-zero-label'
        )
    text = f'{len(names)} classes of classes.txt, 0 is {"unlabelled" if first else repr(names[0])}'
    return Meaning(names, values, f'{text}, {values[-1]} is {names[-1]!r}')


def check_masks(held: Mapping[str, set[int]]) -> None:
    """Refuses masks of 0 and 1 beside masks of 0 and 255, one of which may be a slip."""
    ones = [image for image, found in held.items() if 1 in found]
    others = [image for image, found in held.items() if {0, IGNORE_INDEX} <= found and 1 not in found]
    have_both = any({1, IGNORE_INDEX} <= held[image] for image in ones)  # then 255 may mark borders, unless 1 is a slip
    if ones and len(others) > (10 * len(ones) if have_both else len(held) / 10):
        raise UserError(
            f'1 occurs in {len(ones):,} masks, such as that of {ones[0]}, and {IGNORE_INDEX} without it in '
            f'{len(others):,}, such as that of {others[0]}; let all have the same, or give --keep-zero-label if '
            f'{IGNORE_INDEX} marks unlabelled pixels'
        )


def meaning_of_masks(values: list[int], names: Sequence[str]) -> Meaning:
    """The two classes of masks with 0 and another value; classes.txt may name both, or the second."""
    background = [] if len(names) == 2 else ['background']
    classes = [*background, *(names or ['foreground'])]
    text = f'masks of two classes: {values[0]} is {classes[0]}, {values[1]} is {classes[1]}'
    return Meaning(classes, values, text)


def soft_ends(pixels: Counter[int], names: Sequence[str] | None, lossy: bool) -> list[int] | None:
    """The two numbers of masks with soft borders; None for other maps.

    Nearly all pixels are close to one of the two, and each of them is frequent. Between them lie shades everywhere (few
    after lossy compression), of which none is frequent: that would be a class.
    """
    numbers = [number for number in pixels if number >= 0]
    low, high = min(numbers, default=0), max(numbers, default=0)
    if len(names or ()) > 2 or high > IGNORE_INDEX or high - low < MIN_CONTRAST:
        return None
    counts, margin = np.array([pixels[number] for number in range(low, high + 1)]), (high - low) // 8
    bottom, middle, top = np.split(counts, [margin + 1, high - low - margin])
    between = middle.sum()
    if between > min(0.1 * counts.sum(), 2 * bottom.sum(), 2 * top.sum()):
        return None
    neighbours = np.convolve(middle, np.ones(9))  # the sums of nine shades side by side
    if neighbours.max() > max(between / 2, 0.01 * counts.sum()):
        return None
    halves = [half.sum() for half in np.array_split(middle, 2)]
    has_shades = np.count_nonzero(middle) >= (MIN_SHADES if names is None else 1)
    if not lossy and (not has_shades or min(halves) < between / 5):
        return None
    return [low + int(bottom.argmax()), high - margin + int(top.argmax())]


def is_gray_scale(numbers: Sequence[int]) -> bool:
    """Whether sorted numbers are evenly spread from 0 to 255, such as 0, 128, 255: then 255 is a class."""
    even = np.linspace(0, IGNORE_INDEX, max(3, len(numbers)))
    return len(numbers) == len(even) and bool((abs(np.array(numbers) - even) <= 1).all())


def zero_is_unlabelled(numbers: Sequence[int], names: Sequence[str] | None, given: bool | None) -> bool:
    """Whether 0 marks unlabelled pixels. Unless the user says so (`given`), the sorted numbers in the maps decide:

    | classes.txt | highest number | 0 occurs | 0 marks           |
    | ---         | ---            | ---      | ---               |
    | K names     | K              | or not   | unlabelled pixels |
    | K names     | K - 1          | yes      | the first class   |
    | none        | any            | no       | nothing           |
    | other cases |                |          | refused           |
    """
    if given is not None:
        return given
    if names is None and (0 not in numbers or numbers == [0]):
        return False
    if names is None:
        raise UserError(
            f'label maps contain {preview(map(str, numbers))}, and no classes.txt says what 0 means; give '
            '--reduce-zero-label if it marks unlabelled pixels, or --keep-zero-label if it is a class'
        )
    if numbers[-1] == len(names):
        return True
    if numbers[-1] == len(names) - 1 and 0 in numbers:
        return False
    raise UserError(
        f'label maps contain {numbers[0]} to {numbers[-1]}, but classes.txt names {len(names)} classes; give '
        '--reduce-zero-label if 0 marks unlabelled pixels, or --keep-zero-label if it is a class'
    )


def unlabelled(pixels: Counter[int], meaning: Meaning, by_colour: bool) -> str:
    """Says how many pixels are unlabelled and, unless these are colours, by which numbers."""
    shares = []
    total, per_pixel = 0.0, 100 / pixels.total()
    for number, count in pixels.most_common():
        if number not in meaning.values and (number < 0 or not meaning.nearest):
            total += per_pixel * count
            shares.append(f'{"no data" if number == NO_DATA else number} ({per_pixel * count:.2g} %)')
    text = f'{total:.0f} % of the pixels are unlabelled'
    return text if by_colour or not shares else f'{text}: {preview(shares)}'

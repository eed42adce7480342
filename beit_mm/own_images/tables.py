"""The classes of images in a table: one of its columns names images, another has their labels."""

import csv
import io
import json
import math
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from beit_mm.apis.inference import BEST_THREE
from beit_mm.checkpoint.names import preview
from beit_mm.datasets.image_folder import EXTENSIONS, read_list
from beit_mm.errors import UserError, warn
from beit_mm.files import quoted
from beit_mm.own_images.annotations import SPLIT_OF, Files, find_annotations, shared_out, split_of
from beit_mm.own_images.images import (
    JOINT,
    ImageList,
    Images,
    TaggedImages,
    divide,
    evenly,
    find_images,
    hold_out,
    least_number,
)
from beit_mm.own_images.layouts import existing_folder

LABEL_COLUMNS = 'label', 'labels', 'class', 'category', 'target'
SPLIT_COLUMNS = 'split', 'set', 'subset', 'fold', 'usage', 'partition', 'phase', 'dataset', 'data_set'
IS_SPLIT = dict(is_train=('train', 'val'), is_valid=('val', 'train'), is_test=('test', 'train'))  # what 1 and 0 mean
SPLIT_NAMES = {*SPLIT_COLUMNS, *IS_SPLIT}
INDEX = re.compile(r'|Unnamed: \d+')  # what pandas calls the column of row numbers that it writes
ROWS = re.compile(r'(?i)index|idx|row|no\.?|nr\.?|#')  # names of columns that may have row numbers
NAMING = re.compile(r'(?i)(.*_)?(id|image|img|photo|picture|file|path|name|file_?name|image_?id)s?')
BINARY = dict.fromkeys(('0', '0.0', 'false', '-1', '-1.0'), '0') | dict.fromkeys(('1', '1.0', 'true'), '1')
LISTED = re.compile(r"""[\[({]\s*['"]|\[[\d\s,]*\]$""")  # begins a list as Python and JSON write it
NUMBERED = re.compile(r'([^\W\d]*[^\W\d_])[\W_]*\d+\)?')  # cat.0, american_bulldog_12, dog (3)
MIN_VALUES = 10  # different fractions are measurements, not names
MIN_UNITED = 0.1  # share of images with several rows from which on these mean several labels, not slips
NO_CLASSES = 'img image images dsc dscn dscf pxl photo picture frame scan tile page download'.split()  # before numbers
PLACES = 'left right before after cam camera original copy'.split()  # no classes either, if there are no other words


class Table(NamedTuple):
    file: str  # relative to the folder
    head: list[str]  # its columns
    rows: list[dict[str, str]]
    names: str  # the column that names images
    longer: list[str]  # cells of a row that has more of them than the header; [] without one


def find_table(folder: str | Path, column: str | None = None, fits_head: bool = False) -> Images | None:
    """Finds the images that a table in a folder labels, and holds some out; None without such a table.

    Args:
        folder: of images and of one table, or of two for splits, such as train.csv and val.csv.
        column: the labels; None: the only column that can be meant.
        fits_head: as for `find_images`.

    Raises:
        UserError: it cannot be told which table or column is meant, or rows give an image different labels.
    """
    files = Files(existing_folder(folder))
    if files.have_maps and not column:
        return None
    labels: dict[str, str] = {}
    splits: dict[str, str] = {}
    notes: list[str] = []
    separator = ''
    for table in tables_of(files):
        label = column or label_column(table)
        if not label and other_classes(files.root):
            warn(f'{quoted(table.file)} is not read; if a column of it has the labels, give --labels COLUMN')
            return None
        check_columns(files.root, table, label, given=bool(column))
        if table.longer:
            raise UserError(
                f'{quoted(table.file)} has more cells than columns in the row {preview(map(quoted, table.longer))}; '
                f'quote a cell that has the separator in it, or write several labels as cat{JOINT}dog'
            )
        if label not in table.rows[0]:
            raise UserError(
                f'{quoted(table.file)} has the columns {", ".join(map(quoted, table.rows[0]))}; say which one has the '
                'labels: --labels COLUMN'
            )
        cells = Counter(row[label] for row in table.rows)
        if len(cells) >= MIN_VALUES and 2 * sum(map(is_fraction, cells)) > len(cells):
            raise UserError(
                f'{quoted(table.file)}: column {quoted(label)} has measurements; give names, such as ranges'
            )
        if lists := [cell for cell in cells if LISTED.match(cell)]:
            raise UserError(f'{quoted(table.file)} has {quoted(lists[0])} as labels; write them as cat{JOINT}dog')
        separator = separator_of(cells) or separator  # a short val.csv may not show its own
        notes += read_labels(files, table, label, separator, labels, splits)
    if not labels and not column:
        labels, splits = labels_in_names(files), files.splits
        notes = [f'classes are what file names begin with, before a number: {preview(sorted({*labels.values()}))}']
    if column and not labels:
        raise UserError(f'--labels {column}: no table in {str(folder)!r} labels its images; leave it out')
    if left_out := [image for image, split in files.splits.items() if image not in splits and split != 'test']:
        notes.append(f'{len(left_out):,} images left out, because no row labels them: {preview(map(quoted, left_out))}')
    several = bool(separator) or any(JOINT in label for label in labels.values())
    return images_of(files.root, labels, splits, notes, several, fits_head) if labels else None


def labels_in_names(files: Files) -> dict[str, str]:
    """The class of each image where names say it, such as cat.0.jpg beside dog.0.jpg; empty if they do not."""
    images = [image for image, split in files.splits.items() if split != 'test']
    found = [NUMBERED.fullmatch(PurePosixPath(image).stem) for image in images]
    labels = {image: match[1] for image, match in zip(images, found, strict=True) if match}
    words = {word.lower() for word in labels.values()}
    if len(labels) < len(images) or len({*map(os.path.dirname, images)}) > 1 or len(words) < 2:
        return {}
    are_classes = not words & {*NO_CLASSES, *SPLIT_OF} and not words <= {*PLACES}
    return labels if are_classes and not other_classes(files.root) else {}


def tables_of(files: Files) -> list[Table]:
    """The table that names images, or those for training and validation."""
    # Kaggle's submissions have no labels
    listed = [file for file in files.ending('.csv', '.tsv', '.jsonl') if 'submission' not in file.lower()]
    listed = listed or [file for file in files.ending('.txt') if split_of(PurePosixPath(file).stem)]
    tables = [table for file in listed if (table := read_table(files, file))]
    if tables and tables[0].file.endswith('.txt') and other_classes(files.root):
        return []
    train, val, others = ([each for each in tables if split_of(each.file) == split] for split in ('train', 'val', ''))
    if len(train or others) > 1:
        raise UserError(f'{preview(quoted(each.file) for each in train or others)} all name images; keep one of them')
    return train + val if train else others


def read_table(files: Files, file: str) -> Table | None:
    """Reads a table; None if no column names images in half of the rows."""
    if file.endswith('.txt'):  # `a.jpg 3` in each line
        listed = read_list(str(files.root / file))
        rows = [dict(image=path, label=str(label)) for _, path, label in listed if label is not None]
        is_list = bool(rows) and files.image_of(rows[0]['image'], file) is not None
        return Table(file, ['image', 'label'], rows, 'image', []) if is_list else None
    lines = lines_of(files.root / file)
    head, *lines = [line for line in lines if line] or [[]]
    if any(cell.lower().endswith(EXTENSIONS) and files.image_of(cell, file) for cell in head):  # it has no header
        head, lines = [f'column {number}' for number, _ in enumerate(head, 1)], [head, *lines]
    while head and not head[-1]:  # programs add columns without a name, which the longest row needs
        head.pop()
    rows = [dict(zip(head, line + [''] * len(head), strict=False)) for line in lines]
    longer = next((line for line in lines if any(line[len(head) :])), [])
    if not rows or len(head) + bool(longer) < 2 or 'xmin' in head:  # boxes are read as annotations
        return None
    if {*BEST_THREE} <= {*head} and files.folders & {row['class'] for row in rows}:
        return None  # answers of `classify`; where the images are in class folders, these may be corrected

    def evidence(column: str) -> tuple[bool, bool, int, bool, int]:
        """That a column names the images: numbers in others may be names of images too."""
        found = [image for row in rows if (image := files.image_of(row[column], file))]
        whole_names = sum(row[column].lower().endswith(EXTENSIONS) for row in rows)
        is_named = bool(NAMING.fullmatch(column))
        return not is_index(column, rows), 2 * whole_names > len(rows), len({*found}), is_named, len(found)

    sample = evenly(rows, 100)
    lost = {key: [files.image_of(row[key], file) for row in sample].count(None) for key in head}
    named = [key for key in lost if 2 * lost[key] <= len(sample)]
    if len(named) > 1:  # each row is looked up
        named = [max(named, key=evidence)]
    return Table(file, head, rows, named[0], longer) if named else None


def lines_of(path: Path) -> list[list[str]]:
    """The cells of each line, the header first, of a table or of a file of JSON objects; [] if it is something else."""
    text = decoded(path)
    if path.suffix == '.jsonl':
        try:
            rows = [json.loads(line) for line in text.splitlines() if line.strip()]
            head = [*dict.fromkeys(key for row in rows for key in row)]
            cells = [['' if row.get(key) is None else str(row[key]) for key in head] for row in rows]
            return [head, *cells]
        except (ValueError, TypeError, AttributeError, RecursionError):
            return []
    while text.startswith(('sep=', '#')):  # lines of Excel, and comments
        text = text.partition('\n')[2]
    separator = max(',;\t|', key=text.partition('\n')[0].count)
    with suppress(csv.Error):
        return [[*map(str.strip, line)] for line in csv.reader(io.StringIO(text, newline=''), delimiter=separator)]
    return []


def decoded(path: Path) -> str:
    """Text in UTF-8, UTF-16 as Excel writes it, or the code page of Western Windows, which a line says."""
    content = path.read_bytes()
    encodings = ['utf-16'] if content.startswith((b'\xff\xfe', b'\xfe\xff')) else ['utf-8-sig', 'cp1252']
    for encoding in encodings:
        with suppress(UnicodeDecodeError):
            text = content.decode(encoding)
            if encoding == 'cp1252':
                warn(
                    f'{quoted(str(path))} is not in UTF-8; read as Windows-1252: if names look wrong, save it in UTF-8'
                )
            return text
    warn(f'{quoted(str(path))} is not in UTF-8, and not read; save it in UTF-8')
    return ''


def is_fraction(cell: str) -> bool:
    with suppress(ValueError):
        return math.isfinite(float(cell)) and not float(cell).is_integer()
    return False


def label_column(table: Table) -> str | None:
    """The column of labels, which columns of 0 and 1 for each class are joined to; None if several can be meant."""
    read = {table.names, *split_columns(table)}
    others = [key for key in dict.fromkeys(table.head) if key not in read and not is_index(key, table.rows)]
    others = [key for key in others if key.lower() not in SPLIT_NAMES] or others
    known = [key for key in others if key.lower() in LABEL_COLUMNS]
    if len(known or others) == 1:
        return (known or others)[0]
    cells = {row[key].lower() for row in table.rows for key in others}
    has_three = not {'-1', '-1.0'}.isdisjoint(cells) and not {'0', '0.0'}.isdisjoint(cells)  # -1 is not 0 there
    if known or has_three or {BINARY.get(cell) for cell in cells} != {'0', '1'}:
        return None
    joined = f'{preview(others, 8)} (0 or 1)'
    for row in table.rows:
        row[joined] = JOINT.join(key for key in others if BINARY[row[key].lower()] == '1')
    return joined


def other_classes(root: Path) -> list[str]:
    """The classes that annotations or folders give."""
    with suppress(UserError):
        found = find_annotations(root)
        return found.classes if found else find_images(root).classes
    return []


def check_columns(root: Path, table: Table, label: str | None, given: bool) -> None:
    """Asks where two columns have the same name, or folders may be the classes rather than the column of labels."""
    if twice := [key for key in (table.names, label) if key and table.head.count(key) > 1]:
        raise UserError(f'{quoted(table.file)} has two columns that are called {quoted(twice[0])}; rename one of them')
    if given or label not in table.head or label.lower() in LABEL_COLUMNS:
        return
    folders = other_classes(root)
    if folders and not all(map(split_of, folders)):
        raise UserError(
            f'{quoted(table.file)} has the column {quoted(label)}, and folders are {preview(map(quoted, folders))}; '
            f'give --labels {quoted(label)}, or move the table away if the folders are the classes'
        )


def is_index(column: str, rows: Sequence[Mapping[str, str]]) -> bool:
    """Whether a column numbers the rows."""
    cells = [row[column] for row in rows]
    has_numbers = len({*cells}) == len(cells) and all(map(str.isdigit, cells))
    return bool(INDEX.fullmatch(column) or (has_numbers and ROWS.fullmatch(column)))


def read_labels(
    files: Files, table: Table, column: str, separator: str, labels: dict[str, str], splits: dict[str, str]
) -> list[str]:
    """Adds the images of a table to `labels` and `splits`; returns notes for the user."""
    file, head, rows, names, _ = table
    candidates = [key for key in head if key.lower() in SPLIT_NAMES and key != column]
    parts = [key for key in split_columns(table) if key != column]
    lost = 0
    found: dict[tuple[str, str], set[str]] = {}  # labels by image and by its name in the table
    united = set()
    for row in rows:
        image, label = files.image_of(row[names], file), row[column]
        if not image or not (label or separator):
            lost += not image
            continue
        own = {*map(str.strip, label.split(separator))} - {''} if separator else {label}
        if found.setdefault((image, row[names]), own) != own:
            united.add(image)
            found[image, row[names]] |= own
        told = {split_in(part, row[part]) for part in parts} or {split_of(file) or files.splits[image]}
        splits[image] = next(split for split in ('test', 'val', 'train', '') if split in told)
    for (image, name), own in found.items():
        label = JOINT.join(sorted(own))
        if labels.setdefault(image, label) != label:
            raise UserError(
                f'{quoted(file)} gives {quoted(image)}, as {quoted(name)}, {quoted(label)}, and by another name or in '
                f'another table {quoted(labels[image])}; keep one'
            )
    notes = [f'{quoted(file)}: images in column {quoted(names)}, labels in column {quoted(column)}']
    if separator:
        notes[0] += f', several of them between {separator!r}'
    if united and not separator and len(united) < MIN_UNITED * len(found):
        raise UserError(
            f'{quoted(file)} has rows with different labels for {len(united):,} of {len(found):,} images, such as '
            f'{quoted(min(united))}; keep one row of each, or write several labels in one cell, as cat{JOINT}dog'
        )
    if united:
        notes.append(f'{len(united):,} images have the labels of several rows: {preview(map(quoted, sorted(united)))}')
    if parts:
        notes.append(f'splits as in {preview(map(quoted, parts))}')
    elif candidates:
        notes.append(f'column {quoted(candidates[0])} is not used: it does not say train, val or test in each row')
    return notes + ([f'{lost:,} rows left out, because their images are missing'] if lost else [])


def split_columns(table: Table) -> list[str]:
    """The columns that say of each row to which split it belongs."""
    named = [key for key in table.head if key.lower() in SPLIT_NAMES]
    return [key for key in named if all(split_in(key, row[key]) for row in table.rows)]


def split_in(column: str, cell: str) -> str:
    """'train', 'val' or 'test', as a cell of a column such as `split` or `is_valid` says; else ''."""
    if column.lower() in IS_SPLIT:
        of_one, of_zero = IS_SPLIT[column.lower()]
        return {'1': of_one, '0': of_zero}.get(BINARY.get(cell.lower(), ''), '')
    return SPLIT_OF.get(cell.lower().removeprefix('public').removeprefix('private').strip(' _-'), '')


def separator_of(cells: Counter[str]) -> str:
    """What separates several labels in some of the cells; '' if each cell has one.

    Commas and spaces may belong to a name, unless all parts are labels of other images, or few parts make up many
    combinations; with spaces, as in `fresh apple`, they do not if each part has its place.
    """
    for separator in (JOINT, ';', ',', ' '):
        several = [[*map(str.strip, cell.split(separator))] for cell in cells if separator in cell]
        firsts, others = {found[0] for found in several}, {part for found in several for part in found[1:]}
        parts = firsts | others
        have_places = separator == ' ' and not firsts & others
        are_few = 2 * len(parts) <= len(cells) and len(parts) < sum(map(len, several))
        are_mixed = are_few and not have_places
        if several and (separator in f'{JOINT};' or parts <= cells.keys() or are_mixed):
            return separator
    return ''


def images_of(
    root: Path, labels: dict[str, str], splits: dict[str, str], notes: list[str], several: bool, fits_head: bool
) -> Images:
    """The images with their labels: held out as the splits say, else a tenth."""
    parts, of_test = shared_out(splits)
    train, *others = (ImageList(root, {image: labels[image] for image in part}) for part in parts)
    if others:
        held_out = others[0]
    elif several:  # each image counts for its rarest label, because many have a combination of their own
        numbers = Counter(label for joined in train.names.values() for label in joined.split(JOINT))
        rarest = {image: min(of.split(JOINT), key=lambda label: numbers[label]) for image, of in train.names.items()}
        train, held_out = divide(train, hold_out(ImageList(root, rarest))[1].names)
    else:
        train, held_out = hold_out(train)
    found = (TaggedImages if several else Images)(train, held_out, [], notes=[*notes, *of_test])
    found.classes = sorted(found.learned)
    if not several:  # of several labels, only the unknown ones are left out
        known = {image: label for image, label in held_out.names.items() if label in found.classes}
        found.held_out = ImageList(root, known)
    least = least_number(train, fits_head)
    if not 1 < len(found.classes) <= len(train.names) / 2 or len(train.names) < least:
        fewer = '' if fits_head else ' (--freeze all needs fewer)'
        raise UserError(
            f'{len(train.names):,} images of {len(found.classes)} classes to learn from in {str(root)!r} '
            f'({"; ".join(found.notes)}); expected at least {least}, of 2 classes or more, with several images of '
            f'each{fewer}'
        )
    held = {label for joined in held_out.names.values() for label in joined.split(JOINT) if label}
    unknown = held - {*found.classes}
    if unknown and unknown == held:
        raise UserError(
            f'the labels of held-out images do not occur among those to learn from: {quoted(min(held))} is not among '
            f'{preview(map(quoted, found.classes))}; spell them alike'
        )
    if unknown:
        number = sum(bool(unknown & {*joined.split(JOINT)}) for joined in held_out.names.values())
        found.notes.append(
            f'{number:,} held-out images have labels that no image to learn from has; these labels are left out: '
            f'{preview(map(quoted, sorted(unknown)))}'
        )
    return found

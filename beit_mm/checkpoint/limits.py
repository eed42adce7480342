"""What a checkpoint file may not be: an archive of other things, or a few bytes that unfold to more than memory holds.

Reading by torch's weights-only reader executes nothing; this file is about what is read. docs/security.md says what
stays open.
"""

import re
import zipfile
from collections.abc import Iterable
from pathlib import Path, PurePath
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch
from mmengine.logging import HistoryBuffer
from torch import Tensor

from beit_mm.terminal import UserError

# What torch.save writes, below one folder of any name
ZIP_ENTRY = re.compile(
    r'([^/]+)/(?:data\.pkl|data/\d+|version|byteorder|\.format_version|\.storage_alignment|\.data/serialization_id)'
)
ZIP_END, ZIP64_END, ZIP64_LOCATOR = 22, 56, 20  # bytes
MAX_VALUES = 2_000_000  # each as often as it is reached, which printing and comparing do
MAX_DEPTH = 100
MAX_NAME = 300  # characters of a tensor's name
MAX_GROWTH = 4  # bytes that content claims for each byte of the file: tensors may share memory
MIN_CLAIM = 64 << 20  # bytes that any file may claim
ATOMS = {int, float, bool, type(None)}
PLAIN = (int, float, complex, bool, type(None), torch.dtype, torch.device, torch.layout, torch.qscheme)


class LimitError(UserError):
    """More than a checkpoint has any use for."""


def check_zip(path: Path, sums: bool = True) -> None:
    """Raises LimitError where a zip file holds what torch.save does not write, or more than its own size.

    A file of code beside the tensors would be one `sys.path` entry away from being imported.

    Args:
        path: the file.
        sums: whether the check sums are compared too, at which torch's reader does not look.

    Raises:
        LimitError, zipfile.BadZipFile: says what.
    """
    size = path.stat().st_size
    with zipfile.ZipFile(path) as archive, path.open('rb') as file:
        entries = archive.infolist()
        check_zip_end(file, size, len(entries))
    folders, total = set(), 0
    for entry in entries:
        match = ZIP_ENTRY.fullmatch(entry.filename)
        if match is None:
            raise LimitError(f'it holds {entry.filename[:MAX_NAME]!r}, and torch.save did not write it')
        if entry.compress_type != zipfile.ZIP_STORED:
            raise LimitError(f'it holds {entry.filename[:MAX_NAME]!r} compressed, and torch.save did not write it')
        folders.add(match[1])
        total += entry.file_size
    if len(folders) > 1:
        raise LimitError(f'it holds {len(folders)} folders, and torch.save did not write it')
    if total > size:
        raise LimitError(f'its entries are {total:,} bytes together, the file has {size:,}')
    if sums:
        with zipfile.ZipFile(path) as archive:
            if damaged := archive.testzip():
                raise zipfile.BadZipFile(f'{damaged} does not have its check sum')


def check_zip_end(file: BinaryIO, size: int, entries: int) -> None:
    """Raises LimitError unless one list of entries lies before the end of a zip file, where its end says it is.

    torch takes the list from where the end says it is, Python the one before the end: they could be two.
    """
    file.seek(max(size - ZIP_END - ZIP64_LOCATOR - ZIP64_END, 0))
    tail = file.read()
    end, locator, end64 = tail[-ZIP_END:], tail[ZIP64_END:-ZIP_END], tail[:ZIP64_END]
    fields = [end[10:12], end[12:16], end[16:20]]  # number of entries; bytes and place of their list
    last = size - ZIP_END
    right = end[:4] == b'PK\x05\x06' and end[20:] == b'\0\0'  # no comment
    if locator[:4] == b'PK\x06\x07':
        last -= ZIP64_LOCATOR + ZIP64_END
        right &= end64[:4] == b'PK\x06\x06' and int.from_bytes(locator[8:16], 'little') == last
        fields = [end64[32:40], end64[40:48], end64[48:56]]
    number, length, place = (int.from_bytes(field, 'little') for field in fields)
    if not right or place + length != last or number != entries:
        raise LimitError('its end is not one that torch.save writes')


def check_content(content: Any, size: int) -> None:
    """Raises LimitError where content would need far more memory or time than the file that it was read from.

    So do functions, classes and objects of other classes than checkpoints hold.

    Attributes that a file sets on dicts and tensors are taken off, in place: they could stand in the place of methods.
    torch's `_metadata` of state dicts stays.

    Args:
        content: what a file holds; nothing in it was copied yet.
        size: of the file, in bytes.
    """
    claimed = _measure(content, 0, {}).claimed
    if claimed > max(MAX_GROWTH * size, MIN_CLAIM):
        raise LimitError(f'what it holds claims {claimed:,} bytes, the file has {size:,}')


class _Size(NamedTuple):
    """Of a value and all in it: number of values and levels, and bytes that a copy of each would have."""

    values: int
    levels: int
    claimed: int


def _measure(value: Any, level: int, measured: dict[int, _Size | None]) -> _Size:
    """Size of a value at some level of nesting. What is in many places is `measured` once and counted often."""
    inner: Iterable[Any]
    if isinstance(value, Tensor):
        vars(value).clear()
        return _Size(1, 0, tensor_bytes(value))
    if isinstance(value, (str, bytes, bytearray)):
        return _Size(1, 0, len(value))
    if isinstance(value, np.ndarray | np.generic):
        if value.dtype.hasobject:
            raise LimitError('it holds an array of objects')
        return _Size(1, 0, value.nbytes)
    if isinstance(value, torch.UntypedStorage | torch.TypedStorage):
        return _Size(1, 0, value.nbytes())
    if isinstance(value, dict):
        check_names(value)
        inner = (*dict.keys(value), *dict.values(value), clean_attributes(value))
    elif isinstance(value, (list, tuple, set, frozenset)):
        inner = value
    elif isinstance(value, HistoryBuffer):
        inner = check_history(value)
    elif isinstance(value, PurePath):
        return _Size(1, 0, len(str(value)))
    elif isinstance(value, PLAIN):
        return _Size(1, 0, 0)
    else:  # a class or function that torch's reader may call, or what came of calling it
        raise LimitError(f'it holds {_described(value)}')
    if id(value) not in measured:
        measured[id(value)] = None
        values, levels, claimed = 1, 0, 0
        for item in inner:
            if type(item) in ATOMS:
                values += 1
                continue
            if level == MAX_DEPTH:
                raise LimitError(f'it is nested deeper than {MAX_DEPTH} levels')
            size = _measure(item, level + 1, measured)
            values, levels, claimed = values + size.values, max(levels, 1 + size.levels), claimed + size.claimed
            if max(values, len(measured)) > MAX_VALUES:
                raise LimitError(f'it unfolds to more than {MAX_VALUES:,} values')
        measured[id(value)] = _Size(values, levels, claimed)
    found = measured[id(value)]
    if found is None:
        raise LimitError('it holds a value that holds itself')
    if level + found.levels > MAX_DEPTH:
        raise LimitError(f'it is nested deeper than {MAX_DEPTH} levels')
    return found


def _described(value: Any) -> str:
    """An unknown value in few words; nothing of the file's is quoted."""
    name = getattr(value, '__name__', None) if callable(value) else None
    return (
        f'the function or class {name!r}' if isinstance(name, str) else f'an object of class {type(value).__name__!r}'
    )


def tensor_bytes(tensor: Tensor) -> int:
    """Bytes that a copy of a tensor would have.

    LimitError for one that is not dense: nobody compares the indices of a sparse tensor with its size, so that adding
    it would write anywhere in memory.
    """
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized or tensor.device.type != 'cpu':
        raise LimitError(f'it holds a tensor {_form(tensor)}; expected dense ones')
    return tensor.numel() * tensor.element_size()


def _form(tensor: Tensor) -> str:
    if tensor.is_meta:
        return 'without values'
    return f'of layout {tensor.layout}' if tensor.layout is not torch.strided else 'that is nested or quantized'


def check_names(values: dict) -> None:
    """Raises LimitError for a tensor's name that a terminal could obey, or that fills a page: messages quote it."""
    for name, value in dict.items(values):
        if isinstance(value, Tensor) and isinstance(name, str) and not (name.isprintable() and len(name) <= MAX_NAME):
            raise LimitError(f'it names a tensor {name[:60]!r}')


def clean_attributes(values: dict) -> Any:
    """Takes the attributes off a dict, but for a state dict's `_metadata`, which is returned: dicts by a module's name.

    A ConfigDict's own are no data of the file's.
    """
    attributes = getattr(values, '__dict__', None)
    if not attributes or not type(values).__module__ == 'collections':
        return None
    metadata = attributes.get('_metadata')
    attributes.clear()
    if isinstance(metadata, dict) and all(isinstance(item, dict) for item in dict.values(metadata)):
        attributes['_metadata'] = metadata
        return metadata
    return None


def check_history(history: HistoryBuffer) -> Iterable[Any]:
    """The arrays of one of mmengine's log histories; LimitError where it holds anything else."""
    values = vars(history)
    numbers = [values.get(name) for name in ('_log_history', '_count_history')]
    known = {'_log_history', '_count_history', 'max_length', '_max_length', 'statistics_methods'}
    if set(values) - known or not all(isinstance(array, np.ndarray | None) for array in numbers):
        raise LimitError('it holds a log history with more than numbers')
    return [array for array in numbers if array is not None]

"""Reads what torch.save wrote, tensors or whole modules such as OpenAI's encoder.pkl, and runs nothing.

A pickle is a program: it names functions and the unpickler calls them. Here every name on a short
list stands for something inert, any other name ends the reading, and no tensor exists while the
program runs:

- foreign classes become `Record`, which ignores its arguments and keeps the state it is given
- torch's rebuild functions become descriptions of tensors
- OrderedDict and Counter become `PlainDict`, which ignores attributes such as `_metadata` of a state dict

None of these objects has attributes that a pickle could set (slots, no `__dict__`) or a method it
could replace, so that the opcode BUILD finds no lever either. Tensors are made afterwards, as views of
the file mapped into memory, with their bounds checked against its size. Nor can a small file fill the
memory or the stack: what it names often is made once, numbers that would reserve memory are checked
before they do, and tuples are counted.
torch.load(weights_only=True) is not asked: its error messages print whole objects, gigabytes from
lists nested ten levels deep.
"""
import io
import mmap
import os
import pickle
import pickletools
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from reprlib import repr as short_repr
from typing import Any, BinaryIO

import torch
from torch import Tensor

from beit_mm.checkpoint.errors import CheckpointError, UnsafeCheckpointError
from beit_mm.checkpoint.records import Materialiser, PlainDict, Record, Storage, TensorView, view_numbers

# Classes and functions that may be named and become inert: they carry no weights.
INERT_MODULES = ('dall_e.', 'torch.nn.modules.')
INERT_NAMES = {
    'argparse.Namespace', 'pathlib.PosixPath', 'pathlib.WindowsPath', 'mmengine.config.config.ConfigDict',
    *(f'builtins.{name}' for name in ('list', 'dict', 'int', 'long', 'float', 'str')),  # what a defaultdict makes
    'torch.Tensor', 'torch.nn.parameter.Parameter', 'torch.device', 'torch.Size', '_codecs.encode',
    'numpy.dtype', 'numpy.ndarray',
    # what the message hub in mmengine's checkpoints consists of
    'mmengine.logging.history_buffer.HistoryBuffer',
    *(f'numpy.{core}.multiarray.{name}' for core in ('core', '_core')
      for name in ('scalar', '_reconstruct')),
}
DTYPES = dict(Double='float64', Float='float32', Half='float16', BFloat16='bfloat16', Long='int64',
              Int='int32', Short='int16', Char='int8', Byte='uint8', Bool='bool')
LEGACY_MAGIC = 0x1950a86a20f9469cfc6c  # first object of files that torch wrote before 1.6
# CPython hashes a tuple by recursion in C: one nested 150,000 deep, as a key, overflows the usual stack of 8 MB. Depth
# is not known before the program runs, but it is at most the number of tuples: 2,300 in a run of BEiT-B.
MAX_TUPLES = 50_000
LOCAL_HEADER = struct.Struct('<4s22xHH')  # of a zip entry: signature, and the lengths of name and extra field behind it


class Callee:
    """A function that a pickle may call; nothing can be set on it."""

    __slots__ = ('function',)

    def __init__(self, function: Callable) -> None:
        self.function = function

    def __call__(self, *args: Any) -> Any:
        return self.function(*args)

    def __setstate__(self, state: Any) -> None:
        raise UnsafeCheckpointError('it sets attributes of a function')


def _rebuild_tensor(storage: Storage, offset: int, size: tuple, stride: tuple,
                    *_: Any) -> TensorView:
    if not isinstance(storage, Storage):
        raise UnsafeCheckpointError('it builds a tensor from something that is no storage')
    if not all(isinstance(number, int) for number in (offset, *size, *stride)):
        raise UnsafeCheckpointError('it builds a tensor whose shape is no numbers')
    return TensorView(storage, offset, tuple(size), tuple(stride))


def _rebuild_with_attributes(rebuild: Callee, _: Any, args: tuple, *__: Any) -> TensorView:
    """A tensor on which attributes were set, without them."""
    if not isinstance(rebuild, Callee):
        raise UnsafeCheckpointError('it builds a tensor by something that is no function of torch')
    return rebuild(*args)


def _method_of_record(owner: Any, name: str) -> type[Record]:
    """`getattr` as mmengine's history buffers use it: to name their own methods."""
    if owner is not Record:
        raise UnsafeCheckpointError(f'it asks for the attribute {short_repr(name):.80} of {short_repr(owner):.80}')
    return Record


CALLEES = {
    'collections.OrderedDict': Callee(PlainDict),
    'collections.Counter': Callee(PlainDict),  # milestones of a schedule
    'collections.defaultdict': Callee(lambda *_: PlainDict()),
    'builtins.set': Callee(set),
    'builtins.getattr': Callee(_method_of_record),
    'torch._utils._rebuild_tensor': Callee(_rebuild_tensor),
    'torch._utils._rebuild_tensor_v2': Callee(_rebuild_tensor),
    'torch._tensor._rebuild_from_type_v2': Callee(_rebuild_with_attributes),
    'torch._utils._rebuild_parameter': Callee(lambda data, *_: data),
    'torch._utils._rebuild_parameter_with_state': Callee(lambda data, *_: data),
    **{f'torch.{name}Storage': dtype for name, dtype in DTYPES.items()},
    **{f'torch.{dtype}': dtype for dtype in DTYPES.values()},
}


class InertUnpickler(pickle.Unpickler):
    """The standard unpickler with both its ways out of the file closed.

    `storages` holds what the pickle referred to, by key.
    """

    def __init__(self, file: BinaryIO | mmap.mmap) -> None:
        _check_numbers(file)
        super().__init__(file)
        self.storages: dict[str, Storage] = {}

    def find_class(self, module: str, name: str) -> Any:
        full_name = f'{"builtins" if module == "__builtin__" else module}.{name}'
        if full_name in CALLEES:
            return CALLEES[full_name]
        if full_name in INERT_NAMES or full_name.startswith(INERT_MODULES):
            return Record
        raise UnsafeCheckpointError(f'it asks for {full_name}')

    def persistent_load(self, pid: Any) -> Any:
        match pid:
            case ('module', cls, *_):  # legacy files name a class together with its source code
                return cls
            case ('storage', str(dtype), str(key), _, int(numel)) if dtype in DTYPES.values():
                return self._storage(Storage(key, dtype, numel))
            case ('storage', str(dtype), str(key), _, int(numel), None) if dtype in DTYPES.values():
                return self._storage(Storage(key, dtype, numel))
            case ('storage', str(dtype), str(key), _, int(numel), (_, int(offset), _)) if dtype in DTYPES.values():
                return self._storage(Storage(key, dtype, numel, offset))
        raise UnsafeCheckpointError(f'it refers to a persistent object {short_repr(pid):.80}')

    def _storage(self, storage: Storage) -> Storage:
        self.storages[storage.key] = storage
        return storage


def _check_numbers(file: BinaryIO | mmap.mmap) -> None:
    """Walks through the next pickle without running it, and goes back to its beginning.

    `genops` itself refuses lengths beyond the end of the file.

    Raises:
        CheckpointError: A memo index above the number of opcodes: the unpickler would reserve 8
            bytes for each index below it, which picklers use up one by one. Or more than MAX_TUPLES.
    """
    start, tuples = file.tell(), 0
    for count, (opcode, index, _) in enumerate(pickletools.genops(file)):
        if opcode.name in ('PUT', 'BINPUT', 'LONG_BINPUT') and index > count:
            raise CheckpointError(f'is damaged: it names its object number {index} after {count} opcodes')
        tuples += opcode.name in ('TUPLE', 'TUPLE1', 'TUPLE2', 'TUPLE3')
    if tuples > MAX_TUPLES:
        raise CheckpointError(f'holds {tuples} tuples, at most {MAX_TUPLES} are read: this many could be nested '
                              'deeper than the stack')
    file.seek(start)


def read_inert(path: Path, zipped: bool, copied: bool) -> Any:
    """Content of a torch file, zip or legacy, as plain containers and tensors.

    A module becomes its state dict, any other foreign object the dict of its attributes.

    Args:
        path: the file.
        zipped: whether it begins as a zip file; searching for one would find those inside a pickle.
        copied: whether the tensors are to be independent of the file, rather than mapped from it.

    Raises:
        UnsafeCheckpointError: it asks for a name that is not on the list; says which.
        CheckpointError: it ends too early or contradicts itself.
    """
    try:
        with path.open('rb') as file:
            # Private pages: writing to a tensor leaves the file as it is. The map lives as long as a tensor in it.
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            if not zipped:  # a file would reserve whatever length it is asked for, a mapped one what there is
                return _read_legacy(mapped, copied)
            with zipfile.ZipFile(file) as archive:
                return _read_zip(archive, mapped, copied)
    except UnsafeCheckpointError as error:
        raise UnsafeCheckpointError(
            f'{path} is refused, nothing in it was run: {error}. Where you trust the file, save '
            'tensors instead: torch.save(model.state_dict(), ...).') from None
    except CheckpointError as error:
        raise CheckpointError(f'{path} {error}.') from None
    except Exception as error:  # a program of someone else's: it can fail in any way
        raise CheckpointError(
            f'{path} is damaged or cut short ({type(error).__name__}: {error}).') from error


def _read_zip(archive: zipfile.ZipFile, mapped: mmap.mmap, copied: bool) -> Any:
    pickles = [name for name in archive.namelist() if name.split('/')[1:] == ['data.pkl']]
    if len(pickles) != 1 or any(name.endswith('/constants.pkl') for name in archive.namelist()):
        raise CheckpointError('is a zip archive or a TorchScript program, not a file of torch.save')
    # a few bytes could fill the memory: compressed, or as the content of many entries
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
        raise CheckpointError('is compressed, which torch.save never does')
    if (claimed := sum(entry.file_size for entry in archive.infolist())) > len(mapped):
        raise CheckpointError(f'is damaged: its entries claim {claimed} bytes of the {len(mapped)} it has')
    content = InertUnpickler(io.BytesIO(archive.read(pickles[0]))).load()
    folder = pickles[0].split('/')[0]

    def numbers(storage: Storage) -> Tensor:
        entry = archive.getinfo(f'{folder}/data/{storage.key}')
        return view_numbers(mapped, _data_start(mapped, entry), entry.file_size, storage, copied)

    return Materialiser(numbers)(content)


def _data_start(mapped: mmap.mmap, entry: zipfile.ZipInfo) -> int:
    """Where an entry's content begins: behind its local header, whose length the directory does not tell."""
    signature, name, extra = LOCAL_HEADER.unpack_from(mapped, entry.header_offset)
    if signature != b'PK\x03\x04':
        raise CheckpointError(f'is damaged: nothing begins where its directory says that {entry.filename} does')
    return entry.header_offset + LOCAL_HEADER.size + name + extra


def _read_legacy(mapped: mmap.mmap, copied: bool) -> Any:
    if InertUnpickler(mapped).load() != LEGACY_MAGIC:
        raise CheckpointError('is a pickle that torch.save did not write')
    for _ in ('protocol version', 'sizes of numbers'):
        InertUnpickler(mapped).load()
    unpickler = InertUnpickler(mapped)
    content = unpickler.load()
    storages = {}
    for key in InertUnpickler(mapped).load():  # the numbers follow, without their types
        if key not in unpickler.storages:
            raise CheckpointError('is damaged: it holds numbers of no tensor')
        itemsize = getattr(torch, unpickler.storages[key].dtype).itemsize
        size = int.from_bytes(mapped.read(8), 'little') * itemsize
        storages[key] = view_numbers(mapped, mapped.tell(), size, unpickler.storages[key], copied)
        mapped.seek(size, os.SEEK_CUR)
    return Materialiser(lambda storage: storages[storage.key])(content)

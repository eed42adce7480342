"""Reads pickles of whole modules, such as OpenAI's encoder.pkl, and runs nothing.

A pickle is a program: it names functions and the unpickler calls them. Here every name on a short
list stands for something inert, any other name ends the reading, and no tensor exists while the
program runs:

- foreign classes become `Record`, which ignores its arguments and keeps the state it is given
- torch's rebuild functions become descriptions of tensors
- OrderedDict becomes dict

None of these objects has attributes that a pickle could set (slots, no `__dict__`) or a method it
could replace, so that the opcode BUILD finds no lever either. Tensors are made afterwards, with
their bounds checked against the bytes in the file.
"""
import io
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from beit_mm.checkpoint.errors import CheckpointError, UnsafeCheckpointError

# Classes and functions that may be named and become inert: they carry no weights.
INERT_MODULES = ('dall_e.', 'torch.nn.modules.')
INERT_NAMES = {
    'argparse.Namespace', 'torch.device', 'torch.Size', '_codecs.encode',
    'numpy.dtype', 'numpy.ndarray',
    # what the message hub in mmengine's checkpoints consists of
    'mmengine.logging.history_buffer.HistoryBuffer',
    *(f'numpy.{core}.multiarray.{name}' for core in ('core', '_core')
      for name in ('scalar', '_reconstruct')),
}
DTYPES = dict(Double='float64', Float='float32', Half='float16', BFloat16='bfloat16', Long='int64',
              Int='int32', Short='int16', Char='int8', Byte='uint8', Bool='bool')
LEGACY_MAGIC = 0x1950a86a20f9469cfc6c  # first object of files that torch wrote before 1.6


class Record:
    """An instance of a foreign class: its state, and nothing that can be called."""

    __slots__ = ('state',)

    def __new__(cls, *args: Any) -> 'Record':
        record = super().__new__(cls)
        record.state = {}
        return record

    def __init__(self, *args: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.state = state


class Storage(NamedTuple):
    """A run of numbers somewhere in the file."""
    key: str
    dtype: str
    numel: int
    offset: int = 0  # in elements; not 0 for views in legacy files


class TensorView(NamedTuple):
    """A tensor to be made from a storage."""
    storage: Storage
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]


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
    return TensorView(storage, offset, tuple(size), tuple(stride))


def _method_of_record(owner: Any, name: str) -> type[Record]:
    """`getattr` as mmengine's history buffers use it: to name their own methods."""
    if owner is not Record:
        raise UnsafeCheckpointError(f'it asks for the attribute {name!r} of {owner!r:.80}')
    return Record


CALLEES = {
    'collections.OrderedDict': Callee(dict),
    'builtins.set': Callee(set),
    'builtins.getattr': Callee(_method_of_record),
    'torch._utils._rebuild_tensor': Callee(_rebuild_tensor),
    'torch._utils._rebuild_tensor_v2': Callee(_rebuild_tensor),
    'torch._utils._rebuild_parameter': Callee(lambda data, *_: data),
    'torch._utils._rebuild_parameter_with_state': Callee(lambda data, *_: data),
    **{f'torch.{name}Storage': dtype for name, dtype in DTYPES.items()},
}


class InertUnpickler(pickle.Unpickler):
    """The standard unpickler with both its ways out of the file closed.

    `storages` holds what the pickle referred to, by key.
    """

    def __init__(self, file: BinaryIO) -> None:
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
            case ('storage', str(dtype), key, _, int(numel)) if dtype in DTYPES.values():
                return self._storage(Storage(str(key), dtype, numel))
            case ('storage', str(dtype), key, _, int(numel), view) if dtype in DTYPES.values():
                offset = view[1] if view else 0
                return self._storage(Storage(str(key), dtype, numel, offset))
        raise UnsafeCheckpointError(f'it refers to a persistent object {pid!r:.80}')

    def _storage(self, storage: Storage) -> Storage:
        self.storages[storage.key] = storage
        return storage


def read_inert(path: Path, zipped: bool) -> Any:
    """Content of a torch file, zip or legacy, as plain containers and tensors.

    A module becomes its state dict, any other foreign object the dict of its attributes.

    Args:
        path: the file.
        zipped: whether it begins as a zip file; searching for one would find those inside a pickle.

    Raises:
        UnsafeCheckpointError: it asks for a name that is not on the list; says which.
        CheckpointError: it ends too early or contradicts itself.
    """
    try:
        with path.open('rb') as file:
            if not zipped:
                return _read_legacy(file)
            with zipfile.ZipFile(file) as archive:
                return _read_zip(archive)
    except UnsafeCheckpointError as error:
        raise UnsafeCheckpointError(
            f'{path} is refused, nothing in it was run: {error}. Where you trust the file, save '
            'tensors instead: torch.save(model.state_dict(), ...).') from None
    except CheckpointError as error:
        raise CheckpointError(f'{path} {error}.') from None
    except Exception as error:  # a program of someone else's: it can fail in any way
        raise CheckpointError(
            f'{path} is damaged or cut short ({type(error).__name__}: {error}).') from error


def _read_zip(archive: zipfile.ZipFile) -> Any:
    pickles = [name for name in archive.namelist() if name.split('/')[1:] == ['data.pkl']]
    if len(pickles) != 1 or any(name.endswith('/constants.pkl') for name in archive.namelist()):
        raise CheckpointError('is a zip archive or a TorchScript program, not a file of torch.save')
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
        raise CheckpointError('is compressed, which torch.save never does')  # a few bytes could fill memory
    content = InertUnpickler(io.BytesIO(archive.read(pickles[0]))).load()
    folder = pickles[0].split('/')[0]

    def read_bytes(storage: Storage) -> bytearray:
        return bytearray(archive.read(f'{folder}/data/{storage.key}'))

    return _Materialiser(read_bytes)(content)


def _read_legacy(file: BinaryIO) -> Any:
    if InertUnpickler(file).load() != LEGACY_MAGIC:
        raise CheckpointError('is a pickle that torch.save did not write')
    for _ in ('protocol version', 'sizes of numbers'):
        InertUnpickler(file).load()
    unpickler = InertUnpickler(file)
    content = unpickler.load()
    data = {}
    for key in InertUnpickler(file).load():  # the storages follow, without their types
        itemsize = getattr(torch, unpickler.storages[key].dtype).itemsize
        count = int.from_bytes(file.read(8), 'little') * itemsize
        if count > os.fstat(file.fileno()).st_size:
            raise CheckpointError('is damaged or cut short')
        data[key] = bytearray(file.read(count))
    return _Materialiser(lambda storage: data[storage.key])(content)


class _Materialiser:
    """Makes plain content of what the unpickler built; tensors go on sharing their storages."""

    def __init__(self, read_bytes: Callable[[Storage], bytearray]) -> None:
        self.read_bytes = read_bytes
        self.storages: dict[str, Tensor] = {}

    def __call__(self, content: Any) -> Any:
        """Modules become state dicts, other records dicts, tensor views tensors."""
        if isinstance(content, TensorView):
            return self._tensor(content)
        if isinstance(content, Record):
            content = _state_dict(content) if '_parameters' in content.state else content.state
        if isinstance(content, dict):
            return {key: self(value) for key, value in content.items()}
        if isinstance(content, (list, tuple, set)):
            return [self(value) for value in content]
        if content is None or isinstance(content, (str, bytes, int, float, complex)):
            return content
        return None  # a class or function by itself

    def _tensor(self, view: TensorView) -> Tensor:
        storage = view.storage
        if storage.key not in self.storages:
            data = self.read_bytes(storage)
            dtype = getattr(torch, storage.dtype)
            self.storages[storage.key] = (
                torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype))
        # as_strided checks the bounds, so numbers made up by the file cannot reach foreign memory
        return self.storages[storage.key].as_strided(
            view.size, view.stride, storage.offset + view.offset)


def _state_dict(module: Record, prefix: str = '') -> dict[str, TensorView]:
    """What `Module.state_dict()` would give."""
    found = {}
    transient = module.state.get('_non_persistent_buffers_set') or ()
    for name, value in {**module.state['_parameters'], **module.state['_buffers']}.items():
        if isinstance(value, TensorView) and name not in transient:
            found[prefix + name] = value
    for name, child in module.state['_modules'].items():
        if isinstance(child, Record):
            found.update(_state_dict(child, f'{prefix}{name}.'))
    return found

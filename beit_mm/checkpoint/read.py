"""Reads files safely, and writes them: nothing in a checkpoint is executed, none is left half written."""

import json
import pickle
import re
import sys
import threading
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePath
from typing import Any, BinaryIO

import numpy as np
import safetensors.torch
import torch
from mmengine.logging import HistoryBuffer
from safetensors import safe_open
from torch import Tensor
from torch import _weights_only_unpickler as reader

from beit_mm.errors import UserError
from beit_mm.files import atomic_file, file_sha256

META_KEY = 'beit_mm'  # in the metadata of safetensors files, which has strings only: `meta` as JSON
MAX_NAME = 300  # characters of a tensor's name, which messages quote
MAX_INFLATION = 8  # bytes of content for each of the file; torch.save compresses nothing
MAX_EXPANDED = 2**26  # bytes that expanded tensors (stride 0) have in excess of what is stored
SUFFIXES = ('.pth', '.pt', '.bin', '.safetensors')
NO_CHECKPOINTS = {  # what downloads leave in the place of a checkpoint, by how it begins
    b'<': 'a web page',
    b'version https://git-lfs': 'a git-lfs pointer (`git lfs pull` fetches the file)',
    b'--20': 'a log of wget (its option -o names the log; -O names the file)',
}
# What torch.save writes, below one folder of any name
ZIP_ENTRY = r'[^/]+/(data\.pkl|data/\d+|version|byteorder|\.format_version|\.storage_alignment|\.data/serialization_id)'
REFUSED_NAME = re.compile(r'GLOBAL (\S+) (?:was not an allowed global|whose module)')  # in torch's message
CONTAINERS = (dict, list, tuple, set, frozenset)
NUMPY_VALUES = (np.ndarray, np.generic)
VALUES: tuple[type, ...] = (str, bytes, bytearray, int, float, complex, bool, type(None), PurePath)
VALUES += (*NUMPY_VALUES, torch.dtype, torch.device, torch.layout, HistoryBuffer)


class CheckpointError(UserError):
    """The file is not a checkpoint, or not the one expected."""


class UnsafeCheckpointError(CheckpointError):
    """The file asks for more than tensors and plain values; none of it was run."""


@contextmanager
def blaming(path: str | Path) -> Iterator[None]:
    """Turns any error that a file's content causes into a CheckpointError of one line that names the file."""
    try:
        yield
    except UserError as error:
        if str(error).startswith((f'{path} ', f'{path}:')):
            raise
        raise CheckpointError(f'{path} {error}') from None
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        reason = ' '.join(ascii(str(error))[1:-1].split())
        raise CheckpointError(
            f'{path} is no checkpoint of a BEiT: reading it as one ends in {type(error).__name__}: {reason:.200}.'
        ) from error


# What torch's weights-only reader may call. It lets a file set attributes: on objects that have none they fail.


class Attributes(dict):
    """The attributes of an object whose class is not imported."""

    __slots__ = ()
    __setstate__ = dict.update

    def plain(self) -> Any:
        """What comes in its place when the file is read."""
        return dict(self)


class PickledModule(Attributes):
    """A network of DALL-E that was saved as a module; these have no buffers."""

    __slots__ = ()

    def plain(self, prefix: str = '') -> dict[str, Tensor]:
        """What `torch.nn.Module.state_dict` would give; empties the object."""
        parameters = self['_parameters'].items()
        weights = {prefix + name: tensor.detach() for name, tensor in parameters if isinstance(tensor, Tensor)}
        # taken out, or a module that is in many places would be visited without end
        for name, child in self.pop('_modules').items():
            weights |= _only(child, PickledModule).plain(f'{prefix}{name}.')
        return weights


class PickledHistory(Attributes):
    """mmengine's HistoryBuffer, whose own methods would call what the file gives them."""

    __slots__ = ()

    def plain(self) -> HistoryBuffer:
        logs, counts = self.get('_log_history'), self.get('_count_history')
        if not all(isinstance(numbers, np.ndarray) and numbers.dtype.kind in 'biuf' for numbers in (logs, counts)):
            raise CheckpointError('it holds a log history with more than numbers')
        return HistoryBuffer(logs.view(np.ndarray), counts.view(np.ndarray), int(self['max_length']))


class PickledType:
    """Stands for `numpy.dtype`, whose state may call any bytes pointers to objects: numbers and text only."""

    __slots__ = ('dtype',)

    def __init__(self, code: str, align: bool = False, copy: bool = False) -> None:
        if not re.fullmatch(r'b1|[iuf][1248]|U\d+', code):
            raise CheckpointError(f'it holds a NumPy type {ascii(code)[:60]}')
        self.dtype = np.dtype(code)

    def __setstate__(self, state: tuple) -> None:
        if state[1] not in ('|', '<' if sys.byteorder == 'little' else '>'):
            raise CheckpointError('it holds NumPy values in the byte order of another machine')


class PickledArray(np.ndarray):
    """Stands for `numpy.ndarray`, whose pickles give it no arguments of its own: empty until its values are there."""

    __slots__ = ()
    __setitem__ = None  # type: ignore[assignment]  # NumPy would read where an object's attributes say it lies

    def __new__(cls) -> 'PickledArray':
        return super().__new__(cls, (0,), 'i1')

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.plain().__reduce_ex__(protocol)

    def __setstate__(self, state: tuple) -> None:  # type: ignore[override]
        version, shape, kind, fortran, data = state
        super().__setstate__((version, shape, _only(kind, PickledType).dtype, fortran, data))

    def plain(self) -> np.ndarray:
        return self.view(np.ndarray)


def _only(value: Any, kind: type) -> Any:
    """What a file gives where one type alone is meant; the attributes of another could say anything."""
    if type(value) is not kind:
        raise CheckpointError(f'it holds a {type(value).__name__} in the place of a {kind.__name__}')
    return value


def _tensor(storage: Any, offset: Any, size: Any, stride: Any, grad: Any = False, hooks: Any = None, dtype: Any = None):
    """Of a storage in the file: a new one has what was in the memory before."""
    storage = _only(storage, torch.TypedStorage)
    tensor = torch.empty((0,), dtype=dtype or storage.dtype, device='cpu')
    return tensor.set_(storage._untyped_storage, offset, size, stride).requires_grad_(grad)


# in OpenAI's encoder.pkl and decoder.pkl
DALLE_MODULES = """
    dall_e.encoder.Encoder dall_e.encoder.EncoderBlock dall_e.decoder.Decoder dall_e.decoder.DecoderBlock
    dall_e.utils.Conv2d torch.nn.modules.container.Sequential torch.nn.modules.activation.ReLU
    torch.nn.modules.conv.Conv2d torch.nn.modules.linear.Identity torch.nn.modules.pooling.MaxPool2d
    torch.nn.modules.upsampling.Upsample
""".split()
NUMPY = ('numpy.core.multiarray', 'numpy._core.multiarray')  # of NumPy 1 and 2
STORAGES = 'Bool Byte Char Short Int Long Half BFloat16 Float Double ComplexFloat ComplexDouble'.split()
ALLOWED: dict[str, Any] = {
    **{str(kind): kind for kind in vars(torch).values() if isinstance(kind, torch.dtype) and 'q' not in str(kind)},
    **{f'torch.{name}Storage': torch.serialization.StorageType(f'{name}Storage') for name in STORAGES},
    'torch.storage.UntypedStorage': torch.serialization.StorageType('ByteStorage'),
    'torch.Tensor': 'torch.Tensor',  # a name only: called, it would show memory that nobody has set
    **{f'torch._utils._rebuild_tensor{version}': _tensor for version in ('', '_v2', '_v3')},
    'torch._utils._rebuild_parameter': lambda data, grad, _: torch.nn.Parameter(_only(data, Tensor), grad),
    'torch._utils._rebuild_parameter_with_state': lambda data, grad, *_: torch.nn.Parameter(_only(data, Tensor), grad),
    'torch._tensor._rebuild_from_type_v2': lambda build, kind, args, attributes: build(*args),
    'torch.serialization._get_layout': torch.serialization._get_layout,
    **{f'torch.{kind.__name__}': kind for kind in (torch.Size, torch.device)},
    **{f'builtins.{kind.__name__}': kind for kind in (bytearray, complex, set)},
    'builtins.getattr': lambda *_: None,  # by which log histories name their methods, which are not read
    '_codecs.encode': lambda text, _: str.encode(text, 'latin1'),  # how bytes are written
    'collections.OrderedDict': OrderedDict,
    'collections.Counter': lambda *counts: Counter(*counts),
    'argparse.Namespace': Attributes,  # the released code's `args`
    'mmengine.config.config.ConfigDict': lambda *values: dict(*values),
    'mmengine.logging.history_buffer.HistoryBuffer': PickledHistory,
    **{f'{module}.{kind}Path': PurePath for module in ('pathlib', 'pathlib._local') for kind in ('Posix', 'Windows')},
    **{f'{core}.scalar': lambda kind, data: np.frombuffer(data, _only(kind, PickledType).dtype)[0] for core in NUMPY},
    **{f'{core}._reconstruct': lambda *_: PickledArray() for core in NUMPY},
    'numpy.dtype': PickledType,
    'numpy.ndarray': PickledArray,
    **dict.fromkeys(DALLE_MODULES, PickledModule),
}
_reading = threading.Lock()  # torch's reader has one list for all threads


def read_checkpoint(path: str | Path, sha256: str | None = None, mapped: bool = False) -> dict[str, Any]:
    """Reads .pth, .pt, .bin, .pkl and .safetensors files, told apart by their content.

    Args:
        path: the file.
        sha256: expected hash; None reads any file.
        mapped: reads tensors when they are used and compares no check sum, for a look at the values beside them. They
            would change, or end the process, when the file is written again or cut.

    Returns:
        The file's content, tensors on the CPU: of a safetensors file its tensors by name, or dict(state_dict=...,
        meta=...) where `write_checkpoint` gave it a `meta`; of a module of DALL-E its state dict.

    Raises:
        CheckpointError: no checkpoint, damaged, of another hash, or with content that no checkpoint has.
        UnsafeCheckpointError: the file asks for functions or classes that are not on a short list; says which.
    """
    path = Path(path)
    if path.exists() and not path.is_file():  # reading a pipe could wait for ever
        raise CheckpointError(f'{path} is no file.')
    with path.open('rb') as file:
        head = file.read(64)
    # before pickles, whose first byte a length can begin with
    is_safetensors = head[8:9] == b'{' and int.from_bytes(head[:8], 'little') <= 100_000_000  # bytes, the format's own
    if not is_safetensors and not head.startswith((b'PK\x03\x04', b'\x80')):
        text = head.removeprefix(b'\xef\xbb\xbf').lstrip()
        described = next((what for start, what in NO_CHECKPOINTS.items() if text.startswith(start)), 'no checkpoint')
        begins = f'begins with {text.splitlines()[0].decode(errors="replace")!r}' if text else 'is empty'
        raise CheckpointError(f'{path} is {described}: it {begins}.')
    if sha256 is not None and (actual := file_sha256(path)) != sha256.lower():
        raise CheckpointError(
            f'{path} has SHA-256 {actual}, expected {sha256}: it is another file, or was changed on '
            'its way here. Fetch it again.'
        )
    try:
        content = _read_safetensors(path) if is_safetensors else _read_torch(path, head.startswith(b'PK'), mapped)
    except pickle.UnpicklingError as error:
        if name := REFUSED_NAME.search(str(error)):
            reason = f'it asks for {"" if "." in name[1] else "builtins."}{ascii(name[1])[1:-1][:MAX_NAME]}'
        elif 'Only persistent_load of storage' in str(error):
            reason = 'it holds a module in the form before torch 1.6, which only running it would read'
        else:
            reason = 'it holds more than tensors and plain values'
        raise UnsafeCheckpointError(
            f'{path} is refused, nothing in it was run: {reason}. Where you trust the file, '
            'save tensors instead: torch.save(model.state_dict(), ...).'
        ) from None
    except CheckpointError as error:
        raise CheckpointError(f'{path} is refused: {error}.') from None
    except Exception as error:  # a program of someone else's: it can fail in any way
        raise CheckpointError(
            f'{path} is damaged or cut short, or no checkpoint '
            f'({type(error).__name__}: {" ".join(ascii(str(error)[:200])[1:-1].split())}).'
        ) from error
    if not isinstance(content, dict):
        raise CheckpointError(f'{path} holds a {type(content).__name__}, expected a dict of tensors or a module.')
    return content


def _read_safetensors(path: Path) -> dict[str, Any]:
    with safe_open(path, framework='pt') as file:
        meta = json.loads((file.metadata() or {}).get(META_KEY, 'null'))
        # copied out of the file, which may be written again while they are in use
        weights = {name: file.get_tensor(name).clone() for name in file.keys()}
    check_content(weights)
    return dict(state_dict=weights, meta=meta) if isinstance(meta, dict) else weights


def _read_torch(path: Path, zipped: bool, mapped: bool) -> Any:
    mapped, size = mapped and zipped, path.stat().st_size
    if zipped:
        with zipfile.ZipFile(path) as archive:
            # Python could import code that lies beside the tensors.
            if others := [name for name in archive.namelist() if not re.fullmatch(ZIP_ENTRY, name)]:
                raise CheckpointError(f'it holds {others[0][:MAX_NAME]!r}, and torch.save did not write it')
            if (held := sum(entry.file_size for entry in archive.infolist())) > MAX_INFLATION * size:
                raise CheckpointError(f'its {size:,} bytes would become {held:,}; write it anew, without compression')
            if not mapped and (damaged := archive.testzip()):  # torch's reader compares no check sums
                raise zipfile.BadZipFile(f'{damaged} does not have its check sum')
    named = 0  # bytes

    def filled(storage: Any, _: Any) -> Any:
        """Zeros in a storage that cannot grow: a file of torch before 1.6 may leave it without values."""
        nonlocal named
        named += storage.nbytes()
        if named > size:
            raise CheckpointError(f'it is cut short, or its {size:,} bytes name storages of more')
        return storage.fill_(0)[:]

    place = 'cpu' if zipped else filled
    # Nothing public takes names off torch's own list. Where a later torch lacks these functions, nothing is read.
    with _reading, path.open('rb') as file:
        before = reader._get_allowed_globals, reader._get_user_allowed_globals
        reader._get_allowed_globals, reader._get_user_allowed_globals = lambda: ALLOWED, dict
        try:
            # Only a name can be mapped, but torch 2.15 believes one that ends with .safetensors, whatever is in it.
            content = torch.load(path if mapped else file, map_location=place, weights_only=True, mmap=mapped)
        finally:
            reader._get_allowed_globals, reader._get_user_allowed_globals = before
    return check_content(content)


def check_content(content: Any) -> Any:
    """Refuses content that checkpoints do not have: other than dense tensors, functions, classes, unknown objects.

    Attributes that a file sets on dicts and tensors are taken off, in place: they could stand in the place of methods.
    torch's `_metadata` of state dicts stays. Returns the content with plain values in the place of stand-ins.
    """
    whole, seen, plain = [content], {}, {}  # the last two by id, with the objects, which keep their ids while they live
    waiting: list[Any] = [whole]
    expanded = 0
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen[id(value)] = value
        if isinstance(value, (dict, list)):
            for key, inner in [*(dict.items(value) if isinstance(value, dict) else enumerate(value))]:
                if isinstance(inner, (Attributes, PickledArray)):
                    if id(inner) not in plain:
                        plain[id(inner)] = inner, inner.plain()
                    value[key] = plain[id(inner)][1]
                elif isinstance(inner, Tensor) and not (str(key).isprintable() and len(str(key)) <= MAX_NAME):
                    raise CheckpointError(f'it names a tensor {str(key)[:60]!r}')
        if isinstance(value, Tensor):
            # nobody compares the indices of a sparse tensor with its size: adding it would write anywhere in memory
            if value.layout is not torch.strided or value.is_nested or value.is_quantized or value.device.type != 'cpu':
                raise CheckpointError('it holds a tensor that is sparse, nested, quantized or without values')
            expanded += max(0, value.nbytes - value.untyped_storage().nbytes())  # in memory once it is copied
            if expanded > MAX_EXPANDED:
                raise CheckpointError(f'it holds tensors that are expanded by more than {MAX_EXPANDED:,} bytes')
            value.grad = value._backward_hooks = None
            vars(value).clear()
        elif isinstance(value, dict):
            waiting += [*dict.keys(value), *dict.values(value)]
            attributes = getattr(value, '__dict__', {})
            metadata = attributes.get('_metadata')
            attributes.clear()
            if isinstance(metadata, dict) and all(isinstance(item, dict) for item in dict.values(metadata)):
                attributes['_metadata'] = metadata
                waiting.append(metadata)
        elif isinstance(value, CONTAINERS):
            waiting += value
        elif isinstance(value, NUMPY_VALUES) and value.dtype.kind == 'U':
            value.tobytes().decode('utf-32', 'surrogatepass')  # Python counts on it that text has characters only
        elif not isinstance(value, VALUES) or isinstance(value, NUMPY_VALUES) and value.dtype.kind not in 'biuf':
            name = next((name for name, known in ALLOWED.items() if known is value), type(value).__name__)
            raise CheckpointError(f'it holds the function, class or object {name!r}')
    return whole[0]


def save_torch(content: Any, file: BinaryIO) -> None:
    """torch.save into an open file; raises OSError on a full disk."""
    try:
        torch.save(content, file)
    except RuntimeError as error:  # torch's own, after that of the file
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise


def write_checkpoint(path: str | Path, content: Mapping[str, Any]) -> None:
    """Writes a checkpoint completely or not at all. Equal content gives equal bytes.

    Args:
        path: ends in one of SUFFIXES.
        content: plain containers, values and tensors; for .safetensors either tensors by name or
            dict(state_dict=..., meta=...), where `meta` has what JSON has.

    Raises CheckpointError for another suffix, or content that such a file cannot hold.
    """
    path = Path(path)
    if path.suffix not in SUFFIXES:
        raise CheckpointError(f'{path} is no name for a checkpoint: it must end in {", ".join(SUFFIXES)}.')
    with atomic_file(path) as file:
        if path.suffix == '.safetensors':
            file.write(_safetensors_bytes(path, content))
        else:
            save_torch(content, file)


def _safetensors_bytes(path: Path, content: Mapping[str, Any]) -> bytes:
    weights, metadata = content, dict(format='pt')  # transformers reads no file without it
    if content.keys() == {'state_dict', 'meta'}:
        try:
            # the only key: the library writes several in any order, and equal content would get another hash
            weights, metadata = content['state_dict'], {META_KEY: json.dumps(content['meta'])}
        except (TypeError, ValueError) as error:
            raise CheckpointError(f'{path} cannot be written: its meta has not plain values only ({error}).') from error
    if others := [name for name, value in weights.items() if not isinstance(value, Tensor)]:
        raise CheckpointError(f'{path} cannot be written: {others[0]} is no tensor.')
    # each with memory of its own, as the format has it
    copies = {name: tensor.detach().clone(memory_format=torch.contiguous_format) for name, tensor in weights.items()}
    return safetensors.torch.save(copies, metadata)

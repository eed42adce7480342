"""Reads checkpoint files without running anything in them, and writes them completely or not at all."""

import json
import pickle
import re
import threading
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePath
from typing import Any, BinaryIO

import numpy as np
import safetensors.torch
import torch
from mmengine.logging import HistoryBuffer
from safetensors import safe_open
from torch import Tensor

from beit_mm.errors import CheckpointError, UserError
from beit_mm.files import atomic_file, file_sha256, printable, size_of_file

META_KEY = 'beit_mm'  # where safetensors metadata, which holds only strings, has `meta` as JSON
MAX_NAME = 300  # characters of a tensor's name, which messages quote
MAX_EXPANDED = 2**26  # bytes by which expanded tensors (stride 0) may exceed what is stored
SUFFIXES = ('.pth', '.pt', '.bin', '.safetensors')
# Names of the entries that torch.save writes: they lie in one folder, whose name varies
ZIP_ENTRY = r'[^/]+/(data\.pkl|data/\d+|version|byteorder|\.format_version|\.storage_alignment|\.data/serialization_id)'
REFUSED_NAME = re.compile(r'GLOBAL (\S+) (?:was not an allowed global|whose module)')  # in torch's message


@contextmanager
def as_checkpoint_error(path: str | Path) -> Iterator[None]:
    """Turns errors that a file's content causes into a CheckpointError of one line. It begins with the path.

    The message of a UserError raised inside has no subject, since the path precedes it: 'names 3 classes, but ...'.
    """
    try:
        yield
    except UserError as error:
        if str(error).startswith((f'{path} ', f'{path}:')):
            raise
        raise CheckpointError(f'{path} {error}') from None
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise CheckpointError(f'{path} is not a BEiT checkpoint ({one_line(error)}).') from error


def one_line(error: Exception) -> str:
    return f'{type(error).__name__}: {" ".join(printable(str(error)[:200]).split())}'


def read_checkpoint(path: str | Path, sha256: str | None = None) -> dict[str, Any]:
    """Reads .pth, .pt, .bin, .pkl and .safetensors files; the content decides the format, not the name.

    Returns the content, with tensors on the CPU. A safetensors file gives its tensors by name, or
    dict(state_dict=..., meta=...) if `write_checkpoint` stored a `meta`; a DALL-E module gives its state dict.

    Raises CheckpointError if the file is not a checkpoint, is damaged, has another hash than `sha256`, or holds more
    than tensors and plain values.
    """
    path = Path(path)
    read = _reader_of(path)
    if sha256 is not None:
        actual = file_sha256(path)
        if actual != sha256.lower():
            raise CheckpointError(f'{path} has SHA-256 {actual}, expected {sha256}: another file, or a changed one.')
    try:
        content = read(path)
        if not isinstance(content, dict):
            raise CheckpointError(f'it holds a {type(content).__name__}, expected a dict of tensors or a module')
    except pickle.UnpicklingError as error:
        refused = REFUSED_NAME.search(str(error))
        asked = printable(refused[1])[:MAX_NAME] if refused else 'more than tensors and plain values'
        raise CheckpointError(
            f'{path} asks for {asked}; it is refused, and nothing in it was run. If you trust the file, save its '
            'tensors instead: torch.save(model.state_dict(), ...).'
        ) from None
    except CheckpointError as error:
        raise CheckpointError(f'{path} is refused: {error}.') from None
    except Exception as error:  # a damaged file can make a reader fail in any way
        raise CheckpointError(f'{path} is damaged, cut short or not a checkpoint ({one_line(error)}).') from error
    return content


def _reader_of(path: Path) -> Callable[[Path], Any]:
    size_of_file(path)
    with path.open('rb') as file:
        head = file.read(64)
    # safetensors first: the length of its header, at most 100 MB, may look like the start of a pickle
    if head[8:9] == b'{' and int.from_bytes(head[:8], 'little') <= 100_000_000:
        return _read_safetensors
    if head.startswith(b'PK\x03\x04'):
        return _read_zip
    if head.startswith(b'\x80'):
        return _read_legacy
    text = head.lstrip()
    is_known = re.match(rb'<(!doctype|html|\?xml)|version https://git-lfs', text, re.IGNORECASE)
    # others are not quoted: a checkpoint may have named the file, and the message may go back to its sender
    begins = f'begins with {text.splitlines()[0].decode(errors="replace")!r}' if is_known else 'holds something else'
    raise CheckpointError(f'{path} is not a checkpoint: it {begins if text else "is empty"}.')


def _read_safetensors(path: Path) -> dict[str, Any]:
    with safe_open(path, framework='pt') as file:
        meta = json.loads((file.metadata() or {}).get(META_KEY, 'null'))
        # cloned, because the file may be overwritten while the tensors are in use
        weights = copy_checked({name: file.get_tensor(name).clone() for name in file.keys()}, {})
    return dict(state_dict=weights, meta=meta) if isinstance(meta, dict) else weights


def _read_zip(path: Path) -> Any:
    size = path.stat().st_size
    with zipfile.ZipFile(path) as archive:
        # With the file on sys.path Python could import other entries as code.
        if others := [name for name in archive.namelist() if not re.fullmatch(ZIP_ENTRY, name)]:
            raise CheckpointError(f'it holds {others[0][:MAX_NAME]!r}, which torch.save does not write')
        unpacked = sum(entry.file_size for entry in archive.infolist())
        if unpacked > size:  # torch.save compresses nothing
            raise CheckpointError(f'its {size:,} bytes would unpack to {unpacked:,}; save it again without compression')
        if damaged := archive.testzip():  # torch does not compare checksums
            raise zipfile.BadZipFile(f'{damaged} has a wrong checksum')
    return _read_torch(path, 'cpu')


def _read_legacy(path: Path) -> Any:
    """Reads files of torch before 1.6. They declare all storages first, so a short file can declare huge ones."""
    size, declared = path.stat().st_size, 0  # bytes

    def filled(storage: Any, _: Any) -> Any:
        """Overwrites what was in a storage's memory before, and returns a slice of it, which cannot grow."""
        nonlocal declared
        declared += storage.nbytes()
        if declared > size:
            raise CheckpointError(f'it is cut short, or its {size:,} bytes declare larger storages')
        return storage.fill_(0)[:]

    return _read_torch(path, filled)


def _read_torch(path: Path, map_location: Any) -> Any:
    # an open file, not a path: torch 2.15 would choose the reader by the suffix of the name
    with path.open('rb') as file, only_stand_ins():
        read = torch.load(file, map_location, weights_only=True)
    known: Copies = {}
    content = copy_checked(read, known)
    tensors = [new for new, _ in known.values() if isinstance(new, Tensor)]
    # an expanded tensor shares its storage, and takes its full size once it is copied
    if sum(max(0, tensor.nbytes - tensor.untyped_storage().nbytes()) for tensor in tensors) > MAX_EXPANDED:
        raise CheckpointError(f'it holds tensors that are expanded by more than {MAX_EXPANDED:,} bytes')
    return content


# Stand-ins that torch's weights-only reader builds instead of the classes that files name. They only hold values.


class Attributes(dict):
    """The attributes of an object whose class is not imported."""

    __slots__ = ()
    __setstate__ = dict.update


class LogHistory(Attributes):  # for mmengine's HistoryBuffer, which would call functions that the file names
    __slots__ = ()


class Module(Attributes):  # for a DALL-E network that was saved as a module; it has no buffers
    __slots__ = ()


class NumpyType:
    """For `numpy.dtype` of numbers and text. A real dtype would take its state, even forged pointers, from the file."""

    __slots__ = ('code',)

    def __init__(self, code: str, *_: Any) -> None:
        if not re.fullmatch(r'b1|[iuf][1248]|U\d+', code):
            raise CheckpointError(f'it holds the NumPy type {ascii(code):.60}')
        self.code = f'<{code}'

    def __setstate__(self, state: tuple) -> None:
        if state[1] == '>':
            raise CheckpointError('it holds NumPy values in the byte order of another machine')


class NumpyArray:
    """For `numpy.ndarray`, whose values follow as its state."""

    __slots__ = ('values',)

    def __init__(self, *_: Any) -> None:
        pass

    def __setstate__(self, state: tuple) -> None:
        _, shape, kind, is_fortran, content = state
        self.values = numpy_values(kind, content).reshape(shape, order='F' if is_fortran else 'C').copy()


def numpy_values(kind: Any, content: bytes) -> np.ndarray:
    if type(kind) is not NumpyType:
        raise CheckpointError(f'it holds a {type(kind).__name__} instead of a NumPy type')
    if 'U' in kind.code:
        content.decode('utf-32-le', 'surrogatepass')  # raises for what Python's text cannot hold
    return np.frombuffer(content, kind.code)


# in OpenAI's encoder.pkl and decoder.pkl
DALLE_MODULES = """
    dall_e.encoder.Encoder dall_e.encoder.EncoderBlock dall_e.decoder.Decoder dall_e.decoder.DecoderBlock
    dall_e.utils.Conv2d torch.nn.modules.container.Sequential torch.nn.modules.activation.ReLU
    torch.nn.modules.conv.Conv2d torch.nn.modules.linear.Identity torch.nn.modules.pooling.MaxPool2d
    torch.nn.modules.upsampling.Upsample
""".split()
STAND_INS: dict[str, Callable] = {  # allowed in addition to torch's own list: tensors and plain containers
    'argparse.Namespace': Attributes,  # the released code's `args`
    'builtins.getattr': lambda *_: None,  # log histories store their methods by it; nothing uses the result
    'mmengine.config.config.ConfigDict': Attributes,
    'mmengine.logging.history_buffer.HistoryBuffer': LogHistory,
    'numpy.dtype': NumpyType,
    'numpy.ndarray': NumpyArray,
    **dict.fromkeys(DALLE_MODULES, Module),
}
for core in ('numpy.core.multiarray', 'numpy._core.multiarray'):  # of NumPy 1 and 2
    STAND_INS[f'{core}._reconstruct'] = NumpyArray
    STAND_INS[f'{core}.scalar'] = lambda kind, content: numpy_values(kind, content)[0]
for paths in ('pathlib', 'pathlib._local'):
    STAND_INS[f'{paths}.PosixPath'] = STAND_INS[f'{paths}.WindowsPath'] = lambda *parts: PurePath(*parts)
_reading = threading.Lock()  # torch has one allow-list for all threads


@contextmanager
def only_stand_ins() -> Iterator[None]:
    """Allows STAND_INS, and sets aside what other code has allowed, such as the real classes."""
    with _reading:
        others = torch.serialization.get_safe_globals()
        torch.serialization.clear_safe_globals()
        try:
            with torch.serialization.safe_globals([(stand_in, name) for name, stand_in in STAND_INS.items()]):
                yield
        finally:
            torch.serialization.add_safe_globals(others)


VALUES: tuple[type, ...] = (str, bytes, bytearray, int, float, complex, type(None), PurePath)
VALUES += (np.generic, torch.dtype, torch.device, torch.layout)
Copies = dict[int, tuple[Any, Any]]  # id of a value -> (its copy, the value); a value that is kept alive keeps its id


def copy_checked(value: Any, known: Copies) -> Any:
    """Copies what was read, without attributes that a file set; CheckpointError for what checkpoints do not hold."""
    if id(value) in known:
        return known[id(value)][0]
    new: Any
    if isinstance(value, Tensor):
        new = _copy_tensor(value)
    elif isinstance(value, NumpyArray):
        new = value.values
    elif isinstance(value, Module):
        new = copy_checked(_weights_of(value), known)
    elif isinstance(value, LogHistory):
        logs, counts = value['_log_history'].values, value['_count_history'].values
        new = HistoryBuffer(logs, counts, int(value['max_length']))
    elif isinstance(value, dict):
        new = _copy_dict(value, known)
    elif isinstance(value, list):
        new = []
        known[id(value)] = new, value  # first, because a list can contain itself
        new += [copy_checked(inner, known) for inner in value]
    elif isinstance(value, (tuple, set)):
        kind = next(kind for kind in (torch.Size, tuple, set) if isinstance(value, kind))  # never a subclass of them
        new = kind([copy_checked(inner, known) for inner in value])
    elif isinstance(value, VALUES):
        new = value
    else:
        name = getattr(value, '__name__', type(value).__name__)
        raise CheckpointError(f'it holds the function, class or object {name!r}')
    known[id(value)] = new, value
    return new


def _copy_tensor(tensor: Tensor) -> Tensor:
    new = Tensor.detach(tensor)  # not tensor.detach, which the file may have set
    # torch does not check that a sparse tensor's indices lie inside its size: adding it could write outside memory
    is_dense = new.layout is torch.strided and not new.is_nested and not new.is_quantized
    if not is_dense or new.device.type != 'cpu':
        raise CheckpointError('it holds a tensor that is sparse, nested, quantized or without values')
    return new


def _copy_dict(value: dict, known: Copies) -> dict:
    metadata = getattr(value, '__dict__', {}).get('_metadata')  # of a state dict
    new: Any = OrderedDict() if isinstance(metadata, dict) else {}
    known[id(value)] = new, value
    for key, inner in dict.items(value):
        if isinstance(inner, Tensor) and not (str(key).isprintable() and len(str(key)) <= MAX_NAME):
            raise CheckpointError(f'it names a tensor {str(key)[:60]!r}')
        new[copy_checked(key, known)] = copy_checked(inner, known)
    if isinstance(metadata, dict):
        new._metadata = copy_checked(metadata, known)
    return new


def _weights_of(module: Module) -> dict[str, Tensor]:
    """A module's tensors by name. Takes them out, so that a module that occurs twice, or in itself, raises KeyError."""
    weights = {name: tensor for name, tensor in module.pop('_parameters').items() if isinstance(tensor, Tensor)}
    for name, child in module.pop('_modules').items():
        weights |= {f'{name}.{key}': tensor for key, tensor in _weights_of(child).items()}
    return weights


def save_torch(content: Any, file: BinaryIO) -> None:
    """torch.save into an open file; raises OSError on a full disk."""
    try:
        torch.save(content, file)
    except RuntimeError as error:  # torch raises its own error while it handles the file's OSError
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise


def write_checkpoint(path: str | Path, content: Mapping[str, Any]) -> None:
    """Writes a checkpoint completely or not at all. Equal content gives equal bytes.

    Args:
        path: ends in one of SUFFIXES; else CheckpointError.
        content: plain containers, values and tensors; for .safetensors either tensors by name or
            dict(state_dict=..., meta=...), where `meta` is JSON.
    """
    path = Path(path)
    if path.suffix not in SUFFIXES:
        raise CheckpointError(f'{path} is not a name for a checkpoint: it must end in {", ".join(SUFFIXES)}.')
    with atomic_file(path) as file:
        if path.suffix == '.safetensors':
            file.write(_safetensors_bytes(content))
        else:
            save_torch(content, file)


def _safetensors_bytes(content: Mapping[str, Any]) -> bytes:
    weights, metadata = content, dict(format='pt')  # transformers does not read a file without it
    if content.keys() == {'state_dict', 'meta'}:
        # this key alone: safetensors writes several in random order, but equal content must give equal bytes
        weights, metadata = content['state_dict'], {META_KEY: json.dumps(content['meta'])}
    # each in its own memory, which the format requires
    copies = {name: tensor.detach().clone(memory_format=torch.contiguous_format) for name, tensor in weights.items()}
    return safetensors.torch.save(copies, metadata)

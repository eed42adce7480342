"""Reads and writes checkpoint files: nothing that one holds is executed, none is left half written."""

import json
import math
import pickle
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePath
from typing import Any, BinaryIO

import numpy as np
import safetensors.torch
import torch
from mmengine.config import ConfigDict
from mmengine.logging import HistoryBuffer
from safetensors import safe_open
from torch import Tensor

from beit_mm.checkpoint.limits import LimitError, check_content, check_zip
from beit_mm.files import atomic_file, file_sha256
from beit_mm.terminal import UserError

META_KEY = 'beit_mm'  # in the metadata of safetensors files, which has strings only: `meta` as JSON
MAX_HEADER = 100_000_000  # bytes, of safetensors files: the format's own limit
MAX_META = 4_000_000  # characters; as a list of lists they would be a hundred megabytes
SUFFIXES = ('.pth', '.pt', '.bin', '.safetensors')
NO_CHECKPOINTS = {  # what downloads leave in the place of a checkpoint, by how it begins
    b'<': 'a web page',
    b'version https://git-lfs': 'a git-lfs pointer (`git lfs pull` fetches the file)',
    b'--20': 'a log of wget (its option -o names the log; -O names the file)',
}
NUMPY_TYPE = re.compile(r'b1|[iu][1248]|f[248]|U(?:\d{1,2}|1\d\d|2[0-4]\d|25[0-6])')  # 1024 bytes at most
NATIVE = '<' if sys.byteorder == 'little' else '>'
MAX_AXES = 32  # of an array, NumPy 1's own limit
MIN_ARRAY = 4096  # bytes that the sides of an empty array may claim, each 0 taken for 1
REFUSED_NAME = re.compile(r'GLOBAL (\S+) (?:was not an allowed global|whose module)')  # in torch's message


class CheckpointError(UserError):
    """The file is not a checkpoint, or not the one expected."""


class UnsafeCheckpointError(CheckpointError):
    """The file asks for more than tensors and plain values; none of it was run."""


@contextmanager
def blaming(path: str | Path) -> Iterator[None]:
    """Turns what odd content of a file makes any code raise into a CheckpointError of one line."""
    try:
        yield
    except CheckpointError:
        raise
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        reason = ' '.join(ascii(str(error))[1:-1].split())
        raise CheckpointError(
            f'{path} is no checkpoint of a BEiT: reading it as one ends in {type(error).__name__}: {reason:.200}.'
        ) from error


# --- reading --------------------------------------------------------------------------------------


class Attributes(dict):
    """Stands for an object whose class is not imported: the attributes that it was saved with."""

    __setstate__ = dict.update


class PickledModule(Attributes):
    """Stands for a network of DALL-E that was saved whole; these have no buffers."""

    def state_dict(self, prefix: str = '') -> dict[str, Tensor]:
        """What `torch.nn.Module.state_dict` would give; empties the object."""
        parameters = self['_parameters'].items()
        weights = {prefix + name: tensor.detach() for name, tensor in parameters if isinstance(tensor, Tensor)}
        # taken out, or a module that is in many places would be visited without end
        for name, child in self.pop('_modules').items():
            weights |= child.state_dict(f'{prefix}{name}.')
        return weights


def _statistics_method(owner: Any, name: Any) -> Any:
    """`getattr`, as far as mmengine's log histories use it: to name their own methods."""
    if owner is not HistoryBuffer or name not in ('min', 'max', 'current', 'mean'):
        raise pickle.UnpicklingError('GLOBAL builtins.getattr was not an allowed global')
    return getattr(HistoryBuffer, name)


class PickledType:
    """Stands for `numpy.dtype`, of which a few bytes can ask for items of gigabytes: numbers and short text."""

    def __init__(self, code: Any, align: Any = False, copy: Any = False) -> None:
        if not isinstance(code, str) or not NUMPY_TYPE.fullmatch(code):
            raise LimitError(f'it holds a NumPy type {ascii(code)[:60]}')
        self.dtype = np.dtype(code)

    def __setstate__(self, state: Any) -> None:
        order, parts = state[1], state[2:5]
        itemsize = self.dtype.itemsize if self.dtype.kind == 'U' else -1
        # other than the machine's own order, values would be copied: again and again from the same bytes
        if order not in ('|', NATIVE) or any(part is not None for part in parts) or state[5] != itemsize:
            raise LimitError('it holds a NumPy type that is no plain number or text of this machine')


class PickledArray(np.ndarray):
    """Stands for `numpy.ndarray`, which would take the memory of any shape: empty until its values are there."""

    def __new__(cls) -> 'PickledArray':
        return np.ndarray.__new__(cls, (0,), 'i1')

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Written again as NumPy's own."""
        return self.view(np.ndarray).__reduce_ex__(protocol)

    def __setstate__(self, state: Any) -> None:  # type: ignore[override]
        version, shape, kind, fortran, data = state
        if not isinstance(kind, PickledType) or not isinstance(data, bytes) or not isinstance(shape, tuple):
            raise LimitError('it holds a NumPy array of something else than plain values')
        claimed = math.prod(max(side, 1) for side in shape) * max(kind.dtype.itemsize, 1)
        if len(shape) > MAX_AXES or claimed > max(len(data), MIN_ARRAY):
            raise LimitError(f'it holds a NumPy array that claims {claimed:,} bytes and has {len(data):,}')
        super().__setstate__((version, shape, kind.dtype, fortran, data))


def _numpy_array(kind: Any, shape: Any, code: Any) -> PickledArray:
    """`_reconstruct` of NumPy, as its pickles begin an array."""
    if not (isinstance(kind, type) and issubclass(kind, PickledArray) and shape == (0,) and code in (b'b', 'b')):
        raise LimitError('it holds a NumPy array that NumPy did not write')
    return kind()


def _numpy_scalar(kind: Any, data: Any) -> Any:
    """`scalar` of NumPy, as its pickles write a number."""
    if not isinstance(kind, PickledType) or not isinstance(data, bytes) or len(data) != kind.dtype.itemsize:
        raise LimitError('it holds a NumPy number that NumPy did not write')
    return np.float64(0).__reduce__()[0](kind.dtype, data)


def _named(target: Any, full_name: str) -> Any:
    """What torch's reader takes for the function or class of another name. (torch 2.6 has no pairs for that.)"""
    module, _, name = full_name.rpartition('.')
    if isinstance(target, type) and issubclass(target, (Attributes, PickledType, PickledArray)):
        return type(name, (target,), dict(__module__=module))

    def call(*args: Any) -> Any:
        return target(*args)

    call.__module__, call.__name__, call.__qualname__ = module, name, name
    return call


# in OpenAI's encoder.pkl and decoder.pkl
DALLE_MODULES = """
    dall_e.encoder.Encoder dall_e.encoder.EncoderBlock dall_e.decoder.Decoder dall_e.decoder.DecoderBlock
    dall_e.utils.Conv2d torch.nn.modules.container.Sequential torch.nn.modules.activation.ReLU
    torch.nn.modules.conv.Conv2d torch.nn.modules.linear.Identity torch.nn.modules.pooling.MaxPool2d
    torch.nn.modules.upsampling.Upsample
""".split()
STAND_INS = {
    'builtins.getattr': _statistics_method,
    'argparse.Namespace': Attributes,  # the released code's `args`
    **{f'{module}.{kind}Path': PurePath for module in ('pathlib', 'pathlib._local') for kind in ('Posix', 'Windows')},
    **{  # how NumPy 1 and 2 pickle numbers and arrays
        f'numpy.{core}.multiarray.{name}': function
        for core in ('core', '_core')
        for name, function in (('scalar', _numpy_scalar), ('_reconstruct', _numpy_array))
    },
    'numpy.dtype': PickledType,
    'numpy.ndarray': PickledArray,
    **dict.fromkeys(DALLE_MODULES, PickledModule),
}
# What torch's weights-only reader may call beside its own list
ALLOWED = [HistoryBuffer, ConfigDict]
ALLOWED += [_named(target, name) for name, target in STAND_INS.items()]


def _name_of(entry: Any) -> str:
    """Under which torch's reader finds what is allowed; pairs have it beside the object."""
    return entry[1] if isinstance(entry, tuple) else f'{entry.__module__}.{entry.__qualname__}'


NAMES = {_name_of(entry) for entry in ALLOWED}


def read_checkpoint(path: str | Path, sha256: str | None = None, mapped: bool = False) -> dict[str, Any]:
    """Reads .pth, .pt, .bin, .pkl and .safetensors files, told apart by their content.

    Args:
        path: the file.
        sha256: expected hash; None reads any file.
        mapped: tensors are read when they are used, which is for a look at the values beside them: no check sum is
            compared. They would change, or end the process, when the file is written again or cut.

    Returns:
        The file's content, tensors on the CPU. Of a safetensors file its tensors by name; of one that
        `write_checkpoint` gave a `meta`, dict(state_dict=..., meta=...). A network of DALL-E that was saved whole is
        its state dict, an argparse.Namespace a dict.

    Raises:
        CheckpointError: no checkpoint (a web page, a log, a git-lfs pointer, ...), damaged, of another hash, or beyond
            the limits of `checkpoint.limits`.
        UnsafeCheckpointError: the file asks for functions or classes that are not on a short list; says which.
    """
    path = Path(path)
    if path.exists() and not path.is_file():  # reading a pipe could wait for ever
        raise CheckpointError(f'{path} is no file.')
    with path.open('rb') as file:
        head = file.read(64)
    if sha256 is not None and (actual := file_sha256(path)) != sha256.lower():
        raise CheckpointError(
            f'{path} has SHA-256 {actual}, expected {sha256}: it is another file, or was changed on '
            'its way here. Fetch it again.'
        )
    # before pickles, whose first byte a length can begin with
    if head[8:9] == b'{' and int.from_bytes(head[:8], 'little') <= MAX_HEADER:
        return _read_safetensors(path)
    if not head.startswith((b'PK\x03\x04', b'\x80')):
        text = head.removeprefix(b'\xef\xbb\xbf').lstrip()
        described = next((what for start, what in NO_CHECKPOINTS.items() if text.startswith(start)), 'no checkpoint')
        begins = f'begins with {text.splitlines()[0].decode(errors="replace")!r}' if text else 'is empty'
        raise CheckpointError(f'{path} is {described}: it {begins}.')
    zipped = head.startswith(b'PK')
    content = _read_torch(path, zipped, mapped and zipped)
    if not isinstance(content, dict):
        raise CheckpointError(f'{path} holds a {type(content).__name__}, expected a dict of tensors or a module.')
    return content


def _read_torch(path: Path, zipped: bool, mapped: bool) -> Any:
    statistics = dict(HistoryBuffer._statistics_methods)
    try:
        if zipped:
            check_zip(path, sums=not mapped)
        with _allowed(), path.open('rb') as file:
            # Only a name can be mapped, but torch 2.15 believes one that ends with .safetensors, whatever is in it.
            content = torch.load(path if mapped else file, map_location='cpu', weights_only=True, mmap=mapped)
        check_content(content, path.stat().st_size)
        content = _plain(content)
        if isinstance(content, dict):
            content.update({key: _plain(value) for key, value in content.items()})
        return content
    except pickle.UnpicklingError as error:
        if name := REFUSED_NAME.search(str(error)):
            reason = f'it asks for {"" if "." in name[1] else "builtins."}{name[1]}'
        elif 'Only persistent_load of storage' in str(error):
            reason = 'it holds a whole network in the form before torch 1.6, which only running it would read'
        else:
            reason = 'it holds more than tensors and plain values'
        raise UnsafeCheckpointError(
            f'{path} is refused, nothing in it was run: {reason}. Where you trust the file, '
            'save tensors instead: torch.save(model.state_dict(), ...).'
        ) from None
    except LimitError as error:
        raise CheckpointError(f'{path} is refused: {error}.') from None
    except Exception as error:  # a program of someone else's: it can fail in any way
        raise CheckpointError(
            f'{path} is damaged or cut short, or torch.save did not write it '
            f'({type(error).__name__}: {" ".join(str(error)[:200].split())}).'
        ) from error
    finally:  # a history that is read registers its methods for the whole process
        HistoryBuffer._statistics_methods.clear()
        HistoryBuffer._statistics_methods.update(statistics)


@contextmanager
def _allowed() -> Iterator[None]:
    """ALLOWED for torch's reader, and what someone else has allowed that is not of the same name."""
    before = torch.serialization.get_safe_globals()
    others = [entry for entry in before if _name_of(entry) not in NAMES]
    torch.serialization.clear_safe_globals()
    try:
        torch.serialization.add_safe_globals([*others, *ALLOWED])
        yield
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(before)


def _plain(value: Any) -> Any:
    """A network as its state dict, another object as its attributes."""
    if isinstance(value, PickledModule):
        return value.state_dict()
    return dict(value) if isinstance(value, Attributes) else value


def _read_safetensors(path: Path) -> dict[str, Any]:
    try:
        with safe_open(path, framework='pt') as file:
            text = (file.metadata() or {}).get(META_KEY, 'null')
            if len(text) > MAX_META:
                raise UserError(f'its meta has {len(text):,} characters')
            meta = json.loads(text)
            # copied out of the file, which may be written again while they are in use
            weights = {name: file.get_tensor(name).clone() for name in file.keys()}
        check_content([weights, meta], path.stat().st_size)
    except LimitError as error:
        raise CheckpointError(f'{path} is refused: {error}.') from None
    except Exception as error:
        raise CheckpointError(f'{path} is damaged or cut short ({error}).') from error
    return dict(state_dict=weights, meta=meta) if isinstance(meta, dict) else weights


# --- writing --------------------------------------------------------------------------------------


def save_torch(content: Any, file: BinaryIO) -> None:
    """torch.save into an open file (given a path, it would put the name into it); raises OSError on a full disk."""
    try:
        torch.save(content, file)
    except RuntimeError as error:  # torch's own, after that of the file
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise


def write_checkpoint(path: str | Path, content: Mapping[str, Any]) -> None:
    """Writes a checkpoint, whole or not at all. Equal content gives equal bytes.

    Args:
        path: .pth, .pt and .bin are written by torch.save; .safetensors files hold nothing that could be run.
        content: plain containers, values and tensors. For .safetensors either dict(state_dict=..., meta=...), where
            `meta` has what JSON has, or tensors by name.

    Raises:
        CheckpointError: another suffix, or content that such a file cannot hold.
        OSError: disk full, no permission, ...
    """
    path = Path(path)
    if path.suffix not in SUFFIXES:
        raise CheckpointError(f'{path} is no name for a checkpoint: it must end in {", ".join(SUFFIXES)}.')
    if path.suffix == '.safetensors':
        data = _safetensors_bytes(path, content)
        with atomic_file(path) as file:
            file.write(data)
    else:
        with atomic_file(path) as file:
            save_torch(_without_attributes(content), file)


def _without_attributes(content: Any) -> Any:
    """Tensors and dicts without what was set on them, which pickles would keep as foreign objects."""
    if isinstance(content, Tensor):
        return content.detach()
    if isinstance(content, Mapping):
        return {key: _without_attributes(value) for key, value in content.items()}
    if isinstance(content, (list, tuple)):
        return [_without_attributes(value) for value in content]
    return content


def _safetensors_bytes(path: Path, content: Mapping[str, Any]) -> bytes:
    weights, metadata = content, dict(format='pt')  # transformers reads no file without it
    if content.keys() == {'state_dict', 'meta'}:
        try:
            # the only key: the library writes several in any order, and equal content would get another hash
            weights, metadata = content['state_dict'], {META_KEY: json.dumps(content['meta'])}
        except (TypeError, ValueError) as error:
            raise CheckpointError(f'{path} cannot be written: its meta has not plain values only ({error}).') from error
    if others := [name for name, value in weights.items() if not isinstance(value, Tensor)]:
        raise CheckpointError(
            f'{path} cannot be written: safetensors files hold tensors, but {others[0]!r} is a '
            f'{type(weights[others[0]]).__name__}; write a .pth file, or leave it out.'
        )
    # each with memory of its own, as the format has it
    copies = {name: tensor.detach().clone(memory_format=torch.contiguous_format) for name, tensor in weights.items()}
    return safetensors.torch.save(copies, metadata)

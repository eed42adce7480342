"""Reads files safely, and writes them: nothing in a checkpoint is executed, none is left half written."""

import json
import pickle
import re
import sys
import zipfile
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

from beit_mm.files import atomic_file, file_sha256
from beit_mm.terminal import UserError

META_KEY = 'beit_mm'  # in the metadata of safetensors files, which has strings only: `meta` as JSON
MAX_NAME = 300  # characters of a tensor's name, which messages quote
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
VALUES: tuple[type, ...] = (str, bytes, bytearray, int, float, complex, bool, type(None), PurePath)
VALUES += (np.ndarray, np.generic, torch.dtype, torch.device, torch.layout, torch.qscheme)
VALUES += (torch.UntypedStorage, torch.TypedStorage)
HISTORY = {'_log_history', '_count_history', 'max_length', '_max_length'}  # HistoryBuffer's own


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
        if str(path) in str(error):
            raise
        raise CheckpointError(f'{path} {error}') from None
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        reason = ' '.join(ascii(str(error))[1:-1].split())
        raise CheckpointError(
            f'{path} is no checkpoint of a BEiT: reading it as one ends in {type(error).__name__}: {reason:.200}.'
        ) from error


# What torch's weights-only reader may call beside its own list


class Attributes(dict):
    """The attributes of an object whose class is not imported."""

    __setstate__ = dict.update


class PickledModule(Attributes):
    """A network of DALL-E that was saved as a module; these have no buffers."""

    def state_dict(self, prefix: str = '') -> dict[str, Tensor]:
        """What `torch.nn.Module.state_dict` would give; empties the object."""
        parameters = self['_parameters'].items()
        weights = {prefix + name: tensor.detach() for name, tensor in parameters if isinstance(tensor, Tensor)}
        # taken out, or a module that is in many places would be visited without end
        for name, child in self.pop('_modules').items():
            weights |= child.state_dict(f'{prefix}{name}.')
        return weights


class PickledType:
    """Stands for `numpy.dtype`, whose state may call any bytes pointers to objects: numbers and text only."""

    def __init__(self, code: str, align: bool = False, copy: bool = False) -> None:
        if not re.fullmatch(r'b1|[iuf][1248]|U\d+', code):
            raise CheckpointError(f'it holds a NumPy type {ascii(code)[:60]}')
        self.dtype = np.dtype(code)

    def __setstate__(self, state: tuple) -> None:
        if state[1] not in ('|', '<' if sys.byteorder == 'little' else '>'):
            raise CheckpointError('it holds NumPy values in the byte order of another machine')


class PickledArray(np.ndarray):
    """Stands for `numpy.ndarray`, whose pickles give it no arguments of its own: empty until its values are there."""

    def __new__(cls) -> 'PickledArray':
        return super().__new__(cls, (0,), 'i1')

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.view(np.ndarray).__reduce_ex__(protocol)

    def __setstate__(self, state: tuple) -> None:  # type: ignore[override]
        version, shape, kind, fortran, data = state
        super().__setstate__((version, shape, kind.dtype, fortran, data))


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
NUMPY = ('numpy.core.multiarray', 'numpy._core.multiarray')  # of NumPy 1 and 2
STAND_INS = {
    'builtins.getattr': lambda *_: None,  # by which log histories name their methods, which are not read
    'argparse.Namespace': Attributes,  # the released code's `args`
    **{f'{module}.{kind}Path': PurePath for module in ('pathlib', 'pathlib._local') for kind in ('Posix', 'Windows')},
    **{f'{module}.scalar': lambda kind, data: np.frombuffer(data, kind.dtype)[0] for module in NUMPY},
    **{f'{module}._reconstruct': lambda kind, *_: kind() for module in NUMPY},
    'numpy.dtype': PickledType,
    'numpy.ndarray': PickledArray,
    **dict.fromkeys(DALLE_MODULES, PickledModule),
}
ALLOWED = [HistoryBuffer, ConfigDict, *(_named(target, name) for name, target in STAND_INS.items())]


@contextmanager
def _allowed() -> Iterator[None]:
    """ALLOWED for torch's reader, and nothing that others have allowed."""
    others, statistics = torch.serialization.get_safe_globals(), dict(HistoryBuffer._statistics_methods)
    torch.serialization.clear_safe_globals()
    torch.serialization.add_safe_globals(ALLOWED)
    try:
        yield
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(others)
        HistoryBuffer._statistics_methods.clear()  # in which a history that is read registers methods of the file
        HistoryBuffer._statistics_methods.update(statistics)


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
    if sha256 is not None and (actual := file_sha256(path)) != sha256.lower():
        raise CheckpointError(
            f'{path} has SHA-256 {actual}, expected {sha256}: it is another file, or was changed on '
            'its way here. Fetch it again.'
        )
    # before pickles, whose first byte a length can begin with
    is_safetensors = head[8:9] == b'{' and int.from_bytes(head[:8], 'little') <= 100_000_000  # bytes, the format's own
    if not is_safetensors and not head.startswith((b'PK\x03\x04', b'\x80')):
        text = head.removeprefix(b'\xef\xbb\xbf').lstrip()
        described = next((what for start, what in NO_CHECKPOINTS.items() if text.startswith(start)), 'no checkpoint')
        begins = f'begins with {text.splitlines()[0].decode(errors="replace")!r}' if text else 'is empty'
        raise CheckpointError(f'{path} is {described}: it {begins}.')
    try:
        content = _read_safetensors(path) if is_safetensors else _read_torch(path, head.startswith(b'PK'), mapped)
    except pickle.UnpicklingError as error:
        if name := REFUSED_NAME.search(str(error)):
            reason = f'it asks for {"" if "." in name[1] else "builtins."}{name[1]}'
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
    mapped = mapped and zipped
    if zipped:
        with zipfile.ZipFile(path) as archive:
            # Python could import code that lies beside the tensors.
            if others := [name for name in archive.namelist() if not re.fullmatch(ZIP_ENTRY, name)]:
                raise CheckpointError(f'it holds {others[0][:MAX_NAME]!r}, and torch.save did not write it')
            if not mapped and (damaged := archive.testzip()):  # torch's reader compares no check sums
                raise zipfile.BadZipFile(f'{damaged} does not have its check sum')
    with _allowed(), path.open('rb') as file:
        # Only a name can be mapped, but torch 2.15 believes one that ends with .safetensors, whatever is in it.
        content = torch.load(path if mapped else file, map_location='cpu', weights_only=True, mmap=mapped)
    check_content(content)
    if isinstance(content, PickledModule):
        return content.state_dict()
    if isinstance(content, dict):
        content.update({key: dict(value) for key, value in content.items() if isinstance(value, Attributes)})
    return content


def check_content(content: Any) -> None:
    """Refuses content that checkpoints do not have: other than dense tensors, functions, classes, unknown objects.

    Attributes that a file sets on dicts and tensors are taken off, in place: they could stand in the place of methods.
    torch's `_metadata` of state dicts stays.
    """
    seen, waiting = set(), [content]
    while waiting:
        value = waiting.pop()
        if isinstance(value, CONTAINERS + (HistoryBuffer,)):
            if id(value) in seen:
                continue
            seen.add(id(value))
        if isinstance(value, Tensor):
            # nobody compares the indices of a sparse tensor with its size: adding it would write anywhere in memory
            if value.layout is not torch.strided or value.is_nested or value.is_quantized or value.device.type != 'cpu':
                raise CheckpointError('it holds a tensor that is sparse, nested, quantized or without values')
            vars(value).clear()
        elif isinstance(value, dict):
            waiting += [*dict.keys(value), *dict.values(value)]
            # of an OrderedDict or Counter; a state dict has its modules' versions there
            attributes = getattr(value, '__dict__', {}) if type(value).__module__ == 'collections' else {}
            metadata = attributes.get('_metadata')
            attributes.clear()
            if isinstance(metadata, dict) and all(isinstance(item, dict) for item in dict.values(metadata)):
                attributes['_metadata'] = metadata
                waiting.append(metadata)
            for name in (name for name, inner in dict.items(value) if isinstance(inner, Tensor)):
                if isinstance(name, str) and not (name.isprintable() and len(name) <= MAX_NAME):
                    raise CheckpointError(f'it names a tensor {name[:60]!r}')
        elif isinstance(value, HistoryBuffer):
            if not vars(value).keys() <= HISTORY:
                raise CheckpointError('it holds a log history with more than numbers')
            waiting += vars(value).values()
        elif isinstance(value, CONTAINERS):
            waiting += value
        elif not isinstance(value, VALUES):  # what torch's reader may call, or what came of calling it
            name = getattr(value, '__name__', None) or type(value).__name__
            raise CheckpointError(f'it holds the function, class or object {name!r}')


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
    # each with memory of its own, as the format has it
    copies = {name: tensor.detach().clone(memory_format=torch.contiguous_format) for name, tensor in weights.items()}
    return safetensors.torch.save(copies, metadata)

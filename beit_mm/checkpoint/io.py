"""Finds, reads and writes checkpoint files: nothing that one holds is executed, none is left half written."""

import hashlib
import http.client
import json
import os
import pathlib
import pickle
import re
import secrets
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import urlsplit

import numpy as np
import safetensors.torch
import torch
from mmengine import dist
from mmengine.config import ConfigDict
from mmengine.fileio import LocalBackend, register_backend
from mmengine.logging import HistoryBuffer
from safetensors import SafetensorError, safe_open
from torch import Tensor

WEIGHTS_VARIABLE = 'BEIT_MM_WEIGHTS'  # a folder with weight files, for machines without a network
HUB_FILES = ('model.safetensors', 'pytorch_model.bin')  # transformers' and timm's weights in a folder
HASH_IN_NAME = re.compile(r'-([0-9a-f]{8,64})\.\w+$')  # as published by OpenMMLab, torchvision and ourselves
META_KEY = 'beit_mm'  # in the metadata of safetensors files, which has strings only: `meta` as JSON
MAX_HEADER = 100_000_000  # bytes, of safetensors files: the format's own limit
TORCH_SUFFIXES = ('.pth', '.pt', '.bin')
SUFFIXES = (*TORCH_SUFFIXES, '.safetensors')
WGET_LOG = re.compile(r'--\d{4}-\d\d-\d\d')  # what `wget -o` leaves where `-O` was meant
REFUSED_NAME = re.compile(r'GLOBAL (\S+) (?:was not an allowed global|whose module)')  # in torch's message


class CheckpointError(ValueError):
    """The file is not a checkpoint, or not the one expected."""


class UnsafeCheckpointError(CheckpointError):
    """The file asks for more than tensors and plain values; none of it was run."""


# --- reading --------------------------------------------------------------------------------------


class Attributes(dict):
    """Stands for an object whose class is not imported: the attributes that it was saved with."""

    def __new__(cls, *_: Any) -> 'Attributes':
        return super().__new__(cls)

    def __init__(self, *_: Any) -> None:
        super().__init__()

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.update(state)


class PickledModule(Attributes):
    """Stands for a network that was saved whole."""

    def state_dict(self, prefix: str = '', seen: set[int] | None = None) -> dict[str, Tensor]:
        """What `torch.nn.Module.state_dict` would give."""
        seen = set() if seen is None else seen
        if id(self) in seen:  # could go on without end
            raise CheckpointError('holds one module in two places')
        seen.add(id(self))
        skipped = self.get('_non_persistent_buffers_set') or ()
        tensors = {**self['_parameters'], **self['_buffers']}
        weights = {
            prefix + name: tensor.detach()
            for name, tensor in tensors.items()
            if isinstance(tensor, Tensor) and name not in skipped
        }
        for name, child in self['_modules'].items():
            if isinstance(child, PickledModule):
                weights |= child.state_dict(f'{prefix}{name}.', seen)
        return weights


def _statistics_method(owner: Any, name: Any) -> Any:
    """`getattr`, as far as mmengine's log histories use it: to name their own methods."""
    if owner is not HistoryBuffer or name not in ('min', 'max', 'current', 'mean'):
        raise pickle.UnpicklingError('GLOBAL builtins.getattr was not an allowed global')
    return getattr(HistoryBuffer, name)


def _named(target: Any, full_name: str) -> Any:
    """What torch's reader takes for the function or class of another name. (torch 2.6 has no pairs for that.)"""
    module, _, name = full_name.rpartition('.')
    if isinstance(target, type) and issubclass(target, Attributes):
        return type(name, (target,), dict(__module__=module))

    def call(*args: Any) -> Any:
        return target(*args)

    call.__module__, call.__name__, call.__qualname__ = module, name, name
    return call


_NUMPY = [np.float64(0).__reduce__()[0], np.zeros(0).__reduce__()[0]]  # how numbers and arrays are pickled
# What torch's weights-only reader may call beside its own list
ALLOWED = [
    HistoryBuffer,
    _named(_statistics_method, 'builtins.getattr'),
    ConfigDict,
    _named(Attributes, 'argparse.Namespace'),  # the released code's `args`
    *[
        _named(getattr(pathlib, f'Pure{kind}Path'), f'{module}.{kind}Path')
        for kind in ('Posix', 'Windows')
        for module in ('pathlib', 'pathlib._local')
    ],
    np.dtype,
    np.ndarray,
    *{type(np.dtype(code)) for code in '?bhilqBHILQefdU'},
    *[
        _named(function, f'numpy.{core}.multiarray.{function.__name__}')  # NumPy 1 and 2
        for core in ('core', '_core')
        for function in _NUMPY
    ],
    # OpenAI's encoder.pkl and decoder.pkl
    *[
        _named(PickledModule, f'{package}.{name}')
        for package, names in {
            'dall_e': (
                'encoder.Encoder',
                'encoder.EncoderBlock',
                'decoder.Decoder',
                'decoder.DecoderBlock',
                'utils.Conv2d',
            ),
            'torch.nn.modules': (
                'container.Sequential',
                'activation.ReLU',
                'conv.Conv2d',
                'linear.Identity',
                'pooling.MaxPool2d',
                'upsampling.Upsample',
            ),
        }.items()
        for name in names
    ],
]


def file_sha256(path: str | Path) -> str:
    """SHA-256 of a file, 64 lower-case hexadecimal digits."""
    with open(path, 'rb') as file:
        digest = hashlib.sha256()
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def read_checkpoint(path: str | Path, sha256: str | None = None, mmap: bool = True) -> dict[str, Any]:
    """Reads .pth, .pt, .bin, .pkl and .safetensors files, told apart by their content.

    Args:
        path: the file.
        sha256: expected hash; None reads any file.
        mmap: tensors may stay in the file until they are used; it must not be written over in place meanwhile.

    Returns:
        The file's content, tensors on the CPU. Of a safetensors file its tensors by name; of one that
        `write_checkpoint` gave a `meta`, dict(state_dict=..., meta=...). A network of DALL-E that was saved whole is
        its state dict, an argparse.Namespace a dict.

    Raises:
        CheckpointError: no checkpoint (a web page, a log, a git-lfs pointer, ...), damaged, or of another hash.
        UnsafeCheckpointError: the file asks for functions or classes that are not on a short list; says which.
    """
    path = Path(path)
    kind = _file_kind(path)
    if sha256 is not None and (found := file_sha256(path)) != sha256.lower():
        raise CheckpointError(
            f'{path} has SHA-256 {found}, expected {sha256}: it is another file, or was changed on '
            'its way here. Fetch it again.'
        )
    content = _read_safetensors(path, mmap) if kind == 'safetensors' else _read_torch(path, mmap and kind == 'zip')
    if not isinstance(content, dict):
        raise CheckpointError(f'{path} holds a {type(content).__name__}, expected a dict of tensors or a module.')
    return content


def _read_torch(path: Path, mmap: bool) -> Any:
    statistics = dict(HistoryBuffer._statistics_methods)
    # leaving the block would also take back what someone else has allowed
    allowed = [entry for entry in ALLOWED if entry not in torch.serialization.get_safe_globals()]
    try:
        with torch.serialization.safe_globals(allowed):
            return _without_stand_ins(torch.load(path, map_location='cpu', weights_only=True, mmap=mmap), set())
    except pickle.UnpicklingError as error:
        text = str(error)[:5000]
        if name := REFUSED_NAME.search(text):
            reason = f'it asks for {name[1] if "." in name[1] else f"builtins.{name[1]}"}'
        elif 'Only persistent_load of storage' in text:
            reason = 'it holds a whole network in the form before torch 1.6, which only running it would read'
        else:
            reason = text.partition('WeightsUnpickler error:')[2].partition('Check the documentation')[0]
            reason = ' '.join(reason.split())[:200]
        raise UnsafeCheckpointError(
            f'{path} is refused, nothing in it was run: {reason}. Where you trust the file, '
            'save tensors instead: torch.save(model.state_dict(), ...).'
        ) from None
    except CheckpointError as error:
        raise CheckpointError(f'{path} {error}.') from None
    except Exception as error:  # a program of someone else's: it can fail in any way
        raise CheckpointError(
            f'{path} is damaged or cut short, or torch.save did not write it '
            f'({type(error).__name__}: {" ".join(str(error)[:200].split())}).'
        ) from error
    finally:  # a history that is read registers its methods for the whole process
        HistoryBuffer._statistics_methods.clear()
        HistoryBuffer._statistics_methods.update(statistics)


def _without_stand_ins(value: Any, seen: set[int]) -> Any:
    """Networks as state dicts and attributes as dicts, in nested dicts and lists, which are changed in place."""
    if isinstance(value, PickledModule):
        return value.state_dict()
    if isinstance(value, Attributes):
        value = dict(value)
    if isinstance(value, (dict, list)) and id(value) not in seen:
        seen.add(id(value))
        for key, item in list(value.items() if isinstance(value, dict) else enumerate(value)):
            if (plain := _without_stand_ins(item, seen)) is not item:
                value[key] = plain
    return value


def _read_safetensors(path: Path, mmap: bool) -> dict[str, Any]:
    try:
        with safe_open(path, framework='pt') as file:
            meta = (file.metadata() or {}).get(META_KEY)
        weights = safetensors.torch.load_file(path)
        if not mmap:
            weights = {name: tensor.clone() for name, tensor in weights.items()}
    except SafetensorError as error:
        raise CheckpointError(f'{path} is damaged or cut short ({error}).') from error
    if meta is None:
        return weights
    try:
        meta = json.loads(meta)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f'{path} is damaged: its metadata {META_KEY!r} is no JSON ({error}).') from error
    if not isinstance(meta, dict):
        raise CheckpointError(f'{path} is damaged: its metadata {META_KEY!r} is no dict.')
    return dict(state_dict=weights, meta=meta)


def _file_kind(path: Path) -> str:
    """'zip', 'pickle' or 'safetensors'; anything else is named in an error."""
    with path.open('rb') as file:
        head = file.read(512)
    if not head:
        raise CheckpointError(f'{path} is empty.')
    if head.startswith(b'PK\x03\x04'):
        if not zipfile.is_zipfile(path):  # the directory stands at the end
            raise CheckpointError(f'{path} is cut short at {path.stat().st_size} bytes: fetch it again.')
        return 'zip'
    # before pickles, whose first byte a length can begin with
    if head[8:9] == b'{' and int.from_bytes(head[:8], 'little') <= MAX_HEADER:
        return 'safetensors'
    if head[0] == 0x80:
        return 'pickle'
    text = head.decode('utf-8', errors='replace').lstrip('\ufeff \r\n\t')
    first_line = text.splitlines()[0] if text else ''
    if text.startswith('<'):
        described = 'a web page'
    elif text.startswith('version https://git-lfs'):
        described = 'a git-lfs pointer (`git lfs pull` fetches the file it stands for)'
    elif WGET_LOG.match(text):
        described = 'a log of wget (its option -o names the log; -O names the file)'
    elif first_line.isprintable() and '\ufffd' not in first_line:
        described = f'a text file beginning with {first_line[:60]!r}'
    else:
        described = f'of an unknown kind, beginning with the bytes {head[:8].hex(" ")}'
    raise CheckpointError(f'{path} is {described}, not a checkpoint.')


# --- finding --------------------------------------------------------------------------------------


def locate_weights(source: str, advice: str) -> Path:
    """Finds a weight file, downloading it once for each node when `source` is a URL.

    A path is taken as it is; of a folder of transformers' or timm's the weights in it. A URL's file is looked for by
    name (see `name_of_url`) in the folder $BEIT_MM_WEIGHTS, then in torch hub's cache, and is downloaded into that
    cache by the first process of each node; every process of the job must make this call.

    Args:
        source: path, or http(s) URL.
        advice: second line of the error: where to get the file and which config key names it.

    Raises:
        FileNotFoundError: with all places looked at.
    """
    if not source.startswith(('http://', 'https://')):
        path = weights_in(Path(source).expanduser())
        if not path.is_file():
            raise FileNotFoundError(f'weight file not found: looked for {path}.\n{advice}')
        return path
    cached = Path(torch.hub.get_dir(), 'checkpoints', name_of_url(source))
    folder = os.environ.get(WEIGHTS_VARIABLE)
    places = [Path(folder, cached.name), cached] if folder else [cached]
    first_of_node = int(os.environ.get('LOCAL_RANK', dist.get_rank())) == 0
    if first_of_node and not any(place.is_file() for place in places):
        digits = HASH_IN_NAME.search(cached.name)
        try:
            cached.parent.mkdir(parents=True, exist_ok=True)
            torch.hub.download_url_to_file(source, str(cached), digits and digits[1])
        except (OSError, RuntimeError, http.client.HTTPException) as error:  # the caller says what to do
            warnings.warn(f'download of {source} failed: {error}', stacklevel=2)
    dist.barrier()  # always: whether a file is there differs between nodes and moments
    for place in places:
        if place.is_file():
            return place
    raise FileNotFoundError(
        f'weight file not found: looked for {" and ".join(map(str, places))} (${WEIGHTS_VARIABLE} '
        f'is {folder or "not set"}), and {source} cannot be downloaded.\n{advice}'
    )


def name_of_url(url: str) -> str:
    """Name under which a URL's file is kept: its own, with a hash before it where all files of a site have one name."""
    name = Path(urlsplit(url).path).name
    return f'{hashlib.sha256(url.encode()).hexdigest()[:8]}-{name}' if name in HUB_FILES else name


def weights_in(path: Path) -> Path:
    """The weight file of a folder of transformers' or timm's; any other path as it is.

    Raises:
        FileNotFoundError: the folder has none, or has it in pieces.
    """
    if not path.is_dir():
        return path
    if found := [path / name for name in HUB_FILES if (path / name).is_file()]:
        return found[0]
    if list(path.glob('*.index.json')):
        raise FileNotFoundError(
            f'{path} has its weights in pieces; save them with transformers in one: '
            "model.save_pretrained(folder, max_shard_size='100GB')"
        )
    raise FileNotFoundError(f'{path} is a folder without {" or ".join(HUB_FILES)}')


# --- writing --------------------------------------------------------------------------------------


@contextmanager
def atomic_file(path: str | Path) -> Iterator[BinaryIO]:
    """A file to write, which gets its name when all of it is on the disk.

    Full disks, interruptions and errors leave what had the name as it was. Folders above it are created.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f'{path.name}.{secrets.token_hex(4)}.part')  # in one folder, so that it can be renamed
    try:
        with partial.open('xb') as file:
            yield file
            file.flush()
            os.fsync(file.fileno())  # or a power cut could leave the name with nothing behind it
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


@register_backend('beit_mm', force=True)
class AtomicBackend(LocalBackend):
    """mmengine's local files, written by `atomic_file`: `CheckpointHook(backend_args=dict(backend='beit_mm'))`."""

    def put(self, obj: bytes, filepath: str | Path) -> None:
        """Writes bytes: all of them, or none."""
        with atomic_file(filepath) as file:
            file.write(obj)


def write_checkpoint(path: str | Path, content: Mapping[str, Any]) -> None:
    """Writes a checkpoint, see `atomic_file`. Equal content gives equal bytes.

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
    data = _safetensors_bytes(path, content) if path.suffix == '.safetensors' else None
    with atomic_file(path) as file:
        if data is not None:
            file.write(data)
            return
        try:
            torch.save(_without_attributes(content), file)  # given a path, torch would put its name into the file
        except RuntimeError as error:  # of torch's own writer, which hides the system's
            raise error.__context__ if isinstance(error.__context__, OSError) else error from None


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
    try:
        if content.keys() == {'state_dict', 'meta'}:
            # the only key: the library writes several in any order, and equal content would get another hash
            weights, metadata = content['state_dict'], {META_KEY: json.dumps(content['meta'])}
    except (TypeError, ValueError) as error:
        raise CheckpointError(f'{path} cannot be written: its meta is not made of plain values ({error}).') from error
    for name, value in weights.items():
        if not isinstance(value, Tensor) or value.layout != torch.strided:
            described = value.layout if isinstance(value, Tensor) else f'a {type(value).__name__}'
            raise CheckpointError(
                f'{path} cannot be written: safetensors files hold tensors of numbers, but {name!r} '
                f'is {described}; write a .pth file, or leave it out.'
            )
    # each with memory of its own, as the format has it
    copies = {name: tensor.detach().clone(memory_format=torch.contiguous_format) for name, tensor in weights.items()}
    return safetensors.torch.save(copies, metadata)

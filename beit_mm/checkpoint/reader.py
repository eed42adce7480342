"""One way to read weights from any file, without running anything in it."""
import hashlib
import json
import os
import re
import zipfile
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from beit_mm.checkpoint.errors import CheckpointError
from beit_mm.checkpoint.inert_pickle import read_inert

META_KEY = 'beit_mm'  # in the metadata of safetensors files, which has strings only: `meta` as JSON
MAX_HEADER = 100_000_000  # bytes, of safetensors files: the format's own limit
PIECE = 1 << 20  # bytes read ahead at a time
WGET_LOG = re.compile(r'--\d{4}-\d\d-\d\d')  # what `wget -o` leaves where `-O` was meant


def file_sha256(path: str | Path) -> str:
    """SHA-256 of a file, 64 lower-case hexadecimal digits."""
    digest = hashlib.sha256()
    with open(path, 'rb') as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def read_checkpoint(path: str | Path, sha256: str | None = None, copied: bool = False) -> dict[str, Any]:
    """Reads .pth, .pt, .bin, .pkl and .safetensors files, told apart by their content.

    Tensors are on the CPU and mapped from the file: they take no memory of their own until they are written to,
    which leaves the file as it is. While they are in use the file may be deleted or replaced, but not be cut short
    or written over in place: the system ends processes that then touch them. Only a hash finds flipped bits.

    A pickled module becomes its state dict, other foreign objects dicts of their attributes.

    Args:
        path: the file.
        sha256: expected hash; None reads any file.
        copied: give the tensors memory of their own, so that the file may be written over while they are in use.

    Returns:
        Nested plain containers and tensors. Of a safetensors file its tensors by name; of one that
        `write_checkpoint` gave a `meta`, dict(state_dict=..., meta=...).

    Raises:
        CheckpointError: no checkpoint (a web page, a log, a git-lfs pointer, ...), damaged, or of
            another hash.
        UnsafeCheckpointError: the file wants to run code; says which.
    """
    path = Path(path)
    kind = _recognise(path)
    if sha256 is not None and (found := file_sha256(path)) != sha256.lower():
        raise CheckpointError(f'{path} has SHA-256 {found}, expected {sha256}: it is another file, '
                              'or was changed on its way here. Fetch it again.')
    _read_ahead(path)
    content = (_read_safetensors(path, copied) if kind == 'safetensors'
               else read_inert(path, kind == 'zip', copied))
    if not isinstance(content, dict):
        raise CheckpointError(
            f'{path} holds a {type(content).__name__}, expected a dict of tensors or a module.')
    return content


def _recognise(path: Path) -> str:
    """'zip', 'pickle' or 'safetensors'; anything else is named in an error."""
    with path.open('rb') as file:
        head = file.read(512)
    if not head:
        raise CheckpointError(f'{path} is empty.')
    if head.startswith(b'PK\x03\x04'):
        if not zipfile.is_zipfile(path):  # the directory stands at the end
            raise CheckpointError(
                f'{path} is cut short at {path.stat().st_size} bytes: fetch it again.')
        return 'zip'
    # before pickles, whose first byte a length can begin with
    if head[8:9] == b'{' and int.from_bytes(head[:8], 'little') <= MAX_HEADER:
        return 'safetensors'
    if head[0] == 0x80:
        return 'pickle'
    raise CheckpointError(f'{path} is {_describe(head)}, not a checkpoint.')


def _read_ahead(path: Path) -> None:
    """Brings the parts of a file into the system's cache that are not there yet.

    A mapped file that is not there is read in small pieces, as each is touched, which takes three times as long.
    """
    if not hasattr(os, 'RWF_NOWAIT'):  # of Linux
        return
    piece, probe = bytearray(PIECE), bytearray(1)
    with path.open('rb', buffering=0) as file:
        for start in range(0, path.stat().st_size, PIECE):
            try:
                os.preadv(file.fileno(), [probe], start, os.RWF_NOWAIT)
            except OSError:  # not in the cache, or a file system that cannot tell
                os.preadv(file.fileno(), [piece], start)


def _describe(head: bytes) -> str:
    text = head.decode('utf-8', errors='replace').lstrip('\ufeff \r\n\t')
    if text.startswith('<'):
        return 'a web page'
    if text.startswith('version https://git-lfs'):
        return 'a git-lfs pointer (`git lfs pull` fetches the file it stands for)'
    if WGET_LOG.match(text):
        return 'a log of wget (its option -o names the log; -O names the file)'
    first_line = text.splitlines()[0] if text else ''
    if first_line.isprintable() and '\ufffd' not in first_line:
        return f'a text file beginning with {first_line[:60]!r}'
    return f'of an unknown kind, beginning with the bytes {head[:8].hex(" ")}'


def _read_safetensors(path: Path, copied: bool) -> dict[str, Any]:
    try:
        with safe_open(path, framework='pt') as file:
            meta = (file.metadata() or {}).get(META_KEY)
        weights = load_file(path)
    except SafetensorError as error:
        raise CheckpointError(f'{path} is damaged or cut short ({error}).') from error
    if copied:
        weights = {name: tensor.clone() for name, tensor in weights.items()}
    if meta is None:
        return weights
    try:
        meta = json.loads(meta)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f'{path} is damaged: its metadata {META_KEY!r} is no JSON ({error}).') from error
    if not isinstance(meta, dict):
        raise CheckpointError(f'{path} is damaged: its metadata {META_KEY!r} is no dict.')
    return dict(state_dict=weights, meta=meta)

"""One way to read weights from any file, without running anything in it."""
import hashlib
import re
import zipfile
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from beit_mm.checkpoint.errors import CheckpointError
from beit_mm.checkpoint.inert_pickle import read_inert

WGET_LOG = re.compile(r'--\d{4}-\d\d-\d\d')  # what `wget -o` leaves where `-O` was meant


def file_sha256(path: str | Path) -> str:
    """SHA-256 of a file, 64 lower-case hexadecimal digits."""
    digest = hashlib.sha256()
    with open(path, 'rb') as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def read_checkpoint(path: str | Path, sha256: str | None = None) -> dict[str, Any]:
    """Reads .pth, .pt, .bin, .pkl and .safetensors files, told apart by their content.

    Tensors are on the CPU; those of safetensors files are mapped from the file. A pickled module
    becomes its state dict, other foreign objects dicts of their attributes.

    Args:
        path: the file.
        sha256: expected hash; None reads any file.

    Returns:
        Nested plain containers and tensors.

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
    content = _read_safetensors(path) if kind == 'safetensors' else read_inert(path, zipped=kind == 'zip')
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
    if head[0] == 0x80:
        return 'pickle'
    if head[8:9] == b'{':
        return 'safetensors'
    raise CheckpointError(f'{path} is {_describe(head)}, not a checkpoint.')


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


def _read_safetensors(path: Path) -> dict[str, torch.Tensor]:
    try:
        return load_file(path)
    except SafetensorError as error:
        raise CheckpointError(f'{path} is damaged or cut short ({error}).') from error

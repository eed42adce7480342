"""One way to write checkpoints: all of a file, or none of it."""
import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from beit_mm.checkpoint.errors import CheckpointError
from beit_mm.checkpoint.reader import META_KEY

TORCH_SUFFIXES = ('.pth', '.pt', '.bin')
SUFFIXES = (*TORCH_SUFFIXES, '.safetensors')
SAFETENSORS_TYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32,
                     torch.int16, torch.int8, torch.uint8, torch.bool)


def write_checkpoint(path: str | Path, content: Mapping[str, Any]) -> None:
    """Writes a checkpoint, which has its name only once it is complete.

    Full disks, interruptions and errors leave the file that had the name as it was. That may be the file from which
    the tensors are mapped. Folders above it are created. Equal content gives equal bytes.

    Args:
        path: .pth, .pt and .bin are written by torch.save; .safetensors files hold nothing that could be run.
        content: plain containers, values and tensors. For .safetensors either dict(state_dict=..., meta=...), where
            `meta` has what JSON has, or tensors by name. Tensors that share memory go on doing so in torch's files;
            in safetensors files each is stored for itself.

    Raises:
        CheckpointError: another suffix, or content that such a file cannot hold.
        OSError: disk full, no permission, ...
    """
    path = Path(path)
    if path.suffix not in SUFFIXES:
        raise CheckpointError(f'{path} is no name for a checkpoint: it must end in {", ".join(SUFFIXES)}.')
    write = _write_torch if path.suffix in TORCH_SUFFIXES else _write_safetensors
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f'{path.name}.{secrets.token_hex(4)}.part')  # in one folder, so that it can be renamed
    try:
        partial.touch(exist_ok=False)
        write(partial, content)
        with partial.open('rb') as file:
            os.fsync(file.fileno())  # or a power cut could leave the name with nothing behind it
        os.replace(partial, path)
    except CheckpointError as error:
        raise CheckpointError(f'{path} cannot be written: {error}.') from error.__cause__
    finally:
        partial.unlink(missing_ok=True)


def _write_torch(path: Path, content: Mapping[str, Any]) -> None:
    try:
        with path.open('wb') as file:  # given a path, torch would put its name into the file
            torch.save(_bare(content), file)
    except RuntimeError as error:  # of torch's own writer, which hides the system's
        raise error.__context__ if isinstance(error.__context__, OSError) else error from None


def _bare(content: Any) -> Any:
    """Without attributes of tensors and dicts, which pickles would keep as foreign objects."""
    if isinstance(content, Tensor):
        return content.detach()
    if isinstance(content, Mapping):
        return {key: _bare(value) for key, value in content.items()}
    if isinstance(content, (list, tuple)):
        return [_bare(value) for value in content]
    return content


def _write_safetensors(path: Path, content: Mapping[str, Any]) -> None:
    weights, metadata = content, dict(format='pt')  # transformers reads no file without it
    if content.keys() == {'state_dict', 'meta'}:
        weights = content['state_dict']
        try:
            # the only key: the library writes several in any order, and equal content would get another hash
            metadata = {META_KEY: json.dumps(content['meta'])}
        except (TypeError, ValueError) as error:
            raise CheckpointError(f'its meta is not made of plain values ({error})') from error
    for name, value in weights.items():
        if not isinstance(value, Tensor) or value.dtype not in SAFETENSORS_TYPES or value.layout != torch.strided:
            raise CheckpointError(f'safetensors files hold tensors of numbers, but {name!r} is {_kind(value)}; write a '
                                  '.pth file, or leave it out')
    mode = path.stat().st_mode
    try:
        save_file(_apart(weights), path, metadata)
    except SafetensorError as error:  # of its writer: a full disk, ...
        raise OSError(f'{path} cannot be written: {error}') from error
    path.chmod(mode)  # the library makes files that nobody else may read


def _apart(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Each tensor with memory of its own, as safetensors files have it; copied only where it shares some."""
    seen = set()
    apart = {}
    for name, tensor in weights.items():
        storage = tensor.untyped_storage()
        alone = storage.nbytes() == tensor.nbytes and storage.data_ptr() not in seen and tensor.is_contiguous()
        seen.add(storage.data_ptr())
        apart[name] = tensor.detach() if alone else tensor.detach().clone(memory_format=torch.contiguous_format)
    return apart


def _kind(value: Any) -> str:
    return f'{value.dtype}, {value.layout}' if isinstance(value, Tensor) else f'a {type(value).__name__}'

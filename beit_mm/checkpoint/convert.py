"""Checkpoint files from any BEiT format into any other, and into files to give away."""
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from beit_mm.checkpoint import hf
from beit_mm.checkpoint.content import (
    FORMAT_VERSION,
    architecture_of,
    check_version,
    meta_of,
    preprocessing_of,
    weights_of,
)
from beit_mm.checkpoint.errors import CheckpointError
from beit_mm.checkpoint.formats import WRITE, check_complete, from_ours, task_of, to_ours
from beit_mm.checkpoint.locate import weights_in
from beit_mm.checkpoint.reader import file_sha256, read_checkpoint
from beit_mm.checkpoint.writing import SUFFIXES, write_checkpoint
from beit_mm.positions import Grid

TARGETS = tuple(WRITE)
# Of a run's meta, what belongs to the weights rather than to the run
KEPT = ('preprocessing', 'architecture', 'tokenizer', 'dataset_meta', 'CLASSES', 'PALETTE', 'cfg')


class Conversion(NamedTuple):
    """What `convert_checkpoint` did.

    Attributes:
        source: format of the source.
        task: 'pretraining', 'classification', 'segmentation', 'features' or 'tokenizer'.
        tensors: number of tensors written.
        left_out: names in the source that the target has no place for.
        notes: what is not the same there.
    """
    source: str
    task: str
    tensors: int
    left_out: list[str]
    notes: list[str]

    def __str__(self) -> str:
        lines = [f'{self.task} weights, {self.source}: {self.tensors} tensors written']
        if self.left_out:
            lines.append(f'left out, {len(self.left_out)}: {", ".join(self.left_out[:8])}' +
                         (', ...' if len(self.left_out) > 8 else ''))
        return '\n'.join([*lines, *self.notes])


def convert_checkpoint(source: str | Path, target: str | Path, to: str = 'beit_mm') -> Conversion:
    """Converts a checkpoint file; the source's format is recognised.

    Args:
        source: a file, or a folder of transformers' with model.safetensors or pytorch_model.bin.
        target: the file to write, .pth or .safetensors; for 'hf' a folder, which gets config.json and, where the
            source says how images were prepared, preprocessor_config.json.
        to: 'beit_mm', 'unilm', 'timm', 'hf', 'mmpretrain' or 'mmseg'. DALL-E networks become a plain state dict
            whatever it says.

    Raises:
        CheckpointError: not a checkpoint of BEiT or DALL-E, or one that the target format cannot express.
        FileNotFoundError: there is no source.
    """
    if to not in TARGETS:
        raise ValueError(f'unknown format {to!r}; choose one of {", ".join(TARGETS)}')
    source, target = weights_in(Path(source)), Path(target)
    if not source.is_file():
        raise FileNotFoundError(f'there is no file {source}')
    content = read_checkpoint(source)
    check_version(content, source)
    weights = weights_of(content)
    if 'blocks.input.w' in weights:
        write_checkpoint(target, weights)
        return Conversion('DALL-E', 'tokenizer', len(weights), [], [])
    if to == 'hf' and (target.suffix in SUFFIXES or target.is_file()):
        raise CheckpointError(f'{target} is to be a folder: the hf format has three files. Nothing was written.')
    meta = _meta(content, source)
    try:
        ours = to_ours(weights)
        check_complete(ours.weights)
        theirs, left_out = from_ours(ours.weights, to, _grid(ours.weights, meta))
        config = hf.model_config(ours.weights, meta) if to == 'hf' else None
    except ValueError as error:
        raise CheckpointError(f'{source} {error}. Nothing was written.') from None
    notes = []
    if config is None:
        write_checkpoint(target, _container(to, task_of(ours.weights), theirs, meta, target.suffix))
    else:
        notes = _write_hub_folder(target, theirs, config, meta.get('preprocessing', {}))
        if hf.taps_out_of_reach(ours.weights, meta):
            notes.append('transformers cannot take the features after the last block, as this model does: its logits '
                         'will differ. The weights are complete.')
    return Conversion(ours.format, task_of(ours.weights), len(theirs), ours.left_out + left_out, notes)


def publish_checkpoint(source: str | Path, target: str | Path) -> Path:
    """Strips a checkpoint to what others need and puts its hash into its name.

    Optimizer, schedules and log are dropped; weights, preprocessing, classes, the tokenizer's hash and the config stay,
    the config with the paths in it.

    Args:
        source: any BEiT checkpoint, as `convert_checkpoint` takes it.
        target: name of the file, .safetensors or .pth.

    Returns:
        The file: `target` with the first eight digits of its SHA-256 before the suffix.

    Raises:
        CheckpointError, FileNotFoundError: as `convert_checkpoint` does; nothing is left behind.
    """
    target = Path(target)
    if target.suffix not in SUFFIXES:
        raise CheckpointError(f'{target} is no name for a checkpoint: it must end in {", ".join(SUFFIXES)}.')
    partial = target.with_name(f'{target.stem}.unnamed{target.suffix}')
    try:
        convert_checkpoint(source, partial)
        named = target.with_name(f'{target.stem}-{file_sha256(partial)[:8]}{target.suffix}')
        os.replace(partial, named)
    finally:
        partial.unlink(missing_ok=True)
    return named


def _grid(weights: Mapping[str, Tensor], meta: Mapping[str, Any]) -> Grid | None:
    """Patch grid of the weights, where the file says the size of its images."""
    patch = weights['backbone.patch_embed.proj.weight'].shape[-1]
    size = meta['preprocessing'].get('size')
    return size and tuple(-(-side // patch) for side in size)


def _meta(content: Mapping[str, Any], source: Path) -> dict[str, Any]:
    meta = {key: value for key, value in meta_of(content).items() if key in KEPT}
    if isinstance(tokenizer := meta.get('tokenizer'), dict):  # paths say nothing elsewhere
        meta['tokenizer'] = {key: value for key, value in tokenizer.items() if not key.endswith('path')}
    return dict(meta, preprocessing=preprocessing_of(content, source),
                architecture=architecture_of(content, source))


def _container(to: str, task: str, weights: dict[str, Tensor], meta: dict[str, Any], suffix: str) -> dict[str, Any]:
    """The form in which each code base keeps a state dict."""
    if to == 'beit_mm':
        return dict(state_dict=weights, meta=dict(meta, beit_mm_format=FORMAT_VERSION))
    if to == 'timm':
        return weights
    if to == 'unilm' and task != 'segmentation':
        return weights if suffix == '.safetensors' else dict(model=weights)
    return dict(state_dict=weights, meta=meta)


def _write_hub_folder(folder: Path, weights: dict[str, Tensor], config: dict[str, Any],
                      preprocessing: Mapping[str, Any]) -> list[str]:
    """Writes the two or three files; returns what there is to say."""
    write_checkpoint(folder / 'model.safetensors', weights)
    (folder / 'config.json').write_text(json.dumps(config, indent=2) + '\n')
    processor = folder / 'preprocessor_config.json'
    if not {'mean', 'std', 'size'} <= set(preprocessing):
        processor.unlink(missing_ok=True)  # of other weights
        return ['the source does not say how its images are prepared: no preprocessor_config.json']
    processor.write_text(json.dumps(hf.image_processor_config(preprocessing), indent=2) + '\n')
    return []

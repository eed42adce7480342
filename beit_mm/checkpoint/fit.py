"""Weights of any file in a backbone: how mmengine reads them, how they are made to fit, and what became of each."""

import logging
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from mmengine.logging import print_log
from mmengine.runner.checkpoint import CheckpointLoader
from torch import Tensor

from beit_mm.checkpoint.find import HUB_SCHEME, locate_weights
from beit_mm.checkpoint.names import (
    POSITIONS,
    SHARED_TABLE,
    TABLE,
    Weights,
    backbone_arguments,
    convert_state_dict,
    describe_source,
    expand_shared_table,
    first_names,
    grid_of,
    meta_of,
    weights_of,
)
from beit_mm.checkpoint.read import CheckpointError, blaming, read_checkpoint
from beit_mm.positions import Grid, resize_bias_table, resize_position_embedding

SOURCE_KEY = 'beit_mm'  # of a state dict's metadata: what `describe_source` says of the file
ADVICE = 'Name a file that exists, as load_from, init_cfg.checkpoint, --resume or on the command line.'
MIN_COVERAGE = 0.95  # of the backbone's tensors, less those of TASK_PARTS
LAST_AXES = {'width': 'cls_token', 'patch size': 'patch_embed.proj.weight', 'MLP width': 'blocks.0.mlp.fc1.bias'}
TASK_PARTS = ('mask_token', 'norm.', 'fc_norm.')  # come and go with the task


# --- mmengine's way to read files -----------------------------------------------------------------


@CheckpointLoader.register_scheme(prefixes=('', 'http://', 'https://', HUB_SCHEME), force=True)
def load_from_file(filename: str, map_location: object = None) -> dict[str, Any]:
    """How mmengine reads paths and URLs: of a BEiT's file dict(state_dict=..., meta=..., ...).

    mmengine 0.10.7 cannot read its own checkpoints with torch >= 2.6; its successors run whatever code a file holds.
    A BEiT's file of the released code, timm or transformers gets our names: it has no prefix by which mmengine could
    find the backbone's part. Files with OpenMMLab's names keep them, since its own classes in the same process may want
    them; our backbone translates what it is given. Other files stay as they are, but for the text `meta['config']`,
    which mmengine's resume would execute. What `describe_source` says is in the metadata of the state dict.

    Args:
        filename: path, URL, or hf://owner/name.
        map_location: ignored; models and optimizers copy to where their parameters are.

    Raises:
        FileNotFoundError: with the places looked at.
        CheckpointError: no checkpoint, damaged, or written by a later version.
        UnsafeCheckpointError: the file wants to run code.
    """
    path = locate_weights(filename, ADVICE)
    content = read_checkpoint(path)
    with blaming(path):
        return _as_read(content, path)


def _as_read(content: dict[str, Any], path: Path) -> dict[str, Any]:
    """A file's content as `load_from_file` returns it."""
    source = describe_source(content, path)
    meta_of(content).pop('config', None)
    if source['format'] in ('unilm', 'timm', 'hf'):
        try:
            weights, dropped, _ = convert_state_dict(weights_of(content), source['format'])
        except CheckpointError:  # a Transformer of another kind: a model that wants it knows its names
            source['format'] = None
        else:
            known = ('preprocessing', 'architecture', 'dataset_meta')
            meta = dict(meta_of(content), **{name: source[name] for name in known if name in source})
            content = dict(state_dict=weights, meta=meta)
            if dropped:
                message = f'{path} ({source["format"]}) holds tensors that no model of ours has: {dropped}'
                print_log(message, logger='current', level=logging.WARNING)
    elif source['format'] is not None:
        content['state_dict'] = weights_of(content)  # under names without wrappers
    whole = 'state_dict' not in content  # mmengine takes it for a state dict then
    given = content if whole else content['state_dict']
    if not isinstance(given, dict):
        raise CheckpointError(f'{path} has a state_dict of type {type(given).__name__}, expected names and tensors')
    if others := [name for name in given if not isinstance(name, str)]:
        raise CheckpointError(f'{path} is no checkpoint of a model: {ascii(others[0]):.60} is no name of a tensor')
    state_dict: Any = OrderedDict(given)
    state_dict._metadata = OrderedDict(getattr(given, '_metadata', {}))
    for module in ('', 'backbone', 'module.backbone'):  # of a backbone, of a model, of a model in a wrapper
        state_dict._metadata[module] = {**state_dict._metadata.get(module, {}), SOURCE_KEY: source}
    return state_dict if whole else dict(content, state_dict=state_dict)


def read_backbone(checkpoint: str) -> tuple[dict[str, Any], Mapping[str, Tensor]]:
    """Arguments of the BEiTBackbone that a file's weights belong to, and its state dict as mmengine reads it.

    Raises:
        CheckpointError: no BEiT, or neither file nor shapes say how many heads or which rectangle of patches.
    """
    content = load_from_file(checkpoint)
    state_dict = content.get('state_dict', content)
    with blaming(checkpoint):
        try:
            source = state_dict._metadata[''][SOURCE_KEY]
            return backbone_arguments(convert_state_dict(state_dict).state_dict, source), state_dict
        except CheckpointError as error:
            raise CheckpointError(f'{checkpoint} {error}.') from None
        except ValueError as error:
            raise CheckpointError(f'{checkpoint}: {error}, and the file does not say to which rectangle.') from None


# --- into a backbone ------------------------------------------------------------------------------


@dataclass
class LoadReport:
    """What became of each tensor when a backbone was loaded; names without `backbone.`.

    Attributes:
        source: file and format.
        preprocessing: of the images that the weights were trained on, see `names.describe_source`.
        grid: patch grid (h, w) of these images, None where the file does not say.
        matched: loaded as they were in the file.
        expanded: tables copied from the one that all blocks shared.
        resized: name -> patch grids, for tables and position embeddings.
        adapted: patch embeddings made for another number of channels.
        folded: LayerScale multiplied into other weights.
        missing_keys: of the model, not in the file: they keep their initial values.
        unexpected_keys: in the file, of no use to the model.
    """

    source: str
    preprocessing: Mapping
    grid: Grid | None = None
    matched: list[str] = field(default_factory=list)
    expanded: list[str] = field(default_factory=list)
    resized: dict[str, str] = field(default_factory=dict)
    adapted: list[str] = field(default_factory=list)
    folded: list[str] = field(default_factory=list)
    missing_keys: list[str] = field(default_factory=list)
    unexpected_keys: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        grids = ', '.join(sorted(set(self.resized.values())))
        parts = [
            (self.matched, 'matched'),
            (self.expanded, 'expanded'),
            (self.resized, f'resized ({grids})'),
            (self.adapted, 'adapted'),
            (self.folded, 'folded'),
            (self.missing_keys, f'missing ({first_names(self.missing_keys)})'),
            (self.unexpected_keys, f'unexpected ({first_names(self.unexpected_keys)})'),
        ]
        counts = ', '.join(f'{len(names)} {what}' for names, what in parts if names)
        return f'Backbone weights from {self.source}: {counts}.'


def of_every_task(names: list[str]) -> list[str]:
    """The names of tensors that do not come and go with the task."""
    return [name for name in names if not name.startswith(TASK_PARTS)]


def fit_state_dict(
    state_dict: Mapping[str, Tensor],
    own: Mapping[str, Tensor],
    grid: Grid,
    num_heads: int,
    interpolate_mode: str,
    source: Mapping | None = None,
) -> tuple[Weights, LoadReport]:
    """What a backbone can load of a state dict, a whole model's or a backbone's.

    Args:
        state_dict: names of any format.
        own: the backbone's state dict.
        grid, num_heads: patch grid (h, w) that the backbone is built for, and its attention heads.
        interpolate_mode: of position embeddings, 'bicubic' or 'bilinear'.
        source: what `describe_source` says of the file; None for a state dict by itself.

    Returns:
        The weights under the backbone's names and in its shapes, and what became of each.

    Raises:
        CheckpointError: not a BEiT, another architecture, less than 95 % of the backbone, or numbers that are NaN or
            infinite; says what differs.
    """
    source = source or dict(path='the state dict', format=None, preprocessing={}, architecture={})
    try:
        converted, dropped, format = convert_state_dict(state_dict)
    except CheckpointError as error:
        raise CheckpointError(f'{source["path"]} {error}. Nothing was loaded.') from None
    prefix = 'backbone.'
    weights = {name.removeprefix(prefix): tensor for name, tensor in converted.items() if name.startswith(prefix)}
    report = LoadReport(f'{source["path"]} ({source["format"] or format})', source['preprocessing'])
    tables = [tensor for name, tensor in weights.items() if name.endswith(TABLE)]
    file_heads = source['architecture'].get('num_heads') or (tables[0].shape[-1] if tables else num_heads)
    depths = [sum(name.endswith('attn.qkv.weight') for name in names) for names in (weights, own)]
    sizes = [('heads', file_heads, num_heads), ('blocks', *depths)]
    for what, name in LAST_AXES.items():
        if name in weights:
            sizes.append((what, weights[name].shape[-1], own[name].shape[-1]))
    if differences := [f'{what} {theirs}, the model has {ours}' for what, theirs, ours in sizes if theirs != ours]:
        raise CheckpointError(
            f'{report.source} does not fit the backbone: {", ".join(differences)}. Nothing was '
            'loaded; build the backbone as the weights are, or take other weights.'
        )
    check_finite(weights, report.source)
    size, patch = source['preprocessing'].get('size'), own['patch_embed.proj.weight'].shape[-1]
    report.grid = (-(-size[0] // patch), -(-size[1] // patch)) if size else None
    if SHARED_TABLE in weights and f'blocks.0.attn.{TABLE}' in own:
        expand_shared_table(weights)
        report.expanded = [name for name in weights if name.endswith(TABLE)]
    if 'blocks.0.gamma_1' not in own:
        report.folded = [name for name in weights if '.gamma_' in name]
        _fold_layer_scale(weights)
    fitted = {}
    for name, target in own.items():
        if name in weights:
            fitted[name] = _fit(name, weights[name], target, grid, interpolate_mode, report)
    changed = {*report.resized, *report.expanded, *report.adapted}
    report.matched = [name for name in fitted if name not in changed]
    report.missing_keys = [name for name in own if name not in fitted]
    report.unexpected_keys = [name.removeprefix(prefix) for name in dropped if name.startswith(prefix)]
    report.unexpected_keys += [name for name in weights if name not in own]
    _check_coverage(own, report)
    return fitted, report


def check_finite(weights: Mapping[str, Tensor], source: str) -> None:
    """Raises CheckpointError where weights hold NaN or infinity, as those of a run that diverged do.

    Args:
        weights: names to tensors; those that are no floating-point numbers are passed over.
        source: what the error calls the file.
    """
    broken = []
    for name, tensor in weights.items():
        if not tensor.is_floating_point() or tensor.is_meta:
            continue
        # a sum is ten times faster than looking at each number, and only large numbers make a wrong alarm
        if not tensor.sum(dtype=torch.float32).isfinite() and not tensor.isfinite().all():
            broken.append(name)
    if broken:
        raise CheckpointError(
            f'{source}: {len(broken)} of {len(weights)} tensors hold NaN or infinity: {first_names(broken)}. Nothing '
            'was loaded; the run that wrote them had diverged: take an earlier checkpoint of it.'
        )


def _fold_layer_scale(weights: Weights) -> None:
    """Multiplies LayerScale into the layers before it, in place: the model computes the same without it."""
    for name in [name for name in weights if name.endswith(('.gamma_1', '.gamma_2'))]:
        gamma = weights.pop(name)
        layer = name.replace('gamma_1', 'attn.proj').replace('gamma_2', 'mlp.fc2')
        for scaled in (f'{layer}.weight', f'{layer}.bias'):
            if scaled in weights:  # otherwise it is reported as missing
                weights[scaled] = weights[scaled] * gamma.view(-1, *[1] * (weights[scaled].dim() - 1))


def _fit(name: str, tensor: Tensor, target: Tensor, grid: Grid, interpolate_mode: str, report: LoadReport) -> Tensor:
    """A tensor in the backbone's shape; says in the report what was done to it."""
    free_axis = 0 if name.endswith(TABLE) else 1 if name in ('pos_embed', 'patch_embed.proj.weight') else None
    shapes = [[size for axis, size in enumerate(t.shape) if axis != free_axis] for t in (tensor, target)]
    if tensor.dim() != target.dim() or shapes[0] != shapes[1]:
        raise CheckpointError(
            f'{report.source}: {name} is {tuple(tensor.shape)}, the backbone has {tuple(target.shape)}. '
            'Nothing was loaded.'
        )
    if name == 'patch_embed.proj.weight' and tensor.shape != target.shape:
        report.adapted.append(name)
        return _adapt_channels(tensor, target.shape[1])
    if not name.endswith(POSITIONS):
        return tensor
    try:
        source = grid_of(name, tensor, report.grid, grid)
    except ValueError as error:
        raise CheckpointError(f'{report.source}: {error}, and the file does not say to which rectangle.') from None
    if source != grid:
        report.resized[name] = f'{source[0]} x {source[1]} -> {grid[0]} x {grid[1]}'
    if name.endswith(TABLE):
        return resize_bias_table(tensor, source, grid)
    return resize_position_embedding(tensor, source, grid, interpolate_mode)


def _adapt_channels(weight: Tensor, channels: int) -> Tensor:
    """Patch embedding (dims, c, patch, patch) for images with another number of channels."""
    if channels == 1:  # a gray image gives what its RGB copy gave
        return weight.sum(dim=1, keepdim=True)
    repeats = -(-channels // weight.shape[1])  # rounded up
    # the filters in turn, scaled so that their sum stays what it was
    return weight.repeat(1, repeats, 1, 1)[:, :channels] * (weight.shape[1] / channels)


def _check_coverage(own: Mapping[str, Tensor], report: LoadReport) -> None:
    """Raises CheckpointError where too much of the backbone would stay as it was initialised."""
    needed, missing = len(of_every_task([*own])), of_every_task(report.missing_keys)
    loaded = needed - len(missing)
    if loaded / needed < MIN_COVERAGE:
        raise CheckpointError(
            f"{report.source} has {loaded} of the backbone's {needed} tensors ({loaded / needed:.0%}, at least "
            f'{MIN_COVERAGE:.0%} are needed): {len(missing)} missing ({first_names(missing)}). Nothing was '
            'loaded; build the backbone as the weights are (rel_pos_bias, layer_scale_init, abs_pos_embed).'
        )
    # Without any position a model may be wanted; with new ones in the place of trained ones nobody wants it.
    positions = [[name for name in names if name.endswith(POSITIONS)] for names in (missing, report.unexpected_keys)]
    if all(positions):
        raise CheckpointError(
            f'{report.source} knows positions by {positions[1][0]}, the backbone by {positions[0][0]}. Nothing was '
            'loaded; build the backbone as the weights are (rel_pos_bias, abs_pos_embed).'
        )

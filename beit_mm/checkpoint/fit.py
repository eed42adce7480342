"""Weights made to fit a backbone of another task, image size, or number of channels, and what became of each."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import count

from torch import Tensor

from beit_mm.checkpoint.io import CheckpointError
from beit_mm.checkpoint.names import SHARED_TABLE, TABLE, Weights, convert_state_dict, expand_shared_table
from beit_mm.positions import (
    Grid,
    num_relative_positions,
    resize_bias_table,
    resize_position_embedding,
    square_grid,
    square_token_grid,
)

SOURCE_KEY = 'beit_mm'  # of a state dict's metadata: what `loader.describe_source` says of the file
MIN_COVERAGE = 0.95  # of the backbone's tensors, less those of TASK_PARTS
TASK_PARTS = ('mask_token', 'norm.', 'fc_norm.')  # come and go with the task


@dataclass
class LoadReport:
    """What became of each tensor when a backbone was loaded; names without `backbone.`.

    Attributes:
        source: file and format.
        preprocessing: of the images that the weights were trained on, see `loader.describe_source`.
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
    preprocessing: Mapping = field(default_factory=dict)
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
            f'{len(self.matched)} matched',
            f'{len(self.expanded)} expanded',
            f'{len(self.resized)} resized' + (f' ({grids})' if grids else ''),
            f'{len(self.adapted)} adapted',
            f'{len(self.folded)} folded',
            _counted(self.missing_keys, 'missing'),
            _counted(self.unexpected_keys, 'unexpected'),
        ]
        return (
            f'Backbone weights from {self.source}: '
            + ', '.join(part for part in parts if not part.startswith('0 '))
            + '.'
        )


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
        state_dict: names of any format; the loader's own once it has translated them (`source['translated']`).
        own: the backbone's state dict.
        grid, num_heads: patch grid (h, w) that the backbone is built for, and its attention heads.
        interpolate_mode: of position embeddings, 'bicubic' or 'bilinear'.
        source: what the loader says of the file, see `loader.describe_source`; None for a state dict by itself.

    Returns:
        The weights under the backbone's names and in its shapes, and what became of each.

    Raises:
        CheckpointError: not a BEiT, another architecture, or less than 95 % of the backbone; says what differs.
    """
    path = source['path'] if source else 'the state dict'
    dropped = []
    if source and source['translated']:
        weights, format = state_dict, source['format']
    else:
        try:
            weights, dropped, format = convert_state_dict(state_dict)
        except CheckpointError as error:
            raise CheckpointError(f'{path} {error}. Nothing was loaded.') from None
    if any(name.startswith('backbone.') for name in weights):
        weights = {
            name.removeprefix('backbone.'): tensor for name, tensor in weights.items() if name.startswith('backbone.')
        }
    if source and source['architecture'].get('num_heads', num_heads) != num_heads:
        raise CheckpointError(
            f'{path} has {source["architecture"]["num_heads"]} attention heads, the backbone '
            f'{num_heads}. Nothing was loaded.'
        )
    report = LoadReport(f'{path} ({source and source["format"] or format})', source['preprocessing'] if source else {})
    report.unexpected_keys += [name.removeprefix('backbone.') for name in dropped if name.startswith('backbone.')]
    return _fit_weights(dict(weights), own, grid, report, interpolate_mode), report


def adapt_channels(weight: Tensor, channels: int) -> Tensor:
    """Patch embedding for images with another number of channels.

    One channel gets the sum of all filters, so that a gray image gives what its RGB copy gave. More channels
    take the filters in turn, scaled so that the sum over channels stays what it was.

    Args:
        weight: (dims, c, patch, patch).
        channels: c of the result.
    """
    if channels == 1:
        return weight.sum(dim=1, keepdim=True)
    repeats = -(-channels // weight.shape[1])  # rounded up
    return weight.repeat(1, repeats, 1, 1)[:, :channels] * (weight.shape[1] / channels)


def fold_layer_scale(weights: Weights) -> None:
    """Multiplies LayerScale into the layers before it, in place: the model computes the same without it."""
    for name in [name for name in weights if name.endswith(('.gamma_1', '.gamma_2'))]:
        gamma = weights.pop(name)
        layer = name.replace('gamma_1', 'attn.proj').replace('gamma_2', 'mlp.fc2')
        for scaled in (f'{layer}.weight', f'{layer}.bias'):
            if scaled in weights:  # otherwise it is reported as missing
                weights[scaled] = weights[scaled] * gamma.view(-1, *[1] * (weights[scaled].dim() - 1))


def _fit_weights(
    weights: Weights, own: Mapping[str, Tensor], grid: Grid, report: LoadReport, interpolate_mode: str
) -> Weights:
    """The part of `weights` that the backbone has a place for, and the report filled in."""
    for name, tensor in weights.items():
        if name in own and tensor.dim() != own[name].dim():
            raise _wrong_shape(name, tensor, own[name], report)
    if (size := report.preprocessing.get('size')) and (patch := _patch_size(weights)):
        report.grid = tuple(-(-side // patch) for side in size)
    if SHARED_TABLE in weights and f'blocks.0.attn.{TABLE}' in own:
        expand_shared_table(weights)
        report.expanded = [name for name in weights if name.endswith(TABLE)]
    if 'blocks.0.gamma_1' not in own:
        report.folded = [name for name in weights if '.gamma_' in name]
        fold_layer_scale(weights)
    if differences := _differences(weights, own):
        raise CheckpointError(
            f'{report.source} does not fit the backbone: {", ".join(differences)}. Nothing was '
            'loaded; build the backbone as the weights are, or take other weights.'
        )
    fitted = {
        name: _fit(name, tensor, own[name], grid, report, interpolate_mode)
        for name, tensor in weights.items()
        if name in own
    }
    changed = {*report.resized, *report.expanded, *report.adapted}
    report.matched = [name for name in fitted if name not in changed]
    report.missing_keys = [name for name in own if name not in fitted]
    report.unexpected_keys += [name for name in weights if name not in own]
    _check_coverage(own, report)
    return fitted


def _fit(name: str, tensor: Tensor, target: Tensor, grid: Grid, report: LoadReport, interpolate_mode: str) -> Tensor:
    if (
        name == 'patch_embed.proj.weight'
        and tensor.shape[1] != target.shape[1]
        and (tensor[:, 0].shape == target[:, 0].shape)
    ):
        report.adapted.append(name)
        return adapt_channels(tensor, target.shape[1])
    if name.endswith(TABLE):
        source = _source_grid(len(tensor), grid, report, num_relative_positions, square_grid)
        fitted = resize_bias_table(tensor, source, grid)
    elif name == 'pos_embed':
        source = _source_grid(tensor.shape[1], grid, report, lambda g: 1 + g[0] * g[1], square_token_grid)
        fitted = resize_position_embedding(tensor, source, grid, interpolate_mode)
    elif tensor.shape == target.shape:
        return tensor
    else:
        raise _wrong_shape(name, tensor, target, report)
    if source != grid:
        report.resized[name] = f'{source[0]} x {source[1]} -> {grid[0]} x {grid[1]}'
    return fitted


def _wrong_shape(name: str, tensor: Tensor, target: Tensor, report: LoadReport) -> CheckpointError:
    return CheckpointError(
        f'{report.source}: {name} is {tuple(tensor.shape)}, the backbone has {tuple(target.shape)}. Nothing was loaded.'
    )


def _source_grid(
    length: int, grid: Grid, report: LoadReport, length_of: Callable[[Grid], int], square_of: Callable[[int], Grid]
) -> Grid:
    """Patch grid of a table or position embedding of so many rows."""
    for candidate in (report.grid, grid):
        if candidate is not None and length_of(candidate) == length:
            return candidate
    try:
        return square_of(length)
    except ValueError as error:
        raise CheckpointError(f'{report.source}: {error}, and the file does not say to which rectangle.') from None


def _differences(weights: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> list[str]:
    """Of the architecture, in words."""
    measured = {
        'width': lambda w: w['cls_token'].shape[-1] if 'cls_token' in w else None,
        'blocks': lambda w: next(i for i in count() if f'blocks.{i}.attn.qkv.weight' not in w),
        'patch size': _patch_size,
        'heads': lambda w: next((tensor.shape[1] for name, tensor in w.items() if name.endswith(TABLE)), None),
        'MLP width': lambda w: len(w['blocks.0.mlp.fc1.bias']) if 'blocks.0.mlp.fc1.bias' in w else None,
    }
    pairs = {what: (measure(weights), measure(own)) for what, measure in measured.items()}
    return [
        f'{what} {theirs}, the model has {ours}'
        for what, (theirs, ours) in pairs.items()
        if None not in (theirs, ours) and theirs != ours
    ]


def _patch_size(weights: Mapping[str, Tensor]) -> int | None:
    return weights['patch_embed.proj.weight'].shape[-1] if 'patch_embed.proj.weight' in weights else None


def _check_coverage(own: Mapping[str, Tensor], report: LoadReport) -> None:
    needed, missing = len(of_every_task([*own])), of_every_task(report.missing_keys)
    loaded = needed - len(missing)
    if loaded / needed < MIN_COVERAGE:
        raise CheckpointError(
            f"{report.source} has {loaded} of the backbone's {needed} tensors ({loaded / needed:.0%}, at least "
            f'{MIN_COVERAGE:.0%} are needed): {_counted(missing, "missing")}. Nothing was loaded; build the '
            'backbone as the weights are (rel_pos_bias, layer_scale_init, abs_pos_embed), or take other weights.'
        )
    # Without any position a model may be wanted; with new ones in the place of trained ones nobody wants it.
    positions = [
        [name for name in names if name == 'pos_embed' or name.endswith(TABLE)]
        for names in (missing, report.unexpected_keys)
    ]
    if all(positions):
        raise CheckpointError(
            f'{report.source} knows positions by {positions[1][0]}, the backbone by {positions[0][0]}. Nothing was '
            'loaded; build the backbone as the weights are (rel_pos_bias, abs_pos_embed).'
        )


def _counted(names: list[str], what: str) -> str:
    """Number, kind and the first few of some names."""
    shown = ', '.join(names[:4]) + (', ...' if len(names) > 4 else '')
    return f'{len(names)} {what} ({shown})' if names else f'0 {what}'

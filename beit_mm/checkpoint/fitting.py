"""Weights made to fit a backbone of another task, image size, or number of channels."""
from collections.abc import Callable, Mapping
from itertools import count

from torch import Tensor

from beit_mm.checkpoint.errors import CheckpointError
from beit_mm.checkpoint.formats import SHARED_TABLE, TABLE, Weights, expand_shared_table, fold_layer_scale, to_ours
from beit_mm.checkpoint.origin import origin_of
from beit_mm.checkpoint.report import TASK_PARTS, LoadReport, listed
from beit_mm.positions import (
    Grid,
    num_relative_positions,
    resize_bias_table,
    resize_position_embedding,
    square_grid,
    square_token_grid,
)

MIN_COVERAGE = 0.95  # of the backbone's other tensors


def fit_state_dict(state_dict: Mapping[str, Tensor], own: Mapping[str, Tensor], grid: Grid, num_heads: int,
                   pos_embed_mode: str) -> tuple[Weights, LoadReport]:
    """What a backbone can load of a state dict of any format, a whole model's or a backbone's.

    Args:
        state_dict: any names.
        own: the backbone's state dict.
        grid, num_heads: patch grid (h, w) that the backbone is built for, and its attention heads.
        pos_embed_mode: 'bicubic' or 'bilinear'.

    Returns:
        The weights under the backbone's names and in its shapes, and what became of each.

    Raises:
        CheckpointError: not a BEiT, another architecture, or less than 95 % of the backbone; says what differs.
    """
    origin = origin_of(state_dict.values())
    source = origin.path if origin else 'the state dict'
    try:
        translation = to_ours(state_dict)
    except CheckpointError as error:
        raise CheckpointError(f'{source} {error}. Nothing was loaded.') from None
    weights = {name.removeprefix('backbone.'): tensor for name, tensor in translation.weights.items()
               if name.startswith('backbone.')}
    heads = origin.architecture.get('num_heads', num_heads) if origin else num_heads
    if heads != num_heads:
        raise CheckpointError(f'{source} has {heads} attention heads, the backbone {num_heads}. Nothing was loaded.')
    if origin:
        report = LoadReport(f'{source} ({origin.format})', origin.preprocessing)
    else:
        report = LoadReport(f'{source} ({translation.format})')
    report.left_out += [name.removeprefix('backbone.') for name in translation.left_out if name.startswith('backbone.')]
    return _fit_weights(weights, own, grid, report, pos_embed_mode), report


def _fit_weights(weights: Weights, own: Mapping[str, Tensor], grid: Grid, report: LoadReport,
                 pos_embed_mode: str) -> Weights:
    """The part of `weights` that the backbone has a place for, and the report filled in."""
    weights = dict(weights)
    for name, tensor in weights.items():
        if name in own and tensor.dim() != own[name].dim():
            raise _wrong_shape(name, tensor, own[name], report)
    if (size := report.preprocessing.get('size')) and (patch := _patch(weights)):
        report.grid = tuple(-(-side // patch) for side in size)
    if SHARED_TABLE in weights and f'blocks.0.attn.{TABLE}' in own:
        expand_shared_table(weights)
        report.expanded = [name for name in weights if name.endswith(TABLE)]
    if 'blocks.0.gamma_1' not in own:
        report.folded = [name for name in weights if '.gamma_' in name]
        fold_layer_scale(weights)
    problems = _differences(weights, own)
    if problems:
        raise CheckpointError(f"{report.source} does not fit the backbone: {', '.join(problems)}. Nothing was loaded; "
                              'build the backbone as the weights are, or take other weights.')
    fitted = {}
    for name, tensor in weights.items():
        if name not in own:
            report.left_out.append(name)
        else:
            fitted[name] = _fit(name, tensor, own[name], grid, report, pos_embed_mode)
            changed = name in report.resized or name in report.expanded or name in report.adapted
            if not changed:
                report.matched.append(name)
    report.missing = [name for name in own if name not in fitted]
    _check_coverage(own, report)
    return fitted


def _fit(name: str, tensor: Tensor, target: Tensor, grid: Grid, report: LoadReport, pos_embed_mode: str) -> Tensor:
    if name.endswith(TABLE):
        source = _source_grid(len(tensor), grid, report, num_relative_positions, square_grid)
        fitted = resize_bias_table(tensor, source, grid)
    elif name == 'pos_embed':
        source = _source_grid(tensor.shape[1], grid, report, lambda g: 1 + g[0] * g[1], square_token_grid)
        fitted = resize_position_embedding(tensor, source, grid, pos_embed_mode)
    elif name == 'patch_embed.proj.weight' and tensor.shape[1] != target.shape[1] and (
            tensor[:, 0].shape == target[:, 0].shape):
        report.adapted.append(name)
        return adapt_channels(tensor, target.shape[1])
    else:
        if tensor.shape != target.shape:
            raise _wrong_shape(name, tensor, target, report)
        return tensor
    if source != grid:
        report.resized[name] = f'{source[0]} x {source[1]} -> {grid[0]} x {grid[1]}'
    return fitted


def _wrong_shape(name: str, tensor: Tensor, target: Tensor, report: LoadReport) -> CheckpointError:
    return CheckpointError(f'{report.source}: {name} is {tuple(tensor.shape)}, the backbone has {tuple(target.shape)}. '
                           'Nothing was loaded.')


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


def _source_grid(length: int, grid: Grid, report: LoadReport, length_of: Callable[[Grid], int],
                 square_of: Callable[[int], Grid]) -> Grid:
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
    found = []
    for what, measure in (('width', _width), ('blocks', _depth), ('patch size', _patch), ('heads', _heads),
                          ('MLP width', _mlp_width)):
        theirs, ours = measure(weights), measure(own)
        if None not in (theirs, ours) and theirs != ours:
            found.append(f'{what} {theirs}, the model has {ours}')
    return found


def _width(weights: Mapping[str, Tensor]) -> int | None:
    return weights['cls_token'].shape[-1] if 'cls_token' in weights else None


def _depth(weights: Mapping[str, Tensor]) -> int:
    return next(i for i in count() if f'blocks.{i}.attn.qkv.weight' not in weights)


def _patch(weights: Mapping[str, Tensor]) -> int | None:
    return weights['patch_embed.proj.weight'].shape[-1] if 'patch_embed.proj.weight' in weights else None


def _heads(weights: Mapping[str, Tensor]) -> int | None:
    return next((tensor.shape[1] for name, tensor in weights.items() if name.endswith(TABLE)), None)


def _mlp_width(weights: Mapping[str, Tensor]) -> int | None:
    return len(weights['blocks.0.mlp.fc1.bias']) if 'blocks.0.mlp.fc1.bias' in weights else None


def _check_coverage(own: Mapping[str, Tensor], report: LoadReport) -> None:
    needed = sum(not name.startswith(TASK_PARTS) for name in own)
    found = needed - len(report.lacking)
    coverage = found / needed
    if coverage < MIN_COVERAGE:
        raise CheckpointError(
            f"{report.source} has {found} of the backbone's {needed} tensors ({coverage:.0%}, at least "
            f'{MIN_COVERAGE:.0%} are needed): {listed(report.lacking, "missing")}. Nothing was loaded; build the '
            'backbone as the weights are (rel_pos_bias, layer_scale_init, abs_pos_embed), or take other weights.')
    # Without any position a model may be wanted; with new ones in the place of trained ones nobody wants it.
    positions = [[name for name in names if name == 'pos_embed' or name.endswith(TABLE)]
                 for names in (report.lacking, report.surplus)]
    if all(positions):
        raise CheckpointError(
            f'{report.source} knows positions by {positions[1][0]}, the backbone by {positions[0][0]}. Nothing was '
            'loaded; build the backbone as the weights are (rel_pos_bias, abs_pos_embed).')

"""State dicts of every format, read as ours and written from ours."""
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from beit_mm.checkpoint import keys
from beit_mm.checkpoint.errors import CheckpointError
from beit_mm.positions import Grid, num_relative_positions, relative_position_index, square_grid

Weights = dict[str, Tensor]
TABLE = 'relative_position_bias_table'
INDEX = 'relative_position_index'  # which row belongs to which pair: computed, never read
SHARED_TABLE = f'rel_pos_bias.{TABLE}'
BLOCK_PARTS = ('attn.qkv.weight', 'attn.q_bias', 'attn.v_bias', 'attn.proj.weight', 'attn.proj.bias',
               *(f'{part}.{kind}' for part in ('norm1', 'norm2', 'mlp.fc1', 'mlp.fc2') for kind in ('weight', 'bias')))
# Modules of transformers' BeitModel, which other models have below `beit.`
HF_ROOTS = ('embeddings.', 'encoder.', 'layers.', 'shared_position_bias.', 'pooler.')


class Translation(NamedTuple):
    """A state dict under our names.

    Attributes:
        format: what it was, one of READ.
        weights: ours.
        left_out: names in the source that have no place with us.
    """
    format: str
    weights: Weights
    left_out: list[str]


def to_ours(weights: Mapping[str, Tensor]) -> Translation:
    """A state dict of any format under our names.

    Computed buffers are dropped, the q, k and v of transformers are fused, and the bias of a plain ViT's keys is
    dropped: it adds the same number to all scores of a query, which the softmax takes away again.

    Raises:
        CheckpointError: not a BEiT, or one that our model cannot express.
    """
    weights = {keys.unwrapped(name): tensor for name, tensor in weights.items() if not name.endswith(INDEX)}
    source = keys.recognise(weights)
    if source is None:
        raise CheckpointError(f'holds no BEiT weights: its tensors are {first_names(weights)}')
    if source == 'hf':
        weights = _hub_names(weights)
    elif source == 'mmpretrain/mmseg' and 'layers.0.attn.qkv.weight' in weights:
        weights = {f'backbone.{name}': tensor for name, tensor in weights.items()}
    pairs = keys.reverse(READ[source])
    ours: Weights = {}
    left_out = []
    for name, tensor in weights.items():
        renamed = keys.rename(name, pairs)
        if renamed is None or renamed in ours and torch.equal(tensor, ours[renamed]):
            left_out.append(name)  # mmsegmentation's converter writes the patch embedding under two names
        elif renamed in ours:
            raise CheckpointError(f'has two tensors for {renamed}, {name} among them: our model applies only one')
        else:
            ours[renamed] = tensor
    if source == 'hf':
        _fuse_qkv(ours)
    _split_qkv_bias(ours)
    left_out += _drop_unknown(ours)
    return Translation(source, ours, left_out)


def from_ours(weights: Mapping[str, Tensor], target: str, grid: Grid | None = None) -> tuple[Weights, list[str]]:
    """A state dict of ours under the names of another format, with all that its own class has in its state dict.

    Args:
        weights: ours.
        target: one of WRITE.
        grid: patch grid (h, w) of the bias tables; None: a square one.

    Returns:
        Their state dict, and the names in ours that have no place in it.

    Raises:
        CheckpointError: the model would compute something else there.
    """
    ours = dict(weights)
    if target == 'mmseg':
        _fit_mmseg(ours)
    if target == 'hf':
        _split_qkv(ours)
    if target in ('unilm', 'mmpretrain', 'mmseg'):
        _add_index_buffers(ours, grid)
    pairs = WRITE[target](ours)
    theirs = {name: keys.rename(name, pairs) for name in ours}
    left_out = [name for name, renamed in theirs.items() if renamed is None]
    return {theirs[name]: tensor for name, tensor in ours.items() if theirs[name] is not None}, left_out


def task_of(weights: Mapping[str, Tensor]) -> str:
    """What a state dict of ours is for: 'pretraining', 'classification', 'segmentation' or 'features'."""
    if 'head.lm_head.weight' in weights:
        return 'pretraining'
    if 'head.fc.weight' in weights:
        return 'classification'
    return 'segmentation' if 'decode_head.conv_seg.weight' in weights else 'features'


def check_complete(weights: Mapping[str, Tensor]) -> None:
    """Raises CheckpointError when a state dict of ours lacks a part that every BEiT has."""
    depth = 1 + max(int(name.split('.')[2]) for name in weights if name.startswith('backbone.blocks.'))
    needed = ['backbone.cls_token', 'backbone.patch_embed.proj.weight', 'backbone.patch_embed.proj.bias']
    needed += [f'backbone.blocks.{index}.{part}' for index in range(depth) for part in BLOCK_PARTS]
    if missing := [name for name in needed if name not in weights]:
        raise CheckpointError(f'lacks {first_names(missing)}')


def expand_shared_table(weights: Weights) -> None:
    """Gives every block a copy of the table that they shared, in place, on top of its own: a model adds both."""
    for shared in [name for name in weights if name.endswith(SHARED_TABLE)]:
        table = weights.pop(shared)
        for name in [name for name in weights if name.endswith('.attn.qkv.weight')]:
            own = name.replace('qkv.weight', TABLE)
            weights[own] = weights[own] + table if own in weights else table.clone()


def fold_layer_scale(weights: Weights) -> None:
    """Multiplies LayerScale into the layers before it, in place: the model computes the same without it."""
    for name in [name for name in weights if name.endswith(('.gamma_1', '.gamma_2'))]:
        gamma = weights.pop(name)
        layer = name.replace('gamma_1', 'attn.proj').replace('gamma_2', 'mlp.fc2')
        for scaled in (f'{layer}.weight', f'{layer}.bias'):
            if scaled in weights:  # otherwise it is reported as missing
                weights[scaled] = (weights[scaled].T * gamma).T


READ: dict[str, keys.Pairs] = {
    'beit_mm': (('', ''), ),
    'unilm/timm': keys.TIMM_VIT,  # timm's names are the released code's
    'unilm segmentation': keys.UNILM_SEGMENTATION,
    'mmpretrain/mmseg': keys.MMPRETRAIN,
    'hf': keys.HF_PRETRAINING,
}


def _pairs_of_unilm(weights: Weights) -> keys.Pairs:
    return keys.UNILM_SEGMENTATION if task_of(weights) == 'segmentation' else keys.UNILM


def _pairs_of_hf(weights: Weights) -> keys.Pairs:
    return keys.HF_PRETRAINING if task_of(weights) == 'pretraining' else keys.HF


WRITE: dict[str, Callable[[Weights], keys.Pairs]] = dict(
    beit_mm=lambda _: (('', ''), ), unilm=_pairs_of_unilm, timm=lambda _: keys.TIMM, hf=_pairs_of_hf,
    mmpretrain=lambda _: keys.MMPRETRAIN, mmseg=lambda _: keys.MMSEG)


def _drop_unknown(weights: Weights) -> list[str]:
    """Takes what no backbone of ours has out of a state dict of ours; what other layers of a block need is an error."""
    unknown = [name for name in weights if name.startswith('backbone.') and not keys.OUR_BACKBONE.fullmatch(name)]
    if inside := [name for name in unknown if name.startswith('backbone.blocks.')]:
        raise CheckpointError(f'is no BEiT: its blocks have {first_names(inside)}')
    for name in unknown:
        del weights[name]
    return unknown


def _hub_names(weights: Weights) -> Weights:
    """transformers' names as they stand in its files of models with a head."""
    if not any(name.startswith('beit.') for name in weights):  # BeitModel, BeitBackbone
        weights = {f'beit.{name}' if name.startswith((*HF_ROOTS, 'layernorm.')) else name: tensor
                   for name, tensor in weights.items()}
    if any('.q_proj.' in name for name in weights):
        pairs = keys.reverse(keys.HF_IN_MEMORY)
        weights = {keys.rename(name, pairs): tensor for name, tensor in weights.items()}
    return weights


def _fuse_qkv(weights: Weights) -> None:
    for name in [name for name in weights if name.endswith('attn.query.weight')]:
        stem = name.removesuffix('query.weight')
        try:
            parts = [weights.pop(f'{stem}{part}.weight') for part in ('query', 'key', 'value')]
            weights[f'{stem}qkv.weight'] = torch.cat(parts)
            weights[f'{stem}q_bias'] = weights.pop(f'{stem}query.bias')
            weights[f'{stem}v_bias'] = weights.pop(f'{stem}value.bias')
        except KeyError as error:
            raise CheckpointError(f'lacks {error}') from None


def _split_qkv(weights: Weights) -> None:
    for name in [name for name in weights if name.endswith('attn.qkv.weight')]:
        stem = name.removesuffix('qkv.weight')
        for part, rows in zip(('query', 'key', 'value'), weights.pop(name).chunk(3), strict=True):
            weights[f'{stem}{part}.weight'] = rows
        weights[f'{stem}query.bias'] = weights.pop(f'{stem}q_bias')
        weights[f'{stem}value.bias'] = weights.pop(f'{stem}v_bias')


def _split_qkv_bias(weights: Weights) -> None:
    for name in [name for name in weights if name.endswith('attn.qkv.bias')]:
        q_bias, _, v_bias = weights.pop(name).chunk(3)
        weights[name.replace('qkv.bias', 'q_bias')] = q_bias
        weights[name.replace('qkv.bias', 'v_bias')] = v_bias


def _fit_mmseg(weights: Weights) -> None:
    """mmsegmentation's backbone has a table and LayerScale in every block and no position embedding."""
    if 'backbone.pos_embed' in weights:
        raise CheckpointError("has an absolute position embedding, which mmsegmentation's BEiT has not")
    expand_shared_table(weights)
    for name in [name for name in weights if name.endswith('.attn.proj.bias')]:
        block = name.removesuffix('attn.proj.bias')
        if f'{block}attn.{TABLE}' not in weights:
            raise CheckpointError("has no relative position bias, without which mmsegmentation's BEiT cannot be built")
        for gamma in ('gamma_1', 'gamma_2'):
            weights.setdefault(f'{block}{gamma}', torch.ones_like(weights[name]))


def _add_index_buffers(weights: Weights, grid: Grid | None) -> None:
    for name in [name for name in weights if name.endswith(TABLE)]:
        rows = len(weights[name])
        if grid is None or num_relative_positions(grid) != rows:
            grid = square_grid(rows)
        weights[name.replace(TABLE, INDEX)] = relative_position_index(grid)


def first_names(names: Iterable[str]) -> str:
    """The first few of some names, and how many there are."""
    names = list(names)
    shown = ', '.join(names[:3])
    return f'{shown}, ... ({len(names)} in all)' if shown else 'none'

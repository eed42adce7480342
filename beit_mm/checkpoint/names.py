"""Translates tensor names between published formats, and reads a model's arguments from tensors."""

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from beit_mm.checkpoint.formats import (
    EVA,
    HF_ROOT,
    HF_ROTARY,
    MMPRETRAIN_V2,
    READ,
    TABLES,
    TABLES_OF_TASKS,
    UNILM_SEGMENTATION,
    VIT,
    Table,
)
from beit_mm.errors import CheckpointError
from beit_mm.positions import Grid, num_relative_positions, relative_position_index

Weights = dict[str, Tensor]
TABLE = 'relative_position_bias_table'
INDEX = 'relative_position_index'  # the table's row for each pair of tokens: computed, never read
POSITIONS = (TABLE, 'pos_embed')  # parameters with a row for each position or offset
SHARED_TABLE = f'rel_pos_bias.{TABLE}'

# All tensors that our backbone can have. Any other name in a block means a layer that BEiT does not have.
STEM_PARTS = ('cls_token', 'patch_embed.proj.weight', 'patch_embed.proj.bias')
BLOCK_PARTS = ('attn.qkv.weight', 'attn.q_bias', 'attn.v_bias', 'attn.proj.weight', 'attn.proj.bias') + tuple(
    f'{part}.{kind}' for part in ('norm1', 'norm2', 'mlp.fc1', 'mlp.fc2') for kind in ('weight', 'bias')
)
OPTIONAL_PARTS = ['mask_token', 'register_tokens', 'pos_embed', 'gamma_1', 'gamma_2', SHARED_TABLE, f'attn.{TABLE}']
OPTIONAL_PARTS += ['rotary_base', 'norm.weight', 'norm.bias', 'fc_norm.weight', 'fc_norm.bias']
ARCHITECTURES = {
    'tiny': dict(embed_dims=192, num_layers=12, num_heads=3),
    'small': dict(embed_dims=384, num_layers=12, num_heads=6),
    'base': dict(embed_dims=768, num_layers=12, num_heads=12),
    'large': dict(embed_dims=1024, num_layers=24, num_heads=16),
    'huge': dict(embed_dims=1280, num_layers=32, num_heads=16),
}
HEAD_DIMS = 64  # channels of an attention head in every published BEiT and most ViTs
# Width -> number of heads, of published ViTs that differ
OTHER_HEADS = {1152: 16, 1280: 16, 1408: 16, 1664: 16}
OTHER_ROTARY_HEADS = {4096: 32}
# The patch embedding's name in every format, after any prefix that a trainer's module adds
PATCH_EMBEDDING = re.compile(
    r'^(.*?)(backbone\.)?((\w+\.)?embeddings\.)?(patch_embed\w*\.proj\w*|patch_embeddings)\.weight$'
)
# Parts of other encoders; to drop them would change what the backbone computes.
ENCODER_PARTS = tuple(f'backbone.{part}.' for part in ('blocks', 'patch_embed', 'norm_pre', 'pre_norm', 'rope'))
HF_DINOV3_PATCHES = 'embeddings.patch_embeddings.weight'
HF_ENCODER_PARTS = ('beit.embeddings.', 'beit.encoder.')
DISTILLATION, REGISTERS = 'backbone.dist_token', 'backbone.register_tokens'
ROTARY = 'backbone.rotary_base'
ROTARY_BASE = 100.0  # of DINOv3 and LingBot-Vision; in other formats no tensor says it, or their PERIODS do
PERIODS = 'backbone.rope_embed.periods'  # Meta's: for each turned pair of channels, channels / 4
# Keys under which files hold a state dict, averages first; DINO's teacher is the average of its student.
WRAPPERS = ['state_dict_ema', 'model_ema', 'ema', 'state_dict', 'model', 'module', 'weights', 'teacher', 'student']
WRAPPERS += ['backbone']  # LingBot-Vision's


class Converted(NamedTuple):
    """A state dict in another format."""

    state_dict: Weights
    dropped_keys: list[str]  # names that have no place in the new format
    source: str  # the original format, one of FORMATS


def convert_state_dict(
    state_dict: Mapping[str, Tensor], source: str | None = None, target: str = 'beit_mm', grid: Grid | None = None
) -> Converted:
    """Translates the state dict of a BEiT or plain ViT, of a whole model or a backbone, from one format into another.

    'beit_mm' leaves out computed buffers and the bias of a plain ViT's keys, which shifts all scores of a query
    equally, so that the softmax cancels it. DeiT's distillation token becomes a register. Other formats get all
    that their class has; 'timm' gets VisionTransformer's names for weights without bias tables, else Beit's.

    Args:
        state_dict: names to tensors; it is not changed.
        source, target: one of FORMATS each; if source is None, it is detected.
        grid: patch grid (h, w) of the position parameters; None: a square one.

    Raises:
        CheckpointError: not a BEiT or plain ViT, or the target would compute something else.
    """
    weights = {name: tensor for name, tensor in bare_names(state_dict).items() if not name.endswith(INDEX)}
    source = source or detect_format(weights)
    if source is None and any('.lora_' in name for name in weights):
        raise CheckpointError(
            f'holds weights of LoRA alone, {preview(weights)}: use finetuned.pth of the run, its config, or what '
            "PEFT's merge_and_unload() gives"
        )
    if source is None:
        raise CheckpointError(f'holds no weights of a BEiT or plain ViT; its tensors are {preview(weights)}')
    ours, dropped = _to_ours(weights, source, grid)
    converted, without_place = from_ours(ours, target, grid)
    return Converted(converted, dropped + without_place, source)


def from_ours(weights: Mapping[str, Tensor], target: str, grid: Grid | None = None) -> tuple[Weights, list[str]]:
    """Weights under our names in the format `target`, and the names without a place; see `convert_state_dict`."""
    weights = dict(weights)
    if target == 'beit_mm':
        return weights, []
    if ROTARY in weights and target in ('timm', 'hf'):
        return _from_rotary(weights, target)
    if target == 'timm' and not any(name.endswith(TABLE) for name in weights):
        _join_bias(weights)
        return _rename(weights, VIT)
    if ROTARY in weights or is_gated(weights):
        raise CheckpointError(f'has rotary positions or gated MLPs, which the models of {target} do not have')
    if REGISTERS in weights:
        raise CheckpointError(f'has registers, which the models of {target} do not have')
    if target == 'mmseg':
        _fit_mmseg(weights)
    if target == 'hf':
        _split_qkv(weights)
    table = TABLES_OF_TASKS.get((target, task_of(weights)), TABLES[target])
    if target == 'mmpretrain' and any(name.startswith('patch_aggregation.') for name in weights):
        table = MMPRETRAIN_V2
    converted, without_place = _rename(weights, table)
    if target in ('unilm', 'mmpretrain', 'mmseg'):
        for name in [name for name in converted if name.endswith(TABLE)]:
            converted[name.replace(TABLE, INDEX)] = relative_position_index(grids_of(name, converted[name], grid)[0])
    return converted, without_place


def detect_format(names: Iterable[str]) -> str | None:
    """Detects the format, one of FORMATS, by tensor names; None if they are not of a BEiT or plain ViT.

    A BEiT of timm counts as 'unilm'; the plain ViTs of DeiT, MAE, DINO and DINOv2 count as 'timm'.
    """
    names = set(names)
    embeddings = {'beit.embeddings.cls_token', 'beit.embeddings.patch_embeddings.projection.weight'}
    if embeddings <= {HF_ROOT.sub('beit.', name) for name in names}:
        return 'hf'
    if {'embeddings.cls_token', HF_DINOV3_PATCHES} <= names:
        return 'hf'
    if not {'cls_token', 'backbone.cls_token'} & names:
        return None
    if {'layers.0.attn.qkv.weight', 'backbone.layers.0.attn.qkv.weight'} & names:
        return 'mmseg' if any(name.startswith('decode_head.') for name in names) else 'mmpretrain'
    if 'backbone.blocks.0.attn.qkv.weight' in names:
        return 'unilm' if 'backbone.fpn1.0.weight' in names else 'beit_mm'
    if 'blocks.0.attn.qkv.weight' not in names:
        return None
    of_vit = {'blocks.0.attn.qkv.bias', 'blocks.0.ls1.gamma', 'dist_token', 'reg_token', 'register_tokens'}
    of_vit |= {'storage_tokens'}
    return 'timm' if of_vit & names else 'unilm'


def task_of(weights: Mapping[str, Tensor]) -> str:
    """The task of weights under our names: 'pretraining', 'classification', 'segmentation' or 'features'."""
    if 'head.lm_head.weight' in weights:
        return 'pretraining'
    if 'head.fc.weight' in weights:
        return 'classification'
    heads = {'decode_head.conv_seg.weight', 'decode_head.class_predictor.weight'}
    return 'segmentation' if heads & weights.keys() else 'features'


def backbone_arguments(weights: Mapping[str, Tensor], meta: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of the BEiTBackbone that fits weights under our names; `meta` is from `describe_source`."""
    check_complete(weights)
    dims, channels, patch, _ = weights['backbone.patch_embed.proj.weight'].shape
    depth = sum(name.startswith('backbone.blocks.') and name.endswith('attn.qkv.weight') for name in weights)
    hidden = weights['backbone.blocks.0.mlp.fc2.weight'].shape[1]
    for name, tensor in weights.items():  # first, as a model of these sizes takes memory
        shape = (3 * dims, dims) if name.endswith('.attn.qkv.weight') else (dims, hidden)
        if re.fullmatch(r'backbone\.blocks\.\d+\.(attn\.qkv|mlp\.fc2)\.weight', name) and tensor.shape != shape:
            raise CheckpointError(f'has {name} of {tuple(tensor.shape)}; expected {shape}')
    usual = dims / head_dims(dims) if ROTARY in weights else OTHER_HEADS.get(dims, dims / HEAD_DIMS)
    heads = heads_of(weights, meta) or usual
    if heads != int(heads) or heads < 1 or dims % heads:
        raise CheckpointError(f'has {heads:g} attention heads at a width of {dims}, or does not say how many')
    size, grid = meta['preprocessing'].get('size'), trained_grid(meta, patch)
    position = next((name for name in weights if name.endswith(POSITIONS)), None)
    known = grids_of(position, weights[position], grid)[0] if position else grid
    if known and known != grid:
        size = [side * patch for side in known]
    bias = {f'backbone.{SHARED_TABLE}': 'shared', f'backbone.blocks.0.attn.{TABLE}': 'per_layer'}
    output = {'backbone.norm.weight': 'raw', 'backbone.fc_norm.weight': 'avg_featmap'}
    registers = weights.get(REGISTERS, torch.empty(1, 0)).shape[1]
    mode = 'bicubic_antialias' if registers > 1 else 'bicubic'  # as DINOv2 with registers, or DeiT
    return dict(
        arch=dict(embed_dims=dims, num_layers=depth, num_heads=int(heads), feedforward_channels=hidden),
        img_size=tuple(size or (224, 224)),
        patch_size=patch,
        in_channels=channels,
        abs_pos_embed='backbone.pos_embed' in weights,
        rel_pos_bias=next((kind for name, kind in bias.items() if name in weights), None),
        rotary_base=float(weights[ROTARY]) if ROTARY in weights else None,
        feedforward='swiglu' if is_gated(weights) else 'mlp',
        num_registers=registers,
        interpolate_mode=meta['architecture'].get('interpolate_mode', mode),
        layer_scale_init=0.1 if 'backbone.blocks.0.gamma_1' in weights else None,
        masked_input='backbone.mask_token' in weights,
        out_type=next((kind for name, kind in output.items() if name in weights), 'featmap'),
    )


def position_mode(weights: Mapping[str, Tensor], wrappers: Iterable[str], stem: str) -> str:
    """How the authors' code resizes positions of plain ViTs whose tensors have Meta's or timm's names.

    DINO's are known by what the file calls the state dict or by the stem of its name, DeiT's and MAE's by 'model'.
    """
    mask_token = weights.get('mask_token', weights.get('backbone.mask_token'))
    is_dinov2 = mask_token is not None and mask_token.dim() == 2
    if is_dinov2 or {'teacher', 'student'} & {*wrappers} or stem.startswith('dino_'):
        return 'bicubic_antialias' if {'register_tokens', 'backbone.register_tokens'} & {*weights} else 'bicubic_offset'
    return 'bicubic' if 'model' in wrappers else 'bicubic_antialias'


def heads_of(weights: Mapping[str, Tensor], meta: Mapping[str, Any]) -> Any:
    """Number of attention heads from a bias table, else from the file's meta; None if neither has it."""
    tables = [tensor for name, tensor in weights.items() if name.endswith(TABLE)]
    return tables[0].shape[-1] if tables else meta['architecture'].get('num_heads')


def released_out_indices(depth: int) -> list[int]:
    """The four blocks whose outputs the released UperNet takes; at other depths, the last of each quarter."""
    return {12: [3, 5, 7, 11], 24: [7, 11, 15, 23]}.get(depth) or [depth * part // 4 - 1 for part in (1, 2, 3, 4)]


def is_gated(weights: Mapping[str, Tensor]) -> bool:
    """Whether weights under our names have gated MLPs (SwiGLU), whose first layer holds two."""
    fc1, fc2 = (weights.get(f'backbone.blocks.0.mlp.{layer}.weight') for layer in ('fc1', 'fc2'))
    return fc1 is not None and fc2 is not None and fc1.shape[0] == 2 * fc2.shape[1]


def check_complete(weights: Mapping[str, Tensor]) -> None:
    """Raises CheckpointError if weights under our names lack a part that every BEiT has."""
    # the number of different blocks, not the highest number in a name
    depth = len({name.split('.')[2] for name in weights if name.startswith('backbone.blocks.')}) or 1
    parts = [*STEM_PARTS, *(f'blocks.{block}.{part}' for block in range(depth) for part in BLOCK_PARTS)]
    if missing := [f'backbone.{part}' for part in parts if f'backbone.{part}' not in weights]:
        raise CheckpointError(f'lacks {preview(missing)}')


def is_part(name: str) -> bool:
    """Whether our backbone, without wrapped layers, can have a tensor with this name."""
    return re.sub(r'^blocks\.\d+\.', '', name) in (*STEM_PARTS, *BLOCK_PARTS, *OPTIONAL_PARTS)


def unwrapped(name: str) -> str:
    """A name without the parts that DistributedDataParallel and torch.compile add."""
    return re.sub(r'^(module\.)+', '', name.replace('_orig_mod.', '').replace('_checkpoint_wrapped_module.', ''))


def bare_names(weights: Mapping[str, Tensor]) -> Weights:
    """Weights under the names of the encoder's own code, without the prefixes that trainers add.

    name in the file                        name here                     what added the prefix
    module._orig_mod.blocks.7.norm1.bias    blocks.7.norm1.bias           DistributedDataParallel and torch.compile
    model.blocks.7.norm1.bias               blocks.7.norm1.bias           a Lightning module
    net.backbone.blocks.7.norm1.bias        backbone.blocks.7.norm1.bias  one that holds a backbone and a head
    net.backbone.blocks.0.attn.qkv.bias     blocks.0.attn.qkv.bias        the same of a plain ViT, by this bias
    backbone.blocks.1.7.norm1.bias          backbone.blocks.7.norm1.bias  DINOv2's groups of blocks
    teacher.backbone.blocks.7.norm1.bias    backbone.blocks.7.norm1.bias  self-distillation; the student is left out
    """
    bare = {re.sub(r'\bblocks\.\d+\.(\d+\.)', r'blocks.\1', unwrapped(name)): part for name, part in weights.items()}
    roots = {match[1] for name in bare if (match := PATCH_EMBEDDING.match(name))}  # one for each encoder
    if len(roots) > 1 and '' not in roots:  # of self-distillation; DINOv3's model_ema is its teacher
        roots = {root for root in roots if 'gram' not in root}
        averages = [root for root in roots if re.search('teacher|ema', root)]
        roots = {min(averages)} if averages else roots
    root = roots.pop() if len(roots) == 1 else ''
    bare = {name.removeprefix(root): part for name, part in bare.items() if name.startswith(root)}
    if {'backbone.blocks.0.attn.qkv.bias', 'backbone.blocks.0.ls1.gamma'} & bare.keys():
        bare = {name.removeprefix('backbone.'): part for name, part in bare.items()}
    return bare


def preview(names: Iterable[str], most: int = 4) -> str:
    names = list(names)
    return ', '.join(names[:most]) + (', ...' if len(names) > most else '') if names else 'none'


def grids_of(name: str, tensor: Tensor, *candidates: Grid | None) -> list[Grid]:
    """The candidates, then the square, that fit a bias table's or position embedding's rows; else CheckpointError."""
    is_table = name.endswith(TABLE)
    rows = len(tensor) if is_table else tensor.shape[1]
    side = (math.isqrt(rows) + 1) // 2 if is_table else math.isqrt(rows)
    known = [grid for grid in (*candidates, (side, side)) if grid]
    fitting = [grid for grid in known if rows == (num_relative_positions(grid) if is_table else 1 + math.prod(grid))]
    if not fitting:
        raise CheckpointError(f'has {rows} rows in {name}: no square patch grid fits, and the file names no rectangle')
    return fitting


def trained_grid(meta: Mapping[str, Any], patch: int) -> Grid | None:
    """Patch grid of the training images; None if the file does not give their size."""
    size = meta['preprocessing'].get('size')
    return (-(-size[0] // patch), -(-size[1] // patch)) if size else None


def expand_shared_table(weights: Weights) -> None:
    """Adds the shared table to each block's own, which may not exist yet, in place."""
    for shared in [name for name in weights if name.endswith(SHARED_TABLE)]:
        table = weights.pop(shared)
        for name in [name for name in weights if re.search(r'\bblocks\.\d+\.attn\.qkv\.weight$', name)]:
            of_block = name.replace('qkv.weight', TABLE)
            weights[of_block] = weights[of_block] + table if of_block in weights else table.clone()


def _to_ours(weights: Weights, source: str, grid: Grid | None) -> tuple[Weights, list[str]]:
    """Weights of a format under our names and in our shapes, and the names in the file that have no place there."""
    is_dinov3 = HF_DINOV3_PATCHES in weights
    if source == 'hf' and not is_dinov3 and any('.q_proj.' in name for name in weights):
        raise CheckpointError('has the names of a transformers model in memory: save it with save_pretrained')
    if source == 'hf':
        weights = {HF_ROOT.sub('beit.', name.removeprefix('model.')): tensor for name, tensor in weights.items()}
    elif 'layers.0.attn.qkv.weight' in weights:  # mmpretrain's backbone without the rest of the model
        weights = {f'backbone.{name}': tensor for name, tensor in weights.items()}
    is_unilm_segmentation = source == 'unilm' and 'backbone.fpn1.0.weight' in weights
    table = UNILM_SEGMENTATION if is_unilm_segmentation else READ[source]
    ours, dropped = _rename(weights, tuple((theirs, mine) for mine, theirs in table if theirs is not None))
    _fuse_gates(ours)
    if source in ('timm', 'hf'):
        _find_rotary(ours)
    elif is_gated(ours) and source == 'unilm':
        raise CheckpointError("has BEiT's attention and gated MLPs: EVA-02, whose rotary positions no tensor shows")
    _fuse_qkv(ours)
    dropped += _split_foreign(ours, dropped)
    if source in ('timm', 'hf', 'mmpretrain'):
        dropped += _fit_plain_vit(ours, dropped, grid)
    return ours, dropped


def _split_foreign(weights: Weights, dropped: list[str]) -> list[str]:
    """Takes out what our backbone cannot have, and returns the names; CheckpointError for parts of another encoder."""
    of_backbone = [name for name in weights if name.startswith('backbone.') and name != DISTILLATION]
    unknown = [name for name in of_backbone if not is_part(name.removeprefix('backbone.'))]
    foreign = [name for name in dropped if name.startswith(HF_ENCODER_PARTS)]
    foreign += [name for name in unknown if name.startswith(ENCODER_PARTS)]
    if foreign:
        raise CheckpointError(f'is not a BEiT or plain ViT: it has {preview(foreign)}')
    fc1, fc2 = (weights.get(f'backbone.blocks.0.mlp.{layer}.weight') for layer in ('fc1', 'fc2'))
    if fc1 is not None and fc2 is not None and fc1.shape[0] not in (fc2.shape[1], 2 * fc2.shape[1]):
        raise CheckpointError(f'has another MLP: blocks.0.mlp.fc2 reads {fc2.shape[1]} of {len(fc1)} values')
    for name in unknown:
        del weights[name]
    return unknown


def _fit_plain_vit(weights: Weights, dropped: list[str], grid: Grid | None) -> list[str]:
    """Brings another ViT into our shapes, in place, and returns the names without a place; `dropped` were before."""
    if ROTARY not in weights and not any(name.endswith(POSITIONS) for name in weights):
        raise CheckpointError("has no position embedding or bias table, nor DINOv3's registers: an unknown rotary ViT")
    dims = weights['backbone.patch_embed.proj.weight'].shape[0]
    misfits = []
    if 'backbone.mask_token' in weights:
        weights['backbone.mask_token'] = weights['backbone.mask_token'].view(1, 1, -1)  # DINOv2's has two axes
        if weights['backbone.mask_token'].shape[-1] != dims:
            misfits.append('backbone.mask_token')  # it belongs to MAE's decoder
    # DINO's head is a network, DINOv2's classifiers read class token and mean, others read what attention pools
    pools_by_attention = any(name.startswith('backbone.attn_pool.') for name in dropped)
    is_linear = 'head.fc.weight' in weights and weights['head.fc.weight'].shape[-1] == dims
    fitting = ('head.fc.weight', 'head.fc.bias') if is_linear and not pools_by_attention else ()
    misfits += [name for name in weights if name.startswith('head.fc.') and name not in fitting]
    for name in misfits:
        del weights[name]
    _fit_prefix(weights, grid)
    return misfits


def _fit_prefix(weights: Weights, grid: Grid | None) -> None:
    """Brings the tokens before the patches, and their positions, into our form, in place.

    A distillation token becomes the first register. Positions of registers are added to them. A position embedding
    without a row for the class token gets one of zeros.
    """
    registers = [weights.pop(name) for name in (DISTILLATION, REGISTERS) if name in weights]  # each 1, R, C
    if 'backbone.pos_embed' in weights:
        positions = weights['backbone.pos_embed']  # 1, rows, C
        rows = _prefix_rows(positions.shape[1], sum(tokens.shape[1] for tokens in registers), grid)
        if rows == 0:
            weights['backbone.pos_embed'] = torch.cat([torch.zeros_like(positions[:, :1]), positions], dim=1)
        elif rows > 1:
            registers = [torch.cat(registers, dim=1) + positions[:, 1:rows]]
            weights['backbone.pos_embed'] = torch.cat([positions[:, :1], positions[:, rows:]], dim=1)
    if registers:
        weights[REGISTERS] = torch.cat(registers, dim=1)


def _prefix_rows(rows: int, registers: int, grid: Grid | None) -> int:
    """How many rows of a position embedding belong to tokens before the patches: 1, 0 or 1 + registers.

    A known grid is preferred to a square: 14 x 16 patches and a class token have as many rows as 15 x 15 patches.
    """
    numbers = (1, 0, 1 + registers)
    known = [number for number in numbers if grid and rows - number == grid[0] * grid[1]]
    square = [number for number in numbers if rows > number and math.isqrt(rows - number) ** 2 == rows - number]
    return next(iter(known + square), 1)  # 1 for an unknown rectangle, which `grids_of` refuses


def _rename(weights: Weights, table: Table) -> tuple[Weights, list[str]]:
    renamed: Weights = {}
    dropped = []
    for name, tensor in weights.items():
        target = _new_name(name, table)
        if target is None or target in renamed:
            dropped.append(name)  # mmsegmentation's converter writes the patch embedding under two names
        else:
            renamed[target] = tensor
    return renamed, dropped


def _new_name(name: str, table: Table) -> str | None:
    for source, target in table:
        if match := re.match(re.escape(source).replace(r'\*', r'(\d+)'), name):
            return None if target is None else target.replace('*', ''.join(match.groups())) + name[match.end() :]
    return None


def _fuse_gates(weights: Weights) -> None:
    """Fuses the two layers at the input of each gated MLP, in place."""
    for name in [name for name in weights if '.mlp.gate.' in name]:
        value = name.replace('gate', 'fc1')
        weights[value] = torch.cat([weights.pop(name), weights[value]])


def _find_rotary(weights: Weights) -> None:
    """Adds the base of DINOv3's rotary positions to its weights, in place; CheckpointError for positions that differ.

    DINOv3 and LingBot-Vision have registers, LayerScale and no tensor of positions but, in Meta's files, the periods.
    """
    if ROTARY in weights:  # our own names, with registers
        return
    periods = weights.pop(PERIODS, None)
    of_dinov3 = {REGISTERS, 'backbone.blocks.0.gamma_1'} <= weights.keys()
    if any(name.endswith(POSITIONS) for name in weights) or (periods is None and not of_dinov3):
        return
    weights[ROTARY] = torch.tensor(ROTARY_BASE)
    if periods is not None:
        number = head_dims(weights['backbone.cls_token'].shape[-1]) / 4
        expected = ROTARY_BASE ** (torch.arange(len(periods)) / len(periods))
        if len(periods) != number or not torch.allclose(periods.float(), expected, rtol=1e-2):
            raise CheckpointError(
                f'has {len(periods)} rotary periods up to {periods.max():.3g}; expected {number:g} of them, up to '
                f'{ROTARY_BASE ** (1 - 1 / number):.3g}'
            )
    for name in [name for name in weights if name.endswith(('attn.qkv.bias', 'attn.key.bias'))]:
        mask = weights.pop(name.replace('bias', 'bias_mask'), torch.ones_like(weights[name]))
        bias = weights[name] * mask.nan_to_num()  # the mask is 0 at the keys
        if (bias.chunk(3)[1] if 'qkv' in name else bias).any():
            raise CheckpointError(f'has {name}, a bias of keys, which the softmax does not cancel after a rotation')


def head_dims(dims: int) -> float:
    """Channels of an attention head in a rotary ViT of this width."""
    return dims / OTHER_ROTARY_HEADS[dims] if dims in OTHER_ROTARY_HEADS else HEAD_DIMS


def _from_rotary(weights: Weights, target: str) -> tuple[Weights, list[str]]:
    """DINOv3 in timm's or transformers' names; the biases of queries and values are left out for timm if all are 0."""
    base = weights.pop(ROTARY)
    if base != ROTARY_BASE:
        raise CheckpointError(f'has rotary positions with base {base:g}, other than {ROTARY_BASE:g} in {target}')
    if not {REGISTERS, 'backbone.blocks.0.gamma_1'} <= weights.keys():
        raise CheckpointError(f'lacks registers or LayerScale, which rotary models of {target} have')
    if target == 'hf' and 'backbone.norm.weight' not in weights:
        raise CheckpointError('lacks the norm at the end of DINOv3ViTModel')
    if is_gated(weights):
        for name in [name for name in weights if '.mlp.fc1.' in name]:
            gate, value = weights.pop(name).chunk(2)
            weights[name.replace('fc1', 'gate')], weights[name.replace('fc1', 'value')] = gate, value
    biases = [name for name in weights if name.endswith(('attn.q_bias', 'attn.v_bias'))]
    if target == 'timm':
        if not any(weights[name].any() for name in biases):
            weights = {name: tensor for name, tensor in weights.items() if name not in biases}
        return _rename(weights, EVA)
    _split_qkv(weights)
    converted, without_place = _rename(weights, HF_ROTARY)
    return {name.removeprefix('beit.'): tensor for name, tensor in converted.items()}, without_place


def _fuse_qkv(weights: Weights) -> None:
    """Fuses the query, key and value layers into one, without the key bias, in place."""
    for name in [name for name in weights if name.endswith('attn.query.weight')]:
        stem = name.removesuffix('query.weight')
        parts = [weights.pop(f'{stem}{part}.weight') for part in ('query', 'key', 'value')]
        weights[f'{stem}qkv.weight'] = torch.cat(parts)
        weights.pop(f'{stem}key.bias', None)
    for name in [name for name in weights if name.endswith('attn.qkv.bias')]:
        q_bias, _, v_bias = weights.pop(name).chunk(3)
        weights[name.replace('qkv.bias', 'q_bias')] = q_bias
        weights[name.replace('qkv.bias', 'v_bias')] = v_bias
    for part in ('q_bias', 'v_bias') if {ROTARY, 'backbone.pos_embed'} & weights.keys() else ():
        if not any(name.endswith(part) for name in weights):  # built without it
            for name in [name for name in weights if name.endswith('attn.qkv.weight')]:
                weights[name.replace('qkv.weight', part)] = torch.zeros_like(weights[name][0])


def _split_qkv(weights: Weights) -> None:
    for name in [name for name in weights if name.endswith('attn.qkv.weight')]:
        stem = name.removesuffix('qkv.weight')
        for part, rows in zip(('query', 'key', 'value'), weights.pop(name).chunk(3), strict=True):
            weights[f'{stem}{part}.weight'] = rows


def _join_bias(weights: Weights) -> None:
    """Brings weights into the shapes of timm's plain ViT: one qkv bias; with registers, positions of patches only."""
    for name in [name for name in weights if name.endswith('attn.q_bias')]:
        stem = name.removesuffix('q_bias')
        q_bias, v_bias = weights.pop(name), weights.pop(f'{stem}v_bias')
        weights[f'{stem}qkv.bias'] = torch.cat([q_bias, torch.zeros_like(q_bias), v_bias])
    if 'backbone.register_tokens' in weights and 'backbone.pos_embed' in weights:
        positions = weights['backbone.pos_embed']
        weights['backbone.cls_token'] = weights['backbone.cls_token'] + positions[:, :1]
        weights['backbone.pos_embed'] = positions[:, 1:]


def _fit_mmseg(weights: Weights) -> None:
    """Gives every block a table and LayerScale, as mmsegmentation's backbone has, in place."""
    expand_shared_table(weights)
    for name in [name for name in weights if name.endswith('.attn.proj.bias')]:
        block = name.removesuffix('attn.proj.bias')
        if f'{block}attn.{TABLE}' not in weights or 'backbone.pos_embed' in weights:
            raise CheckpointError("has a position embedding or no relative position bias, unlike mmsegmentation's BEiT")
        for gamma in ('gamma_1', 'gamma_2'):
            weights.setdefault(f'{block}{gamma}', torch.ones_like(weights[name]))


def weights_of(content: Mapping[str, Any]) -> Weights:
    """The state dict in a file's content, without the wrappers around it and its names."""
    for _ in WRAPPERS:  # bounded, because a file may hold itself
        content = next((content[key] for key in WRAPPERS if isinstance(content.get(key), dict)), content)
    return {unwrapped(key): part for key, part in content.items() if isinstance(key, str) and isinstance(part, Tensor)}

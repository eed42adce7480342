"""The two JSON files that transformers wants beside its weights."""
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from beit_mm.checkpoint.errors import CheckpointError
from beit_mm.checkpoint.formats import SHARED_TABLE, TABLE, task_of
from beit_mm.positions import square_grid, square_token_grid

CLASSES = dict(pretraining='BeitForMaskedImageModeling', classification='BeitForImageClassification',
               segmentation='BeitForSemanticSegmentation', features='BeitModel')
RELEASED_TAPS = {12: [3, 5, 7, 11], 24: [7, 11, 15, 23]}
HEAD_DIMS = 64  # of every published BEiT


def model_config(weights: Mapping[str, Tensor], meta: Mapping[str, Any]) -> dict[str, Any]:
    """Content of config.json.

    Args:
        weights: state dict of ours.
        meta: of our file; of it `preprocessing.size`, `architecture` and `dataset_meta.classes`.

    Raises:
        CheckpointError: a number of heads or sides of a rectangle that the file does not say, or segmentation heads
            that transformers does not have.
    """
    task = task_of(weights)
    dims, channels, patch, _ = weights['backbone.patch_embed.proj.weight'].shape
    config = dict(
        model_type='beit', architectures=[CLASSES[task]],
        hidden_size=dims, num_hidden_layers=_depth(weights),
        num_attention_heads=_num_heads(weights, dims, meta),
        intermediate_size=len(weights['backbone.blocks.0.mlp.fc1.bias']),
        image_size=_image_size(weights, patch, meta), patch_size=patch, num_channels=channels,
        layer_norm_eps=1e-6,
        use_mask_token='backbone.mask_token' in weights,
        use_absolute_position_embeddings='backbone.pos_embed' in weights,
        use_shared_relative_position_bias=f'backbone.{SHARED_TABLE}' in weights,
        use_relative_position_bias=f'backbone.blocks.0.attn.{TABLE}' in weights,
        # above zero switches LayerScale on; the value itself is only a start
        layer_scale_init_value=0.1 if 'backbone.blocks.0.gamma_1' in weights else 0.0,
        # the pretraining model applies the final norm outside of what this switch is about
        use_mean_pooling=task == 'pretraining' or 'backbone.norm.weight' not in weights)
    if task == 'pretraining':
        config['vocab_size'] = len(weights['head.lm_head.bias'])
    elif task == 'classification':
        config.update(_labels(weights['head.fc.bias'], meta))
    elif task == 'segmentation':
        config.update(_labels(weights['decode_head.conv_seg.bias'], meta))
        config.update(_heads(weights, dims), out_indices=_out_indices(_depth(weights), meta))
    return config


def image_processor_config(preprocessing: Mapping[str, Any]) -> dict[str, Any]:
    """Content of preprocessor_config.json, from `mean` and `std` (pixels 0-255) and `size` (height, width)."""
    height, width = preprocessing['size']
    return dict(
        image_processor_type='BeitImageProcessor', do_resize=True, size=dict(height=height, width=width),
        resample=3,  # bicubic
        do_center_crop=False, do_rescale=True, rescale_factor=1 / 255, do_normalize=True,
        image_mean=[value / 255 for value in preprocessing['mean']],
        image_std=[value / 255 for value in preprocessing['std']])


def taps_out_of_reach(weights: Mapping[str, Tensor], meta: Mapping[str, Any]) -> bool:
    """Whether transformers' segmentation model cannot take the outputs of the blocks that this one takes.

    It counts the embedding as 1 and the first block's output as 2, and accepts numbers up to the depth (transformers
    5.23): the last block's output, which the released UperNet uses, cannot be named.
    """
    depth = _depth(weights)
    return task_of(weights) == 'segmentation' and max(_tapped_blocks(depth, meta)) + 2 > depth


def _tapped_blocks(depth: int, meta: Mapping[str, Any]) -> list[int]:
    """Blocks (0-based) whose outputs the heads take: the file's own, or the released ones."""
    blocks = meta.get('architecture', {}).get('out_indices')
    if blocks is None or len(blocks) != 4:
        blocks = RELEASED_TAPS.get(depth, [depth * quarter // 4 - 1 for quarter in (1, 2, 3, 4)])
    return blocks


def _out_indices(depth: int, meta: Mapping[str, Any]) -> list[int]:
    """As transformers counts; where it cannot, as the files on its hub have them, although it reads others then."""
    blocks = _tapped_blocks(depth, meta)
    return blocks if max(blocks) + 2 > depth else [block + 2 for block in blocks]


def _depth(weights: Mapping[str, Tensor]) -> int:
    return sum(name.endswith('attn.qkv.weight') for name in weights)


def _table(weights: Mapping[str, Tensor]) -> Tensor | None:
    return next((tensor for name, tensor in weights.items() if name.endswith(TABLE)), None)


def _num_heads(weights: Mapping[str, Tensor], dims: int, meta: Mapping[str, Any]) -> int:
    if (table := _table(weights)) is not None:
        return table.shape[1]
    if heads := meta.get('architecture', {}).get('num_heads'):
        return heads
    if dims % HEAD_DIMS:
        raise CheckpointError(f'does not say how many attention heads it has, and its width {dims} is no multiple of '
                              f'{HEAD_DIMS}')
    return dims // HEAD_DIMS


def _image_size(weights: Mapping[str, Tensor], patch: int, meta: Mapping[str, Any]) -> int | list[int]:
    size = meta.get('preprocessing', {}).get('size')
    try:
        if size is None and (table := _table(weights)) is not None:
            size = [side * patch for side in square_grid(len(table))]
        elif size is None and 'backbone.pos_embed' in weights:
            size = [side * patch for side in square_token_grid(weights['backbone.pos_embed'].shape[1])]
    except ValueError as error:
        raise CheckpointError(f'does not say its image size: {error}') from None
    height, width = size or (224, 224)
    return height if height == width else [height, width]


def _labels(bias: Tensor, meta: Mapping[str, Any]) -> dict[str, Any]:
    classes = meta.get('dataset_meta', {}).get('classes') or meta.get('CLASSES') or []
    if len(classes) != len(bias):
        classes = [f'LABEL_{number}' for number in range(len(bias))]
    return dict(id2label={str(number): label for number, label in enumerate(classes)},
                label2id={label: number for number, label in enumerate(classes)})


def _heads(weights: Mapping[str, Tensor], dims: int) -> dict[str, Any]:
    """What can be said of transformers' pyramid, UperNet and FCN head."""
    fixed = {'neck.upsample_4x.0.weight': dims, 'neck.upsample_2x.0.weight': dims,
             'decode_head.psp_modules.3.1.conv.weight': dims, 'decode_head.fpn_bottleneck.conv.weight': dims}
    for name, width in fixed.items():
        if name not in weights or len(weights[name]) != width:
            found = len(weights[name]) if name in weights else 'no such tensor'
            raise CheckpointError(f'has a segmentation head that transformers has not: {name} {found}, there it is a '
                                  f'UperNet as wide as the backbone, {width}')
    if 'auxiliary_head.conv_seg.weight' not in weights:
        return dict(use_auxiliary_head=False)
    return dict(
        use_auxiliary_head=True, auxiliary_channels=weights['auxiliary_head.conv_seg.weight'].shape[1],
        auxiliary_num_convs=sum(name.startswith('auxiliary_head.convs.') and name.endswith('.conv.weight')
                                for name in weights),
        auxiliary_concat_input='auxiliary_head.conv_cat.conv.weight' in weights)

"""The two JSON files that transformers wants beside its weights."""
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from beit_mm.checkpoint.formats import SHARED_TABLE, TABLE, task_of
from beit_mm.functional.relative_position import square_grid

CLASSES = dict(pretraining='BeitForMaskedImageModeling', classification='BeitForImageClassification',
               segmentation='BeitForSemanticSegmentation', features='BeitModel')
RELEASED_TAPS = {12: [3, 5, 7, 11], 24: [7, 11, 15, 23]}
HEAD_DIMS = 64  # of every published BEiT; a checkpoint without a bias table does not show its number of heads


def model_config(weights: Mapping[str, Tensor], meta: Mapping[str, Any]) -> dict[str, Any]:
    """Content of config.json.

    Args:
        weights: state dict of ours.
        meta: of our file; of it `preprocessing.size`, `architecture` and `dataset_meta.classes`.

    Raises:
        ValueError: a rectangle whose sides the file does not say.
    """
    task = task_of(weights)
    # transformers' pretraining model applies the final norm outside of what `use_mean_pooling` is about
    mean_pooling = task == 'pretraining' or 'backbone.norm.weight' not in weights
    dims, channels, patch, _ = weights['backbone.patch_embed.proj.weight'].shape
    depth = sum(name.endswith('attn.qkv.weight') for name in weights)
    table = next((tensor for name, tensor in weights.items() if name.endswith(TABLE)), None)
    heads = meta.get('architecture', {}).get('num_heads', dims // HEAD_DIMS) if table is None else table.shape[1]
    size = meta.get('preprocessing', {}).get('size')
    config = dict(
        model_type='beit', architectures=[CLASSES[task]],
        hidden_size=dims, num_hidden_layers=depth,
        num_attention_heads=heads,
        intermediate_size=len(weights['backbone.blocks.0.mlp.fc1.bias']),
        image_size=_image_size(weights, table, patch, size), patch_size=patch, num_channels=channels,
        layer_norm_eps=1e-6,
        use_mask_token='backbone.mask_token' in weights,
        use_absolute_position_embeddings='backbone.pos_embed' in weights,
        use_shared_relative_position_bias=f'backbone.{SHARED_TABLE}' in weights,
        use_relative_position_bias=f'backbone.blocks.0.attn.{TABLE}' in weights,
        # above zero switches LayerScale on; the value itself is only a start
        layer_scale_init_value=0.1 if 'backbone.blocks.0.gamma_1' in weights else 0.0,
        use_mean_pooling=mean_pooling)
    if task == 'pretraining':
        config['vocab_size'] = len(weights['head.lm_head.bias'])
    elif task != 'features':
        labels = _labels(weights['head.fc.bias' if task == 'classification' else 'decode_head.conv_seg.bias'], meta)
        config.update(id2label=labels, label2id={label: int(number) for number, label in labels.items()})
    if task == 'segmentation':
        config.update(out_indices=_out_indices(depth, tapped_blocks(depth, meta)),
                      use_auxiliary_head='auxiliary_head.conv_seg.bias' in weights)
        if config['use_auxiliary_head']:
            config['auxiliary_channels'] = weights['auxiliary_head.conv_seg.weight'].shape[1]
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


def tapped_blocks(depth: int, meta: Mapping[str, Any]) -> list[int]:
    """Blocks (0-based) whose outputs the segmentation heads take: the file's own, or the released ones."""
    blocks = meta.get('architecture', {}).get('out_indices')
    if blocks is None or len(blocks) != 4:
        blocks = RELEASED_TAPS.get(depth, [depth * quarter // 4 - 1 for quarter in (1, 2, 3, 4)])
    return blocks


def out_of_reach(depth: int, blocks: list[int]) -> bool:
    """Whether transformers' segmentation model cannot take the outputs of these blocks (0-based).

    It counts the embedding as 1 and the first block's output as 2, and accepts numbers up to the depth (transformers
    5.23): the last block's output, which the released UperNet uses, cannot be named.
    """
    return max(blocks) + 2 > depth


def _out_indices(depth: int, blocks: list[int]) -> list[int]:
    """As transformers counts; where it cannot, as the files on its hub have them, although it reads others then."""
    return blocks if out_of_reach(depth, blocks) else [block + 2 for block in blocks]


def _image_size(weights: Mapping[str, Tensor], table: Tensor | None, patch: int,
                size: list[int] | None) -> int | list[int]:
    if size is None and table is not None:
        size = [side * patch for side in square_grid(len(table))]
    elif size is None:
        size = [round((weights['backbone.pos_embed'].shape[1] - 1)**0.5) * patch] * 2
    return size[0] if size[0] == size[1] else list(size)


def _labels(bias: Tensor, meta: Mapping[str, Any]) -> dict[str, str]:
    classes = meta.get('dataset_meta', {}).get('classes') or meta.get('CLASSES') or []
    if len(classes) != len(bias):
        classes = [f'LABEL_{number}' for number in range(len(bias))]
    return {str(number): label for number, label in enumerate(classes)}

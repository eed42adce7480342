"""Converts checkpoint files between formats, and publishes them."""

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from beit_mm.checkpoint import description, names
from beit_mm.checkpoint.checkpoint import Checkpoint, CheckpointInput
from beit_mm.checkpoint.formats import FORMATS
from beit_mm.checkpoint.read import as_checkpoint_error, write_checkpoint
from beit_mm.errors import CheckpointError, check_choice, warn
from beit_mm.files import file_sha256

# The part of a run's meta that belongs to the weights
KEPT = ('preprocessing', 'architecture', 'tokenizer', 'dataset_meta', 'CLASSES', 'PALETTE', 'config_dict')
HF_CLASSES = dict(  # for each task transformers' class and pipeline tag
    pretraining=('BeitForMaskedImageModeling', 'image-feature-extraction'),
    classification=('BeitForImageClassification', 'image-classification'),
    segmentation=('BeitForSemanticSegmentation', 'image-segmentation'),
    features=('BeitModel', 'image-feature-extraction'),
)
# Layers of transformers' pyramid and UperNet that are always as wide as the backbone
HF_HEAD = ['neck.upsample_4x.0', 'neck.upsample_2x.0']
HF_HEAD += ['decode_head.psp_modules.3.1.conv', 'decode_head.fpn_bottleneck.conv']

CARD = """---
library_name: transformers
pipeline_tag: {tag}
tags:
- beit
---
# {name}

A [BEiT](https://arxiv.org/abs/2106.08254) for {task}, written by beit_mm. Its sizes and classes are in `config.json`.

```python
from transformers import {kind}

model = {kind}.from_pretrained('{name}')
```

To be filled in by the author: training images, their licence, and measured results.
"""


class Conversion(NamedTuple):
    """What `convert_checkpoint` did."""

    source: str  # its format
    task: str  # one of `names.task_of`, or 'tokenizer'
    tensors: int  # how many were written
    dropped_keys: list[str]  # names in the source that have no place in the target

    def __str__(self) -> str:
        written = f'{self.task} weights, {self.source}: {self.tensors} tensors written'
        dropped = f'\ndropped, {len(self.dropped_keys)}: {names.preview(self.dropped_keys)}'
        return written + dropped if self.dropped_keys else written


def convert_checkpoint(source: CheckpointInput, target: str | Path, to: str = 'beit_mm') -> Conversion:
    """Converts a checkpoint file; the source's format is detected. CheckpointError if the target cannot express it.

    Args:
        source: see `Checkpoint.open`.
        target: the file to write, .pth or .safetensors; for 'hf' a folder, which gets config.json, a model card
            (README.md) and, if the source says how images were prepared, preprocessor_config.json.
        to: one of FORMATS. DALL-E networks always become a plain state dict.
    """
    check_choice('to', to, FORMATS)
    checkpoint, target = Checkpoint.open(source), Path(target)
    if 'blocks.input.w' in checkpoint.weights:
        write_checkpoint(target, checkpoint.weights)
        return Conversion('DALL-E', 'tokenizer', len(checkpoint.weights), [])
    with as_checkpoint_error(checkpoint.path):
        meta = {key: value for key, value in checkpoint.meta.items() if key in KEPT}
        if isinstance(tokenizer := meta.get('tokenizer'), dict):  # paths mean nothing elsewhere
            meta['tokenizer'] = {key: value for key, value in tokenizer.items() if not key.endswith('path')}
        ours, dropped, format = checkpoint.converted
        names.check_complete(ours)
        grid = names.trained_grid(meta, ours['backbone.patch_embed.proj.weight'].shape[-1])
        weights, without_place = names.from_ours(ours, to, grid)
        task = names.task_of(ours)
        config = _hf_config(ours, meta) if to == 'hf' else {}
    if to == 'hf':
        _write_hub_folder(target, task, weights, config, meta['preprocessing'])
    elif to == 'timm' or to == 'unilm' and task != 'segmentation':
        is_torch = to == 'unilm' and target.suffix != '.safetensors'
        write_checkpoint(target, dict(model=weights) if is_torch else weights)
    else:
        version = dict(beit_mm_format=description.FORMAT_VERSION) if to == 'beit_mm' else {}
        write_checkpoint(target, dict(state_dict=weights, meta=meta | version))
    return Conversion(format, task, len(weights), dropped + without_place)


def publish_checkpoint(source: CheckpointInput, target: str | Path) -> Path:
    """Strips optimizer, schedules and log from a checkpoint, for others to use. Its config keeps its paths.

    Returns the file: `target` (.safetensors or .pth) with the first eight digits of its SHA-256 before the suffix.
    """
    target = Path(target)
    partial = target.with_name(f'{target.stem}.unnamed{target.suffix}')
    convert_checkpoint(source, partial)
    named = target.with_name(f'{target.stem}-{file_sha256(partial)[:8]}{target.suffix}')
    os.replace(partial, named)
    return named


def _hf_config(weights: Mapping[str, Tensor], meta: Mapping[str, Any]) -> dict[str, Any]:
    """Content of transformers' config.json; CheckpointError for what its BEiT would compute in another way."""
    task, model = names.task_of(weights), names.backbone_arguments(weights, meta)
    if model['rotary_base']:
        return _hf_rotary(model)
    dims, depth = model['arch']['embed_dims'], model['arch']['num_layers']
    side, width = model['img_size']
    if side != width or side % model['patch_size']:  # of others it runs none, or takes wrong rows of the bias tables
        raise CheckpointError(f"takes images of {side} x {width}; transformers' BEiT needs squares of whole patches")
    if task == 'classification' and {'backbone.norm.weight', 'backbone.fc_norm.weight'} <= weights.keys():
        raise CheckpointError("has norms before and after the mean of the patches; transformers' BEiT has one")
    config = dict(
        model_type='beit',
        architectures=[HF_CLASSES[task][0]],
        hidden_size=dims,
        num_hidden_layers=depth,
        num_attention_heads=model['arch']['num_heads'],
        intermediate_size=model['arch']['feedforward_channels'],
        image_size=side,
        patch_size=model['patch_size'],
        num_channels=model['in_channels'],
        layer_norm_eps=1e-6,
        use_mask_token=model['masked_input'],
        use_absolute_position_embeddings=model['abs_pos_embed'],
        use_shared_relative_position_bias=model['rel_pos_bias'] == 'shared',
        use_relative_position_bias=model['rel_pos_bias'] == 'per_layer',
        layer_scale_init_value=model['layer_scale_init'] or 0.0,  # a value above 0 switches LayerScale on
        # the pretraining model has its final norm whatever this says
        use_mean_pooling=task == 'pretraining' or 'backbone.norm.weight' not in weights,
    )
    if task == 'pretraining':
        config['vocab_size'] = len(weights['head.lm_head.bias'])
    if task in ('classification', 'segmentation'):
        number = len(weights['head.fc.bias' if task == 'classification' else 'decode_head.conv_seg.bias'])
        config['num_labels'] = number
        classes = description.class_names(meta) or ()
        if len(classes) == number:
            config['id2label'] = {str(label): name for label, name in enumerate(classes)}
            config['label2id'] = {name: label for label, name in enumerate(classes)}
    if task == 'segmentation':
        config |= _hf_upernet(weights, meta, dims, depth)
    return config


def _hf_rotary(model: Mapping[str, Any]) -> dict[str, Any]:
    """Content of config.json for a backbone with rotary positions, to transformers a DINOv3."""
    is_gated = model['feedforward'] == 'swiglu'
    return dict(
        model_type='dinov3_vit',
        architectures=['DINOv3ViTModel'],
        hidden_size=model['arch']['embed_dims'],
        num_hidden_layers=model['arch']['num_layers'],
        num_attention_heads=model['arch']['num_heads'],
        intermediate_size=model['arch']['feedforward_channels'],
        use_gated_mlp=is_gated,
        hidden_act='silu' if is_gated else 'gelu',
        num_register_tokens=model['num_registers'],
        image_size=list(model['img_size']),
        patch_size=model['patch_size'],
        num_channels=model['in_channels'],
        layer_norm_eps=1e-5,
        rope_theta=model['rotary_base'],
    )


def _hf_upernet(weights: Mapping[str, Tensor], meta: Mapping[str, Any], dims: int, depth: int) -> dict[str, Any]:
    """UperNet's part of config.json, and its auxiliary head's, on a backbone of `depth` blocks of width `dims`."""
    if any(len(weights.get(f'{layer}.weight', ())) != dims for layer in HF_HEAD):
        raise CheckpointError(f'has a head that transformers lacks: its UperNet is as wide as the backbone, {dims}')
    blocks = meta['architecture'].get('out_indices') or names.released_out_indices(depth)
    # transformers numbers the embedding 1 and the first block's output 2, but has no number for the last block's,
    # which the released UperNet uses. Its own files then give the numbers of the blocks, and its logits differ
    numbers = [block + 2 for block in blocks]
    if max(numbers) > depth:
        warn('transformers cannot take the output of the last block, which this segmentor uses: logits will differ')
        numbers = blocks
    auxiliary = weights.get('auxiliary_head.conv_seg.weight')
    config = dict(out_indices=numbers, beit_mm_out_indices=blocks, use_auxiliary_head=auxiliary is not None)
    if auxiliary is not None:
        convs = [name for name in weights if re.fullmatch(r'auxiliary_head\.convs\..*\.conv\.weight', name)]
        config['auxiliary_channels'] = auxiliary.shape[1]
        config['auxiliary_num_convs'] = len(convs)
        config['auxiliary_concat_input'] = 'auxiliary_head.conv_cat.conv.weight' in weights
    return config


def _write_hub_folder(
    folder: Path, task: str, weights: dict[str, Tensor], config: dict[str, Any], preprocessing: Mapping[str, Any]
) -> None:
    """Writes transformers' files and, unless there is one, a model card."""
    write_checkpoint(folder / 'model.safetensors', weights)
    (folder / 'config.json').write_text(json.dumps(config, indent=2) + '\n')
    card = folder / 'README.md'
    if not card.exists():
        kind, tag = HF_CLASSES[task]
        card.write_text(CARD.format(name=folder.name, task=task, kind=kind, tag=tag))
    file = folder / 'preprocessor_config.json'
    if not {'mean', 'std', 'size'} <= set(preprocessing):
        file.unlink(missing_ok=True)  # it belongs to other weights
        warn('the source does not say how its images are prepared: no preprocessor_config.json')
        return
    size = preprocessing['size']
    geometry = preprocessing.get('geometry') or description.usual_geometry(size)
    if task == 'segmentation':  # its label maps are for all of an image
        geometry = dict(geometry, resize=size, crop=size)
    by_edge = len(geometry['resize']) == 1
    sides = ['shortest_edge'] if by_edge else ['height', 'width']
    processor = dict(
        image_processor_type='BitImageProcessor' if by_edge else 'BeitImageProcessor',  # both resize and crop
        do_resize=True,
        size=dict(zip(sides, geometry['resize'], strict=True)),
        resample=description.INTERPOLATIONS.index(geometry['interpolation']),
        do_center_crop=True,
        crop_size=dict(zip(('height', 'width'), geometry['crop'], strict=True)),
        do_rescale=True,
        rescale_factor=1 / 255,
        do_normalize=True,
        image_mean=[value / 255 for value in preprocessing['mean']],
        image_std=[value / 255 for value in preprocessing['std']],
    )
    file.write_text(json.dumps(processor, indent=2) + '\n')

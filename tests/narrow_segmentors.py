"""Narrow segmentors with random weights, for tests of inference."""

import copy

import torch
import torch.nn.functional as F
from mmengine.config import ConfigDict
from mmengine.registry import DefaultScope
from mmseg.models.segmentors import EncoderDecoder
from peers import randomise
from torch import Tensor, nn

from beit_mm.registry import MODELS

CLASSES, WIDTH, CROP, STRIDE = 5, 32, 64, 43
VARIANTS = {
    'absolute': dict(abs_pos_embed=True, rel_pos_bias=None, layer_scale_init=None),
    'bias': dict(abs_pos_embed=False, rel_pos_bias='per_layer', layer_scale_init=0.1),
    'rotary': dict(abs_pos_embed=False, rel_pos_bias=None, rotary_base=100.0, num_registers=4, feedforward='swiglu'),
}
LEVELS = [0, 1, 2, 3]
UPERNET = dict(num_classes=CLASSES, in_channels=[WIDTH] * 4, in_index=LEVELS, channels=WIDTH, norm_cfg=dict(type='BN'))
MASKS = dict(type='beit_mm.MaskClassificationHead', num_classes=CLASSES, in_channels=WIDTH, num_queries=8, num_blocks=2)

# a config as a checkpoint holds it
SEGMENTOR = dict(
    type='beit_mm.SlidingSegmentor',
    data_preprocessor=dict(type='SegDataPreProcessor', mean=[127.5] * 3, std=[127.5] * 3),
    backbone=dict(
        VARIANTS['bias'],
        type='beit_mm.BEiTBackbone',
        arch=dict(embed_dims=WIDTH, num_layers=4, num_heads=4),
        img_size=CROP,
        out_type='featmap',
        out_indices=LEVELS,
    ),
    neck=dict(type='Feature2Pyramid', embed_dim=WIDTH, norm_cfg=dict(type='BN')),
    decode_head=dict(UPERNET, type='beit_mm.EfficientUPerHead'),
    test_cfg=dict(mode='slide', crop_size=(CROP, CROP), stride=(STRIDE, STRIDE), precision='float32'),
)


def narrow_config(variant: str, head: str, **test_cfg: object) -> ConfigDict:
    """SEGMENTOR with another backbone, head and inference; `head` is a type, or 'decoder' or 'backbone' of masks."""
    config = ConfigDict(copy.deepcopy(SEGMENTOR))
    config.backbone.update(VARIANTS[variant])
    config.decode_head.type = head
    config.test_cfg.update(test_cfg)
    if 'SETR' in head:
        del config['neck'], config.backbone['out_indices']
        config.decode_head.update(in_channels=WIDTH, in_index=0, channels=16, num_convs=4, up_scale=2, dropout_ratio=0)
    if head in ('decoder', 'backbone'):
        del config['neck']
        config.decode_head = ConfigDict(MASKS, where=head, in_index=LEVELS if head == 'decoder' else -1)
    return config


def narrow_segmentor(
    variant: str = 'bias', head: str = 'beit_mm.EfficientUPerHead', bgr_to_rgb: bool = False, **test_cfg: object
) -> nn.Module:
    """A SlidingSegmentor of four blocks, windows of 64 pixels 43 apart, in evaluation mode."""
    config = narrow_config(variant, head, **test_cfg)
    config.data_preprocessor.bgr_to_rgb = bgr_to_rgb
    return build_segmentor(config)


def build_segmentor(config: ConfigDict) -> nn.Module:
    """With random weights, in evaluation mode."""
    with DefaultScope.overwrite_default_scope('mmseg'):
        return randomise(MODELS.build(config))


@torch.no_grad()
def mmsegs_logits(model: EncoderDecoder, images: Tensor) -> Tensor:
    """mmseg's logits of images (B, 3, h, w) at their size; sides that are no multiple of the coarsest cell and not
    those of a window are padded before, and the logits of the padding are cut off."""
    height, width = images.shape[2:]
    cell = model.backbone.patch_size * (2 if model.with_neck else 1)
    sides = [
        side if side >= crop else -(-side // cell) * cell
        for side, crop in zip((height, width), model.test_cfg.crop_size, strict=True)
    ]
    images = F.pad(images, (0, sides[1] - width, 0, sides[0] - height))
    logits = EncoderDecoder.inference(model, images, [dict(ori_shape=sides, img_shape=sides)] * len(images))
    return logits[:, :, :height, :width]

"""Narrow segmentors with random weights, for tests of inference."""

import torch
from mmengine.config import ConfigDict
from torch import nn

from beit_mm.registry import MODELS

CLASSES, WIDTH, CROP, STRIDE = 5, 32, 64, 43
VARIANTS = {
    'absolute': dict(abs_pos_embed=True),
    'bias': dict(abs_pos_embed=False, rel_pos_bias='per_layer', layer_scale_init=0.1),
}

# a config as a checkpoint holds it
SEGMENTOR = dict(
    type='beit_mm.SlidingSegmentor',
    data_preprocessor=dict(type='SegDataPreProcessor', mean=[127.5] * 3, std=[127.5] * 3),
    backbone=dict(
        type='beit_mm.BEiTBackbone',
        arch=dict(embed_dims=WIDTH, num_layers=4, num_heads=4),
        img_size=CROP,
        out_type='featmap',
        out_indices=[0, 1, 2, 3],
        abs_pos_embed=False,
        rel_pos_bias='per_layer',
        layer_scale_init=0.1,
    ),
    neck=dict(type='Feature2Pyramid', embed_dim=WIDTH, norm_cfg=dict(type='BN')),
    decode_head=dict(
        type='beit_mm.EfficientUPerHead',
        num_classes=CLASSES,
        norm_cfg=dict(type='BN'),
        in_channels=[WIDTH] * 4,
        in_index=[0, 1, 2, 3],
        channels=WIDTH,
    ),
    test_cfg=dict(mode='slide', crop_size=(CROP, CROP), stride=(STRIDE, STRIDE), precision='float32'),
)


def narrow_segmentor(
    variant: str = 'bias', head: str = 'beit_mm.EfficientUPerHead', bgr_to_rgb: bool = False, **test_cfg: object
) -> nn.Module:
    """A SlidingSegmentor of four blocks, windows of 64 pixels 43 apart, in evaluation mode."""
    backbone = {key: value for key, value in SEGMENTOR['backbone'].items() if key not in VARIANTS['bias']}
    decode_head = dict(SEGMENTOR['decode_head'], type=head if '.' in head else f'mmseg.{head}')
    parts = dict(
        backbone=dict(backbone, **VARIANTS[variant]),
        neck=dict(SEGMENTOR['neck'], type='mmseg.Feature2Pyramid'),
        decode_head=decode_head,
        data_preprocessor=dict(SEGMENTOR['data_preprocessor'], type='mmseg.SegDataPreProcessor', bgr_to_rgb=bgr_to_rgb),
        test_cfg=ConfigDict(dict(SEGMENTOR['test_cfg'], **test_cfg)),
    )
    if 'SETR' in head:
        del parts['neck'], parts['backbone']['out_indices']
        decode_head.update(in_channels=WIDTH, in_index=0, channels=16, num_convs=4, up_scale=2, dropout_ratio=0)
    model = MODELS.build(dict(parts, type='beit_mm.SlidingSegmentor'))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if name.endswith('running_var'):
                tensor.uniform_(0.5, 2, generator=generator)
            elif tensor.is_floating_point():
                scale = 0.5 if tensor.ndim < 2 or name.endswith('table') else tensor[0].numel() ** -0.5
                tensor.normal_(0, scale, generator=generator)
    return model.eval()

"""Segmentors on a plain ViT with registers and patches of 14 pixels: loaded, tested at any size, decayed."""

import copy

import pytest
import torch
from mmengine.config import ConfigDict
from mmengine.registry import DefaultScope
from narrow_segmentors import SEGMENTOR, WIDTH
from peers import randomise
from timm.layers import resample_abs_pos_embed
from timm.models.vision_transformer import VisionTransformer

from beit_mm.engine.optim import parameter_groups
from beit_mm.registry import MODELS

CROP, PATCH, DEPTH = 56, 14, 4


def registered_vit(size: int) -> VisionTransformer:
    sizes = dict(img_size=size, patch_size=PATCH, embed_dim=WIDTH, depth=DEPTH, num_heads=4, num_classes=0)
    return randomise(VisionTransformer(**sizes, reg_tokens=4, no_embed_class=True, init_values=0.1))


@pytest.fixture(params=['beit_mm.EfficientUPerHead', 'SETRUPHead'])
def segmentor(request, tmp_path):
    """A file's weights, of images of 70 pixels, and a segmentor of crops of another size that begins with them."""
    weights = registered_vit(70).state_dict()
    torch.save(weights, tmp_path / 'vit.pth')
    config = ConfigDict(copy.deepcopy(SEGMENTOR))
    config.backbone.update(
        abs_pos_embed=True, rel_pos_bias=None, num_registers=4, img_size=CROP, patch_size=PATCH,
        interpolate_mode='bicubic_antialias',
        init_cfg=dict(type='Pretrained', checkpoint=str(tmp_path / 'vit.pth')),
    )  # fmt: skip
    config.decode_head.type = request.param
    if 'SETR' in request.param:
        del config['neck'], config.backbone['out_indices']
        config.decode_head.update(in_channels=WIDTH, in_index=0, channels=16, num_convs=4, up_scale=2, dropout_ratio=0)
    config.test_cfg.update(crop_size=(CROP, CROP), stride=(37, 37))
    with DefaultScope.overwrite_default_scope('mmseg'):
        model = MODELS.build(config)
    model.init_weights()
    return weights, model


@torch.no_grad()
def test_features_are_the_peers(segmentor):
    """Of timm, with the position embedding resampled as Meta's code does it."""
    weights, model = segmentor
    report = model.backbone.load_report
    assert set(report.resized) == {'pos_embed'} and not report.missing_keys
    peer, images = registered_vit(CROP), torch.randn(2, 3, CROP, CROP)
    position = resample_abs_pos_embed(weights['pos_embed'], [CROP // PATCH] * 2, num_prefix_tokens=0)
    peer.load_state_dict(weights | dict(pos_embed=position))
    blocks = [index % DEPTH for index in model.backbone.out_indices]
    expected = peer.forward_intermediates(images, blocks, intermediates_only=True)
    for found, truth in zip(model.backbone.eval()(images), expected, strict=True):
        torch.testing.assert_close(found, truth, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize('size', [(CROP, CROP), (61, 97), (20, 130)])
def test_images_of_any_size(segmentor, size):
    _, model = segmentor
    with torch.no_grad():
        logits = model.eval().inference(torch.randn(1, 3, *size))
    assert logits.shape == (1, 5, *size) and logits.isfinite().all()


def test_layer_decay_knows_its_layers(segmentor):
    _, model = segmentor
    rates = {}
    for group in parameter_groups(model, rate=0.5, lr=1.0):
        rates |= dict.fromkeys(group['names'], (group['lr'], group.get('weight_decay')))
    for name in ('register_tokens', 'cls_token', 'patch_embed.proj.weight'):
        assert rates[f'backbone.{name}'][0] == 0.5 ** (DEPTH + 1)
    assert rates['backbone.blocks.3.mlp.fc1.weight'][0] == 0.5
    assert rates['backbone.register_tokens'][1] == 0

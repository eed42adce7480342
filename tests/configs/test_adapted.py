"""Configs that train little of a model, or all of one with queries: what learns, and which file they begin with."""

import pytest
import torch
from helpers import build_on_meta, list_configs, load_config
from mmengine.config import Config
from mmengine.registry import DefaultScope
from peers import dinov2_layout

from beit_mm.checkpoint.find import list_models
from beit_mm.registry import MODELS

LEARNS = {
    'beit/attentive_probe_in1k_90e.py': ('heads.',),
    'beit_v2/attentive_probe_in1k_90e.py': ('heads.',),
    'beit_v2/finetune_frozen_in1k_30e.py': ('head.', 'backbone.fc_norm'),
    'beit_v2/finetune_lora_in1k_30e.py': ('head.', '.lora_'),
    'beit_v2/upernet_frozen_512_ade20k_160k.py': ('neck.', 'decode_head.', 'auxiliary_head.'),
    'beit_v2/upernet_lora_512_ade20k_160k.py': ('neck.', 'decode_head.', 'auxiliary_head.', '.lora_'),
    'dinov2/masks_frozen_512_ade20k_39k.py': ('decode_head.',),
    'dinov2/masks_frozen_large_512_ade20k_39k.py': ('decode_head.',),
    **dict.fromkeys(list_configs('masks_5', 'masks_6', 'masks_large', 'masks_decoder'), ('',)),
}


@pytest.mark.parametrize('name', LEARNS)
def test_what_learns(name):
    for key, parameter in build_on_meta(name).named_parameters():
        assert parameter.requires_grad == any(part in key for part in LEARNS[name]), key


@pytest.mark.parametrize('name', [name for name in LEARNS if name.startswith('dinov2/')])
def test_a_config_of_dinov2_takes_all_of_its_file(name, tmp_path):
    model = Config(load_config(name).to_dict()).model
    depth = 24 if 'large' in name else 12
    file = dinov2_layout(tmp_path / 'dinov2.pth', 32, depth)
    start = dict(type='Pretrained', checkpoint=file)
    model.backbone.update(arch=dict(embed_dims=32, num_layers=depth, num_heads=4), img_size=64, init_cfg=start)
    model.decode_head.in_channels = 32
    assert load_config(name).model.backbone.init_cfg.checkpoint in list_models('dinov2_vit*14_reg4_pretrain')
    with DefaultScope.overwrite_default_scope('mmseg'):
        model = MODELS.build(model)
    model.init_weights()
    report = model.backbone.load_report
    assert set(report.resized) == {'pos_embed'} and set(report.adapted) == {'patch_embed.proj.weight'}
    norm = set() if model.queries_join_backbone else {'norm.weight', 'norm.bias'}  # else it is before the predictions
    assert not report.missing_keys and set(report.unexpected_keys) == {'mask_token', *norm}
    assert torch.equal(model.backbone.register_tokens, torch.load(file)['register_tokens'])

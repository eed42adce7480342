"""A step of configs that train little of a model, or classify masks, at toy size: what learns, stays, is stored."""

import pytest
import torch
from helpers import list_configs, load_config
from mmengine.config import Config
from mmengine.optim import build_optim_wrapper
from mmengine.registry import DefaultScope
from mmengine.structures import PixelData
from mmpretrain.structures import DataSample
from mmseg.structures import SegDataSample
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


def narrow(name: str) -> Config:
    """The config with blocks of 32 channels for images of 64 pixels, with as many blocks and classes."""
    cfg = Config(load_config(name).to_dict())
    model = cfg.model
    arch = dict(embed_dims=32, num_layers=24 if 'large' in name else 12, num_heads=4)
    model.backbone.get('module', model.backbone).update(arch=arch, img_size=64, init_cfg=None)
    if 'neck' in model:
        model.neck.embed_dim = 32
        model.data_preprocessor.size = (64, 64)
        model.decode_head.update(in_channels=[32] * 4, channels=16)
        model.auxiliary_head.update(in_channels=32, channels=16)
    elif 'decode_head' in model:
        model.data_preprocessor.size = (64, 64)
        model.decode_head.update(in_channels=32, num_points=100)
        if model.backbone.get('layer_scale_init'):  # 1e-6 hides small gradients from Adam
            model.backbone.layer_scale_init = 0.1
    elif 'head' in model:
        model.head.in_channels = 32
    return cfg


def batch_of(cfg: Config) -> dict:
    samples = [DataSample().set_gt_label(label) for label in range(4)]
    if cfg.default_scope == 'mmseg':
        labels = [PixelData(data=torch.randint(0, 150, (1, 64, 64))) for _ in samples]
        samples = [SegDataSample(gt_sem_seg=each) for each in labels]
    return dict(inputs=list(torch.randint(0, 256, (4, 3, 64, 64), dtype=torch.uint8)), data_samples=samples)


@pytest.mark.parametrize('name', LEARNS)
def test_a_step_changes_what_learns_and_nothing_else(name):
    torch.manual_seed(0)
    cfg = narrow(name)
    with DefaultScope.overwrite_default_scope(cfg.default_scope):
        model = MODELS.build(cfg.model)
        model.init_weights()
        optim_wrapper = build_optim_wrapper(model.train(), cfg.optim_wrapper)
        before = {key: parameter.detach().clone() for key, parameter in model.named_parameters()}
        batch = batch_of(cfg)
        if cfg.default_scope == 'mmpretrain':
            batch['inputs'] = torch.stack(batch['inputs'])
        losses = model.train_step(batch, optim_wrapper)
    assert torch.isfinite(losses['loss'])
    changed = {key for key, parameter in model.named_parameters() if not torch.equal(parameter, before[key])}
    learns = {key for key in before if any(part in key for part in LEARNS[name])}
    assert changed == learns
    stored = model.state_dict()
    assert ('lora' not in name) or not any('original_layer' in key or 'patch_embed' in key for key in stored)


@pytest.mark.parametrize('name', [name for name in LEARNS if name.startswith('dinov2/')])
def test_a_config_of_dinov2_takes_all_of_its_file(name, tmp_path):
    cfg = narrow(name)
    file = dinov2_layout(tmp_path / 'dinov2.pth', 32, cfg.model.backbone.arch.num_layers)
    cfg.model.backbone.init_cfg = dict(type='Pretrained', checkpoint=file)
    assert load_config(name).model.backbone.init_cfg.checkpoint in list_models('dinov2_vit*14_reg4_pretrain')
    with DefaultScope.overwrite_default_scope('mmseg'):
        model = MODELS.build(cfg.model)
    model.init_weights()
    report = model.backbone.load_report
    assert set(report.resized) == {'pos_embed'} and set(report.adapted) == {'patch_embed.proj.weight'}
    assert not report.missing_keys and set(report.unexpected_keys) == {'mask_token', 'norm.weight', 'norm.bias'}
    assert torch.equal(model.backbone.register_tokens, torch.load(file)['register_tokens'])

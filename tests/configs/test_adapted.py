"""A step of each config that trains little of a model, at toy size: what learns, what stays, what is stored."""

import pytest
import torch
from helpers import load_config
from mmengine.config import Config
from mmengine.optim import build_optim_wrapper
from mmengine.registry import DefaultScope
from mmengine.structures import PixelData
from mmpretrain.structures import DataSample
from mmseg.structures import SegDataSample

from beit_mm.registry import MODELS

LEARNS = {
    'beit/attentive_probe_in1k_90e.py': ('heads.',),
    'beit_v2/attentive_probe_in1k_90e.py': ('heads.',),
    'beit_v2/finetune_frozen_in1k_30e.py': ('head.', 'backbone.fc_norm'),
    'beit_v2/finetune_lora_in1k_30e.py': ('head.', '.lora_'),
    'beit_v2/upernet_frozen_512_ade20k_160k.py': ('neck.', 'decode_head.', 'auxiliary_head.'),
    'beit_v2/upernet_lora_512_ade20k_160k.py': ('neck.', 'decode_head.', 'auxiliary_head.', '.lora_'),
}


def narrow(name: str) -> Config:
    """The config with twelve blocks of 32 channels for images of 64 pixels, with as many classes."""
    cfg = Config(load_config(name).to_dict())
    model = cfg.model
    arch = dict(embed_dims=32, num_layers=12, num_heads=4)
    model.backbone.get('module', model.backbone).update(arch=arch, img_size=64, init_cfg=None)
    if 'neck' in model:
        model.neck.embed_dim = 32
        model.data_preprocessor.size = (64, 64)
        model.decode_head.update(in_channels=[32] * 4, channels=16)
        model.auxiliary_head.update(in_channels=32, channels=16)
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

"""Checkpoints of timm under mmpretrain's own tools."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import library_tools, run_tool
from PIL import Image
from timm.models.beit import Beit

CLASSIFICATION = """
default_scope = 'mmpretrain'
custom_hooks = [dict(type='beit_mm.FitCheckHook')]
data_preprocessor = dict(mean=[127.5] * 3, std=[127.5] * 3, to_rgb=True, num_classes=3)
backbone = dict(type='beit_mm.BEiTBackbone', arch=dict(embed_dims=32, num_layers=2, num_heads=4), img_size=32,
    patch_size=8, abs_pos_embed=False, rel_pos_bias='per_layer', layer_scale_init=0.1, out_type='avg_featmap')
model = dict(
    type='ImageClassifier', backbone=backbone, head=dict(type='LinearClsHead', num_classes=3, in_channels=32))
test_dataloader = dict(
    batch_size=4, num_workers=0, persistent_workers=False, sampler=dict(type='DefaultSampler', shuffle=False),
    dataset=dict(type='CustomDataset', data_root='images', pipeline=[
        dict(type='LoadImageFromFile'), dict(type='Resize', scale=(32, 32)), dict(type='PackInputs')]))
test_evaluator = dict(type='Accuracy', topk=(1, ))
test_cfg = dict()
"""


def test_mmpretrain_classifies_as_timm_does(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    bias = dict(use_abs_pos_emb=False, use_rel_pos_bias=True, init_values=0.1)
    model = Beit(img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=4, num_classes=3, **bias).eval()
    torch.save(model.state_dict(), 'timm.pth')
    rng, right = np.random.default_rng(0), []
    for index in range(12):
        pixels = rng.integers(0, 256, (32, 32, 3), dtype=np.uint8)
        Path(f'images/{index % 3}').mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(f'images/{index % 3}/{index}.png')
        images = (torch.from_numpy(pixels).permute(2, 0, 1)[None].float() - 127.5) / 127.5
        right.append(model(images).argmax().item() == index % 3)
    Path('config.py').write_text(CLASSIFICATION)
    run_tool('test.py', 'config.py', 'timm.pth', '--work-dir', 'run', folder=library_tools('mmpretrain'))
    log = next(Path('run').glob('*/*.log')).read_text()
    assert 'timm.pth (unilm): 37 matched.' in log
    assert float(re.search(r'accuracy/top1: ([\d.]+)', log)[1]) == pytest.approx(100 * sum(right) / 12, abs=1e-4)

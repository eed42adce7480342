"""Checkpoints of timm under the libraries' own tools, and under mim."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import ROOT, library_tools, run_tool
from PIL import Image
from timm.models.beit import Beit

BACKBONE = """dict(type='beit_mm.BEiTBackbone', arch=dict(embed_dims=32, num_layers=2, num_heads=4), img_size=32,
    patch_size=8, abs_pos_embed=False, rel_pos_bias='per_layer', layer_scale_init=0.1, out_type='{}')"""
CLASSIFICATION = f"""
default_scope = 'mmpretrain'
custom_hooks = [dict(type='beit_mm.FitCheckHook')]
data_preprocessor = dict(mean=[127.5] * 3, std=[127.5] * 3, to_rgb=True, num_classes=3)
model = dict(type='ImageClassifier', backbone={BACKBONE.format('avg_featmap')},
             head=dict(type='LinearClsHead', num_classes=3, in_channels=32))
test_dataloader = dict(
    batch_size=4, num_workers=0, persistent_workers=False, sampler=dict(type='DefaultSampler', shuffle=False),
    dataset=dict(type='CustomDataset', data_root='images', pipeline=[
        dict(type='LoadImageFromFile'), dict(type='Resize', scale=(32, 32)), dict(type='PackInputs')]))
test_evaluator = dict(type='Accuracy', topk=(1, ))
test_cfg = dict()
"""
SEGMENTATION = f"""
default_scope = 'mmseg'
model = dict(
    type='EncoderDecoder', backbone={BACKBONE.format('featmap')}, test_cfg=dict(mode='whole'),
    data_preprocessor=dict(type='SegDataPreProcessor', mean=[127.5] * 3, std=[127.5] * 3, bgr_to_rgb=True,
                           size=(32, 32)),
    decode_head=dict(type='FCNHead', in_channels=32, channels=8, num_convs=1, concat_input=False, num_classes=3))
test_dataloader = dict(
    batch_size=1, num_workers=0, persistent_workers=False, sampler=dict(type='DefaultSampler', shuffle=False),
    dataset=dict(type='BaseSegDataset', data_root='scenes', metainfo=dict(classes=('a', 'b', 'c')),
                 data_prefix=dict(img_path='images', seg_map_path='annotations'), pipeline=[
        dict(type='LoadImageFromFile'), dict(type='Resize', scale=(32, 32)), dict(type='LoadAnnotations'),
        dict(type='PackSegInputs')]))
test_evaluator = dict(type='IoUMetric', iou_metrics=['mIoU'])
test_cfg = dict(type='TestLoop')
"""


@pytest.fixture
def folder(tmp_path) -> Path:
    """A checkpoint of timm's, twelve images of three classes and two scenes."""
    torch.manual_seed(0)
    bias = dict(use_abs_pos_emb=False, use_rel_pos_bias=True, init_values=0.1)
    model = Beit(img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=4, num_classes=3, **bias).eval()
    torch.save(model.state_dict(), tmp_path / 'timm.pth')
    rng = np.random.default_rng(0)
    for name in ('images/0', 'images/1', 'images/2', 'scenes/images', 'scenes/annotations'):
        (tmp_path / name).mkdir(parents=True)
    right = []
    for index in range(12):
        pixels = rng.integers(0, 256, (32, 32, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / f'images/{index % 3}/{index}.png')
        images = (torch.from_numpy(pixels).permute(2, 0, 1)[None].float() - 127.5) / 127.5
        right.append(model(images).argmax().item() == index % 3)
    (tmp_path / 'accuracy').write_text(f'{100 * sum(right) / len(right):.4f}')
    for index in range(2):
        Image.fromarray(rng.integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(tmp_path / f'scenes/images/{index}.jpg')
        Image.fromarray(rng.integers(0, 3, (32, 32), dtype=np.uint8)).save(tmp_path / f'scenes/annotations/{index}.png')
    (tmp_path / 'classification.py').write_text(CLASSIFICATION)
    (tmp_path / 'segmentation.py').write_text(SEGMENTATION)
    return tmp_path


def test_mmpretrain_classifies_as_timm_does(folder, monkeypatch):
    monkeypatch.chdir(folder)
    run_tool('test.py', 'classification.py', 'timm.pth', '--work-dir', 'run', folder=library_tools('mmpretrain'))
    log = next(folder.glob('run/*/*.log')).read_text()
    assert 'timm.pth (unilm): 37 matched.' in log
    assert re.search(r'accuracy/top1: ([\d.]+)', log)[1] == (folder / 'accuracy').read_text()

    torch.save(Beit(img_size=32, patch_size=16, embed_dim=32, depth=2, num_heads=4).state_dict(), 'wrong.pth')
    with pytest.raises(Exception, match=r'patch_embed.proj.weight \(32, 3, 16, 16\), the model has \(32, 3, 8, 8\)'):
        run_tool('test.py', 'classification.py', 'wrong.pth', '--work-dir', 'run', folder=library_tools('mmpretrain'))


def test_mim_tests_with_weights_of_timms(folder):
    """A process where nothing of ours runs but what the config names."""
    words = 'mim test mmsegmentation segmentation.py --checkpoint timm.pth --gpus 0 --launcher none --work-dir run'
    path = f'{Path(sys.executable).parent}:{os.environ["PATH"]}'
    environment = os.environ | dict(OMP_NUM_THREADS='1', PYTHONPATH=str(ROOT), PATH=path)
    done = subprocess.run(words.split(), cwd=folder, capture_output=True, text=True, timeout=240, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    assert 'timm.pth (unilm): 35 matched, 2 unexpected (fc_norm.weight, fc_norm.bias)' in done.stdout
    assert 'mIoU' in done.stdout

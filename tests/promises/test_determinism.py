"""`randomness.deterministic=True` works in every task: nothing of ours is refused, and two runs give the same bits."""

import os
from collections.abc import Iterator

import pytest
import torch
from mmengine.registry import DefaultScope
from mmengine.structures import PixelData
from mmseg.structures import SegDataSample
from narrow_segmentors import CLASSES, CROP, narrow_segmentor
from promises.test_resume import differences, fine_tuning, pretraining, run

from beit_mm.engine.optim import AutocastOptimWrapper


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv('CUBLAS_WORKSPACE_CONFIG', '')  # is restored afterwards
    monkeypatch.delenv('CUBLAS_WORKSPACE_CONFIG')
    flags = torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic
    yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = flags


@pytest.mark.parametrize('task', [pretraining, fine_tuning])
def test_two_runs_give_the_same_bits(task, images, tmp_path):
    config = task(tmp_path, images)
    bias = 'shared' if task is pretraining else 'per_layer'
    config.model.backbone.update(rel_pos_bias=bias, img_size=64, layer_scale_init=0.1)  # resized to 32
    config.randomness = dict(seed=0, deterministic=True)
    config.train_cfg, config.param_scheduler = dict(type='beit_mm.IterLoop', max_iters=2), []
    one, two = (run(config, tmp_path / name) for name in ('one', 'two'))
    assert torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
    assert os.environ['CUBLAS_WORKSPACE_CONFIG'] == ':4096:8'  # before the first step; cuBLAS reads it then
    assert not differences(one['state_dict'], two['state_dict'])


@pytest.mark.parametrize('head', ['beit_mm.EfficientUPerHead', 'beit_mm.EfficientSETRUPHead'])
def test_segmentors_train_under_the_switch(head):
    torch.use_deterministic_algorithms(True)
    with DefaultScope.overwrite_default_scope('mmseg'):
        model = narrow_segmentor(head=head).train()
    model.data_preprocessor.size = (CROP, CROP)
    wrapper = AutocastOptimWrapper('float32', optimizer=torch.optim.AdamW(model.parameters(), 1e-3, fused=True))
    labels = torch.randint(0, CLASSES, (2, 1, CROP, CROP))
    samples = [SegDataSample(gt_sem_seg=PixelData(data=label)) for label in labels]
    images = torch.randint(0, 256, (2, 3, CROP, CROP), dtype=torch.uint8)
    model.train_step(dict(inputs=list(images), data_samples=samples), wrapper)  # what is refused raises

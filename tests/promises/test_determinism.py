"""`randomness.deterministic=True` works: nothing of ours is refused, and two runs give the same bits."""

import os
from collections.abc import Iterator

import pytest
import torch
from promises.test_resume import differences, fine_tuning, pretraining, run


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

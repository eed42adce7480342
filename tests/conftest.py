"""Fixtures that tests share: small images, and a small pretraining on them."""

import importlib
import logging
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import ROOT, narrow_dino_model, narrow_feature_model, narrow_model
from labelled import save_backbone
from mmengine.config import Config, ConfigDict
from mmengine.logging import MMLogger
from mmengine.registry import DefaultScope
from PIL import Image


def pytest_configure() -> None:
    # yapf writes a file at its first import on a machine, of which processes that import it together read half
    importlib.import_module('yapf.yapflib.yapf_api')
    # At the first backward pass torch counts the devices; fake tensors, of an export for example, add one that does not
    # exist, and with a device a process that is forked later cannot train.
    torch.ones(1, requires_grad=True).sum().backward()


@pytest.fixture(autouse=True)
def _reproducible() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope='module', autouse=True)
def _scope_of_its_own():
    """The library whose types need no prefix is set by runners and tools, and stays set: for one file, not the next."""
    before = DefaultScope._instance_dict.copy()
    yield
    DefaultScope._instance_dict = before


@pytest.fixture(scope='session', autouse=True)
def _unformatted_configs():
    """mmengine formats the config of a run eight times, longer than a short run takes; unformatted means the same."""
    with pytest.MonkeyPatch.context() as patch:
        for place in ('yapf.yapflib.yapf_api', 'mmengine.config.config'):  # where the two stacks look for it
            patch.setattr(f'{place}.FormatCode', lambda text, **_: (text, False), raising=False)
        yield


@pytest.fixture(scope='session', autouse=True)
def _no_released_start(tmp_path_factory: pytest.TempPathFactory):
    """Where a released model is at hand a run begins with it, so results would depend on the machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv('BEIT_MM_WEIGHTS', raising=False)
        patch.setenv('TORCH_HOME', str(tmp_path_factory.mktemp('torch')))
        patch.setenv('https_proxy', 'http://127.0.0.1:9')  # which nobody serves
        yield


@pytest.fixture(scope='session')
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of twelve JPEGs of smooth colours, 48 x 64 pixels."""
    folder = tmp_path_factory.mktemp('images')
    rng = np.random.default_rng(0)
    for index in range(12):
        small = Image.fromarray(rng.integers(0, 256, (4, 5, 3), dtype=np.uint8))
        small.resize((64, 48), Image.Resampling.BICUBIC).save(folder / f'{index:02}.jpg')
    return folder


@pytest.fixture(scope='module')
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    """See `save_backbone`."""
    return save_backbone(tmp_path_factory.mktemp('base') / 'base.pth')


def narrow_pretraining(images: Path, folder: Path, name: str = 'demo/pretrain.py') -> Config:
    """A pretraining config shrunk to a narrow model, twelve images, three steps an epoch."""
    cfg = Config.fromfile(ROOT / 'configs' / name)
    cfg.model = narrow_model()
    for loader in (cfg.train_dataloader, cfg.val_dataloader, cfg.test_dataloader):
        loader.batch_size = 4
        loader.num_workers = 0
        loader.persistent_workers = False
        loader.dataset.update(data_root=str(images), data_prefix='')
        for transform in loader.dataset.pipeline:
            if 'size' in transform:
                transform.update(size=32, second_size=32)
            if 'grid' in transform:
                transform.update(grid=(4, 4), num_masked=6, min_block=2)
    cfg.train_cfg = dict(type='beit_mm.EpochLoop', max_epochs=2, val_interval=1)
    cfg.param_scheduler = []
    cfg.auto_scale_lr = dict(base_batch_size=4)
    cfg.default_hooks.checkpoint = dict(type='beit_mm.CheckpointHook', interval=1)
    cfg.default_hooks.logger.interval = 1
    # Its sheet of pictures takes longer to draw than all the steps
    cfg.custom_hooks = [hook for hook in cfg.custom_hooks if hook.type != 'beit_mm.ReconstructionHook']
    cfg.log_processor.by_epoch = True
    cfg.work_dir = str(folder / 'work')
    cfg.launcher = 'none'
    return cfg


def narrow_dino_pretraining(images: Path, folder: Path) -> Config:
    """The same with BEiT + DINO: crops of 32 and 16 pixels, a last layer that is frozen in the first epoch."""
    cfg = narrow_pretraining(images, folder)
    cfg.model = narrow_dino_model()
    crops = ConfigDict(type='beit_mm.MultiCrop', size=32, local_size=16, num_local=2, blur_sigma=(0.1, 0.5))
    cfg.train_dataloader.dataset.pipeline.insert(-1, crops)
    schedules = dict(momentum=0.9, temperature=(0.04, 0.07), warmup_epochs=2, freeze_last_layer=1)
    cfg.custom_hooks.append(dict(type='beit_mm.DINOHook', **schedules))
    return cfg


def narrow_feature_pretraining(images: Path, folder: Path) -> Config:
    """The same with features of the model's own moving average."""
    cfg = narrow_pretraining(images, folder)
    cfg.model = narrow_feature_model()
    for loader in (cfg.train_dataloader, cfg.val_dataloader, cfg.test_dataloader):
        for transform in loader.dataset.pipeline:
            if 'second_size' in transform:
                transform.second_size = None
    cfg.val_evaluator = cfg.test_evaluator = dict(type='beit_mm.FeatureMetric')
    cfg.custom_hooks.append(dict(type='beit_mm.TeacherMomentumHook', momentum=0.9))
    return cfg


@pytest.fixture
def pretrain_config(images: Path, tmp_path: Path) -> Config:
    """See `narrow_pretraining`."""
    return narrow_pretraining(images, tmp_path)


@pytest.fixture
def warnings(caplog):
    """A function that returns the warnings so far."""
    logger = MMLogger.get_current_instance()
    logger.addHandler(caplog.handler)
    yield lambda: [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    logger.removeHandler(caplog.handler)

"""A run that is stopped after any step and resumed ends as the run that was never stopped, to the last bit."""

import copy
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import narrow_dino_pretraining, narrow_feature_pretraining, narrow_pretraining
from helpers import ROOT, make_runner
from label_maps import make_label_maps, mask_training
from labelled import classifier_config, make_images
from mmengine.config import Config
from torch.utils.data import BatchSampler

from beit_mm.models.lora import with_lora
from beit_mm.registry import MODELS

pytestmark = pytest.mark.long

KILL_LOOP = ROOT / 'tools/dev/stress/kill_loop.py'
kill_loop = runpy.run_path(str(KILL_LOOP))
differences = kill_loop['differences']


def pretraining(folder: Path, images: Path, name: str = 'demo/pretrain.py') -> Config:
    config = narrow_pretraining(images, folder, name)
    config.model.backbone.drop_path_rate = 0.3
    config.train_cfg = dict(type='beit_mm.EpochLoop', max_epochs=2)
    config.param_scheduler = [
        dict(type='LinearLR', start_factor=0.1, end=2, by_epoch=False),
        dict(type='CosineAnnealingLR', begin=2, end=6, T_max=4, by_epoch=False, eta_min_ratio=0.1),
    ]
    return config


def accumulating(folder: Path, images: Path) -> Config:
    config = pretraining(folder, images)
    config.optim_wrapper.accumulative_counts = 2  # of 3 batches in an epoch
    return config


def by_iterations(folder: Path, images: Path) -> Config:
    config = pretraining(folder, images)
    config.train_cfg = dict(type='beit_mm.IterLoop', max_iters=7)
    config.custom_hooks.append(dict(type='EMAHook', momentum=0.1))
    return config


def in_batches_of_a_sampler(folder: Path, images: Path) -> Config:
    """With a seed that the run draws."""
    config = pretraining(folder, images)
    config.train_dataloader.batch_sampler = dict(type=BatchSampler, drop_last=config.train_dataloader.pop('drop_last'))
    config.pop('randomness', None)
    return config


def with_dino(folder: Path, images: Path) -> Config:
    config = narrow_dino_pretraining(images, folder)
    config.model.backbone.drop_path_rate = 0.3
    config.optim_wrapper.optimizer.weight_decay = 0.04
    config.param_scheduler = [
        dict(type='CosineAnnealingWeightDecay', T_max=6, end=6, by_epoch=False, eta_min=0.4),
        *pretraining(folder, images).param_scheduler,
    ]
    return config


def with_features(folder: Path, images: Path) -> Config:
    """Of its own moving average, which is in the checkpoint; of two layers, with a step every two batches; rotary."""
    config = narrow_feature_pretraining(images, folder)
    config.model.backbone.update(abs_pos_embed=False, rotary_base=100.0, feedforward='swiglu')
    config.model.target_generator.layers = [0, -1]
    config.model.backbone.drop_path_rate = 0.3
    config.param_scheduler = pretraining(folder, images).param_scheduler
    return config


def of_vqkd(folder: Path, images: Path) -> Config:
    """With codes that begin anew in each step, by vectors that are drawn."""
    config = pretraining(folder, images, 'demo/vqkd.py')
    sizes = dict(arch=dict(embed_dims=32, num_layers=2, num_heads=4), img_size=32, patch_size=8, decoder_layers=1)
    codes = dict(vocab_size=24, code_dims=6, restart_below=2.0, pixel_decoder=dict(hidden=8, width=8))
    codes['pixel_decoder']['bottleneck_blocks'] = 1
    teacher = dict(teacher=dict(type='beit_mm.BEiTTeacher', checkpoint='demo', layer=2), teacher_dims=128)
    data = dict(data_preprocessor=config.model.data_preprocessor)
    config.model = dict(type='beit_mm.VQKD', **sizes, **codes, **teacher, **data)
    return config


def fine_tuning(folder: Path, images: Path) -> Config:
    config = classifier_config(make_images(folder / 'images'), folder)
    config.model.backbone.drop_path_rate = 0.3
    config.model.data_preprocessor = dict(
        type='beit_mm.ClassificationDataPreprocessor', mean=[127.5] * 3, std=[127.5] * 3, num_classes=3
    )
    augments = [dict(type='Mixup', alpha=0.8), dict(type='CutMix', alpha=1.0)]
    config.model.train_cfg = dict(augments=augments)
    config.model.head.loss = dict(type='LabelSmoothLoss', label_smooth_val=0.1, mode='original')
    config.train_dataloader.dataset.pipeline = [
        dict(type='beit_mm.LoadImage'),
        dict(type='RandomResizedCrop', scale=32, backend='pillow'),
        dict(type='RandomFlip', prob=0.5),
        dict(type='beit_mm.RandomErasing', prob=0.5),
        dict(type='PackInputs', meta_keys=('sample_idx', 'img_path', 'erase_box', 'unreadable')),
    ]
    config.custom_hooks.insert(0, dict(type='beit_mm.StepSeedHook'))
    return config


def of_masks(folder: Path, images: Path) -> Config:
    """Where a random share of the queries is masked, which falls with the steps."""
    return mask_training(make_label_maps(folder / 'maps'), folder)


def with_low_rank_matrices(folder: Path, images: Path) -> Config:
    """Checkpoints hold the matrices and the head, and their average; the frozen weights come from their file."""
    config = fine_tuning(folder, images)
    backbone = dict(config.model.backbone, init_cfg=dict(type='Pretrained', checkpoint=str(folder / 'base.pth')))
    torch.save(MODELS.build(config.model.backbone).state_dict(), folder / 'base.pth')
    config.model.backbone = with_lora(backbone, rank=2)
    config.custom_hooks.append(dict(type='EMAHook', momentum=0.1))
    return config


def run(config: Config, folder: Path, **changes: object) -> dict:
    """Trains with a checkpoint after each step, and returns what the last one holds."""
    config = copy.deepcopy(config)
    config.work_dir = str(folder)
    config.val_cfg = config.val_dataloader = config.val_evaluator = None
    config.default_hooks.checkpoint = dict(type='beit_mm.CheckpointHook', by_epoch=False, interval=1, max_keep_ckpts=-1)
    config.update(changes)
    runner = make_runner(config)
    runner.train()
    return torch.load((folder / 'last_checkpoint').read_text(), weights_only=True)


LOOPS = [pretraining, accumulating, by_iterations, in_batches_of_a_sampler]
TASKS = [*LOOPS, with_dino, with_features, of_vqkd, fine_tuning, with_low_rank_matrices, of_masks]


@pytest.mark.parametrize('task', TASKS)
def test_a_resumed_run_ends_as_the_uninterrupted_one(task, images, tmp_path):
    config = task(tmp_path, images)
    whole = run(config, tmp_path / 'whole')
    files = sorted((tmp_path / 'whole').glob('iter_*.pth'), key=lambda file: file.stat().st_mtime_ns)
    assert len(files) >= 3 and not differences(whole, torch.load(files[-1], weights_only=True))
    # within an epoch; and at its end, which is the same for every model and all data
    for index in (0, len(files) // 2) if task in LOOPS else (1,):
        folder = tmp_path / f'resumed_{index}'
        folder.mkdir()
        (folder / files[index].name).hardlink_to(files[index])
        found = differences(whole, run(config, folder, resume=True))
        assert not found, '\n'.join([files[index].name, *found[:10]])


@pytest.mark.slow
def test_three_kills_change_nothing(tmp_path):
    options = ['--kills', '3', '--steps', '40', '--longest', '3', '--out', str(tmp_path)]
    result = subprocess.run([sys.executable, KILL_LOOP, *options], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0 and '3 kills, ' in result.stdout and '0 differences' in result.stdout, result

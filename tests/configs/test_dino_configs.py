"""The two pretraining configs with DINO: BEiT's numbers, and those of DINO's released ViT-B/16."""

import math

import pytest
import torch
from helpers import count_parameters, load_config
from mmpretrain.registry import PARAM_SCHEDULERS

BOTH, ALONE = 'beit_dino/pretrain_beit_dino_300e.py', 'beit_dino/pretrain_dino_400e.py'
VIT = 85_798_656  # with 197 positions, class token and last norm, and a bias for q, k and v as timm's
EPOCH = 5  # steps of an epoch, fewer than ImageNet's
HEAD = 769 * 2048 + 2049 * 2048 + 2049 * 256 + 256 * 65536


def steps_of(name: str) -> dict[str, dict]:
    return {step.type.removeprefix('beit_mm.'): step for step in load_config(name).train_dataloader.dataset.pipeline}


def test_models():
    keys_bias = 12 * 768  # which changes no attention
    assert count_parameters(ALONE) == VIT - keys_bias + HEAD
    assert count_parameters(BOTH) == count_parameters('beit/pretrain_300e.py') + HEAD
    both, alone = load_config(BOTH).model, load_config(ALONE).model
    assert both.dino_head == alone.dino_head == dict(type='beit_mm.DINOHead', embed_dims=768, num_prototypes=65536)
    assert alone.head is alone.target_generator is None
    assert both.backbone.drop_path_rate == alone.backbone.drop_path_rate == 0.1
    assert (both.dino_weight, both.dino_on_masked) == (1.0, False)


def test_crops_and_schedules_of_dino_are_the_same_in_both():
    crops, hook = steps_of(ALONE)['MultiCrop'], load_config(ALONE).custom_hooks[-1]
    assert steps_of(BOTH)['MultiCrop'] == crops and load_config(BOTH).custom_hooks[-1] == hook
    assert (crops.size, tuple(crops.scale)) == (224, (0.25, 1.0))
    assert (crops.local_size, tuple(crops.local_scale), crops.num_local) == (96, (0.05, 0.25), 10)
    assert (hook.momentum, tuple(hook.temperature), hook.warmup_epochs, hook.freeze_last_layer) == (
        0.996,
        (0.04, 0.07),
        50,
        3,
    )


def test_view_of_beit_is_the_first_global_crop():
    steps, beit = steps_of(BOTH), load_config('beit/pretrain_300e.py').train_dataloader.dataset.pipeline
    assert list(steps) == [
        'LoadImage',
        'TwoViewRandomResizedCrop',
        'TwoViewColorJitter',
        'BlockwiseMask',
        'MultiCrop',
        'PackViews',
    ]
    assert [steps['TwoViewColorJitter'], steps['BlockwiseMask']] == beit[2:4]
    assert steps['TwoViewRandomResizedCrop'] == dict(beit[1], scale=(0.25, 1.0))
    assert load_config(BOTH).val_dataloader == load_config('beit/pretrain_300e.py').val_dataloader


def test_optimizer_of_both_is_beits():
    both, beit = load_config(BOTH), load_config('beit/pretrain_300e.py')
    for key in ('optim_wrapper', 'param_scheduler', 'train_cfg', 'auto_scale_lr'):
        assert both[key] == beit[key]
    assert 32 * both.train_dataloader.batch_size == 2048


def test_optimizer_of_dino_alone_is_dinos():
    """lr 7.5e-4 for 256 images, 10 epochs of warm-up, half a cosine to 2e-6; weight decay from 0.04 to 0.4."""
    cfg = load_config(ALONE)
    batch, adamw = cfg.auto_scale_lr.base_batch_size, cfg.optim_wrapper.optimizer
    assert (batch, 16 * cfg.train_dataloader.batch_size, adamw.lr) == (1024, 1024, 7.5e-4 * 1024 / 256)
    assert (adamw.type, tuple(adamw.betas), adamw.eps) == ('AdamW', (0.9, 0.999), 1e-8)
    groups = [dict(params=[torch.zeros(1, requires_grad=True)], weight_decay=decay) for decay in (0.04, 0)]
    optimizer = torch.optim.AdamW(groups, lr=adamw.lr)
    schedulers = []
    for scheduler in cfg.param_scheduler.copy():
        scheduler = dict(scheduler)
        kind = PARAM_SCHEDULERS.get(scheduler.pop('type'))
        assert scheduler.pop('convert_to_iter_based')
        schedulers.append(kind.build_iter_from_epoch(optimizer=optimizer, **scheduler, epoch_length=EPOCH))
    warmup, total = 10 * EPOCH, 400 * EPOCH
    for step in range(total):
        half = (1 + math.cos(math.pi * (step - warmup) / (total - warmup))) / 2
        rate = adamw.lr * step / (warmup - 1) if step < warmup else 2e-6 + (adamw.lr - 2e-6) * half
        decay = 0.4 + (0.04 - 0.4) * (1 + math.cos(math.pi * step / total)) / 2
        for group, decays in zip(optimizer.param_groups, (decay, 0), strict=True):
            assert group['lr'] == pytest.approx(rate, rel=1e-5, abs=1e-11), step
            assert group['weight_decay'] == pytest.approx(decays, rel=1e-5), step
        optimizer.step()
        for scheduler in schedulers:
            scheduler.step()


def test_rows_start_from_the_student_or_the_teacher():
    for row in ('finetune_{}_in1k_100e', 'setr_pup_{}_512_ade20k_160k'):
        for name, prefix in (('beit_dino', 'backbone.'), ('dino', 'teacher.backbone.')):
            init = load_config(f'beit_dino/{row.format(name)}.py').model.backbone.init_cfg
            assert (init.type, init.prefix) == ('Pretrained', prefix)

"""Every classification config holds the numbers of the paper's appendix tables, or of the released commands."""

import copy
import math
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from helpers import build_on_meta, check_all, count_parameters, list_configs, load_config
from mmengine.registry import PARAM_SCHEDULERS, init_default_scope

from beit_mm.registry import MODELS

IN1K, IN22K, CIFAR = 1_281_167, 14_197_122, 50_000
IMAGENET_STATISTICS, HALF = (123.675, 116.28, 103.53), (127.5,) * 3
SWEEP = (2e-3, 3e-3, 4e-3, 5e-3)  # the paper takes the best of these


class Recipe(NamedTuple):
    """One row of the paper's table of fine-tuning settings, or one released command."""

    parameters: int
    start: str | None  # config whose last checkpoint it starts from
    rates: tuple[float, ...] = SWEEP  # peak
    min_rate: float = 1e-6
    epochs: int = 100
    batch: int = 1024
    warmup: int = 20  # epochs
    layer_decay: float = 0.65
    weight_decay: float = 0.05
    drop_path: float = 0.1
    mix: bool = True  # mixup 0.8 and cutmix 1.0
    erasing: float = 0.25
    repeated: bool = True
    size: int = 224
    mean: tuple[float, ...] = IMAGENET_STATISTICS
    images: int = IN1K
    classes: int = 1000
    layer_scale: float | None = None


# The paper, table of fine-tuning settings
BASE = Recipe(86_558_440, 'beit/pretrain_800e.py')
LARGE = Recipe(304_302_056, 'beit/pretrain_large_800e.py', epochs=50, warmup=5, layer_decay=0.75, repeated=False)
CIFAR100 = BASE._replace(
    parameters=86_558_440 - 900 * 769, epochs=150, batch=512, weight_decay=0.3, erasing=0, images=CIFAR, classes=100
)
# DeiT's command for higher resolutions, for ten epochs: its rate has no other minimum, and is the same for all layers
HIGHER = dict(
    rates=(5e-6,), min_rate=5e-6, epochs=10, batch=512, warmup=5, layer_decay=1.0, weight_decay=1e-8, size=384
)
# The released commands
PLUS = dict(mean=HALF, repeated=False)
PT22K_BASE = BASE._replace(
    parameters=86_530_984, start='beit_plus/pretrain_in22k_150e.py', rates=(4e-3,), layer_scale=0.1, **PLUS
)
PT22K_LARGE = LARGE._replace(
    parameters=304_430_568,
    start='beit_plus/pretrain_large_in22k_150e.py',
    rates=(1e-3,),
    drop_path=0.2,
    layer_scale=1e-5,
    **PLUS,
)
AFTER22K = dict(rates=(2e-5,), epochs=30, batch=512, warmup=5, weight_decay=1e-8, mix=False)
FT22K_BASE = PT22K_BASE._replace(start='beit_plus/intermediate_in22k_90e.py', layer_decay=0.85, **AFTER22K)
FT22K_LARGE = PT22K_LARGE._replace(
    start='beit_plus/intermediate_large_in22k_90e.py', layer_decay=0.9, drop_path=0.4, **AFTER22K
)
INTERMEDIATE = dict(epochs=90, warmup=5, drop_path=0.2, mix=False, images=IN22K, classes=21841)
# BEiT v2's released commands
V2_BASE = PT22K_BASE._replace(
    start='beit_v2/pretrain_1600e.py', rates=(5e-4,), layer_decay=0.6, drop_path=0.2, mean=IMAGENET_STATISTICS
)
V2_LARGE = PT22K_LARGE._replace(
    start='beit_v2/pretrain_large_1600e.py', rates=(2e-4,), layer_decay=0.8, mean=IMAGENET_STATISTICS
)
V2_INTERMEDIATE = dict(rates=(6e-4,), epochs=90, batch=4096, warmup=20, layer_decay=0.75, images=IN22K, classes=21841)

RECIPES = {
    'beit/finetune_in1k_100e.py': BASE,
    'beit/finetune_large_in1k_50e.py': LARGE,
    'beit/finetune_384_in1k_10e.py': BASE._replace(parameters=86_850_280, start='beit/finetune_in1k_100e.py', **HIGHER),
    'beit/finetune_large_384_in1k_10e.py': LARGE._replace(
        parameters=304_691_176, start='beit/finetune_large_in1k_50e.py', **HIGHER
    ),
    'beit/finetune_cifar100_150e.py': CIFAR100,
    'beit/finetune_cifar100_150e_after_in1k.py': CIFAR100._replace(start='beit/finetune_in1k_100e.py'),
    'beit_plus/finetune_pt22k_in1k_100e.py': PT22K_BASE,
    'beit_plus/finetune_large_pt22k_in1k_50e.py': PT22K_LARGE,
    'beit_plus/intermediate_in22k_90e.py': PT22K_BASE._replace(
        parameters=102_557_713, rates=(3e-3,), batch=4096, **INTERMEDIATE
    ),
    'beit_plus/intermediate_large_in22k_90e.py': PT22K_LARGE._replace(
        parameters=325_792_593, rates=(2e-3,), batch=2048, **INTERMEDIATE
    ),
    'beit_plus/finetune_224_in1k.py': FT22K_BASE,
    'beit_plus/finetune_384_in1k.py': FT22K_BASE._replace(parameters=86_744_104, size=384),
    'beit_plus/finetune_large_224_in1k.py': FT22K_LARGE,
    'beit_plus/finetune_large_384_in1k.py': FT22K_LARGE._replace(parameters=304_998_888, size=384),
    'beit_plus/finetune_large_512_in1k.py': FT22K_LARGE._replace(parameters=305_674_728, size=512),
    'beit_v2/finetune_in1k_100e.py': V2_BASE,
    'beit_v2/finetune_pt300e_in1k_100e.py': V2_BASE._replace(
        start='beit_v2/pretrain_300e.py', layer_decay=0.65, drop_path=0.1
    ),
    'beit_v2/finetune_after_in22k_in1k_30e.py': V2_BASE._replace(
        start='beit_v2/intermediate_in22k_90e.py', rates=(5e-5,), epochs=30, layer_decay=0.75, drop_path=0.1, mix=False
    ),
    'beit_v2/finetune_large_in1k_50e.py': V2_LARGE,
    'beit_v2/finetune_large_pt300e_in1k_50e.py': V2_LARGE._replace(
        start='beit_v2/pretrain_large_300e.py', rates=(5e-4,)
    ),
    'beit_v2/finetune_large_after_in22k_in1k_20e.py': V2_LARGE._replace(
        start='beit_v2/intermediate_large_in22k_90e.py', rates=(7e-5,), epochs=20, drop_path=0.25, mix=False
    ),
    'beit_v2/intermediate_in22k_90e.py': V2_BASE._replace(parameters=102_557_713, drop_path=0.1, **V2_INTERMEDIATE),
    'beit_v2/intermediate_large_in22k_90e.py': V2_LARGE._replace(
        parameters=325_792_593, drop_path=0.2, **V2_INTERMEDIATE
    ),
    'ablation/finetune_baseline_in1k_100e.py': BASE._replace(start='beit/pretrain_300e.py'),
    **{
        f'ablation/finetune_{row}_in1k_100e.py': BASE._replace(start=f'ablation/pretrain_{row}_300e.py')
        for row in ('random_mask', 'pixels', 'pixels_random_mask', 'recover_all', 'no_mask_recover_all', 'own_dvae')
    },
    # 12 blocks x 2 vectors of 768
    'ablation/finetune_layer_scale_in1k_100e.py': BASE._replace(
        parameters=86_558_440 + 12 * 2 * 768, start='ablation/pretrain_layer_scale_300e.py', layer_scale=0.1
    ),
    'ablation/finetune_layer_scale_rel_pos_in1k_100e.py': BASE._replace(
        parameters=86_530_984, start='beit_plus/pretrain_300e.py', layer_scale=0.1
    ),
    'beit_dino/finetune_beit_dino_in1k_100e.py': BASE._replace(start='beit_dino/pretrain_beit_dino_300e.py'),
    'beit_dino/finetune_dino_in1k_100e.py': BASE._replace(start='beit_dino/pretrain_dino_400e.py'),
    # DeiT's defaults
    'ablation/scratch_in1k_300e.py': BASE._replace(
        start=None, rates=(1e-3,), min_rate=1e-5, epochs=300, warmup=5, layer_decay=1.0
    ),
}
# config -> probed block from 1, pretraining, parameters: embeddings, blocks, no last norm, and the classifier
PROBES = {
    'beit/linear_probe_in1k_50e.py': (9, 'beit/pretrain_800e.py', 85_789_440 - 2 * 768 + 769 * 1000),
    'beit/linear_probe_large_in1k_50e.py': (14, 'beit/pretrain_large_800e.py', 303_277_056 - 2 * 1024 + 1025 * 1000),
}


def steps_of(pipeline: list[dict]) -> dict[str, dict]:
    return {step['type'].removeprefix('beit_mm.'): step for step in pipeline}


def test_no_row_is_left_out():
    assert sorted([*RECIPES, *PROBES]) == list_configs('finetune', 'intermediate', 'scratch', 'linear_probe')


def test_optimizers_are_the_published_ones():

    def check(name: str) -> None:
        recipe, cfg = RECIPES[name], load_config(name)
        wrapper, optimizer = cfg.optim_wrapper, cfg.optim_wrapper.optimizer
        assert optimizer.lr in recipe.rates
        assert (optimizer.type, tuple(optimizer.betas), optimizer.eps, optimizer.weight_decay) == (
            'AdamW',
            (0.9, 0.999),
            1e-8,
            recipe.weight_decay,
        )
        assert wrapper.constructor == 'beit_mm.BEiTOptimWrapperConstructor'
        assert wrapper.paramwise_cfg == dict(layer_decay_rate=recipe.layer_decay)
        assert 'clip_grad' not in wrapper and wrapper.dtype == 'bfloat16'
        assert cfg.auto_scale_lr.base_batch_size == recipe.batch
        of_a_gpu = cfg.train_dataloader.batch_size * wrapper.get('accumulative_counts', 1)
        assert recipe.batch // of_a_gpu in (8, 16, 32) and recipe.batch % of_a_gpu == 0
        assert cfg.train_cfg.max_epochs == recipe.epochs

    check_all(RECIPES, check)


def test_models_are_the_published_ones():

    def check(name: str) -> None:
        recipe, cfg = RECIPES[name], load_config(name)
        backbone, head = cfg.model.backbone, cfg.model.head
        assert count_parameters(name) == recipe.parameters
        assert (backbone.drop_path_rate, backbone.get('layer_scale_init')) == (recipe.drop_path, recipe.layer_scale)
        assert backbone.get('img_size', 224) == recipe.size and backbone.out_type == 'avg_featmap'
        assert head.num_classes == cfg.model.data_preprocessor.num_classes == recipe.classes
        assert head.loss == dict(type='LabelSmoothLoss', label_smooth_val=0.1, mode='original')
        # 0.02 x 0.001 for what is fine-tuned
        assert head.init_cfg == dict(type='Normal', layer='Linear', std=pytest.approx(2e-5 if recipe.start else 0.02))
        mix = dict(augments=[dict(type='Mixup', alpha=0.8), dict(type='CutMix', alpha=1.0)])
        assert cfg.model.train_cfg == (mix if recipe.mix else None)
        assert tuple(cfg.model.data_preprocessor.mean) == recipe.mean
        assert cfg.model.data_preprocessor.std[0] == (58.395 if recipe.mean == IMAGENET_STATISTICS else 127.5)

    check_all(RECIPES, check)


def test_data_are_the_published_ones():
    check_all(RECIPES, check_data)


def check_data(name: str) -> None:
    recipe, cfg = RECIPES[name], load_config(name)
    train = steps_of(cfg.train_dataloader.dataset.pipeline)
    assert list(train) == [
        'LoadImage',
        'RandomResizedCrop',
        'RandAugment',
        *(['RandomErasing'] if recipe.erasing else []),
        'PackInputs',
    ]
    # 8 to 100 % of the image, 3/4 to 4/3, and a flip of every other image are the defaults
    assert train['RandomResizedCrop'] == dict(type='beit_mm.RandomResizedCrop', size=recipe.size)
    augment = train['RandAugment']
    assert (augment.policies, augment.num_policies) == ('timm_increasing', 2)
    assert (augment.magnitude_level, augment.magnitude_std, augment.total_level) == (9, 0.5, 10)
    assert augment.hparams == dict(pad_val=[round(mean) for mean in recipe.mean], interpolation='bicubic')
    if recipe.erasing:
        assert train['RandomErasing'].prob == recipe.erasing
        assert 'erase_box' in train['PackInputs'].meta_keys
    sampler = cfg.train_dataloader.sampler
    assert sampler == (
        dict(type='beit_mm.RepeatedAugmentationSampler', num_repeats=3)
        if recipe.repeated
        else dict(type='beit_mm.SeededSampler', shuffle=True)
    )
    assert cfg.train_dataloader.drop_last
    folder = {IN1K: 'imagenet', IN22K: 'imagenet22k', CIFAR: 'cifar100'}[recipe.images]
    assert cfg.train_dataloader.dataset.data_root == f'data/{folder}/train'
    if recipe.images == IN22K:  # has no validation images
        assert not (cfg.val_dataloader or cfg.val_evaluator or cfg.val_cfg or cfg.test_dataloader)
        return
    assert cfg.val_dataloader.dataset.data_root == f'data/{folder}/val'
    val = steps_of(cfg.val_dataloader.dataset.pipeline)
    assert list(val) == ['LoadImage', 'ResizeEdge', 'CenterCrop', 'PackInputs']
    edge = 256 if recipe.size == 224 else recipe.size  # crop ratio 0.875, and 1 from 384 on
    assert val['ResizeEdge'] == dict(
        type='ResizeEdge', scale=edge, edge='short', backend='pillow', interpolation='bicubic'
    )
    assert val['CenterCrop'].crop_size == recipe.size
    assert cfg.test_dataloader == cfg.val_dataloader and cfg.test_evaluator == cfg.val_evaluator


def test_learning_rates_follow_the_released_formula():
    """Warm-up t/(W-1), then half a cosine to the minimum; low layers are as much lower throughout. 3 steps an epoch."""
    schedules = {}  # each once: (schedule, peak) -> recipe
    for name, recipe in RECIPES.items():
        cfg = load_config(name)
        schedules[str(cfg.param_scheduler), cfg.optim_wrapper.optimizer.lr] = recipe, cfg
    for recipe, cfg in schedules.values():
        check_schedule(recipe, cfg.param_scheduler, cfg.optim_wrapper.optimizer.lr)


def check_schedule(recipe: Recipe, param_scheduler: list[dict], peak: float) -> None:
    groups = [dict(params=[torch.zeros(1, requires_grad=True)], lr=peak * scale) for scale in (1, 0.001)]
    optimizer = torch.optim.SGD(groups, lr=peak)
    schedulers = []
    for scheduler in param_scheduler:
        scheduler = dict(scheduler)
        kind = PARAM_SCHEDULERS.get(scheduler.pop('type'))
        assert scheduler.pop('convert_to_iter_based')
        schedulers.append(kind.build_iter_from_epoch(optimizer=optimizer, **scheduler, epoch_length=3))
    warmup, total = 3 * recipe.warmup, 3 * recipe.epochs
    first = 1e-6 if recipe.min_rate == peak else 0  # DeiT's warm-up
    for step in range(total):
        expected = (
            first + (peak - first) * step / (warmup - 1)
            if step < warmup
            else recipe.min_rate
            + (peak - recipe.min_rate) / 2 * (1 + math.cos(math.pi * (step - warmup) / (total - warmup)))
        )
        for group, scale in zip(optimizer.param_groups, (1, 0.001), strict=True):
            assert group['lr'] == pytest.approx(expected * scale, rel=1e-5, abs=2e-9 * peak * scale), step
        optimizer.step()
        for scheduler in schedulers:
            scheduler.step()


def test_each_starts_from_the_last_checkpoint_of_its_row():

    def check(name: str) -> None:
        start = RECIPES[name].start if name in RECIPES else PROBES[name][1]
        cfg = load_config(name)
        init = cfg.model.backbone.get('init_cfg')
        if start is None:
            assert init is None and cfg.load_from is None
            return
        whole_model = '_384_in1k_10e' in name  # goes on with the same head
        assert (init is None) == whole_model and (cfg.load_from is None) != whole_model
        checkpoint = cfg.load_from if whole_model else init.checkpoint
        folder = load_config(start).get('work_dir', f'work_dirs/{Path(start).stem}')
        assert checkpoint == f'{folder}/epoch_{load_config(start).train_cfg.max_epochs}.pth'

    check_all([*RECIPES, *PROBES], check)


@pytest.mark.parametrize('name', PROBES)
def test_linear_probe_is_the_published_one(name):
    block, _, parameters = PROBES[name]
    cfg = load_config(name)
    optimizer = cfg.optim_wrapper.optimizer
    assert (optimizer.type, optimizer.lr, optimizer.weight_decay) == ('AdamW', 4e-3, 1e-4)
    assert (cfg.train_cfg.max_epochs, cfg.auto_scale_lr.base_batch_size) == (50, 1024)
    assert cfg.model.layers == block - 1 and cfg.model.feature == 'mean'
    assert cfg.param_scheduler == [dict(type='CosineAnnealingLR', eta_min=0, begin=0, end=50)]
    assert list(steps_of(cfg.train_dataloader.dataset.pipeline)) == [
        'LoadImage',
        'RandomResizedCrop',
        'RandomFlip',
        'PackInputs',
    ]
    val = steps_of(cfg.val_dataloader.dataset.pipeline)
    assert (val['ResizeEdge'].scale, val['CenterCrop'].crop_size) == (256, 224)
    assert tuple(cfg.model.data_preprocessor.mean) == IMAGENET_STATISTICS
    assert sum(p.numel() for p in build_on_meta(name).parameters()) == parameters
    init_default_scope('mmpretrain')
    all_blocks = copy.deepcopy(cfg.model)
    all_blocks.layers = None
    with torch.device('meta'):
        assert len(MODELS.build(all_blocks).layers) == (24 if 'large' in name else 12)

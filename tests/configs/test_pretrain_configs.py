"""Every pretraining and tokenizer config holds the numbers of the papers' tables."""

import math
from typing import NamedTuple

import pytest
import torch
from helpers import check_all, count_parameters, list_configs, load_config
from mmengine.registry import PARAM_SCHEDULERS

STEPS_1K, STEPS_22K = 1_281_167 // 2048, 14_197_122 // 2048  # an epoch


class Recipe(NamedTuple):
    """One row of the paper's table of pretraining settings, or one released command."""

    parameters: int
    epochs: int = 300
    steps: int = 187_500
    warmup: int = 6_250  # steps
    clip: float = 3.0
    layer_scale: float | None = None
    bias: str | None = None
    mask: str | None = 'BlockwiseMask'
    second_size: int | None = 112  # pixels, for the tokenizer
    mean: float = 123.675
    drop_path: float = 0.1
    beta: float = 0.999
    early_layers: int | None = None  # of BEiT v2


VIT_BASE = 92_089_856
BASE = Recipe(VIT_BASE)
IN22K = dict(epochs=150, steps=1_039_800, warmup=10_000, bias='shared', mean=127.5)
# 12 blocks and two additional ones of 4 matrices (3, 1, 4 and 4 times 768 x 768) and 14 vectors of 768
V2_BASE = Recipe(
    91_965_776 + 2 * (12 * 768 + 14) * 768, layer_scale=0.1, bias='shared', second_size=None, early_layers=9
)
V2_LARGE = V2_BASE._replace(parameters=311_534_016 + 2 * (12 * 1024 + 14) * 1024, layer_scale=1e-5, early_layers=21)
PIXELS = Recipe(VIT_BASE - (8192 - 768) * 769, second_size=None)  # predicts 768 pixels, not one of 8192 tokens
RECIPES = {
    'beit/pretrain_800e.py': BASE._replace(epochs=800, steps=500_000),
    'beit/pretrain_300e.py': BASE,
    'beit/pretrain_large_800e.py': Recipe(311_674_880, 800, 500_000, clip=1.0),
    'beit_plus/pretrain_300e.py': Recipe(91_965_776, layer_scale=0.1, bias='shared'),
    'beit_plus/pretrain_in22k_150e.py': Recipe(91_965_776, layer_scale=0.1, **IN22K),
    'beit_plus/pretrain_large_in22k_150e.py': Recipe(311_534_016, clip=1.0, layer_scale=1e-5, **IN22K),
    **{
        f'beit_v2/pretrain_{name}1600e.py': recipe._replace(epochs=1600, steps=1_000_000)
        for name, recipe in (('', V2_BASE), ('large_', V2_LARGE))
    },
    **{
        f'beit_v2/pretrain_{name}300e.py': recipe._replace(drop_path=0.0, beta=0.98)
        for name, recipe in (('', V2_BASE), ('large_', V2_LARGE))
    },
    'ablation/pretrain_random_mask_300e.py': BASE._replace(mask='RandomMask'),
    'ablation/pretrain_pixels_300e.py': PIXELS,
    'ablation/pretrain_pixels_random_mask_300e.py': PIXELS._replace(mask='RandomMask'),
    'ablation/pretrain_recover_all_300e.py': BASE,
    'ablation/pretrain_no_mask_recover_all_300e.py': BASE._replace(parameters=VIT_BASE - 768, mask=None),
    # 12 blocks x 2 vectors of 768
    'ablation/pretrain_layer_scale_300e.py': BASE._replace(parameters=VIT_BASE + 12 * 2 * 768, layer_scale=0.1),
    'ablation/pretrain_own_dvae_300e.py': BASE,
}


def test_no_row_is_left_out():
    rows = list_configs('pretrain')
    assert sorted(RECIPES) == [row for row in rows if not row.startswith('beit_dino/')]  # test_dino_configs.py


def test_recipes_are_the_published_ones():

    def check(name: str) -> None:
        recipe, cfg = RECIPES[name], load_config(name)
        wrapper, optimizer, backbone = cfg.optim_wrapper, cfg.optim_wrapper.optimizer, cfg.model.backbone
        assert (optimizer.type, optimizer.lr, tuple(optimizer.betas), optimizer.eps, optimizer.weight_decay) == (
            'AdamW',
            1.5e-3,
            (0.9, recipe.beta),
            1e-8,
            0.05,
        )
        assert (wrapper.clip_grad.max_norm, wrapper.dtype) == (recipe.clip, 'bfloat16')
        assert cfg.train_cfg.max_epochs == recipe.epochs
        assert recipe.epochs * (STEPS_22K if 'in22k' in name else STEPS_1K) == recipe.steps
        assert cfg.auto_scale_lr.base_batch_size == 16 * cfg.train_dataloader.batch_size == 2048
        assert backbone.drop_path_rate == recipe.drop_path
        assert cfg.model.get('early_layers') == recipe.early_layers
        assert (backbone.get('layer_scale_init'), backbone.get('rel_pos_bias')) == (recipe.layer_scale, recipe.bias)
        assert backbone.get('abs_pos_embed', True) == (recipe.bias is None)
        assert cfg.model.get('recover', 'masked') == ('all' if 'recover_all' in name else 'masked')
        assert count_parameters(name) == recipe.parameters

    check_all(RECIPES, check)


def test_data_are_the_published_ones():

    def check(name: str) -> None:
        recipe, cfg = RECIPES[name], load_config(name)
        folder = 'imagenet22k' if 'in22k' in name else 'imagenet'
        assert cfg.train_dataloader.dataset.data_root == f'data/{folder}/train'
        for loader, views in (
            (cfg.train_dataloader, ['TwoViewRandomResizedCrop', 'TwoViewColorJitter']),
            (cfg.val_dataloader, ['TwoViewCenterCrop']),
        ):
            steps = {t.type.removeprefix('beit_mm.'): t for t in loader.dataset.pipeline}
            masks = [recipe.mask] if recipe.mask else []
            assert list(steps) == ['LoadImage', *views, *masks, 'PackViews']
            assert (steps[views[0]].size, steps[views[0]].second_size) == (224, recipe.second_size)
            assert all((steps[mask].num_masked, tuple(steps[mask].grid)) == (75, (14, 14)) for mask in masks)
            if 'TwoViewRandomResizedCrop' in steps:
                assert steps['TwoViewRandomResizedCrop'].get('scale') == ((0.2, 1.0) if 'v2' in name else None)
            assert all(steps[mask].get('variant') == ('exact' if 'v2' in name else None) for mask in masks)
            if 'TwoViewColorJitter' in steps:
                jitter = steps['TwoViewColorJitter']
                assert (jitter.brightness, jitter.contrast, jitter.saturation) == (0.4, 0.4, 0.4)
        assert cfg.model.data_preprocessor.mean[0] == recipe.mean
        assert cfg.test_dataloader == cfg.val_dataloader

    check_all(RECIPES, check)


@pytest.mark.parametrize(
    'name',
    ['beit/pretrain_300e.py', 'beit/pretrain_800e.py', 'beit_v2/pretrain_1600e.py', 'beit_plus/pretrain_in22k_150e.py'],
)
def test_learning_rate_follows_the_released_formula(name):
    """Warm-up t/(W-1), then half a cosine to 1e-5; 5 steps an epoch, or a thousandth of the steps."""
    recipe = RECIPES[name]
    total, warmup = (5 * recipe.epochs, 50) if 'in22k' not in name else (recipe.steps // 1000, recipe.warmup // 1000)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.5e-3)
    schedulers = []
    for scheduler in load_config(name).param_scheduler.copy():
        scheduler = dict(scheduler)
        kind = PARAM_SCHEDULERS.get(scheduler.pop('type'))
        if scheduler.pop('convert_to_iter_based', False):
            schedulers.append(kind.build_iter_from_epoch(optimizer=optimizer, **scheduler, epoch_length=5))
        else:
            for key in ('begin', 'end'):
                scheduler[key] //= 1000
            schedulers.append(kind(optimizer, **scheduler))
    for step in range(total):
        expected = (
            1.5e-3 * step / (warmup - 1)
            if step < warmup
            else 1e-5 + (1.5e-3 - 1e-5) / 2 * (1 + math.cos(math.pi * (step - warmup) / (total - warmup)))
        )
        assert optimizer.param_groups[0]['lr'] == pytest.approx(expected, rel=1e-5, abs=1e-11), step
        optimizer.step()
        for scheduler in schedulers:
            scheduler.step()


def test_schedules_are_those_of_one_of_the_four():
    """The formula is followed there; here all others have the same schedule."""

    def check(name: str) -> None:
        like = (
            'beit_plus/pretrain_in22k_150e.py'
            if 'in22k' in name
            else 'beit/pretrain_800e.py'
            if '800e' in name
            else 'beit_v2/pretrain_1600e.py'
            if '1600e' in name
            else 'beit/pretrain_300e.py'
        )
        assert load_config(name).param_scheduler == load_config(like).param_scheduler

    check_all(RECIPES, check)


def test_dalle_tokenizer_recipe_is_the_published_one():
    """DALL-E paper, appendix A."""
    cfg = load_config('dvae/dalle_8k_in1k.py')
    model, optimizer, cosine = cfg.model, cfg.optim_wrapper.optimizer, cfg.param_scheduler[0]
    assert count_parameters('dvae/dalle_8k_in1k.py') == 53_786_240 + 43_829_766
    assert (model.vocab_size, tuple(model.temperature), model.temperature_steps) == (8192, (1, 1 / 16), 150_000)
    assert (model.kl_weight, model.kl_steps, model.loss) == (6.6, 5000, 'laplace')
    assert (optimizer.lr, tuple(optimizer.betas), optimizer.eps, optimizer.weight_decay) == (
        1e-4,
        (0.9, 0.999),
        1e-8,
        1e-4,
    )
    assert (cosine.type, cosine.get('begin', 0), cosine.end, cosine.eta_min) == (
        'CosineAnnealingLR',
        0,
        1_200_000,
        1.25e-6,
    )
    assert cfg.train_cfg.max_iters == 3_000_000 and cfg.auto_scale_lr.base_batch_size == 512
    assert cfg.default_hooks.ema == dict(type='EMAHook', momentum=0.001)


def test_own_tokenizer_is_the_one_that_is_trained():
    trained = load_config('dvae/discrete_vae_8k_in1k.py').model
    used = load_config('ablation/pretrain_own_dvae_300e.py').model.target_generator
    shape = ('type', 'arch', 'hidden', 'vocab_size', 'embed_dims', 'num_levels', 'bottleneck_blocks')
    assert {key: used[key] for key in shape} == {key: trained[key] for key in shape}
    assert count_parameters('dvae/discrete_vae_8k_in1k.py') == 20_081_411  # the class of the released code

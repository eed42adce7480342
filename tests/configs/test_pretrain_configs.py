"""Every config loads, builds, says what it is, and holds the numbers of the paper's tables."""
import ast
import math
import re
from pathlib import Path

import pytest
import torch
from helpers import ROOT
from mmengine.config import Config
from mmengine.registry import PARAM_SCHEDULERS, init_default_scope

from beit_mm.registry import METRICS, MODELS, OPTIM_WRAPPERS, TRANSFORMS

CONFIGS = ROOT / 'configs'
LEAVES = sorted(str(p.relative_to(CONFIGS)) for p in CONFIGS.rglob('*.py') if '_base_' not in p.parts)
PRETRAIN = [leaf for leaf in LEAVES if Path(leaf).name.startswith('pretrain')]
IMAGENET = [leaf for leaf in PRETRAIN if not leaf.startswith('demo')]
STEPS_1K, STEPS_22K = 1_281_167 // 2048, 14_197_122 // 2048  # an epoch

# config -> epochs, steps, warm-up steps, gradient clip, trainable parameters
VIT_BASE = 92_089_856
RECIPES = {
    'beit/pretrain_800e.py': (800, 500_000, 6_250, 3.0, VIT_BASE),
    'beit/pretrain_300e.py': (300, 187_500, 6_250, 3.0, VIT_BASE),
    'beit/pretrain_large_800e.py': (800, 500_000, 6_250, 1.0, 311_674_880),
    'beit_plus/pretrain_300e.py': (300, 187_500, 6_250, 3.0, 91_965_776),
    'beit_plus/pretrain_in22k_150e.py': (150, 1_039_800, 10_000, 3.0, 91_965_776),
    'beit_plus/pretrain_large_in22k_150e.py': (150, 1_039_800, 10_000, 1.0, 311_534_016),
    'ablation/pretrain_random_mask_300e.py': (300, 187_500, 6_250, 3.0, VIT_BASE),
    # 768 pixels instead of 8192 tokens to predict from 768 + 1 numbers
    'ablation/pretrain_pixels_300e.py': (300, 187_500, 6_250, 3.0, VIT_BASE - (8192 - 768) * 769),
    'ablation/pretrain_pixels_random_mask_300e.py':
        (300, 187_500, 6_250, 3.0, VIT_BASE - (8192 - 768) * 769),
    'ablation/pretrain_recover_all_300e.py': (300, 187_500, 6_250, 3.0, VIT_BASE),
    'ablation/pretrain_no_mask_recover_all_300e.py': (300, 187_500, 6_250, 3.0, VIT_BASE - 768),
    # 12 blocks x 2 vectors of 768
    'ablation/pretrain_layer_scale_300e.py': (300, 187_500, 6_250, 3.0, VIT_BASE + 12 * 2 * 768),
    'ablation/pretrain_own_dvae_300e.py': (300, 187_500, 6_250, 3.0, VIT_BASE),
}


def load(leaf: str) -> Config:
    cfg = Config.fromfile(CONFIGS / leaf)
    init_default_scope(cfg.default_scope)  # as a runner does
    return cfg


def build_on_meta(cfg: Config) -> torch.nn.Module:
    """The model without memory and without weight files."""
    target = cfg.model.get('target_generator')
    if target and target.type.endswith('DALLETokenizer'):
        target.random_weights = True
    elif target:
        target.checkpoint = None
    with torch.device('meta'):
        return MODELS.build(cfg.model)


def test_no_pretraining_row_is_left_out():
    assert set(RECIPES) == set(IMAGENET)


@pytest.mark.parametrize('leaf', LEAVES)
def test_config_builds(leaf):
    cfg = load(leaf)
    model = build_on_meta(cfg)
    for loader in filter(None, (cfg.train_dataloader, cfg.val_dataloader, cfg.test_dataloader)):
        transforms = [TRANSFORMS.build(t) for t in loader.dataset.pipeline]
        if hasattr(model, 'check_data'):
            model.check_data(transforms)
    if cfg.val_evaluator:  # ImageNet-22K has no validation images
        METRICS.build(cfg.val_evaluator)
    assert OPTIM_WRAPPERS.get(cfg.optim_wrapper.type) is not None


@pytest.mark.parametrize('leaf', LEAVES)
def test_inheritance_is_at_most_two_deep(leaf):

    def depth(path: Path) -> int:
        match = re.search(r'^_base_ = (\[.*?\]|\'.*?\')', path.read_text(), re.M | re.S)
        bases = ast.literal_eval(match[1]) if match else []
        return max((1 + depth(path.parent / base) for base in ([bases] if isinstance(bases, str) else bases)),
                   default=0)

    assert depth(CONFIGS / leaf) <= 2


@pytest.mark.parametrize('leaf', LEAVES)
def test_header_says_what_the_config_holds(leaf):
    header, cfg = ast.get_docstring(ast.parse((CONFIGS / leaf).read_text())), load(leaf)
    assert f'configs/{leaf}' in header or leaf.startswith('demo')
    for entry in ('Command:', 'Batch:', 'Differs:'):
        assert entry in header
    if leaf.endswith('_ms.py'):
        assert 'for testing only' in header
        return
    processes, batch, accumulated, total = _numbers(
        r'(\d+) (?:GPUs|process) x (\d+)(?: x (\d+) accumulated)?(?: = (\d+))?', header)
    assert batch == cfg.train_dataloader.batch_size
    assert accumulated == (cfg.optim_wrapper.get('accumulative_counts') or 0)
    assert processes * batch * (accumulated or 1) == cfg.auto_scale_lr.base_batch_size == (total or batch)
    if rate := re.search(r'lr ([\d.e-]+\d)', header):
        assert float(rate[1]) == cfg.optim_wrapper.optimizer.lr
    if leaf in IMAGENET:
        steps_an_epoch, all_steps = _numbers(r'(\d+) an epoch, ([\d,]+) in all', header)
        assert all_steps == steps_an_epoch * cfg.train_cfg.max_epochs == RECIPES[leaf][1]
        assert steps_an_epoch == (STEPS_22K if 'in22k' in leaf else STEPS_1K)


def _numbers(pattern: str, text: str) -> tuple[int, ...]:
    groups = re.search(pattern, text).groups()
    return tuple(int(g.replace(',', '')) if g else 0 for g in groups)


@pytest.mark.parametrize('leaf', RECIPES)
def test_recipe_is_the_published_one(leaf):
    epochs, _, _, clip, parameters = RECIPES[leaf]
    cfg = load(leaf)
    optimizer = cfg.optim_wrapper.optimizer
    assert cfg.train_cfg.max_epochs == epochs
    assert (optimizer.type, optimizer.lr, tuple(optimizer.betas), optimizer.eps, optimizer.weight_decay) == (
        'AdamW', 1.5e-3, (0.9, 0.999), 1e-8, 0.05)
    assert cfg.optim_wrapper.clip_grad.max_norm == clip
    assert cfg.optim_wrapper.dtype == 'bfloat16'
    assert cfg.model.backbone.drop_path_rate == 0.1
    assert cfg.model.backbone.get('layer_scale_init') == (
        None if leaf.startswith('beit/') or (leaf.startswith('ablation') and 'layer_scale' not in leaf)
        else 1e-5 if 'large' in leaf else 0.1)
    trained = sum(p.numel() for p in build_on_meta(cfg).parameters() if p.requires_grad)
    assert trained == parameters


@pytest.mark.parametrize('leaf', RECIPES)
def test_data_is_the_published_one(leaf):
    cfg = load(leaf)
    steps = {t.type.removeprefix('beit_mm.'): t for t in cfg.train_dataloader.dataset.pipeline}
    assert list(steps)[:3] == ['LoadImage', 'TwoViewRandomResizedCrop', 'TwoViewColorJitter']
    jitter = steps['TwoViewColorJitter']
    assert (jitter.brightness, jitter.contrast, jitter.saturation) == (0.4, 0.4, 0.4)
    assert steps['TwoViewRandomResizedCrop'].second_size == (None if 'pixels' in leaf else 112)
    expected = None if 'no_mask' in leaf else 'RandomMask' if 'random_mask' in leaf else 'BlockwiseMask'
    masks = [t for name, t in steps.items() if name.endswith('Mask')]
    assert [m.type.removeprefix('beit_mm.') for m in masks] == ([expected] if expected else [])
    assert all(m.num_masked == 75 and tuple(m.grid) == (14, 14) for m in masks)
    mean = cfg.model.data_preprocessor.mean[0]
    assert mean == (127.5 if 'in22k' in leaf else 123.675)


@pytest.mark.parametrize('leaf', RECIPES)
def test_learning_rate_follows_the_released_formula(leaf):
    """Warm-up t/(W-1), then half a cosine to 1e-5, a hundred times shorter than the real run."""
    _, total, warmup, _, _ = RECIPES[leaf]
    shrink = 125 if 'in22k' not in leaf else 100
    total, warmup = total // shrink, warmup // shrink
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.5e-3)
    schedulers = []
    for scheduler in load(leaf).param_scheduler:
        scheduler = dict(scheduler)
        kind = PARAM_SCHEDULERS.get(scheduler.pop('type'))
        if scheduler.pop('convert_to_iter_based', False):
            schedulers.append(kind.build_iter_from_epoch(
                optimizer=optimizer, **scheduler, epoch_length=STEPS_1K // shrink))
        else:
            for key in {'end', 'T_max', 'begin'} & set(scheduler):
                scheduler[key] //= shrink
            schedulers.append(kind(optimizer, **scheduler))
    for step in range(total):
        expected = (1.5e-3 * step / (warmup - 1) if step < warmup else 1e-5 + (1.5e-3 - 1e-5) / 2 *
                    (1 + math.cos(math.pi * (step - warmup) / (total - warmup))))
        assert optimizer.param_groups[0]['lr'] == pytest.approx(expected, rel=1e-5, abs=1e-11), step
        optimizer.step()
        for scheduler in schedulers:
            scheduler.step()


def test_half_precision_is_one_option():
    cfg = load('beit/pretrain_800e.py')
    cfg.merge_from_dict({'optim_wrapper.dtype': 'float16'})
    assert cfg.optim_wrapper.dtype == 'float16' and cfg.optim_wrapper.type == 'beit_mm.AutocastOptimWrapper'


def test_dalle_tokenizer_recipe_is_the_published_one():
    """DALL-E paper, appendix A."""
    cfg = load('dvae/dalle_8k_in1k.py')
    model, optimizer = cfg.model, cfg.optim_wrapper.optimizer
    assert sum(p.numel() for p in build_on_meta(cfg).parameters()) == 53_786_240 + 43_829_766
    assert (model.vocab_size, tuple(model.temperature), model.temperature_steps) == (8192, (1, 1 / 16), 150_000)
    assert (model.kl_weight, model.kl_steps, model.loss) == (6.6, 5000, 'laplace')
    assert (optimizer.lr, tuple(optimizer.betas), optimizer.eps, optimizer.weight_decay) == (
        1e-4, (0.9, 0.999), 1e-8, 1e-4)
    assert cfg.param_scheduler[0].T_max == 1_200_000 and cfg.param_scheduler[0].eta_min == 1.25e-6
    assert cfg.train_cfg.max_iters == 3_000_000 and cfg.auto_scale_lr.base_batch_size == 512
    assert {'type': 'EMAHook', 'momentum': 0.001} in cfg.custom_hooks

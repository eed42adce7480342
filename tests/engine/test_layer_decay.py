"""Learning rates of the layers, their schedule, and what gradient accumulation makes of it, against the formulas."""

import math
import warnings

import pytest
import torch
from mmengine.registry import PARAM_SCHEDULERS, init_default_scope
from torch import nn

from beit_mm.engine.optim import AutocastOptimWrapper, BEiTOptimWrapperConstructor
from beit_mm.models import BEiTBackbone
from beit_mm.registry import MODELS

LOWEST = 1e-6
VARIANTS = [
    dict(),
    dict(abs_pos_embed=False, rel_pos_bias='per_layer', layer_scale_init=0.1),
    dict(abs_pos_embed=False, rel_pos_bias='shared', masked_input=True, out_type='cls_token'),
]


def classifier(**backbone) -> nn.Module:
    """A classifier without numbers, so that large ones take no memory."""
    with torch.device('meta'):
        init_default_scope('mmpretrain')  # whatever ran before in this process
        return MODELS.build(
            dict(
                type='mmpretrain.ImageClassifier',
                backbone=dict(dict(type='beit_mm.BEiTBackbone', out_type='avg_featmap'), **backbone),
                head=dict(type='mmpretrain.LinearClsHead', num_classes=10, in_channels=768),
            )
        )


def wrap(model: nn.Module, rate: float | None, **optimizer):
    paramwise = None if rate is None else dict(layer_decay_rate=rate)
    optimizer = dict(dict(type='AdamW', lr=4e-3, weight_decay=0.05), **optimizer)
    return BEiTOptimWrapperConstructor(dict(optimizer=optimizer), paramwise)(model)


def released_layer(name: str, depth: int) -> int:
    """The released code's layer of a parameter; its names have no `backbone.` in front."""
    if name in ('cls_token', 'mask_token', 'pos_embed') or name.startswith('patch_embed'):
        return 0
    return int(name.split('.')[1]) + 1 if name.startswith('blocks') else depth + 1


def released_decays(name: str, parameter: torch.Tensor) -> bool:
    return not (parameter.dim() == 1 or name.endswith('.bias') or name in ('pos_embed', 'cls_token'))


def schedule(step: int, peak: float, warmup: int, total: int) -> float:
    """The released code's rate of the last layer."""
    if step < warmup:
        return peak * step / (warmup - 1)
    return LOWEST + (peak - LOWEST) * (1 + math.cos(math.pi * (step - warmup) / (total - warmup))) / 2


def schedulers(wrapper, peak: float, warmup_epochs: int, epochs: int, epoch_length: int) -> list:
    """As the fine-tuning configs have them."""
    cfgs = [
        dict(type='LinearLR', start_factor=1e-9, begin=0, end=warmup_epochs, convert_to_iter_based=True),
        dict(
            type='CosineAnnealingLR',
            eta_min_ratio=LOWEST / peak,
            begin=warmup_epochs,
            end=epochs,
            convert_to_iter_based=True,
        ),
    ]
    if not warmup_epochs:
        cfgs = cfgs[1:]
    return [
        PARAM_SCHEDULERS.build(cfg, default_args=dict(optimizer=wrapper, epoch_length=epoch_length)) for cfg in cfgs
    ]


def advance(schedules: list) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')  # that no optimizer step came before
        for scheduler in schedules:
            scheduler.step()


@pytest.mark.parametrize('variant', VARIANTS)
def test_groups_are_the_released_ones(variant):
    model = classifier(**variant)
    parameters = {n.removeprefix('backbone.'): p for n, p in model.named_parameters()}
    found = {}
    for group in wrap(model, 0.65).optimizer.param_groups:
        assert group['params'] == [dict(model.named_parameters())[n] for n in group['names']]
        for name in group['names']:
            found[name.removeprefix('backbone.')] = (group['lr'], group['weight_decay'])
    assert found == {
        name: (pytest.approx(4e-3 * 0.65 ** (13 - released_layer(name, 12))), 0.05 * released_decays(name, parameter))
        for name, parameter in parameters.items()
    }


@pytest.mark.parametrize(
    'arch, rate, examples',
    [
        (
            'base',
            0.65,
            {'patch_embed.proj.bias': 3.70e-3, 'blocks.0.norm1.weight': 5.69e-3, 'blocks.11.norm1.bias': 0.65},
        ),
        ('large', 0.75, {'cls_token': 7.53e-4}),
        ('base', 0.85, {'pos_embed': 0.121}),
        ('large', 0.9, {'cls_token': 0.0718}),
        ('base', 0.9, {'cls_token': 0.254}),
        ('large', 0.95, {'cls_token': 0.277}),
    ],
)
def test_examples_of_the_recipe(arch, rate, examples):
    groups = wrap(classifier(arch=arch), rate, lr=1.0).optimizer.param_groups
    rates = {name: group['lr'] for group in groups for name in group['names']}
    assert {name: rates[f'backbone.{name}'] for name in examples} == pytest.approx(examples, rel=5e-3)
    assert rates['head.fc.weight'] == rates['backbone.fc_norm.weight'] == 1


@pytest.mark.parametrize(
    'arch, depth, peak, rate, warmup, epochs',
    [('base', 12, 4e-3, 0.65, 20, 100), ('large', 24, 1e-3, 0.75, 5, 50), ('large', 24, 2e-5, 0.9, 5, 30)],
)
def test_rates_of_all_layers_at_start_middle_and_end(arch, depth, peak, rate, warmup, epochs):
    length = 7
    warmup_steps, steps = warmup * length, epochs * length
    wrapper = wrap(classifier(arch=arch), rate, lr=peak)
    groups = [
        (released_layer(group['names'][0].removeprefix('backbone.'), depth), group)
        for group in wrapper.optimizer.param_groups
    ]
    assert {layer for layer, _ in groups} == set(range(depth + 2))
    schedules = schedulers(wrapper, peak, warmup, epochs, length)
    checked = {0, 1, warmup_steps - 1, warmup_steps, warmup_steps + 1, steps // 2, steps - 1}
    for step in range(steps):
        if step in checked:
            expected = schedule(step, peak, warmup_steps, steps)
            for layer, group in groups:  # 1e-9: where the warm-up starts in place of 0
                assert group['lr'] == pytest.approx(
                    expected * rate ** (depth + 1 - layer), rel=1e-9, abs=1.01e-9 * peak
                ), (step, layer)
        advance(schedules)


def test_schedule_does_not_drift_over_a_whole_training():
    wrapper = AutocastOptimWrapper('float32', optimizer=torch.optim.SGD([nn.Parameter(torch.zeros(1))], 4e-3))
    schedules = schedulers(wrapper, 4e-3, 20, 100, 1251)
    for step in range(125100):
        if step % 1251 in (0, 1250):
            expected = schedule(step, 4e-3, 25020, 125100)
            assert wrapper.optimizer.param_groups[0]['lr'] == pytest.approx(expected, rel=1e-7, abs=4.1e-12)
        advance(schedules)


def test_one_rate_is_two_groups_and_wrong_ones_are_refused():
    model = classifier()
    for rate in (None, 1, 1.0):
        groups = wrap(model, rate).optimizer.param_groups
        assert [(g['lr'], g['weight_decay']) for g in groups] == [(4e-3, 0.05), (4e-3, 0.0)]
    for rate in (0, -0.5, 1.5, '0.65', True, float('nan')):
        with pytest.raises(ValueError, match='layer_decay_rate is .*; expected a number') as error:
            wrap(model, rate)
        assert '\n' not in str(error.value)
    with pytest.raises(ValueError, match='takes layer_decay_rate only'):
        BEiTOptimWrapperConstructor(dict(optimizer={}), dict(layer_decay_rate=0.5, custom_keys={}))
    with pytest.raises(ValueError, match='set optim_wrapper.optimizer.lr'):
        BEiTOptimWrapperConstructor(dict(optimizer=dict(type='AdamW')), dict(layer_decay_rate=0.5))(model)
    with pytest.raises(ValueError, match='needs one BEiTBackbone.*Linear has 0'):
        wrap(nn.Linear(2, 2), 0.5)


class Segmentor(nn.Module):
    """As in a segmentor or another wrapper: the backbone lies deep, a head has blocks of its own."""

    def __init__(self):
        super().__init__()
        self.net = nn.Module()
        self.net.backbone = BEiTBackbone(
            dict(embed_dims=8, num_layers=2, num_heads=2), img_size=32, out_type='featmap', frozen_stages=1
        )
        self.blocks = nn.ModuleList([nn.Linear(8, 8)])


def test_deep_frozen_and_fused():
    model = Segmentor()
    wrapper = wrap(model, 0.5, lr=1.0, fused=True)
    rates = {name: group['lr'] for group in wrapper.optimizer.param_groups for name in group['names']}
    assert set(rates) == {name for name, p in model.named_parameters() if p.requires_grad}
    assert {lr for name, lr in rates.items() if name.startswith('net')} == {0.5}  # what is left: the last block
    assert rates['blocks.0.weight'] == 1.0
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    loss = model.blocks[0](model.net.backbone(torch.rand(1, 3, 32, 32))[-1].flatten(2).mean(2)).square().sum()
    wrapper.update_params(loss)
    assert {name for name, p in model.named_parameters() if not torch.equal(p, before[name])} == set(rates)


def train(accumulation: int) -> torch.Tensor:
    """The weights after 20 updates at a constant rate, each from `accumulation` parts of the same batch."""
    model = nn.Linear(3, 1, bias=False)
    nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    wrapper = AutocastOptimWrapper('float32', optimizer=optimizer, accumulative_counts=accumulation)
    wrapper.initialize_count_status(model, 0, 20 * accumulation)
    for batch in torch.randn(20, 4, 3, generator=torch.Generator().manual_seed(0)):
        for part in batch.chunk(accumulation):
            with wrapper.optim_context(model):
                loss = model(part).square().mean()
            wrapper.update_params(loss)
    return model.weight.detach()


def test_accumulation_trains_the_same_model():
    whole = train(1)
    assert not torch.equal(whole, torch.ones(1, 3))
    torch.testing.assert_close(train(4), whole)

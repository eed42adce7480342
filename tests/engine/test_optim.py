"""Parameter groups, learning rates and schedules against the released rules; precision, clipping and stored state."""

import copy
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import narrow_model
from mmengine.registry import DefaultScope, init_default_scope
from torch import nn

from beit_mm.checkpoint.read import CheckpointError
from beit_mm.engine.optim import LARS, AutocastOptimWrapper, BEiTOptimWrapperConstructor
from beit_mm.models import BEiTBackbone
from beit_mm.precision import usable_dtype
from beit_mm.registry import MODELS, OPTIMIZERS


def classifier(**backbone) -> nn.Module:
    """A classifier without numbers, so that large ones take no memory."""
    backbone = dict(type='beit_mm.BEiTBackbone', out_type='avg_featmap') | backbone
    head = dict(type='mmpretrain.LinearClsHead', num_classes=10, in_channels=768)
    init_default_scope('mmpretrain')  # whatever ran before in this process
    with torch.device('meta'):
        return MODELS.build(dict(type='mmpretrain.ImageClassifier', backbone=backbone, head=head))


def wrap(model: nn.Module, rate: float | None, **optimizer):
    paramwise = None if rate is None else dict(layer_decay_rate=rate)
    optimizer = dict(type='AdamW', lr=4e-3, weight_decay=0.05) | optimizer
    return BEiTOptimWrapperConstructor(dict(optimizer=optimizer), paramwise)(model)


def released_layer(name: str, depth: int) -> int:
    """The released code's layer of a parameter; its names have no `backbone.` in front."""
    if name in ('cls_token', 'mask_token', 'pos_embed') or name.startswith('patch_embed'):
        return 0
    return int(name.split('.')[1]) + 1 if name.startswith('blocks') else depth + 1


def released_decay(name: str, parameter: torch.Tensor) -> float:
    plain = parameter.dim() == 1 or name.endswith('.bias') or name in ('pos_embed', 'cls_token')
    return 0.0 if plain else 0.05


ABSOLUTE, SHARED = dict(), dict(abs_pos_embed=False, rel_pos_bias='shared', layer_scale_init=0.1, masked_input=True)
PER_LAYER = dict(abs_pos_embed=False, rel_pos_bias='per_layer', layer_scale_init=0.1)


@pytest.mark.parametrize('rate', [None, 1, 0.65])
@pytest.mark.parametrize('variant', [ABSOLUTE, SHARED, PER_LAYER])
def test_groups_are_the_released_ones(variant, rate):
    if rate == 0.65:
        model, depth = classifier(**variant), 12
    else:
        model, depth = MODELS.build(narrow_model(backbone=dict(narrow_model()['backbone'], **variant))), 2
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    groups, found, expected = wrap(model, rate).optimizer.param_groups, {}, {}
    for group in groups:
        assert group['params'] == [parameters[name] for name in group['names']]
        found |= {name: (group['lr'], group['weight_decay']) for name in group['names']}
    for name, parameter in parameters.items():
        released = name.removeprefix('backbone.').removeprefix('head.')
        lr = 4e-3 * (rate or 1) ** (depth + 1 - released_layer(released, depth))
        expected[name] = pytest.approx(lr), released_decay(released, parameter)
    assert found == expected and len(groups) == (2 * (depth + 2) if rate == 0.65 else 2)


def test_wrong_rates_are_refused():
    model = classifier()
    for rate in (0, 1.5, float('nan')):
        with pytest.raises(ValueError, match='layer_decay_rate is .*; expected a number'):
            wrap(model, rate)
    with pytest.raises(ValueError, match='custom_keys.*layer_decay_rate'):
        BEiTOptimWrapperConstructor(dict(optimizer={}), dict(layer_decay_rate=0.5, custom_keys={}))


def test_deep_frozen_and_fused():
    """As in a segmentor or another wrapper: the backbone lies deep, a head has blocks of its own."""
    model = nn.Module()
    model.net, model.blocks = nn.Module(), nn.ModuleList([nn.Linear(8, 8)])
    arch = dict(embed_dims=8, num_layers=2, num_heads=2)
    model.net.backbone = BEiTBackbone(arch, img_size=32, out_type='featmap', frozen_stages=1)
    wrapper = wrap(model, 0.5, lr=1.0, fused=True)
    rates = {name: group['lr'] for group in wrapper.optimizer.param_groups for name in group['names']}
    assert set(rates) == {name for name, p in model.named_parameters() if p.requires_grad}
    assert {lr for name, lr in rates.items() if name.startswith('net')} == {0.5}  # what is left: the last block
    assert rates['blocks.0.weight'] == 1.0
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    loss = model.blocks[0](model.net.backbone(torch.rand(1, 3, 32, 32))[-1].flatten(2).mean(2)).square().sum()
    wrapper.update_params(loss)
    assert {name for name, p in model.named_parameters() if not torch.equal(p, before[name])} == set(rates)


def make_wrapper(dtype: str, kind: type = torch.optim.SGD) -> tuple[nn.Linear, AutocastOptimWrapper]:
    model = nn.Linear(4, 4)
    return model, AutocastOptimWrapper(dtype, optimizer=kind(model.parameters(), 1.0))


def test_forward_runs_in_the_type_that_the_device_has():
    for dtype in ('bfloat16', 'float16', 'float32'):
        model, wrapper = make_wrapper(dtype)
        with wrapper.optim_context(model):
            assert model(torch.randn(2, 4)).dtype == getattr(torch, usable_dtype(dtype, wrapper.device_type))


def test_a_type_that_a_device_lacks_is_replaced(monkeypatch):
    assert usable_dtype('float16', 'cpu') == 'float32'
    for fast in (True, False):  # an A100, a V100
        monkeypatch.setattr(torch.cuda, 'is_bf16_supported', lambda including_emulation, fast=fast: fast)
        assert usable_dtype('bfloat16', 'cuda') == ('bfloat16' if fast else 'float16')
        assert all(usable_dtype(dtype, 'cuda') == dtype for dtype in ('float16', 'float32'))
    with pytest.raises(ValueError, match="dtype is 'half'"):
        make_wrapper('half')


@pytest.mark.parametrize(('cpu', 'dtype'), [('AVX512', 'bfloat16'), ('AVX2', 'float32'), ('DEFAULT', 'float32')])
def test_the_kind_of_the_cpu_decides_where_torch_does_not_say(monkeypatch, cpu, dtype):
    """Its function for this is private, and may get another name."""
    monkeypatch.setattr(torch.ops, 'mkldnn', SimpleNamespace())
    monkeypatch.setattr(torch.backends.cpu, 'get_cpu_capability', lambda: cpu)
    assert usable_dtype('bfloat16', 'cpu') == dtype and usable_dtype('float32', 'cpu') == 'float32'


def test_a_replaced_type_is_warned_of(monkeypatch, warnings):
    monkeypatch.setattr('beit_mm.engine.optim.usable_dtype', lambda dtype, device: 'float32')
    for dtype in ('float32', 'bfloat16'):
        make_wrapper(dtype)
    (text,) = warnings()
    assert 'float32' in text and 'bfloat16' in text


def test_state_survives_a_change_of_precision():
    (_, half), (_, full) = map(make_wrapper, ('float16', 'float32'))
    state = half.state_dict()
    full.load_state_dict(state)
    half.load_state_dict(full.state_dict())
    assert 'loss_scaler' in state  # the caller's dict is left as it was


@pytest.fixture
def fused() -> tuple[nn.Module, AutocastOptimWrapper, dict]:
    """A model, its wrapper with a fused optimizer, and the state after a step."""
    model = nn.Linear(4, 3)
    wrapper = AutocastOptimWrapper('float32', optimizer=torch.optim.AdamW(model.parameters(), fused=True))
    wrapper.update_params(model(torch.ones(1, 4)).sum())
    return model, wrapper, copy.deepcopy(wrapper.state_dict())


@pytest.mark.parametrize(('name', 'shape'), [('exp_avg', (1,)), ('step', (4,))])
def test_a_state_of_another_shape_is_refused(fused, name, shape):
    """Fused kernels would read and write behind it."""
    _, wrapper, state = fused
    state['state'][0][name] = torch.zeros(shape)
    with pytest.raises(CheckpointError, match=f'optimizer of another model: {name} is'):
        wrapper.load_state_dict(state)


def test_the_host_decides_a_fused_step_where_torch_lacks_its_private_mark(fused, monkeypatch):
    model, wrapper, _ = fused
    monkeypatch.setattr(wrapper.optimizer, '_step_supports_amp_scaling', False)
    for factor, moves in ((math.nan, False), (1.0, True)):
        before = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
        wrapper.update_params(factor * sum(parameter.sum() for parameter in model.parameters()))
        after = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
        assert torch.equal(before, after) != moves


def test_a_state_without_a_fused_kernel_may_have_any_shapes():
    """Adafactor's has rows and columns."""
    model, wrapper = make_wrapper('float32', torch.optim.Adafactor)
    wrapper.update_params(model(torch.ones(1, 4)).sum())
    _, other = make_wrapper('float32', torch.optim.Adafactor)
    other.load_state_dict(copy.deepcopy(wrapper.state_dict()))
    assert str(other.state_dict()) == str(wrapper.state_dict())


def test_a_states_memory_and_kernel_are_the_runs(fused):
    model, wrapper, state = fused
    state['state'][0]['exp_avg'] = torch.ones(1).expand(model.weight.shape)  # one number under all
    state['param_groups'][0].update(amsgrad=True, lr=0.25)
    wrapper.load_state_dict(state)
    (group, *_), moment = wrapper.param_groups, wrapper.optimizer.state[model.weight]['exp_avg']
    assert not group['amsgrad'] and group['lr'] == 0.25
    assert moment.is_contiguous() and moment.untyped_storage().nbytes() == 4 * moment.numel()


def test_lars_applies_the_rate_after_the_momentum():
    """The update of MAE's and MoCo v3's LARS while the rate falls; vectors and zeros keep their gradients."""
    rng = np.random.default_rng(0)
    values = [rng.standard_normal((3, 4)), rng.standard_normal(4), np.zeros((2, 2))]
    parameters = [nn.Parameter(torch.tensor(value)) for value in values]
    momenta = [0.0] * 3
    with DefaultScope.overwrite_default_scope('mmpretrain'):
        optimizer = OPTIMIZERS.build(dict(type='beit_mm.LARS', params=parameters, lr=1.0, momentum=0.9))
    for rate in (1.0, 0.5, 0.1):
        optimizer.param_groups[0]['lr'] = rate
        for place, parameter in enumerate(parameters):
            gradient = rng.standard_normal(parameter.shape)
            parameter.grad = torch.tensor(gradient)
            value, has_length = values[place], np.linalg.norm(values[place]) > 0
            if value.ndim > 1 and has_length:
                gradient = gradient * 0.001 * np.linalg.norm(value) / np.linalg.norm(gradient)
            momenta[place] = 0.9 * momenta[place] + gradient
            values[place] = value - rate * momenta[place]
        optimizer.step()
        for parameter, value in zip(parameters, values, strict=True):
            np.testing.assert_allclose(parameter.detach(), value, rtol=1e-9)


def test_lars_refuses_weight_decay():
    """MAE's adds it before the length of a gradient is measured, torch's SGD would after it."""
    parameters, decay = [nn.Parameter(torch.ones(2, 2))], dict(weight_decay=0.1)
    for groups, settings in ((parameters, decay), ([dict(params=parameters, **decay)], {})):
        with pytest.raises(ValueError, match='weight_decay is 0.1'):
            LARS(groups, lr=1.0, **settings)

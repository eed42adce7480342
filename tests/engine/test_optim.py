"""Parameter groups against the released rule, and precision on a CPU."""

import copy

import pytest
import torch
from helpers import narrow_model

from beit_mm.checkpoint.read import CheckpointError
from beit_mm.engine.optim import (
    MAX_SKIPPED_IN_A_ROW,
    STEPS_BETWEEN_LOOKS,
    AutocastOptimWrapper,
    BEiTOptimWrapperConstructor,
    parameter_groups,
)
from beit_mm.precision import usable_dtype
from beit_mm.registry import MODELS

ADAMW = dict(type='AdamW', lr=1e-3, weight_decay=0.05)


def released_rule(name: str, parameter: torch.Tensor) -> bool:
    """Does the released code decay it? Its names have no `backbone.` in front."""
    name = name.removeprefix('backbone.').removeprefix('head.')
    return not (parameter.dim() == 1 or name.endswith('.bias') or name in ('pos_embed', 'cls_token'))


@pytest.mark.parametrize(
    'variant',
    [dict(), dict(abs_pos_embed=False, rel_pos_bias='shared', layer_scale_init=0.1), dict(rel_pos_bias='per_layer')],
)
def test_groups_follow_the_released_rule(variant):
    backbone = dict(narrow_model()['backbone'], **variant)
    model = MODELS.build(narrow_model(backbone=backbone))
    decayed, plain = parameter_groups(model)
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    assert set(decayed['names']) == {n for n, p in trained.items() if released_rule(n, p)}
    assert set(plain['names']) == {n for n, p in trained.items() if not released_rule(n, p)}
    assert plain['weight_decay'] == 0 and 'weight_decay' not in decayed
    assert 'backbone.mask_token' in decayed['names'] and 'backbone.cls_token' in plain['names']


def test_constructor_builds_two_groups_and_refuses_other_rules():
    model = MODELS.build(narrow_model())
    wrapper = BEiTOptimWrapperConstructor(dict(type='OptimWrapper', optimizer=ADAMW))(model)
    assert [g['weight_decay'] for g in wrapper.optimizer.param_groups] == [0.05, 0.0]
    with pytest.raises(ValueError, match='paramwise_cfg'):
        BEiTOptimWrapperConstructor(dict(optimizer=ADAMW), dict(norm_decay_mult=0))


def make_wrapper(dtype: str, **kwargs) -> tuple[torch.nn.Linear, AutocastOptimWrapper]:
    model = torch.nn.Linear(4, 4)
    return model, AutocastOptimWrapper(dtype, optimizer=torch.optim.SGD(model.parameters(), 1.0), **kwargs)


@pytest.mark.parametrize('dtype', ['bfloat16', 'float16', 'float32'])
def test_forward_runs_in_the_type_that_the_device_has(dtype):
    model, wrapper = make_wrapper(dtype)
    expected = getattr(torch, usable_dtype(dtype, wrapper.device_type))
    with wrapper.optim_context(model):
        assert model(torch.randn(2, 4)).dtype == expected


def test_a_type_that_a_device_lacks_is_replaced(monkeypatch):
    assert usable_dtype('float16', 'cpu') == 'float32'
    for fast in (True, False):  # an A100, a V100
        monkeypatch.setattr(torch.cuda, 'is_bf16_supported', lambda including_emulation, fast=fast: fast)
        assert usable_dtype('bfloat16', 'cuda') == ('bfloat16' if fast else 'float16')
        assert all(usable_dtype(dtype, 'cuda') == dtype for dtype in ('float16', 'float32'))


def test_step_clips_the_true_gradient():
    model, wrapper = make_wrapper('float32', clip_grad=dict(max_norm=0.5))
    before = model.weight.detach().clone()
    wrapper.update_params(100 * model(torch.ones(1, 4)).sum())
    moved = torch.cat([(model.weight - before).flatten(), torch.zeros(0)]).norm()
    assert 0 < moved <= 0.5 + 1e-6


@pytest.mark.parametrize('clip', [None, dict(max_norm=3.0)])
def test_a_step_without_finite_gradient_is_left_out(clip):
    model, wrapper = make_wrapper('bfloat16', clip_grad=clip)
    before = model.weight.detach().clone()
    wrapper.update_params(model(torch.full((1, 4), float('nan'))).sum())
    assert torch.equal(model.weight, before) and model.weight.grad is None
    wrapper.update_params(model(torch.ones(1, 4)).sum())
    assert torch.isfinite(model.weight).all() and not torch.equal(model.weight, before)


def test_too_many_steps_without_finite_gradient_stop_the_run_even_without_hook():
    model, wrapper = make_wrapper('float32')
    bad, good = torch.full((1, 4), float('inf')), torch.ones(1, 4)
    most = 2 * STEPS_BETWEEN_LOOKS
    for step in range(most):  # one good step starts the count again
        wrapper.update_params((0 * model(good if step == most - MAX_SKIPPED_IN_A_ROW else bad)).sum())
    for _ in range(most - 1):
        wrapper.update_params((0 * model(bad)).sum())
    with pytest.raises(ValueError, match='not finite in 124 steps in a row'):
        wrapper.update_params((0 * model(bad)).sum())


def test_state_survives_a_change_of_precision():
    _, half = make_wrapper('float16')
    _, full = make_wrapper('float32')
    state = half.state_dict()
    full.load_state_dict(state)
    half.load_state_dict(full.state_dict())
    assert 'loss_scaler' in state  # the caller's dict is left as it was


def fused_wrapper() -> tuple[torch.nn.Module, AutocastOptimWrapper]:
    """After a step."""
    model = torch.nn.Linear(4, 3)
    wrapper = AutocastOptimWrapper('float32', optimizer=torch.optim.AdamW(model.parameters(), fused=True))
    wrapper.update_params(model(torch.ones(1, 4)).sum())
    return model, wrapper


@pytest.mark.parametrize(
    ('name', 'shape'), [('exp_avg', (1,)), ('exp_avg_sq', (1, 2)), ('step', (4,)), ('max_exp_avg_sq', (1,))]
)
def test_a_state_of_another_shape_is_refused(name, shape):
    """Fused kernels would read and write behind it."""
    _, wrapper = fused_wrapper()
    state = copy.deepcopy(wrapper.state_dict())
    state['state'][0][name] = torch.zeros(shape)
    with pytest.raises(CheckpointError, match=f'optimizer has .{name}. of shape'):
        wrapper.load_state_dict(state)


def test_a_states_memory_and_kernel_are_the_runs():
    model, wrapper = fused_wrapper()
    state = copy.deepcopy(wrapper.state_dict())
    state['state'][0]['exp_avg'] = torch.ones(1).expand(model.weight.shape)  # one number under all
    state['param_groups'][0].update(amsgrad=True, lr=0.25)
    wrapper.load_state_dict(state)
    (group, *_), moment = wrapper.param_groups, wrapper.optimizer.state[model.weight]['exp_avg']
    assert not group['amsgrad'] and group['lr'] == 0.25
    assert moment.is_contiguous() and moment.untyped_storage().nbytes() == 4 * moment.numel()


def test_unknown_precision():
    with pytest.raises(ValueError, match="dtype is 'half'"):
        make_wrapper('half')

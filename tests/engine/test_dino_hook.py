"""DINO's schedules in a run, against its formulas."""

import copy
import math

import numpy as np
import pytest
import torch
from conftest import narrow_dino_pretraining
from helpers import train
from mmengine.hooks import Hook

from beit_mm.engine.steps import unwrap

STEPS, EPOCH = 9, 3


def cosine(start: float, end: float, steps: int) -> np.ndarray:
    """cosine_scheduler of facebookresearch/dino `utils.py`, without warm-up."""
    return end + 0.5 * (start - end) * (1 + np.cos(math.pi * np.arange(steps) / steps))


class Notes(Hook):
    """Notes what holds in each step, and the weights after it."""

    priority = 'LOWEST'

    def before_train(self, runner):
        self.temperature, self.decay, self.weights = [], [], [copy.deepcopy(unwrap(runner).state_dict())]

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        self.temperature.append(unwrap(runner).teacher_temperature)
        self.weights.append(copy.deepcopy(unwrap(runner).state_dict()))

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        self.decay.append([group['weight_decay'] for group in runner.optim_wrapper.optimizer.param_groups])


@pytest.fixture
def config(images, tmp_path):
    config = narrow_dino_pretraining(images, tmp_path)
    config.val_cfg = config.val_dataloader = config.val_evaluator = None
    config.train_cfg = dict(type='beit_mm.EpochLoop', max_epochs=STEPS // EPOCH)
    config.optim_wrapper.update(dtype='float32')
    return config


def noted(config, *hooks):
    notes = Notes()
    return notes, train(config, notes, *hooks)


def check_teacher(weights: list[dict], momenta: np.ndarray) -> None:
    """Each step's teacher is momentum * teacher + (1 - momentum) * student."""
    for before, after, momentum in zip(weights[:-1], weights[1:], momenta, strict=True):
        for name in (name for name in after if name.startswith('teacher.')):
            expected = momentum * before[name] + (1 - momentum) * after[name.removeprefix('teacher.')]
            torch.testing.assert_close(after[name], expected, atol=1e-7, rtol=1e-5)


LAST = 'dino_head.last_layer.parametrizations.weight.original1'


def test_schedules_are_dinos(config):
    config.optim_wrapper.optimizer.weight_decay = 0.04
    config.param_scheduler = [
        dict(type='CosineAnnealingWeightDecay', begin=0, end=3, eta_min=0.4, convert_to_iter_based=True)
    ]
    notes, runner = noted(config)
    warmup = np.linspace(0.04, 0.07, 2)
    assert notes.temperature == pytest.approx(np.repeat([*warmup, 0.07], EPOCH))
    assert all(map(torch.is_tensor, notes.temperature))  # numbers would be compiled in
    decayed, others = np.array(notes.decay).T
    assert decayed == pytest.approx(cosine(0.04, 0.4, STEPS)) and not others.any()
    check_teacher(notes.weights, cosine(0.9, 1, STEPS))
    last = [weights[LAST] for weights in notes.weights]
    assert all(torch.equal(last[0], weight) for weight in last[1 : EPOCH + 1])  # frozen: no step, no decay
    assert not any(torch.equal(one, two) for one, two in zip(last[EPOCH:], last[EPOCH + 1 :], strict=False))
    # its moments begin with it
    parameter = unwrap(runner).get_parameter(LAST)
    assert runner.optim_wrapper.optimizer.state[parameter]['step'] == STEPS - EPOCH
    logged = runner.message_hub.get_scalar('train/teacher_momentum').data[0]
    assert logged == pytest.approx(cosine(0.9, 1, STEPS))


def test_loops_that_count_iterations_have_the_same_schedules(config):
    config.train_cfg = dict(type='beit_mm.IterLoop', max_iters=6)
    config.optim_wrapper.accumulative_counts = 2
    notes, _ = noted(config)
    assert notes.temperature == pytest.approx(np.repeat([0.04, 0.07], EPOCH))
    momenta = cosine(0.9, 1, 6)
    momenta[::2] = 1  # no step yet
    check_teacher(notes.weights, momenta)


@pytest.mark.parametrize('fused', [True, False])
def test_teacher_stays_where_a_step_is_skipped(config, fused):
    bad = 2  # not the first: a fused optimizer decides that one on the host

    class Spoil(Hook):
        def before_train(self, runner):
            weight = unwrap(runner).dino_head.mlp[0].weight
            weight.register_hook(lambda gradient: gradient * math.nan if runner.iter == bad else gradient)

    config.train_cfg = dict(type='beit_mm.IterLoop', max_iters=4)
    config.optim_wrapper.optimizer.fused = fused
    notes, _ = noted(config, Spoil())
    momenta = cosine(0.9, 1, 4)
    momenta[bad] = 1
    check_teacher(notes.weights, momenta)
    before, after = notes.weights[bad : bad + 2]
    assert all(torch.equal(after[name], before[name]) for name in after)
    moved = 'teacher.backbone.blocks.0.mlp.fc1.weight'
    assert not torch.equal(before[moved], before[moved.removeprefix('teacher.')])  # it had a way to go

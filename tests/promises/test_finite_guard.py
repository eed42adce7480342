"""A step without a finite gradient changes nothing, on no rank; 25 in a row stop the run, which can be resumed."""

import copy
import math
from contextlib import nullcontext

import pytest
import torch
from helpers import run_ranks
from helpers import train as train_run
from mmengine.hooks import Hook
from promises.test_resume import differences
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from beit_mm.engine.optim import MAX_SKIPPED_IN_A_ROW, STEPS_BETWEEN_FETCHES, AutocastOptimWrapper
from beit_mm.errors import UserError
from beit_mm.registry import HOOKS

OPTIMIZERS = {
    'fused AdamW': lambda parameters: torch.optim.AdamW(parameters, 0.1, fused=True),
    'fused SGD': lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9, fused=True),
    'AdamW': lambda parameters: torch.optim.AdamW(parameters, 0.1),
}
GOOD, BAD = torch.linspace(-1, 1, 16).view(4, 4), torch.full((4, 4), math.nan)


def make(optimizer: str = 'fused AdamW', half: bool = False, **kwargs) -> tuple[nn.Module, AutocastOptimWrapper]:
    """A model with batch norm and its wrapper; `half`: with a loss scale, as float16 has it on a GPU."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    wrapper = AutocastOptimWrapper('float32', optimizer=OPTIMIZERS[optimizer](model.parameters()), **kwargs)
    if half:
        wrapper.loss_scaler = torch.amp.GradScaler('cpu', init_scale=2.0**16)
    return model, wrapper


def train(model: nn.Module, wrapper: AutocastOptimWrapper, *batches: torch.Tensor) -> list[torch.Tensor]:
    """All that a step may change, after steps on these batches."""
    for batch in batches:
        with wrapper.optim_context(model):
            loss = model(batch).square().mean()
        wrapper.update_params(loss)
    moments = [value for entry in wrapper.optimizer.state.values() for value in entry.values()]
    return [value.clone() for value in (*model.state_dict().values(), *moments)]


@pytest.mark.parametrize('steps_before', [0, 3])
@pytest.mark.parametrize('optimizer', OPTIMIZERS)
def test_a_bad_step_changes_nothing_and_training_goes_on_as_without_it(optimizer, steps_before):
    (model, wrapper), peer = make(optimizer), make(optimizer)
    before = train(model, wrapper, *[GOOD] * steps_before)
    assert not differences(before, train(model, wrapper, BAD, BAD))
    after = train(model, wrapper, GOOD, BAD, GOOD)
    assert not differences(after, train(*peer, *[GOOD] * (steps_before + 2)))
    assert wrapper.read_counters() == (0, 3, 0)


@pytest.mark.parametrize('clip', [dict(max_norm=0.1), dict(type='value', clip_value=0.01)])
def test_a_good_step_is_the_optimizers_own(clip):
    """Bit by bit, with clipping and batch norm."""
    (model, wrapper), (peer, _) = make(clip_grad=dict(clip)), make()
    clip_peer = nn.utils.clip_grad_value_ if 'type' in clip else nn.utils.clip_grad_norm_
    optimizer = OPTIMIZERS['fused AdamW'](peer.parameters())
    for step in range(4):
        train(model, wrapper, GOOD + step)
        peer(GOOD + step).square().mean().backward()
        clip_peer(peer.parameters(), [*clip.values()][-1])
        optimizer.step()
        optimizer.zero_grad()
    assert all(map(torch.equal, model.state_dict().values(), peer.state_dict().values()))


def test_a_trained_parameter_may_have_the_name_of_what_a_forward_pass_changes():
    model = nn.Module()
    model.codebook = nn.Parameter(torch.ones(4))
    wrapper = AutocastOptimWrapper('float32', optimizer=torch.optim.SGD(model.parameters(), 0.5))
    for factor, expected in ((2.0, 0.0), (float('nan'), 0.0), (2.0, -1.0)):
        with wrapper.optim_context(model):
            loss = factor * model.codebook.sum()
        wrapper.update_params(loss)
        assert model.codebook.tolist() == [expected] * 4


def test_accumulation_skips_the_whole_step():
    model, wrapper = make(accumulative_counts=3)
    before = train(model, wrapper, *[GOOD] * 3)
    for batches in ([BAD, GOOD, GOOD], [GOOD, BAD, GOOD], [GOOD, GOOD, BAD]):
        assert not differences(before, train(model, wrapper, *batches))
    assert wrapper.read_counters() == (3, 3, 0)
    assert differences(before, train(model, wrapper, *[GOOD] * 3)) and wrapper.read_counters() == (0, 3, 0)


def test_an_overflow_is_told_apart_from_a_nan_of_the_model():
    model, wrapper = make(half=True)
    before = train(model, wrapper, GOOD)
    train(model, wrapper, BAD)  # the loss is NaN: the scale is not to blame
    assert wrapper.read_counters() == (1, 1, 0) and wrapper.loss_scaler.get_scale() == 2**16
    wrapper.loss_scaler.update(1e38)
    after = train(model, wrapper, 100 * GOOD)  # the loss is finite, times the scale it is not
    assert wrapper.read_counters() == (2, 1, 1) and wrapper.loss_scaler.get_scale() == pytest.approx(5e37)
    assert not differences(before, after)
    wrapper.loss_scaler.update(1.0)
    model[2].weight.register_hook(lambda gradient: gradient / 0)  # behind a finite loss; no scale pushed it there
    train(model, wrapper, GOOD)
    assert wrapper.read_counters() == (3, 2, 1)


def test_counters_are_resumed_and_logged_with_the_norms(warnings):
    model, before = make()
    train(model, before, GOOD, BAD, BAD, GOOD, BAD)
    model, wrapper = make()
    wrapper.load_state_dict(copy.deepcopy(before.state_dict()))
    train(model, wrapper, BAD, GOOD, BAD)
    wrapper.read_counters()
    assert '2 of the last 3 steps' in warnings()[-1]  # not those of the run before
    assert wrapper.message_hub.get_scalar('train/skipped_steps').current() == 5
    norms = wrapper.message_hub.get_scalar('train/grad_norm').data[0][-3:]
    assert [math.isfinite(norm) for norm in norms] == [False, True, False]
    train(model, wrapper, GOOD)
    assert wrapper.read_counters() == (0, 5, 0)


def test_a_nan_on_one_rank_skips_the_step_on_both(tmp_path):
    """With a loss scale, where rank 0 sees a finite loss and has to learn that rank 1's is not."""

    def run(rank: int) -> tuple:
        model, wrapper = make(half=True)
        parallel = DistributedDataParallel(model, broadcast_buffers=False, gradient_as_bucket_view=True)
        before = train(parallel, wrapper, GOOD + rank)
        batch, found = BAD if rank else GOOD, []
        for number in (MAX_SKIPPED_IN_A_ROW - 1, 1):
            after = train(parallel, wrapper, *[batch] * number)
            found.append((differences(before, after), wrapper.loss_scaler.get_scale()))
            with nullcontext() if number > 1 else pytest.raises(UserError, match='not finite .* from iteration 1 on'):
                found.append(tuple(wrapper.read_counters()))
        return found

    unchanged, skipped = ([], 2.0**16), MAX_SKIPPED_IN_A_ROW - 1
    assert run_ranks(run, tmp_path) == [[unchanged, (skipped, skipped, 0), unchanged]] * 2


POISONED = range(5, 9)  # batches; two are a step; the run is stopped after the step with the last of them
FIRST = 4  # the first batch of the first step with a poisoned one


class Poison(Hook):
    def before_train_iter(self, runner, batch_idx, data_batch=None):
        if runner.iter in POISONED:
            data_batch['inputs']['images'] = data_batch['inputs']['images'].float().fill_(math.nan)


def test_a_stop_names_the_first_bad_step_and_its_last_checkpoint_is_from_before_it_and_can_be_resumed(
    pretrain_config, tmp_path, monkeypatch
):
    config = pretrain_config
    config.val_cfg = config.val_dataloader = config.val_evaluator = None
    config.train_cfg = dict(type='beit_mm.IterLoop', max_iters=12)
    config.param_scheduler = [
        dict(type='LinearLR', start_factor=0.1, end=12, by_epoch=False)
    ]  # goes on in skipped steps
    config.optim_wrapper.accumulative_counts = 2
    config.default_hooks.checkpoint.update(by_epoch=False, interval=FIRST, max_keep_ckpts=-1)
    config.default_hooks.logger.interval = 3
    with monkeypatch.context() as patch, pytest.raises(UserError, match=f'2 steps.* iteration {FIRST} .*dtype'):
        patch.setattr('beit_mm.engine.optim.MAX_SKIPPED_IN_A_ROW', 2)
        train_run(config, Poison())
    files = [tmp_path / f'work/iter_{number}.pth' for number in (FIRST, 2 * FIRST)]
    before, left = (torch.load(file, weights_only=True) for file in files)
    assert (tmp_path / 'work/last_checkpoint').read_text() == str(files[1])
    assert not differences(before['state_dict'], left['state_dict'])
    for part in ('state', 'loss_scaler'):
        assert not differences(before['optimizer'][part], left['optimizer'][part])
    assert left['optimizer']['skipped_steps']['counters'].tolist() == [2, 2, 0]

    whole = train_run(config, Poison(), work_dir=str(tmp_path / 'whole'))
    resumed = train_run(config, Poison(), work_dir=str(tmp_path / 'rest'), resume=True, load_from=str(files[1]))
    assert not differences(*(runner.model.state_dict() for runner in (whole, resumed)))


def test_a_run_without_our_hooks_stops_too():
    model, wrapper = make()
    with pytest.raises(UserError, match='not finite'):
        train(model, wrapper, *[BAD] * 2 * STEPS_BETWEEN_FETCHES)


def test_a_config_of_an_earlier_version_may_name_the_hook_that_stopped_a_run():
    assert HOOKS.build(dict(type='beit_mm.BadStepHook'))

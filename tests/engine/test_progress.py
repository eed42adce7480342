"""A run's progress by its steps or by a clock, which passes here by steps alone, as slowly as a load makes them."""

import math
from types import SimpleNamespace

import pytest
import torch
from mmengine.dataset import DefaultSampler
from mmengine.hooks import Hook
from mmengine.logging import MessageHub
from mmengine.model import BaseModel
from mmengine.runner import Runner
from torch import nn
from torch.utils.data import DataLoader

from beit_mm.engine import CheckpointHook, LoggerHook, progress
from beit_mm.engine.logs import ProgressHook
from beit_mm.engine.progress import MIN_STEPS, ClockHook, progress_of
from beit_mm.registry import MODELS

STEP = 0.25  # seconds, on a machine without other load
SECONDS = 54.0
LOADS = dict(
    stays=lambda now: 3,
    comes=lambda now: 3 if now > 20 else 1,
    comes_late=lambda now: 10 if now > 50 else 1,
    goes=lambda now: 8 if now < 16 else 1,
)
RATE = 1e-3


class Line(BaseModel):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.asked: list[float] = []  # progress, as a model asks for it in each step

    def forward(self, inputs: torch.Tensor, mode: str) -> dict:
        self.asked.append(progress_of())
        return dict(loss=self.layer(inputs).square().mean())


class Load(Hook):
    """Lets time pass, and notes what the optimizer used in each step."""

    priority = 'HIGHEST'  # registered before the clock

    def __init__(self, load, stop_at: float = math.inf):
        self.now, self.load, self.stop_at = 0.0, load, stop_at
        self.rates: list[float] = []

    def after_train_iter(self, runner, *args, **kwargs) -> None:
        self.now += STEP * self.load(self.now)
        self.rates.append(runner.optim_wrapper.get_lr()['lr'][-1])
        if self.now >= self.stop_at:
            self.stop_at = math.inf
            runner.train_loop.stop_training = True


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Starts or resumes a run by a clock."""

    def call(time: Load, seconds: float = SECONDS, most_steps: float = math.inf, resume: bool = False) -> Runner:
        monkeypatch.setattr(progress, 'time', SimpleNamespace(monotonic=lambda: time.now))
        call.number += 1
        points = [dict(inputs=torch.ones(2))] * 8
        checkpoint = dict(type='beit_mm.CheckpointHook', by_epoch=False, interval=1000)
        runner = Runner(
            Line(),
            str(tmp_path),
            train_dataloader=DataLoader(points, batch_size=4, sampler=DefaultSampler(points)),
            train_cfg=dict(type='beit_mm.IterLoop', max_iters=1000),
            optim_wrapper=dict(
                type='beit_mm.AutocastOptimWrapper', dtype='float32', optimizer=dict(type='SGD', lr=RATE)
            ),
            param_scheduler=dict(type='CosineAnnealingLR', T_max=1000, eta_min=0.0, by_epoch=False),
            default_hooks=dict(checkpoint=checkpoint, logger=dict(type='beit_mm.LoggerHook', interval=1000)),
            custom_hooks=[dict(type='beit_mm.CheckpointMetaHook')],
            resume=resume,
            cfg=dict(resume=resume),
            experiment_name=f'{tmp_path.name}_{call.number}',
        )
        runner.register_hook(time)
        clock = ClockHook(seconds, time.now, most_steps, lambda steps: dict(validation=steps, checkpoint=7, log=9))
        clock.register_in(runner)
        runner.train()
        runner.clock = clock
        return runner

    call.number = 0
    return call


def steps_in(seconds: float, load) -> int:
    now, steps = 0.0, 0
    while now < seconds:
        now += STEP * load(now)
        steps += 1
    return steps


@pytest.mark.parametrize(('load', 'stop_at'), [('stays', None), ('comes', 15), ('comes_late', None), ('goes', 30)])
def test_the_time_is_kept_and_the_schedule_ends_with_it(start, load, stop_at):
    time, idle = Load(LOADS[load], stop_at or math.inf), 0
    runner = start(time)
    if stop_at:
        assert 0 < progress_of(runner) < 1
        idle = 100
        time.now += idle  # while nothing runs
        time.load = lambda now: LOADS[load](now - idle)
        earlier, runner = runner.message_hub, start(time, resume=True)
        assert runner.clock.seconds_before == earlier.get_info('training_seconds') == pytest.approx(stop_at, abs=3)
    assert time.now - idle == pytest.approx(SECONDS, abs=0.05 * SECONDS)
    assert runner.iter == len(time.rates) == pytest.approx(steps_in(SECONDS, LOADS[load]), abs=2)
    assert progress_of(runner) == 1 and runner.optim_wrapper.get_lr()['lr'][-1] < 0.01 * RATE
    assert time.rates == sorted(time.rates, reverse=True)
    asked = runner.model.asked
    assert asked == sorted(asked) and asked[-1] < 1 and (asked[0] > 0) == bool(stop_at)


def test_the_rate_of_steps_gives_the_intervals(start):
    runner = start(Load(LOADS['stays']))
    assert runner.train_loop.val_interval == pytest.approx(steps_in(SECONDS, LOADS['stays']), rel=0.4)
    for kind, interval in ((CheckpointHook, 7), (LoggerHook, 9)):
        assert [hook.interval for hook in runner.hooks if isinstance(hook, kind)] == [interval]


def test_a_run_has_a_least_and_a_greatest_number_of_steps(start, tmp_path):
    assert start(Load(lambda now: 1), seconds=1e-3).iter == MIN_STEPS
    (tmp_path / 'last_checkpoint').unlink()
    assert start(time := Load(lambda now: 1), most_steps=40).iter == 40 and time.now < SECONDS


def test_a_run_resumes_beyond_the_steps_of_its_schedules(start, monkeypatch):
    monkeypatch.setattr(progress, 'NOMINAL_STEPS', 10)
    time = Load(LOADS['stays'], stop_at=15)
    assert start(time).iter > 10
    start(time, resume=True)
    assert time.now == pytest.approx(SECONDS, abs=0.05 * SECONDS)


def test_the_temperature_of_a_tokenizer_is_a_schedule_too():
    model = MODELS.build(dict(type='beit_mm.DiscreteVAE', hidden=8, vocab_size=8, embed_dims=8))
    ClockHook(1, 0, 1, dict).move_schedules(SimpleNamespace(model=model, param_schedulers=[]), 3, 21)
    assert model.steps == 21


def test_progress_by_steps_is_the_share_that_is_done_before_a_step():
    hub = MessageHub.get_instance('by_steps')
    runner = SimpleNamespace(iter=3, max_iters=7, message_hub=hub)
    assert progress_of(runner) == 3 / 7 and progress_of(runner, steps=4) == 4 / 7 and progress_of(runner, 9) == 1
    assert progress_of() == 0  # of a model outside a run
    hub.update_info_dict(
        dict(iter=3, max_iters=7, schedule_share=0.9)
    )  # the last is of a timed run that it goes on with
    assert progress_of() == progress_of(runner) == 3 / 7


def test_the_time_left_of_a_timed_run_is_the_clocks(capsys, monkeypatch):
    hub = MessageHub.get_instance('time_left')
    runner = SimpleNamespace(iter=0, max_iters=1000, message_hub=hub, hooks=[])
    now = [0.0]
    monkeypatch.setattr('beit_mm.engine.logs.time', SimpleNamespace(monotonic=lambda: now[0]))
    hook = ProgressHook('pretrain')
    hub.update_info('progress_by_clock', 0.0, resumed=False)
    hook.before_train(runner)
    for seconds, done in ((5, 0.0), (20, 0.25)):
        now[0] = seconds
        hub.update_info('progress_by_clock', done, resumed=False)
        hook.after_train_iter(runner, 0)
    first, second = capsys.readouterr().out.splitlines()
    assert 'unknown' in first and '0:01:00 left' in second

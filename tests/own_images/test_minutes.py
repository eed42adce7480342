"""A run of so many minutes takes them, by a clock of its own, whatever load comes, goes or stays, resumed or not."""

import json
import math
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from calls import call_of
from labelled import make_images
from mmengine.config import Config
from mmengine.hooks import Hook

from beit_mm.engine import progress
from beit_mm.own_images import images as finding
from beit_mm.own_images import run as runs
from beit_mm.own_images.task import Task
from beit_mm.pictures import read_scalars

pytestmark = pytest.mark.long

STEP = 0.25  # seconds, on a machine without other load
TRAINED = 0.9 * 60  # seconds of a minute; the others are for the report


class Clock(Hook):
    """Time that passes by steps alone, as slow as the load at that time makes them."""

    priority = 'HIGHEST'

    def __init__(self, load, stop_at=None):
        self.now, self.load = 0.0, load
        self.stop_at, self.fail_at = stop_at or math.inf, math.inf
        self.rates: list[float] = []
        self.validations = 0

    def monotonic(self) -> float:
        return self.now

    def before_train(self, runner) -> None:
        self.rates = self.rates[: runner.iter]

    def after_val_epoch(self, runner, metrics=None) -> None:
        self.validations += 1

    def after_train_iter(self, runner, *args, **kwargs) -> None:
        self.now += STEP * self.load(self.now)
        self.rates.append(runner.optim_wrapper.get_lr()['lr'][-1])
        if self.now >= self.stop_at:
            self.stop_at = math.inf
            signal.raise_signal(signal.SIGINT)
        if self.now >= self.fail_at:
            self.fail_at = math.inf
            raise RuntimeError('killed')


@pytest.fixture(scope='module')
def images(tmp_path_factory) -> Path:
    return make_images(tmp_path_factory.mktemp('data'), 12) / 'train'


@pytest.fixture
def start(images, tmp_path, monkeypatch):
    """Starts or resumes a narrow run of a minute, without its report, by a clock."""

    def plan(task: Task) -> None:
        task.record.device, task.call.workers = 'cpu', 0
        make_plan(task)
        sizes = dict(arch=dict(embed_dims=32, num_layers=1, num_heads=4), img_size=32, drop_path_rate=0.0)
        task.plan.backbone |= sizes
        task.plan.batch = 4

    def call(clock: Clock, verb: str = 'finetune', init: str = 'none', **length: float) -> runs.Run:
        def make(cfg, hook):
            runner = make_runner(cfg, hook)
            runner.register_hook(clock)
            return runner

        monkeypatch.setattr(runs, 'make_runner', make)
        for module in (runs, progress):
            monkeypatch.setattr(module, 'time', SimpleNamespace(monotonic=clock.monotonic))
        run = runs.Run(call_of(verb, images, init=init, **length), tmp_path / 'run')
        run.run()
        return run

    make_runner, make_plan = runs.make_runner, Task.make_plan
    monkeypatch.setattr(Task, 'make_plan', plan)
    monkeypatch.setattr(finding, 'MIN_IMAGES', 10)
    monkeypatch.setattr(runs.Run, 'write_report', lambda run: None)
    return call


LOADS = dict(
    stays=lambda now: 3,
    comes=lambda now: 3 if now > 20 else 1,
    comes_late=lambda now: 10 if now > 50 else 1,
    goes=lambda now: 8 if now < 16 else 1,
)


def steps_in(seconds: float, load) -> int:
    now, steps = 0.0, 0
    while now < seconds:
        now += STEP * load(now)
        steps += 1
    return steps


@pytest.mark.parametrize(('load', 'stop_at'), [('stays', None), ('comes', 15), ('comes_late', None), ('goes', 30)])
def test_minutes_are_kept_and_the_schedule_ends_with_them(start, tmp_path, load, stop_at):
    clock, idle = Clock(LOADS[load], stop_at), 0
    if stop_at:
        with pytest.raises(SystemExit, match='130'):
            start(clock, minutes=1)
        idle = 100
        clock.now += idle  # while nothing runs
        clock.load = lambda now: LOADS[load](now - idle)
    run = start(clock, minutes=1)
    assert clock.now - idle == run.seconds() == pytest.approx(TRAINED, abs=0.05 * 60)
    last = torch.load(run.checkpoint('finetune'), weights_only=True)
    steps = run.record.stages['finetune']['steps']
    assert steps == last['meta']['iter'] == Config.fromfile(tmp_path / 'run/config.py').train_cfg.max_iters
    assert steps == pytest.approx(steps_in(TRAINED, LOADS[load]), abs=2)
    assert len(clock.rates) == steps  # nothing twice
    assert 0 < clock.validations <= runs.MAX_VALIDATIONS
    folder = tmp_path / 'run/finetune'
    assert len([*folder.glob('iter_*.pth')]) == 2 and len(read_scalars(folder)[0]) > 10  # as steps are known
    highest = max(clock.rates)
    falling = clock.rates[clock.rates.index(highest) :]
    assert falling == sorted(falling, reverse=True) and highest > 1e-4
    assert last['optimizer']['param_groups'][-1]['lr'] < 0.01 * highest


def test_a_run_resumes_beyond_the_steps_of_its_schedules(start, monkeypatch):
    for module in (runs, progress):
        monkeypatch.setattr(module, 'NOMINAL_STEPS', 10)
    clock = Clock(LOADS['stays'], stop_at=15)
    with pytest.raises(SystemExit, match='130'):
        start(clock, minutes=1)
    assert len(clock.rates) > 10
    assert start(clock).seconds() == pytest.approx(TRAINED, abs=0.05 * 60)
    assert len(clock.rates) == pytest.approx(steps_in(TRAINED, LOADS['stays']), abs=2)


@pytest.mark.slow
def test_a_killed_run_goes_on_from_its_checkpoint_with_the_time_that_this_leaves(start, tmp_path):
    """Killed, a run has not written how long it took; the tokenizer's own schedules follow the time too."""
    clock = Clock(lambda now: 1 if now < 17 else 2)
    clock.fail_at = 15  # in the tokenizer, behind its checkpoint of step 50
    with pytest.raises(RuntimeError, match='killed'):
        start(clock, 'pretrain', minutes=1)
    record = json.loads((tmp_path / 'run/plan.json').read_text())
    record['seconds'] = record['stages']['tokenizer']['begun']
    (tmp_path / 'run/plan.json').write_text(json.dumps(record))
    saved = torch.load(tmp_path / 'run/tokenizer/iter_50.pth', weights_only=True)
    lost = clock.now - record['seconds'] - saved['message_hub']['runtime_info']['training_seconds']
    run = start(clock, 'pretrain')
    assert 0 < lost < 10 and run.seconds() == pytest.approx(clock.now - lost)
    assert run.seconds() == pytest.approx(TRAINED, abs=0.05 * 60)
    trained = torch.load(run.checkpoint('tokenizer'), weights_only=True)
    planned = record['stages']['tokenizer']['steps']
    assert trained['state_dict']['steps'] == planned > trained['meta']['iter']

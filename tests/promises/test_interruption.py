"""A signal ends a run after its step with a checkpoint that resumes as if nothing had been, and with a code."""

import copy
import multiprocessing
import os
import signal
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import narrow_pretraining
from helpers import make_runner, run_ranks
from mmengine.config import Config
from mmengine.hooks import Hook
from promises.test_resume import differences
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from beit_mm.datasets import LoadImage
from beit_mm.pictures import read_scalars

pytestmark = pytest.mark.long

SIGNALS = {signal.SIGTERM: 75, signal.SIGUSR1: 75, signal.SIGHUP: 75, signal.SIGINT: 130}  # and the exit code


class Act(Hook):
    """Does something at one place of the run, at the given iteration."""

    def __init__(self, place: str, action: object, iteration: int = 1):
        setattr(self, place, lambda runner, *_, **__: action() if runner.iter == iteration else None)


def send(*numbers: int) -> object:
    return lambda: [os.kill(os.getpid(), number) for number in numbers]


def without_validation(images: Path, folder: Path) -> Config:
    config = narrow_pretraining(images, folder)
    config.val_cfg = config.val_dataloader = config.val_evaluator = None
    config.default_hooks.checkpoint = dict(type='beit_mm.CheckpointHook', interval=2)
    config.model.backbone.drop_path_rate = 0.3
    return config


@pytest.fixture
def config(images, tmp_path):
    return without_validation(images, tmp_path)


@pytest.fixture(scope='module')
def whole(images, tmp_path_factory) -> dict:
    """The last checkpoint of the run that nobody stopped."""
    folder = tmp_path_factory.mktemp('whole')
    assert train(without_validation(images, folder), folder) == 0
    return torch.load(folder / 'epoch_2.pth', weights_only=True)


@pytest.fixture(autouse=True)
def terminal():
    """A terminal as it usually is, also where the tests themselves run under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def train(config, folder: Path, *hooks: Hook, **changes: object) -> int:
    """Trains; the exit code, 0 where the training came to its end."""
    runner = make_runner(Config(dict(copy.deepcopy(config), work_dir=str(folder), **changes)))
    for hook in hooks:
        runner.register_hook(hook)
    before = [signal.getsignal(number) for number in SIGNALS]
    try:
        runner.train()
    except SystemExit as stop:
        return stop.code
    finally:
        assert [signal.getsignal(number) for number in SIGNALS] == before
    return 0


@pytest.mark.parametrize('number', SIGNALS)
def test_a_signal_saves_and_the_resumed_run_ends_the_same(number, config, whole, tmp_path, monkeypatch):
    said, work = [], tmp_path / 'work'
    monkeypatch.setattr('beit_mm.engine.signals.log', lambda message: said.append(message))
    assert train(config, work, Act('after_train_iter', send(number))) == SIGNALS[number]
    assert [path.name for path in work.glob('*.pth')] == ['interrupted.pth']  # in the middle of an epoch of 3
    assert len(said) == 1 and f' 3, {work}/interrupted.pth ' in said[0] and said[0].endswith('the same command')
    assert train(config, work, resume=True) == 0
    assert not differences(whole, torch.load(work / 'epoch_2.pth', weights_only=True))
    assert not (work / 'interrupted.pth').exists()  # it goes when a newer one to resume from is written


def test_a_signal_in_the_last_step_changes_nothing(config, tmp_path):
    assert train(config, tmp_path, Act('after_train_iter', send(signal.SIGTERM), iteration=5)) == 0
    assert (tmp_path / 'epoch_2.pth').exists() and not (tmp_path / 'interrupted.pth').exists()


@pytest.mark.parametrize(('place', 'iteration'), [('after_train_iter', 2), ('after_val_iter', 3)])
def test_accumulated_gradients_are_used_first(place, iteration, pretrain_config, tmp_path):
    pretrain_config.optim_wrapper.accumulative_counts = 2  # of three batches in an epoch
    assert train(pretrain_config, tmp_path, Act(place, send(signal.SIGTERM), iteration)) == 75
    assert torch.load(tmp_path / 'interrupted.pth', weights_only=True)['meta']['iter'] == 4


def losses_of(folder: Path) -> dict[int, float]:
    """What a run has measured on held-out images, in all its calls, by the step."""
    return {step: row['mim_loss'] for step, row in read_scalars(folder)[1].items()}


EPOCHS, STEPS = dict(type='EpochLoop', max_epochs=2, val_interval=1), dict(type='IterLoop', max_iters=6, val_interval=4)
EMA = dict(type='EMAHook', momentum=0.5)
OTHER_EMA = dict(type='mmpretrain.EMAHook', momentum=0.5, evaluate_on_origin=True)


@pytest.mark.parametrize(
    ('loop', 'iteration', 'ema', 'saved'),
    [
        (EPOCHS, 3, EMA, 'interrupted'),
        (STEPS, 4, OTHER_EMA, 'interrupted'),
        (dict(STEPS, val_begin=0), 6, None, 'iter_6'),
    ],
)
def test_a_signal_in_a_validation_ends_it_and_the_resumed_run_begins_it_anew(
    loop, iteration, ema, saved, pretrain_config, tmp_path
):
    batches = []
    config, by_epoch = pretrain_config, 'max_epochs' in loop
    config.train_cfg = dict(loop, type=f'beit_mm.{loop["type"]}')
    config.val_dataloader.batch_size = 2  # of 12 images
    best = dict(save_best='mim_loss', rule='less')
    config.default_hooks.checkpoint.update(by_epoch=by_epoch, interval=1 if by_epoch else 3, **best)
    config.log_processor.by_epoch = by_epoch
    config.custom_hooks += [ema] if ema else []
    assert train(config, tmp_path / 'whole') == 0
    signals = Act('after_val_iter', lambda: batches.append(0) or send(signal.SIGTERM)(), iteration)
    assert train(config, tmp_path / 'work', signals) == 75
    assert len(batches) == 1 and Path((tmp_path / 'work/last_checkpoint').read_text()).stem == saved
    assert train(config, tmp_path / 'work', resume=True) == 0
    losses = losses_of(tmp_path / 'whole')
    assert losses == losses_of(tmp_path / 'work') and len(losses) == 2 + (loop.get('val_begin') == 0)
    names = [sorted(path.name for path in (tmp_path / folder).glob('*.pth')) for folder in ('whole', 'work')]
    assert names[0] == names[1] and 'interrupted.pth' not in names[0]
    for name in names[0]:
        files = [torch.load(tmp_path / folder / name, weights_only=True) for folder in ('whole', 'work')]
        assert not differences(*({key: file[key] for key in file if key != 'message_hub'} for file in files)), name


def test_a_signal_in_the_second_validation_of_mmpretrains_emahook_saves_the_trained_weights(pretrain_config, tmp_path):
    pretrain_config.custom_hooks += [OTHER_EMA]
    assert train(pretrain_config, tmp_path / 'whole') == 0
    batches = []
    stop = send(signal.SIGTERM)
    second = Act('after_val_iter', lambda: batches.append(0) or len(batches) == 4 and stop(), iteration=3)  # of 3 each
    assert train(pretrain_config, tmp_path / 'work', second) == 75
    assert train(pretrain_config, tmp_path / 'work', resume=True) == 0
    files = [torch.load(tmp_path / folder / 'epoch_2.pth', weights_only=True) for folder in ('whole', 'work')]
    assert not differences(*({key: file[key] for key in file if key != 'message_hub'} for file in files))


def stopped_ranks(config: Config, folder: Path, act: Act) -> list[object]:
    """Iteration and exit code of both of two processes, one of which is told to stop."""
    config.work_dir, config.launcher, config.auto_scale_lr = str(folder / 'work'), 'pytorch', None
    config.train_dataloader.batch_size = 2

    def stopped(rank: int) -> tuple:
        runner = make_runner(config)
        if rank == 1:
            runner.register_hook(act)
        with pytest.raises(SystemExit) as stop:
            runner.train()
        return runner.iter, stop.value.code

    return run_ranks(stopped, folder)


@pytest.mark.parametrize(('place', 'iteration'), [('before_val_iter', 6), ('before_train_iter', 4)])
def test_two_processes_stop_in_the_second_validation(place, iteration, pretrain_config, tmp_path):
    """Also after a first one of which one of them has a batch more than the other."""
    loader = pretrain_config.val_dataloader
    loader.update(batch_size=1, sampler=dict(type='DefaultSampler', shuffle=False, round_up=False))
    loader.dataset.indices = 11
    act = Act(place, send(signal.SIGUSR1), iteration)
    assert stopped_ranks(pretrain_config, tmp_path, act) == [(6, 75)] * 2


def test_two_processes_stop_at_the_same_step_and_soon(config, tmp_path):
    """Only one of them is told, after it has exchanged what it was told before that step."""
    config.train_cfg.max_epochs = 300
    config.default_hooks.checkpoint.interval = 300
    act = Act('before_train_iter', send(signal.SIGUSR1), 9)
    assert stopped_ranks(config, tmp_path, act) == [(11, 75)] * 2
    assert torch.load(tmp_path / 'work/interrupted.pth', weights_only=True)['meta']['iter'] == 11


@pytest.mark.parametrize(('loop', 'iteration'), [(EPOCHS, 3), (dict(STEPS, val_interval=3), 6)])
def test_a_run_killed_in_a_validation_validates_when_it_is_resumed(loop, iteration, pretrain_config, tmp_path):
    def kill() -> None:
        raise MemoryError('killed')

    done = []
    pretrain_config.train_cfg = dict(loop, type=f'beit_mm.{loop["type"]}')
    pretrain_config.default_hooks.checkpoint.update(by_epoch='max_epochs' in loop, interval=loop['val_interval'])
    with pytest.raises(MemoryError, match='killed'):
        train(pretrain_config, tmp_path, Act('after_val_iter', kill, iteration))
    trained = Act('after_train_iter', lambda: done.append('trained'), iteration - 1)
    validated = Act('after_val_epoch', lambda: done.append('validated'), iteration)
    train(pretrain_config, tmp_path, trained, validated, resume=True)
    assert done == ['validated']


def test_a_run_under_nohup_outlives_its_terminal(config, tmp_path):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # what nohup does
    try:
        assert train(config, tmp_path, Act('after_train_iter', send(signal.SIGHUP))) == 0
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_second_sigint_stops_at_once(config, tmp_path, monkeypatch):
    clock = SimpleNamespace(monotonic=lambda: clock.now, now=0.0, strftime=time.strftime)
    monkeypatch.setattr('beit_mm.engine.signals.time', clock)

    def twice() -> None:
        send(signal.SIGINT, signal.SIGINT)()  # in one moment: a terminal's and a launcher's are one
        clock.now = 1.1
        send(signal.SIGINT)()

    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path, Act('before_train_iter', twice))
    assert clock.now and not (tmp_path / 'interrupted.pth').exists()


def test_workers_take_no_part(pretrain_config, tmp_path):
    """They would die, or the loader would raise; and none stays behind."""
    for loader in (pretrain_config.train_dataloader, pretrain_config.val_dataloader):
        loader.update(num_workers=1, persistent_workers=True)
    others, told = set(multiprocessing.active_children()), set()  # of tests before this one

    def send_all() -> None:
        """As a terminal or Slurm does it: to the main process and its workers, from outside."""
        if not told:  # it is called for each of three batches
            told.update(set(multiprocessing.active_children()) - others)
            processes = [str(number) for number in (os.getpid(), *(worker.pid for worker in told))]
            for number in SIGNALS:
                subprocess.run(['/bin/kill', f'-{int(number)}', *processes], check=True)

    runner = make_runner(pretrain_config)
    runner.register_hook(Act('after_val_iter', send_all, iteration=3))
    with pytest.raises(SystemExit, match='130'):
        runner.train()
    assert len(told) == 2
    assert set(multiprocessing.active_children()) <= others and {worker.exitcode for worker in told} == {0}


def test_where_torch_names_the_end_of_workers_otherwise_they_live_on_and_the_run_ends(pretrain_config, monkeypatch):
    pretrain_config.train_dataloader.update(num_workers=1, persistent_workers=True)
    pretrain_config.train_cfg.max_epochs = 1
    shut_down = _MultiProcessingDataLoaderIter._shutdown_workers
    monkeypatch.setattr(_MultiProcessingDataLoaderIter, '__del__', shut_down)
    monkeypatch.delattr(_MultiProcessingDataLoaderIter, '_shutdown_workers')
    others = set(multiprocessing.active_children())
    runner = make_runner(pretrain_config)
    runner.train()
    assert runner.iter == 3 and len(set(multiprocessing.active_children()) - others) == 1
    shut_down(runner.train_dataloader._iterator)


def test_a_frozen_data_worker_ends_the_run_after_the_loaders_timeout(config, monkeypatch):
    """And is ended itself, as docs/reliability.md says."""
    monkeypatch.setattr(LoadImage, 'transform', lambda *_: time.sleep(60))  # the worker is forked with it
    config.train_dataloader.update(num_workers=1, persistent_workers=True, timeout=1)
    others, begin = set(multiprocessing.active_children()), time.monotonic()
    with pytest.raises(RuntimeError, match='timed out after 1 seconds'):
        make_runner(config).train()
    for worker in set(multiprocessing.active_children()) - others:
        worker.join(20)  # torch tells it to end, but does not wait
    assert time.monotonic() - begin < 40 and set(multiprocessing.active_children()) <= others

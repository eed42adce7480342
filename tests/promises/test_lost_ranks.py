"""A process or data loader worker that dies or freezes ends the run, with a line that names it and where it was."""

import copy
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from helpers import make_runner
from mmengine.hooks import Hook

from beit_mm.datasets.reading import LoadImage
from beit_mm.engine import interruption
from beit_mm.engine.interruption import WAITING, InterruptionHook, Watch
from beit_mm.engine.workers import DeadWorkerError
from beit_mm.terminal import message_for_user


class Ended(SystemExit):
    """In place of the end of the process."""


@pytest.fixture
def ends(monkeypatch) -> list[str]:
    """What the watch would say at the end of this process."""
    ends: list[str] = []

    def end(message: str) -> None:
        ends.append(message)
        raise Ended  # of the thread

    monkeypatch.setattr(interruption, 'end', end)
    return ends


def start_two(main: Callable[[], None], folder: Path) -> list[multiprocessing.Process]:
    """Two processes of one gloo group that call `main`; what they say goes to `said_<rank>` in the folder."""

    def enter(rank: int) -> None:
        said = os.open(folder / f'said_{rank}', os.O_CREAT | os.O_WRONLY)
        os.dup2(said, 2)
        os.environ['MASTER_ADDR'] = '127.0.0.1'
        dist.init_process_group('gloo', f'file://{folder}/group', rank=rank, world_size=2)
        main()

    processes = [multiprocessing.get_context('fork').Process(target=enter, args=(rank,)) for rank in (0, 1)]
    for process in processes:
        process.start()
    return processes


@pytest.mark.parametrize('frozen', [0, 1])
def test_a_frozen_process_ends_the_others(frozen, tmp_path):
    def main() -> None:
        watch = Watch(1.0, dist.new_group(backend='gloo'))
        watch.after_train_iter(SimpleNamespace(iter=40), 40)
        watch.before_train_iter(SimpleNamespace(iter=41), 41)  # a long step: not of itself a reason
        time.sleep(1.4)
        os.write(2, b'alive\n')
        if dist.get_rank() == frozen:
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(30)

    processes = start_two(main, tmp_path)
    processes[1 - frozen].join(25)
    processes[frozen].kill()
    said = (tmp_path / f'said_{1 - frozen}').read_text()
    assert processes[1 - frozen].exitcode == 1
    line = f'error: Rank {frozen} on {socket.gethostname()} has shown no sign of life for 1 s, last seen at iteration '
    assert f'alive\n{line}42, in a step. The run ends; go on with: ' in said


@pytest.mark.parametrize('first', [0, 1])
def test_the_end_of_training_is_no_silence(first, tmp_path):
    """Processes end one after another: the main one writes the last checkpoint."""

    def main() -> None:
        watch = Watch(1.0, dist.new_group(backend='gloo'))
        if dist.get_rank() == first:
            watch.stopped.set()
        time.sleep(1.5)

    processes = start_two(main, tmp_path)
    for process in processes:
        process.join(25)
    assert [process.exitcode for process in processes] == [0, 0]


@pytest.mark.parametrize('phase', ['in a step', 'validating', 'saving', 'starting'])
def test_what_takes_long_is_let_be(phase, ends):
    watch = Watch(0.2, None)
    watch.phase = phase
    time.sleep(0.8)
    watch.stopped.set()
    assert not ends


def test_time_in_which_the_process_stood_still_does_not_count(ends, monkeypatch):
    now = time.monotonic
    suspended = 0.0
    monkeypatch.setattr(interruption.time, 'monotonic', lambda: now() + suspended)
    watch = Watch(5.0, None)
    watch.phase = WAITING
    time.sleep(0.7)
    suspended = 3600.0
    time.sleep(0.8)
    watch.stopped.set()
    assert not ends


def test_a_slow_validation_that_gets_on_is_let_be(ends):
    """Of batches that are read in this process, each faster than the timeout."""
    watch, runner = Watch(0.5, None), SimpleNamespace(val_dataloader=range(9))
    watch.before_val_epoch(runner)
    for index in range(6):
        time.sleep(0.2)  # for the data
        watch.before_val_iter(runner, index)
        watch.after_val_iter(runner, index)
    assert not ends and watch.phase == WAITING
    time.sleep(0.8)
    assert len(ends) == 1 and 'has waited 0.5 s for data' in ends[0]
    watch.stopped.set()


class AfterTwoSteps(Hook):
    """Sends a signal to the first worker."""

    def __init__(self, number: int):
        self.number = number

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None) -> None:
        if runner.iter == 1:
            os.kill(multiprocessing.active_children()[0].pid, self.number)


@pytest.fixture
def runner(pretrain_config, monkeypatch):
    """A run of which the only worker stays long at an image of its third batch."""
    config = copy.deepcopy(pretrain_config)
    config.val_cfg = config.val_dataloader = config.val_evaluator = None
    config.train_dataloader.update(num_workers=1, persistent_workers=True)
    config.train_dataloader.sampler.shuffle = False
    load = LoadImage.transform

    def slow(self, results):
        if results['img_path'].endswith('09.jpg'):
            time.sleep(60)
        return load(self, results)

    monkeypatch.setattr(LoadImage, 'transform', slow)
    return make_runner(config)


def test_a_dead_worker_is_named_with_its_image(runner):
    runner.register_hook(AfterTwoSteps(signal.SIGKILL))
    with pytest.raises(DeadWorkerError, match=r'worker \(pid.* while it was at \S+/09\.jpg\. .*--resume') as caught:
        runner.train()
    assert message_for_user(caught.value) == str(caught.value) and '\n' not in str(caught.value)


def test_a_frozen_worker_is_named_with_its_image(runner, ends):
    runner.register_hook(AfterTwoSteps(signal.SIGSTOP))
    next(hook for hook in runner.hooks if isinstance(hook, InterruptionHook)).timeout = 3.0

    def end(message):
        ends.append(message)
        for worker in multiprocessing.active_children():
            worker.kill()  # as `end` does

    interruption.end = end  # put back by the fixture
    with pytest.raises(DeadWorkerError):
        runner.train()
    assert len(ends) == 1
    assert re.match(r'Rank 0 on .+ has waited 3 s for data at iteration 3; its workers are at \S+/09\.jpg\.', ends[0])


def test_a_killed_process_is_named_by_torchrun(tmp_path):
    """And ends the others at once."""
    (tmp_path / 'script.py').write_text(
        'import os, time\nif os.environ["RANK"] == "1":\n    os.kill(os.getpid(), 9)\ntime.sleep(60)\n'
    )
    command = [sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc_per_node=2']
    result = subprocess.run([*command, tmp_path / 'script.py'], capture_output=True, text=True, timeout=50)
    assert result.returncode == 1
    assert re.search(r'rank\s*: 1 .*exitcode\s*: -9', result.stderr, re.S)

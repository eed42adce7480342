"""A process or data loader worker that dies, or a worker that freezes, ends the run with a line that names it."""

import copy
import os
import re
import signal
import subprocess
import sys
import time

import pytest
from helpers import make_runner
from mmengine.hooks import Hook
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from beit_mm.datasets.reading import LoadImage
from beit_mm.engine.interruption import InterruptionHook
from beit_mm.engine.workers import DeadWorkerError, end_workers
from beit_mm.terminal import message_for_user


class AfterTwoSteps(Hook):
    """Sends a signal to the worker that has come to the slow image."""

    def __init__(self, number: int):
        self.number = number

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None) -> None:
        if runner.iter == 1:
            (loader,) = next(hook for hook in runner.hooks if isinstance(hook, InterruptionHook)).workers
            until = time.monotonic() + 20
            while not any(path.endswith('09.jpg') for path in loader.at_work().values()):
                assert time.monotonic() < until, f'no worker has come to the slow image: {loader.at_work()}'
                time.sleep(0.01)
            (self.worker,) = loader.at_work()  # other tests' workers may be children of this process too
            os.kill(self.worker, self.number)


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


@pytest.mark.parametrize('lost', [None, ConnectionResetError(104, 'Connection reset by peer'), EOFError()], ids=str)
def test_a_dead_worker_is_named_with_its_image(lost, runner, monkeypatch):
    """Also where its connection is lost first, as while it hands a batch over."""

    def receive(self, timeout=None):
        try:
            return try_get(self, 0.1)
        except RuntimeError:  # torch has noticed
            raise lost from None

    try_get = _MultiProcessingDataLoaderIter._try_get_data
    if lost is not None:
        monkeypatch.setattr(_MultiProcessingDataLoaderIter, '_try_get_data', receive)
        monkeypatch.setattr('torch.utils.data._utils.signal_handling._error_if_any_worker_fails', lambda: None)
    runner.register_hook(AfterTwoSteps(signal.SIGKILL))
    with pytest.raises(DeadWorkerError, match=r'worker \(pid.* while it was at \S+/09\.jpg\. .*--resume') as caught:
        runner.train()
    assert message_for_user(caught.value) == str(caught.value) and '\n' not in str(caught.value)


def test_a_frozen_worker_is_named_with_its_image(runner):
    """Where the loader has a timeout."""
    hook = AfterTwoSteps(signal.SIGSTOP)
    runner.register_hook(hook)
    runner.train_dataloader.timeout = 3
    try:
        with pytest.raises(DeadWorkerError, match=r'timed out after 3 seconds while it was at \S+/09\.jpg\.'):
            runner.train()
    finally:
        os.kill(hook.worker, signal.SIGCONT)
        end_workers(runner.train_dataloader)


def test_a_killed_process_is_named_by_torchrun(tmp_path):
    """And ends the others at once."""
    (tmp_path / 'script.py').write_text(
        'import os, time\nif os.environ["RANK"] == "1":\n    os.kill(os.getpid(), 9)\ntime.sleep(60)\n'
    )
    command = [sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc_per_node=2']
    result = subprocess.run([*command, tmp_path / 'script.py'], capture_output=True, text=True, timeout=50)
    assert result.returncode == 1
    assert re.search(r'rank\s*: 1 .*exitcode\s*: -9', result.stderr, re.S)

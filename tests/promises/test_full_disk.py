"""A full disk, or a work directory that is gone, costs logs and pictures: one warning, and the training goes on."""

import contextlib
import errno
import functools
import io
import resource
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from helpers import make_runner
from mmengine.config import Config
from mmengine.hooks import Hook
from mmengine.runner import Runner
from PIL import Image
from torch.utils import tensorboard


class AtStep(Hook):
    """Does something before a step, and counts the steps."""

    def __init__(self, step: int, act: Callable[[Runner], None]):
        self.step, self.act, self.steps = step, act, 0

    def before_train_iter(self, runner: Runner, batch_idx: int, data_batch: dict | None = None) -> None:
        if runner.iter == self.step:
            self.act(runner)
        self.steps += 1


@pytest.fixture
def unhandled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Errors that a thread has ended with and that Python would print; TensorBoard's thread writes at once."""
    monkeypatch.setattr(tensorboard, 'SummaryWriter', functools.partial(tensorboard.SummaryWriter, flush_secs=0.05))
    errors: list[str] = []
    monkeypatch.setattr(threading, 'excepthook', lambda args: errors.append(repr(args)))
    return errors


@contextlib.contextmanager
def file_sizes_restored() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    assert signal.getsignal(signal.SIGXFSZ) == signal.SIG_IGN  # as Python does
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def nothing_fits(runner: Runner) -> None:
    """From now on the kernel refuses each byte, of all files, with EFBIG."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def remove_work_dir(runner: Runner) -> None:
    shutil.rmtree(runner.work_dir)


@pytest.mark.parametrize(
    'act, reason', [(nothing_fits, 'File too large'), (remove_work_dir, 'No such file or directory')]
)
def test_what_cannot_be_written_is_one_warning(act, reason, pretrain_config: Config, unhandled):
    said, errors, watch = io.StringIO(), io.StringIO(), AtStep(2, act)
    with file_sizes_restored(), contextlib.redirect_stdout(said), contextlib.redirect_stderr(errors):
        runner = make_runner(pretrain_config)
        runner.register_hook(watch)
        runner.train()
    assert watch.steps == runner.iter == 6
    warnings = [line for line in said.getvalue().splitlines() if 'logs and pictures' in line]
    assert len(warnings) == 1 and f'{runner.work_dir}: {reason}' in warnings[0], warnings
    full = act is nothing_fits  # a folder that is gone is made again for a checkpoint
    assert ('epoch_2.pth could not be written' in said.getvalue()) == full
    assert Path(runner.work_dir, 'epoch_2.pth').is_file() != full
    assert 'Traceback' not in errors.getvalue() and 'Logging error' not in errors.getvalue(), errors.getvalue()


def test_pictures_that_do_not_fit(pretrain_config: Config, monkeypatch):
    """They are warned of where the logs are written still."""
    write = Image.Image.save

    def full(self, path, *args, **kwargs):
        if 'pictures' in str(path):
            raise OSError(errno.ENOSPC, 'No space left on device')
        write(self, path, *args, **kwargs)

    monkeypatch.setattr(Image.Image, 'save', full)
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        runner = make_runner(pretrain_config)
        runner.train()
    assert runner.iter == 6 and said.getvalue().count('No space left on device') == 1
    assert [*Path(runner.work_dir).glob('*/vis_data/scalars.json')]


def test_an_image_that_cannot_be_read_is_no_such_warning(pretrain_config: Config, images, tmp_path):
    """It is an OSError too, and ends the run where the data set says so."""
    shutil.copytree(images, tmp_path / 'copy')
    pretrain_config.val_dataloader.dataset.data_root = str(tmp_path / 'copy')
    runner = make_runner(pretrain_config)
    runner.register_hook(AtStep(2, lambda _: (tmp_path / 'copy/00.jpg').write_bytes(b'')))
    with pytest.raises(OSError, match='00.jpg'):
        runner.train()

"""A full disk, or a work directory that is gone, costs logs and pictures: one warning, and the training goes on."""

import resource
import shutil
import threading
from functools import partial
from pathlib import Path

import pytest
from helpers import file_size_limit, train
from mmengine.config import Config
from promises.test_interruption import Act


def nothing_fits(folder: Path) -> None:
    """From now on the kernel refuses each byte, of all files, with EFBIG."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


@pytest.mark.parametrize(
    ('act', 'reason'), [(nothing_fits, 'File too large'), (shutil.rmtree, 'No such file or directory')]
)
def test_what_cannot_be_written_is_one_warning(act, reason, pretrain_config: Config, monkeypatch, capsys):
    monkeypatch.setattr(threading, 'excepthook', lambda _: None)  # TensorBoard's thread may end with a traceback
    folder = Path(pretrain_config.work_dir)
    pretrain_config.custom_hooks.append(dict(type='beit_mm.ReconstructionHook'))
    with file_size_limit(resource.RLIM_INFINITY):  # as before afterwards
        runner = train(pretrain_config, Act('before_train_iter', partial(act, folder), 2))
    said, errors = capsys.readouterr()
    assert runner.iter == 6
    warnings = [line for line in said.splitlines() if 'logs and pictures' in line]
    assert len(warnings) == 1 and f'{folder}: {reason}' in warnings[0], warnings
    full = act is nothing_fits  # a folder that is gone is made again for a checkpoint
    assert ('epoch_2.pth could not be written' in said) == full != (folder / 'epoch_2.pth').is_file()
    assert 'Traceback' not in errors and 'Logging error' not in errors, errors

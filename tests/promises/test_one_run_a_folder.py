"""Two runs at once in one work directory are refused, before anything in it is touched."""

import errno
import multiprocessing
import os
from multiprocessing.connection import Connection
from pathlib import Path
from unittest.mock import Mock

import pytest
from helpers import make_runner, tree

from beit_mm.apis import commands
from beit_mm.engine.resuming import resumed_from
from beit_mm.engine.signals import InterruptionHook


def hold(folder: Path, pipe: Connection) -> None:
    hook = InterruptionHook()
    pipe.send(hook.take_lock(folder))
    pipe.recv()  # for ever


@pytest.fixture
def other(tmp_path):
    """Another process that has a run in the folder `work`."""
    (tmp_path / 'work').mkdir()
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context('fork').Process(target=hold, args=(tmp_path / 'work', theirs))
    process.start()
    assert ours.recv() is None
    yield process
    process.kill()


def test_a_second_run_is_refused_and_touches_nothing(other, pretrain_config, tmp_path):
    half_written = tmp_path / 'work/epoch_1.pth.0123abcd.part'  # by the other process, just now
    half_written.touch()
    with pytest.raises(ValueError, match=f'process {other.pid} on .+ --work-dir or --out'):
        make_runner(pretrain_config).train()
    assert half_written.exists() and not list((tmp_path / 'work').glob('*.pth'))

    other.kill()  # without a chance to clean up
    other.join()
    make_runner(pretrain_config).train()
    assert not half_written.exists() and (tmp_path / 'work/epoch_2.pth').exists()
    assert (tmp_path / 'work/run.lock').read_text().startswith(f'process {os.getpid()} on ')


@pytest.mark.parametrize('words', [[], ['--verbose']])
def test_a_second_command_leaves_config_and_logs_of_the_first(words, other, pretrain_config, tmp_path):
    """Nothing new lies beside them either: logs of the same second would have the same names."""
    work, config = tmp_path / 'work', tmp_path / 'mine.py'
    pretrain_config.dump(config)
    (work / 'mine.py').write_text('# of the first')
    before = tree(work)
    with pytest.raises(ValueError, match=f'process {other.pid} on .+ --work-dir or --out'):
        commands.train([str(config), '--work-dir', str(work), *words])
    assert tree(work) == before


def test_a_training_is_tested_beside_it(other, pretrain_config, tmp_path, monkeypatch):
    """Without a lock, and without a look at its checkpoints."""
    locks, half_written = [], tmp_path / 'work/epoch_1.pth.0123abcd.part'
    half_written.touch()
    monkeypatch.setattr('beit_mm.engine.signals.lock_folder', locks.append)
    monkeypatch.setenv('SLURM_RESTART_COUNT', '1')
    (runner := make_runner(pretrain_config)).test()
    assert resumed_from(runner) is None and half_written.exists() and not locks
    assert make_runner(pretrain_config).val()


def test_where_a_folder_cannot_be_locked_a_run_is_warned(tmp_path, monkeypatch, warnings):
    monkeypatch.setattr('fcntl.flock', Mock(side_effect=OSError(errno.ENOLCK, 'No locks available')))
    InterruptionHook().take_lock(tmp_path)
    assert warnings()[0].startswith(f'{tmp_path} cannot be locked')

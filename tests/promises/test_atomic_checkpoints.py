"""A good checkpoint is on the disk at every moment, and `--resume` finds it, whatever happened to the others."""

import copy
import os
import zipfile
from pathlib import Path

import pytest
import torch
from conftest import narrow_pretraining
from helpers import file_size_limit, make_runner, train
from mmengine.config import Config

from beit_mm.checkpoint.read import CheckpointError, read_checkpoint
from beit_mm.engine import checkpoints
from beit_mm.files import atomic_file


@pytest.fixture
def config(images: Path, tmp_path: Path) -> Config:
    """Six steps, a checkpoint after each, one of them kept."""
    config = narrow_pretraining(images, tmp_path)
    config.train_cfg = dict(type='beit_mm.EpochLoop', max_epochs=2)
    config.val_cfg = config.val_dataloader = config.val_evaluator = None
    config.default_hooks.checkpoint = dict(type='beit_mm.CheckpointHook', by_epoch=False, interval=1, max_keep_ckpts=1)
    return config


@pytest.fixture
def scored(config, images, monkeypatch):
    """A function that gives the config two validations, with these scores."""

    def set_scores(*scores: dict, **checkpoint: object) -> None:
        narrow = narrow_pretraining(images, Path(config.work_dir).parent)
        for key in ('val_cfg', 'val_dataloader', 'val_evaluator'):
            config[key] = narrow[key]
        config.train_cfg.val_interval = 1
        config.default_hooks.checkpoint.update(checkpoint)
        rest = iter(scores)
        monkeypatch.setattr('mmengine.evaluator.Evaluator.evaluate', lambda self, size: next(rest))

    return set_scores


@pytest.fixture(autouse=True)
def _pathlib_calls_os_unlink(monkeypatch):
    """Python 3.10's pathlib keeps a reference of its own, which a test that replaces os.unlink would miss."""

    def unlink(path: Path, missing_ok: bool = False) -> None:
        try:
            os.unlink(path)
        except FileNotFoundError:
            if not missing_ok:
                raise

    monkeypatch.setattr(Path, 'unlink', unlink)


class Killed(BaseException):
    """Stands for a process that is gone: no clean-up that an ordinary error would get."""


def readable(folder: Path) -> list[str]:
    """Names of the resumable checkpoints that read without an error."""
    return [file.name for file in sorted(folder.glob('*.pth')) if 'optimizer' in read_checkpoint(file)]


def names(config: Config) -> list[str]:
    files = [file for file in Path(config.work_dir).glob('*') if file.is_file() and file.suffix != '.py']
    return sorted(file.name for file in files if file.name != 'run.lock')


def chosen(config: Config, **changes: object) -> str | None:
    """What a run would resume from, as far as its hooks choose before it starts."""
    runner = make_runner(copy.deepcopy(Config(dict(config, **changes))))
    runner._train_loop = runner.build_train_loop(runner._train_loop)
    runner.call_hook('before_run')
    runner.call_hook('after_run')
    return runner._load_from


# --- how a file is written ------------------------------------------------------------------------


def test_a_checkpoint_is_on_the_disk_before_it_gets_its_name(config, monkeypatch):
    """A power cut leaves the old file or the new one: bytes first, then the name, then the folder's list of names."""
    folder, done, fsync, replace = Path(config.work_dir), [], os.fsync, os.replace

    def synced(number):
        fsync(number)
        done.append(('fsync', os.readlink(f'/proc/self/fd/{number}'), os.fstat(number).st_size))

    def renamed(source, target):
        replace(source, target)
        done.append(('replace', str(source), str(target)))

    monkeypatch.setattr(os, 'fsync', synced)
    monkeypatch.setattr(os, 'replace', renamed)
    train(config)
    for name in ('iter_6.pth', 'last_checkpoint'):
        path = folder / name
        last = max(index for index, (what, _, target) in enumerate(done) if what == 'replace' and target == str(path))
        bytes_first, (_, partial, _), (what, where, _) = done[last - 1 : last + 2]
        assert bytes_first == ('fsync', partial, path.stat().st_size) and (what, where) == ('fsync', str(folder))


def test_an_atomic_file_is_whole_or_not_there(tmp_path):
    path = tmp_path / 'folder' / 'file'
    with atomic_file(path) as file:
        file.write(b'old')
        assert not path.exists()
    with pytest.raises(ZeroDivisionError), atomic_file(path) as file:
        file.write(b'new')
        raise ZeroDivisionError
    assert path.read_bytes() == b'old' and os.listdir(path.parent) == ['file']
    (tmp_path / 'other').touch()
    assert path.stat().st_mode == (tmp_path / 'other').stat().st_mode


def test_there_is_a_good_file_before_and_after_every_change_of_the_folder(config, monkeypatch):
    """The folder is looked at whenever a file gets its name or goes."""
    folder, seen = Path(config.work_dir), []
    for name in ('replace', 'unlink'):
        change = getattr(os, name)

        def looked(*args, change=change, **kwargs):
            seen.append(readable(folder))
            change(*args, **kwargs)
            seen.append(readable(folder))

        monkeypatch.setattr(os, name, looked)
    train(config)
    first = next(index for index, found in enumerate(seen) if found)
    assert first <= 4 and len(seen) > 20 and all(seen[first:])
    assert names(config) == ['iter_6.pth', 'last_checkpoint', 'run_id']
    assert (folder / 'last_checkpoint').read_text() == str(folder / 'iter_6.pth')


@pytest.mark.parametrize('full', [(3, 4), (3, 4, 5, 6)])
def test_a_full_disk_ends_no_run_and_takes_no_file_away(full, config, monkeypatch, capfd):
    """Neither the best checkpoint, nor one for a bad step, nor the end of the run is a reason to."""
    folder, save, found = Path(config.work_dir), checkpoints.CheckpointHook.save, {}

    def on_a_full_disk(self, runner, name, **options):
        number = runner.iter + 1
        with file_size_limit(20_000 if name in [f'iter_{step}.pth' for step in full] else 2**30):
            path = save(self, runner, name, **options)
        found.setdefault(number, readable(folder))
        if name == 'iter_4.pth':
            (folder / 'interrupted.pth').write_bytes((folder / 'iter_2.pth').read_bytes())
            save(self, runner, 'bad_step_4/checkpoint.pth')
            assert self.save_if_best(runner, 'loss', dict(loss=1.0), 4)
        return path

    monkeypatch.setattr(checkpoints.CheckpointHook, 'save', on_a_full_disk)
    assert train(config).iter == 6
    stays = ['interrupted.pth', 'iter_2.pth']
    assert found == {
        **{1: ['iter_1.pth'], 2: ['iter_2.pth'], 3: ['iter_2.pth'], 4: ['iter_2.pth']},
        **{step: stays if step in full else [f'iter_{step}.pth'] for step in (5, 6)},
    }
    assert 'iter_4.pth could not be written' in ' '.join(capfd.readouterr())


# --- what a run resumes from ----------------------------------------------------------------------


def damaged(path: Path) -> None:
    """One byte in the middle of a tensor is another."""
    with zipfile.ZipFile(path) as archive:
        largest = max(archive.infolist(), key=lambda entry: entry.file_size)
    data = bytearray(path.read_bytes())
    name, extra = (int.from_bytes(data[largest.header_offset + at :][:2], 'little') for at in (26, 28))
    data[largest.header_offset + 30 + name + extra + largest.file_size // 2] ^= 255
    path.write_bytes(data)


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1000])


def emptied(path: Path) -> None:
    path.write_bytes(b'')


STRANGE = {
    'an iteration that is no number': dict(meta=dict(iter=float('inf'), epoch=0), state_dict={}, optimizer={}),
    'a meta that is a list': dict(meta=[1], state_dict={}, optimizer={}),
    'a batch that is text': dict(meta=dict(iter=99, epoch=0, batch='x'), state_dict={}, optimizer={}),
    'no weights': dict(meta=dict(iter=99, epoch=0), optimizer={}),
    'numbers': {1: 2},
}


@pytest.mark.parametrize(
    ('harm', 'pointer'), [(damaged, 'iter_6.pth'), (cut_short, 'iter_99.pth'), (emptied, ''), (damaged, None)]
)
def test_resume_takes_the_newest_that_is_whole_and_names_the_others(harm, pointer, config, capfd):
    config.default_hooks.checkpoint.max_keep_ckpts = 3
    folder = Path(config.work_dir)
    train(config)
    harm(folder / 'iter_6.pth')
    for name, content in STRANGE.items():
        torch.save(content, folder / f'{name}.pth')
    os.utime(folder / 'iter_4.pth')  # as after a copy: the times say nothing
    (folder / 'last_checkpoint').unlink()
    if pointer is not None:
        (folder / 'last_checkpoint').write_text(pointer)
    capfd.readouterr()
    assert chosen(config, resume=True) == str(folder / 'iter_5.pth')
    passed_over = ' '.join(capfd.readouterr()).partition('Passed over: ')[2]
    assert 'iter_6.pth is ' in passed_over
    assert all(f'{name}.pth' in passed_over for name in STRANGE if name != 'numbers')


def test_a_flipped_bit_in_a_named_file_is_noticed_too(config):
    train(config)
    path = Path(config.work_dir, 'iter_6.pth')
    damaged(path)
    for resume in (True, False):
        with pytest.raises(CheckpointError, match=r'iter_6.pth is damaged .* does not have its check sum'):
            train(config, load_from=str(path), resume=resume)


def test_checkpoints_of_which_none_is_whole_are_not_started_over(config):
    train(config)
    emptied(Path(config.work_dir, 'iter_6.pth'))
    said = r"None of this run's checkpoints in .* can be resumed: iter_6.pth is no checkpoint"
    with pytest.raises(CheckpointError, match=said):
        train(config, resume=True)
    assert names(config) == ['iter_6.pth', 'last_checkpoint', 'run_id']


def test_an_empty_folder_starts_at_the_beginning_and_a_restarted_run_resumes(config, monkeypatch):
    assert train(config, resume=True).iter == 6
    for variable in ('TORCHELASTIC_RESTART_COUNT', 'SLURM_RESTART_COUNT'):
        for count, expected in (('0', None), ('1', f'{config.work_dir}/iter_6.pth')):
            monkeypatch.setenv(variable, count)
            assert chosen(config) == expected, (variable, count)
        monkeypatch.delenv(variable)


@pytest.mark.parametrize(('place', 'left'), [('save', None), ('after_train', 'iter_2.pth')])
def test_no_run_resumes_from_one_before_the_last(config, place, left, monkeypatch):
    """A new run in the folder of an old one, which came farther; killed before and after its first checkpoint."""
    train(config)
    folder, hook = Path(config.work_dir), checkpoints.CheckpointHook
    (folder / 'iter_6.pth').rename(folder / 'iter_9.pth')
    config.train_cfg.max_epochs = 1
    config.default_hooks.checkpoint.update(interval=2, save_last=False)

    def killed(*_, **__):
        raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(hook, place, killed)
        patch.setattr(hook, 'every_n_train_iters', lambda self, runner, *_: runner.iter == 1)
        train(config)
    if left is None:
        with pytest.raises(CheckpointError, match='checkpoints of an earlier run only, such as iter_9.pth; .*FILE'):
            chosen(config, resume=True)
    else:
        assert chosen(config, resume=True) == str(folder / left)
    monkeypatch.setenv('TORCHELASTIC_RESTART_COUNT', '1')
    assert chosen(config) == (left and str(folder / left))


def test_a_test_looks_for_no_checkpoint(config, images, monkeypatch):
    train(config)
    leftover = Path(config.work_dir) / f'x.{"0" * 8}.part'
    leftover.touch()
    monkeypatch.setenv('SLURM_RESTART_COUNT', '1')
    runner = make_runner(narrow_pretraining(images, Path(config.work_dir).parent))
    runner.test()
    assert runner._load_from is None and leftover.exists()


# --- the best -------------------------------------------------------------------------------------


TWO = ['mim_loss', 'single-label/accuracy']


@pytest.mark.parametrize(
    ('wanted', 'scores', 'kept'),
    [  # a loss is good when it is low, an accuracy when it is high
        ('auto', [dict(mim_loss=2.0, x=0), dict(mim_loss=1.0, x=0)], ['best_mim_loss_iter_6.pth']),
        ('auto', [dict(mim_loss=1.0), dict(mim_loss=1.0)], ['best_mim_loss_iter_3.pth']),
        (
            TWO,
            [dict(zip(TWO, (1.0, 3.0), strict=True)), dict(zip(TWO, (2.0, 4.0), strict=True))],
            ['best_mim_loss_iter_3.pth', 'best_single-label_accuracy_iter_6.pth'],
        ),
        ('mim_los', [dict(mim_loss=1.0)], 'the validation measures mim_loss'),
        ('x', [dict(x=1.0)], "whether a high x is good is unknown; set the CheckpointHook's rule"),
    ],
)
def test_the_best_of_each_metric_is_kept(wanted, scores, kept, config, scored):
    scored(*scores, save_best=wanted)
    if isinstance(kept, str):
        with pytest.raises(ValueError, match=kept):
            train(config)
    else:
        train(config)
        assert sorted(path.name for path in Path(config.work_dir).glob('best_*')) == kept


def test_a_run_that_was_resumed_twice_replaces_its_best_checkpoint(config, scored):
    scored(*(dict(mim_loss=score) for score in (2.0, 3.0, 1.0)), by_epoch=True, save_best='mim_loss')
    for epochs in (1, 2, 3):
        config.train_cfg.max_epochs = epochs
        train(config, resume=True)
    assert [path.name for path in Path(config.work_dir).glob('best_*')] == ['best_mim_loss_epoch_3.pth']

"""A good checkpoint is on the disk at every moment, and `--resume` finds it, whatever happened to the others."""

import copy
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from conftest import narrow_pretraining
from helpers import file_size_limit, make_runner, train
from mmengine.config import Config
from mmengine.logging import MessageHub
from promises.test_resume import differences

from beit_mm.checkpoint.read import CheckpointError, read_checkpoint
from beit_mm.engine import checkpoints
from beit_mm.engine.resuming import asked_for, resume_instead, resumed_from
from beit_mm.files import atomic_file


def six_steps(images: Path, folder: Path, **checkpoint: object) -> Config:
    """A checkpoint after each step, one of them kept."""
    config = narrow_pretraining(images, folder)
    config.val_cfg = config.val_dataloader = config.val_evaluator = None
    kept = dict(type='beit_mm.CheckpointHook', by_epoch=False, interval=1, max_keep_ckpts=1)
    config.default_hooks.checkpoint = dict(kept, **checkpoint)
    return config


@pytest.fixture
def config(images: Path, tmp_path: Path) -> Config:
    return six_steps(images, tmp_path)


@pytest.fixture(scope='module')
def trained(images: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a run that kept its last three checkpoints."""
    return train(six_steps(images, tmp_path_factory.mktemp('trained'), max_keep_ckpts=3)).work_dir


@pytest.fixture
def folder(config, trained) -> Path:
    """A copy of it where the config's run would write."""
    return Path(shutil.copytree(trained, config.work_dir))


def readable(folder: Path) -> list[str]:
    """Names of the resumable checkpoints that read without an error."""
    return [file.name for file in sorted(folder.glob('*.pth')) if 'optimizer' in read_checkpoint(file)]


def chosen(config: Config, **changes: object) -> str | None:
    """What a run would resume from, as far as its hooks choose before it starts."""
    runner = make_runner(copy.deepcopy(Config(dict(config, **changes))))
    assert runner.train_loop is not None  # now it is built
    runner.optim_wrapper = runner.build_optim_wrapper(runner.optim_wrapper)  # as `train` does first
    runner.call_hook('before_run')
    runner.call_hook('after_run')
    return resumed_from(runner) or asked_for(runner)[1]


def test_a_file_is_on_the_disk_before_it_gets_its_name(tmp_path, monkeypatch):
    """A power cut leaves the old file or the new one: bytes first, then the name, then the folder's list of names."""
    path, done, fsync, replace = tmp_path / 'file', [], os.fsync, os.replace

    def synced(number: int) -> None:
        fsync(number)
        done.append((os.readlink(f'/proc/self/fd/{number}'), os.fstat(number).st_size))

    monkeypatch.setattr(os, 'fsync', synced)
    monkeypatch.setattr(os, 'replace', lambda *names: replace(*names) or done.append((*map(str, names),)))
    with atomic_file(path) as file:
        file.write(b'new')
    (partial, size), rename, (folder, _) = done
    assert size == 3 and rename == (partial, str(path)) and folder == str(tmp_path)


def test_a_full_disk_ends_no_run_and_takes_no_file_away(config, monkeypatch, capfd):
    """Neither the best checkpoint, nor one for a bad step, nor the end of the run is a reason to."""
    folder, save, found = Path(config.work_dir), checkpoints.CheckpointHook.save, {}

    def on_a_full_disk(self, runner, name, **options):
        number = runner.iter + 1
        with file_size_limit(20_000 if name in ('iter_3.pth', 'iter_4.pth', 'iter_6.pth') else 2**30):
            path = save(self, runner, name, **options)
        found.setdefault(number, readable(folder))
        if name == 'iter_4.pth':
            (folder / 'interrupted.pth').write_bytes((folder / 'iter_2.pth').read_bytes())
            self.save_if_best(runner, 'loss', dict(loss=1.0))
        return path

    monkeypatch.setattr(checkpoints.CheckpointHook, 'save', on_a_full_disk)
    assert train(config).iter == 6
    assert found == {number: [f'iter_{kept}.pth'] for number, kept in enumerate((1, 2, 2, 2, 5, 5), start=1)}
    assert 'iter_4.pth could not be written' in ' '.join(capfd.readouterr())
    assert (folder / 'last_checkpoint').read_text() == str(folder / 'iter_5.pth')


def damaged(path: Path) -> None:
    """One byte in the middle of a tensor is another."""
    tensors = torch.load(path, weights_only=True)['state_dict'].values()
    values, data = max((tensor.numpy().tobytes() for tensor in tensors), key=len), bytearray(path.read_bytes())
    data[data.index(values) + len(values) // 2] ^= 255
    path.write_bytes(data)


def cut_short(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1000)


@pytest.mark.parametrize(('harm', 'pointer'), [(damaged, 'iter_6.pth'), (cut_short, None)])
def test_resume_takes_the_newest_that_is_whole_and_names_the_others(harm, pointer, config, folder, capfd):
    harm(folder / 'iter_6.pth')
    (folder / 'iter_10.pth').write_bytes(b'')
    (folder / 'numbers.pth').write_bytes(b'')  # it has no name of a run's checkpoints
    os.utime(folder / 'iter_4.pth')  # as after a copy: the times say nothing
    (folder / 'last_checkpoint').unlink()
    if pointer is not None:
        (folder / 'last_checkpoint').write_text(pointer)
    capfd.readouterr()
    assert chosen(config, resume=True) == str(folder / 'iter_5.pth')
    skipped = ' '.join(capfd.readouterr()).partition('Skipped checkpoints: ')[2]
    assert [name in skipped for name in ('iter_6', 'iter_10', 'numbers')] == [True, True, False]


def test_the_newest_is_the_last_written_then_the_interrupted_one_then_the_highest(config, folder):
    (folder / 'iter_6.pth').rename(folder / 'iter_10.pth')  # more digits, so later
    assert chosen(config, resume=True) == str(folder / 'iter_10.pth')
    shutil.copy(folder / 'iter_5.pth', folder / 'interrupted.pth')
    assert chosen(config, resume=True) == str(folder / 'interrupted.pth')
    (folder / 'last_checkpoint').write_text('/before/it/was/moved/iter_5.pth')
    assert chosen(config, resume=True) == str(folder / 'iter_5.pth')


def test_a_flipped_bit_in_a_named_file_is_noticed_too(config, folder):
    path = folder / 'iter_6.pth'
    damaged(path)
    for resume in (True, False):
        with pytest.raises(CheckpointError, match=r'iter_6.pth is damaged.*checksum'):
            train(config, load_from=str(path), resume=resume)


def test_checkpoints_of_which_none_is_whole_are_not_started_over(config, folder):
    for path in folder.glob('*.pth'):
        path.write_bytes(b'')
    with pytest.raises(CheckpointError, match='iter_6.pth .*; iter_5.pth .*; iter_4.pth '):
        train(config, resume=True)
    assert {path.stat().st_size for path in folder.glob('*.pth')} == {0}


@pytest.mark.parametrize('variable', ['TORCHELASTIC_RESTART_COUNT', 'SLURM_RESTART_COUNT'])
def test_a_restarted_run_resumes(variable, config, folder, monkeypatch):
    for count, expected in (('0', None), ('1', f'{folder}/iter_6.pth')):
        monkeypatch.setenv(variable, count)
        assert chosen(config) == expected


@pytest.mark.parametrize('kind', ['EMAHook', 'mmpretrain.EMAHook'])
def test_weights_and_their_average_are_those_that_the_same_choice_by_hand_gives(kind, config, images, monkeypatch):
    """A file holds the average as its weights, and hooks ask whether the run resumes to tell the two apart."""
    config.custom_hooks.append(dict(type=kind, momentum=0.1))
    folder = Path(config.work_dir)

    def last(name: str, **changes: object) -> dict:
        found = train(config, work_dir=str(folder / name), **changes).work_dir
        return torch.load(Path(found, 'last_checkpoint').read_text(), weights_only=True)

    whole = last('whole', **{'default_hooks.checkpoint.max_keep_ckpts': -1})
    weights = str(folder / 'whole/iter_3.pth')
    begun = last('begun', load_from=weights)
    assert differences(whole, begun) and not differences(begun, last('empty', load_from=weights, resume='auto'))
    (folder / 'restarted').mkdir()
    shutil.copy(weights, folder / 'restarted')
    monkeypatch.setenv('TORCHELASTIC_RESTART_COUNT', '1')
    assert not differences(whole, last('restarted'))


@pytest.mark.parametrize(('path', 'loaded'), [('newest.pth', 'newest.pth'), (None, 'weights.pth')])
def test_what_is_chosen_is_loaded_once_also_by_a_runner_without_mmengines_private_names(path, loaded):
    calls = []
    config = dict(resume='auto', load_from='weights.pth')
    runner = SimpleNamespace(cfg=config, message_hub=MessageHub(f'chosen {path}'), resume=calls.append)
    runner.load_checkpoint = calls.append
    assert asked_for(runner) == ('auto', 'weights.pth') and resumed_from(runner) == 'weights.pth'
    resume_instead(runner, path)
    runner.load_or_resume()
    runner.load_or_resume()  # for a test after the training
    assert calls == [loaded] and resumed_from(runner) == path


def test_a_run_without_a_checkpoint_begins_with_load_from_and_names_the_folder(config, folder, tmp_path, capfd):
    wanted = dict(resume='auto', load_from='weights.pth')
    assert chosen(config, **wanted) == str(folder / 'iter_6.pth')
    capfd.readouterr()
    assert chosen(config, work_dir=str(tmp_path / 'mistyped'), **wanted) == 'weights.pth'
    lines = [line for line in ''.join(capfd.readouterr()).splitlines() if 'WARNING' in line]
    assert any(f'{tmp_path}/mistyped' in line and 'weights.pth' in line for line in lines), lines


def test_no_run_resumes_from_one_before_the_last(config, folder, monkeypatch):
    """A new run in the folder of an old one, which came farther, is killed before it has saved anything, and after."""
    (folder / 'iter_6.pth').rename(folder / 'iter_9.pth')
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(checkpoints.CheckpointHook, 'save', Mock(side_effect=KeyboardInterrupt))
        train(config)
    with pytest.raises(CheckpointError, match='checkpoints of an earlier run only; .*--resume iter_9.pth'):
        chosen(config, resume=True)
    with monkeypatch.context() as patch:
        patch.setenv('TORCHELASTIC_RESTART_COUNT', '1')
        assert chosen(config) is None
    config.train_cfg.max_epochs = 1
    train(config)
    assert chosen(config, resume=True) == str(folder / 'iter_3.pth')


@pytest.mark.parametrize(
    ('wanted', 'scores', 'kept'),
    [  # a loss is good when it is low, an accuracy when it is high
        ('auto', [dict(mim_loss=2.0, x=0), dict(mim_loss=1.0, x=0)], ['best_mim_loss_iter_2.pth']),
        ('single/accuracy', [{'single/accuracy': 3.0}], ['best_single_accuracy_iter_1.pth']),
        (
            ['mim_loss', 'accuracy'],
            [dict(mim_loss=1.0, accuracy=3.0), dict(mim_loss=1.0, accuracy=4.0)],
            ['best_mim_loss_iter_1.pth', 'best_accuracy_iter_2.pth'],
        ),
    ],
)
def test_the_best_of_each_metric_is_kept(wanted, scores, kept, tmp_path, monkeypatch):
    hook, files = checkpoints.CheckpointHook(by_epoch=False, save_best=wanted), []
    runner = SimpleNamespace(message_hub=MessageHub.get_instance(str(tmp_path)), work_dir=tmp_path)

    def save(runner, name, resumable, replaces):
        assert not resumable
        files[:] = [*(file for file in files if file not in replaces), name]
        return tmp_path / name

    monkeypatch.setattr(hook, 'save', save)
    for runner.iter, metrics in enumerate(scores, start=1):
        for metric in hook.save_best:
            hook.save_if_best(runner, metric, metrics)
    assert files == kept
    for metric, said in (('mim_los', 'the validation measures x'), ('x', 'whether a high x is good is unknown')):
        with pytest.raises(ValueError, match=said):
            hook.save_if_best(runner, metric, dict(x=1.0))


def test_a_run_that_was_resumed_twice_replaces_its_best_checkpoint(config, images, monkeypatch):
    narrow = narrow_pretraining(images, Path())
    scores = iter([2.0, 2.0, 3.0, 3.0, 1.0])  # the checkpoints are from before their validations, which are repeated
    config.update({key: narrow[key] for key in ('val_cfg', 'val_dataloader', 'val_evaluator')})
    config.default_hooks.checkpoint.update(by_epoch=True, save_best='mim_loss')
    monkeypatch.setattr('mmengine.evaluator.Evaluator.evaluate', lambda self, size: dict(mim_loss=next(scores)))
    for epochs in (1, 2, 3):
        config.train_cfg.max_epochs = epochs
        train(config, resume=True)
    assert [path.name for path in Path(config.work_dir).glob('best_*')] == ['best_mim_loss_epoch_3.pth']


def test_a_run_that_a_hook_ends_early_is_saved_and_goes_on_from_there(pretrain_config):
    pretrain_config.default_hooks.checkpoint.update(interval=5, by_epoch=False)
    pretrain_config.optim_wrapper.accumulative_counts = 2  # it ends between the two batches of a step
    hook = dict(type='EarlyStoppingHook', monitor='mim_loss', rule='less', stopping_threshold=100.0)
    runner = train(Config(dict(pretrain_config, custom_hooks=[*pretrain_config.custom_hooks, hook])))
    assert runner.iter == 3 and readable(Path(runner.work_dir)) == ['iter_3.pth']
    assert train(pretrain_config, resume=True).iter == 6


def test_a_resumed_run_ends_early_where_the_whole_one_does(pretrain_config):
    pretrain_config.default_hooks.checkpoint.update(interval=1, max_keep_ckpts=-1, save_best='mim_loss')
    pretrain_config.train_cfg.update(max_epochs=6, val_interval=1)
    hook = dict(type='EarlyStoppingHook', monitor='mim_loss', patience=2, min_delta=100.0)
    config = Config(dict(pretrain_config, custom_hooks=[*pretrain_config.custom_hooks, hook]))
    assert (whole := train(config)).iter == 9  # after three epochs: the first one has the best loss
    assert train(config, resume=True, load_from=str(Path(whole.work_dir, 'epoch_2.pth'))).iter == 9


def test_an_interval_in_epochs_has_no_effect_in_a_run_of_iterations_which_is_said(config, monkeypatch):
    monkeypatch.setattr(checkpoints, 'warn', (said := []).append)
    for unit, number in dict(iter=0, epoch=1).items():
        config.default_hooks.checkpoint.update(by_epoch=unit == 'epoch', interval=2)
        config.train_cfg = dict(type='beit_mm.IterLoop', max_iters=6)
        train(config)
        assert len([text for text in said if 'by_epoch=False' in text]) == number

"""What happens to files and disks while a run goes on: it says so and goes on, or the same call does."""

import json
import os
import pkgutil
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import ROOT, file_size_limit, interrupt_after
from label_maps import make_label_maps
from labelled import make_images
from promises.test_resume import differences

import beit_mm
from beit_mm.engine.logs import ThroughputHook
from beit_mm.errors import UserError
from beit_mm.own_images import images as finding
from beit_mm.own_images.run import Run

pytestmark = pytest.mark.long


@pytest.fixture(autouse=True)
def few_images(monkeypatch):
    monkeypatch.setattr(finding, 'MIN_IMAGES', 10)


@pytest.fixture
def classes(tmp_path) -> Path:
    return make_images(tmp_path / 'images', 12) / 'train'


def finetune(images: Path, out: Path, base: str) -> Path:
    return beit_mm.finetune(images, out, base, batch=4, workers=0, epochs=1)


def lost(folder: Path, kind: str) -> tuple[Path, list[Path]]:
    """A folder of images, and files of it to lose; the first is to learn from."""
    if kind == 'classes':
        images = make_images(folder, 12) / 'train'
        return images, [images / 'red/3.png', images.parent / 'val/blue/1.png']
    images = make_label_maps(folder, 12)
    names = 'annotations/training/3', 'annotations/validation/1', 'images/validation/2'
    return images, [images / f'{name}.png' for name in names]


@pytest.mark.parametrize('stopped', [False, True])
@pytest.mark.parametrize('kind', ['classes', 'maps'])
def test_a_run_goes_on_without_files_that_are_gone(kind, stopped, base, tmp_path, monkeypatch, capsys):
    """They go after the second step; stopped then, the same call resumes it."""
    images, files = lost(tmp_path / 'data', kind)
    after, made = ThroughputHook.after_train_iter, []

    def lose(hook: ThroughputHook, runner, *args, **kwargs) -> None:
        after(hook, runner, *args, **kwargs)
        made.append(runner.iter)
        for file in files if runner.iter == 1 else ():
            file.unlink()

    monkeypatch.setattr(ThroughputHook, 'after_train_iter', lose)
    if stopped:
        interrupt_after(monkeypatch, 'finetune', 1)
        with pytest.raises(SystemExit):
            finetune(images, tmp_path / 'run', base)
    assert finetune(images, tmp_path / 'run', base).is_file() and (tmp_path / 'run/report.md').is_file()
    assert made == [*range(len(made))] and ('are gone' in capsys.readouterr().out) == stopped
    listed = {*(tmp_path / 'run/finetune/unreadable_images.txt').read_text().split()}
    assert {*map(str, files[1:])} <= listed <= {*map(str, files)}  # the first may have been seen before


def test_a_disk_that_is_too_small_is_refused_before_the_training(classes, base, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=10_000)
    monkeypatch.setattr('shutil.disk_usage', lambda _: usage)
    with pytest.raises(UserError, match=f'on the disk of {tmp_path}/run'):
        finetune(classes, tmp_path / 'run', base)
    assert [path.name for path in (tmp_path / 'run').iterdir()] == ['run.lock']


def test_checkpoints_of_a_run_need_no_room_again_when_it_resumes(tmp_path, monkeypatch):
    plan = SimpleNamespace(depth=2, width=100)  # weights of 0.96 MB, seven times: 6.72 MB
    run = SimpleNamespace(task=SimpleNamespace(plan=plan), record=SimpleNamespace(options={}), folder=tmp_path)
    usage = shutil.disk_usage(tmp_path)._replace(free=3_000_000)
    monkeypatch.setattr('shutil.disk_usage', lambda _: usage)
    with pytest.raises(UserError, match='^3 MB are free .* expected 7 for'):
        Run.check_space(run)
    (tmp_path / 'finetune').mkdir()
    (tmp_path / 'finetune/iter_3.pth').write_bytes(bytes(3_750_000))
    Run.check_space(run)


def test_weights_that_a_full_disk_refuses_are_written_by_the_next_call(classes, base, tmp_path, monkeypatch):
    """The kernel allows files as long as those written before, and not the weights."""
    write = Run.write_weights

    def without_space(run: Run) -> None:
        with file_size_limit(0):
            write(run)

    monkeypatch.setattr(Run, 'write_weights', without_space)
    with pytest.raises(UserError, match=f'make room on the disk of {tmp_path}/run, then the same call'):
        finetune(classes, tmp_path / 'run', base)
    monkeypatch.setattr(Run, 'write_weights', write)
    (left := tmp_path / 'run/finetuned.pth.0123abcd.part').touch()  # by a process that was killed
    assert finetune(classes, tmp_path / 'run', base).is_file() and not left.exists()


SENT = [  # the stage that fits a head, in which call of a function a signal comes, and which signal
    ('head', 'beit_mm.engine.fit_head.images_of', 2, signal.SIGINT),
    ('head', 'mmengine.runner.ValLoop.run_iter', 2, signal.SIGTERM),  # in the head's validation
    ('head', 'beit_mm.engine.logs.ThroughputHook.after_train', 1, signal.SIGTERM),  # after the last step of `finetune`
    ('finetune', 'beit_mm.engine.fit_head.images_of', 2, signal.SIGTERM),
    ('finetune', 'beit_mm.engine.fit_head.choose_penalty', 1, signal.SIGINT),
    ('finetune', 'beit_mm.own_images.run.write_checkpoint', 1, signal.SIGTERM),
]


def signalled(function: Callable, number: int, sent: int) -> Callable:
    """The function; before its call of this number the process gets a signal."""
    calls = count(1)

    def before(*args: object, **kwargs: object) -> object:
        if next(calls) == number:
            signal.raise_signal(sent)
        return function(*args, **kwargs)

    return before


@pytest.mark.parametrize('stage', ['head', 'finetune'])
def test_a_signal_outside_of_the_steps_ends_the_run_and_the_same_call_gives_what_it_would_have_given(
    stage, classes, base, tmp_path, monkeypatch, capsys
):
    def run(name: str) -> dict:
        options = dict(epochs=1, batch=4, workers=0, freeze='all' if stage == 'finetune' else None)
        weights = torch.load(beit_mm.finetune(classes, tmp_path / name, base, **options))['state_dict']
        measured = json.loads((tmp_path / name / 'plan.json').read_text())['stages']
        return dict(weights=weights, accuracies=[each['accuracy/top1'] for each in measured.values()])

    monkeypatch.setattr(Run, 'write_report', lambda run: None)
    whole = run('whole')
    for place, number, sent in [each[1:] for each in SENT if each[0] == stage]:
        name = place.rpartition('.')[2]
        with monkeypatch.context() as patch, pytest.raises(SystemExit) as stopped:
            patch.setattr(place, signalled(pkgutil.resolve_name(place), number, sent))
            run(name)
        assert stopped.value.code == (130 if sent == signal.SIGINT else 75)
        assert capsys.readouterr().out.splitlines()[-1].startswith('Stopped. Resume with: ')
        assert not [*(tmp_path / name).rglob('*.part')] and not (tmp_path / name / 'finetuned.pth').exists()
        assert not differences(whole, run(name)), name


def test_a_second_call_beside_a_run_changes_nothing(classes, base, tmp_path, monkeypatch):
    def beside(run: Run) -> None:
        files = {path: path.read_bytes() for path in (tmp_path / 'run').rglob('*') if path.is_file()}
        code = f"""import beit_mm; from beit_mm.own_images import images; images.MIN_IMAGES = 10
beit_mm.finetune({str(classes)!r}, {str(tmp_path / 'run')!r})"""
        done = subprocess.run([sys.executable, '-c', code], cwd=ROOT, capture_output=True, text=True)
        assert f'has a run already: process {os.getpid()}' in done.stderr, done.stderr
        assert files == {path: path.read_bytes() for path in (tmp_path / 'run').rglob('*') if path.is_file()}
        raise KeyboardInterrupt

    monkeypatch.setattr(Run, 'write_weights', beside)
    with pytest.raises(SystemExit):
        finetune(classes, tmp_path / 'run', base)

"""A terminal sees what a user can act on, the log files see everything, and nothing stays changed."""

import io
import logging
import os
import re
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from helpers import ROOT
from mmcv.transforms import RandomResize, Resize
from mmengine.dataset import BaseDataset, ConcatDataset
from mmengine.hooks import CheckpointHook
from mmengine.logging import MMLogger
from mmengine.registry import MODELS, build_from_cfg
from mmseg.datasets import ADE20KDataset

import beit_mm
from beit_mm import __main__, terminal
from beit_mm.errors import UserError


def run(*words: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess:
    """Python in an environment that says nothing else of where modules are."""
    bare = {key: value for key, value in os.environ.items() if not key.startswith('PYTHON')}
    return subprocess.run([sys.executable, *words], cwd=cwd, env=bare | environment, capture_output=True, text=True)


def test_a_terminal_gets_warnings_that_a_user_can_act_on_and_a_log_file_everything(tmp_path):
    stream, logger = io.StringIO(), logging.Logger('some run')
    for handler in (logging.StreamHandler(stream), logging.FileHandler(tmp_path / 'run.log')):
        logger.addHandler(handler)
    assert [*terminal.hush(logger)] == logger.handlers[:1]
    logger.info('Hooks will be executed in the following order')
    logger.warning('"FileClient" will be deprecated in future')
    logger.warning('%s images cannot be read', '3\x1b')
    assert stream.getvalue() == 'warning: 3\\x1b images cannot be read\n'
    assert len((tmp_path / 'run.log').read_text().splitlines()) == 3


def test_quiet_ends(capsys):
    """With the outermost one: verbs call each other."""

    def settings() -> list:
        handlers = [(handler.level, handler.formatter, [*handler.filters]) for handler in logger.handlers]
        return [*handlers, *warnings.filters]

    logger = MMLogger.get_current_instance()
    before = settings()
    with terminal.quiet():
        hushed = settings()
        with terminal.quiet():
            warnings.warn_explicit('meshgrid', UserWarning, torch.__file__, 1)
            logger.info('nothing to act on')
            print('said by us')
        assert settings() == hushed != before
    assert settings() == before and capsys.readouterr().out == 'said by us\n'


def test_a_line_of_a_training_stands_once_in_its_log(tmp_path, monkeypatch, capsys):
    """Whether printed, in a training's inner context too, or logged by a logger that writes to the terminal too."""
    logger = MMLogger.get_current_instance()
    with terminal.training_output():
        handlers = [logging.StreamHandler(sys.stdout), logging.FileHandler(tmp_path / 'log')]
        monkeypatch.setattr(logger, 'handlers', handlers)
        logger.warning('logged')
        with terminal.training_output():
            print('printed')
    handlers[1].close()
    assert (tmp_path / 'log').read_text() == capsys.readouterr().out == 'logged\nprinted\n'


def test_a_users_mistake_is_told_from_a_fault():
    """Also behind the error that a library made of it, and from a worker, whose traceback is left out."""
    wrapped = KeyError('broken')
    wrapped.__cause__ = UserError('no such thing')
    worker = 'Caught {0} in DataLoader worker process 0.\nOriginal Traceback:\n  File "x"\nbeit_mm.errors.{0}: {1}'
    for mistake, said in (
        (wrapped, 'no such thing'),
        (OSError(worker.format('X', 'a.png is empty')), 'a.png is empty'),
        (UserError(worker.format('UserError', 'a.png is empty')), 'a.png is empty'),
        (OSError('a.png: is empty'), 'a.png: is empty'),
        (ImportError('run "pip install wandb"'), 'run "pip install wandb"'),
        (ImportError('cannot import name'), None),
        *((fault('x'), None) for fault in (AssertionError, ValueError, KeyError, RuntimeError)),
    ):
        assert terminal.message_for_user(mistake) == said


def test_a_key_that_a_class_does_not_take_is_told_from_a_bug_in_the_class():
    def part(sides: int) -> None:
        (lambda: sides)(side=1)

    with pytest.raises(TypeError) as error:
        build_from_cfg(dict(type=part, side=2), MODELS)
    assert "part() got an unexpected keyword argument 'side'" in terminal.message_for_user(error.value)
    with pytest.raises(TypeError) as error:
        build_from_cfg(dict(type=part, sides=()), MODELS)
    assert terminal.message_for_user(error.value) is None


@pytest.mark.parametrize(
    ('cause', 'cure'),
    [
        (lambda: RandomResize(scale=[400, 160]).transform({}), 'scale as a tuple'),
        (lambda: Resize(scale=[9, 4], keep_ratio=True).transform(dict(img=np.zeros((8, 8, 3)))), 'scale as a tuple'),
        (lambda: ADE20KDataset(metainfo=dict(classes=('x',)), lazy_init=True), 'metainfo=dict(classes='),
        (lambda: ConcatDataset([a_dataset(classes=('a', 'b')), a_dataset(classes=('b', 'a'))]), 'the same classes'),
        (lambda: CheckpointHook(save_best='IoU/road'), "rule='greater'"),
        (lambda: best_of('mIou'), "save_best is 'mIou'"),
    ],
)
def test_what_libraries_say_of_a_config_is_a_line_with_the_cure(cause, cure):
    with pytest.raises(Exception) as error:
        cause()
    message = terminal.message_for_user(error.value)
    assert cure in message and '\n' not in message


def a_dataset(**metainfo: object) -> BaseDataset:
    return BaseDataset(metainfo=metainfo, serialize_data=False, lazy_init=True)


def best_of(metric: str) -> None:
    hook = CheckpointHook(save_best=metric, rule='greater', filename_tmpl='{}.pth')
    hook.after_val_epoch(MagicMock(iter=1, epoch=1), dict(mIoU=1.0))


def test_what_no_program_can_help_is_a_line_that_says_what_does():
    full = 'CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB of which 8 is free.'
    said = terminal.message_for_user(torch.OutOfMemoryError(full))
    assert '2.00 GiB' in said and 'train_dataloader.batch_size=' in said and '\n' not in said
    with pytest.raises(RuntimeError) as error:
        torch.empty(1 << 60)
    assert 'train_dataloader.batch_size=' in terminal.message_for_user(error.value)
    with pytest.raises(ValueError) as error:
        torch.nn.BatchNorm2d(1)(torch.zeros(1, 1, 1, 1))
    assert 'train_dataloader.batch_size=2' in terminal.message_for_user(error.value)


def test_names_cannot_steer_a_terminal(capsys):
    name, shown = 'a\x1b]0;owned\x07\u202e\udcff\r.jpg', r'a\x1b]0;owned\x07\u202e\udcff\r.jpg'

    def main() -> None:
        terminal.say(f'{name}\nerror: nothing')
        raise FileNotFoundError(2, 'No such file', name)

    with pytest.raises(SystemExit) as end:
        terminal.run(main)
    assert end.value.code.isprintable() and shown in end.value.code.replace('\\\\', '\\')
    assert capsys.readouterr().out == shown + '\\nerror: nothing\n'
    for words in ([name], ['pretrain', 'x', '--out', 'y', '--batch', name], ['classify', 'x', 'y', f'--{name}']):
        with pytest.raises(SystemExit):
            __main__.parser().parse_args(words)
        assert shown in (error := capsys.readouterr().err).replace('\\\\', '\\')  # argparse quotes some words
        assert error.replace('\n', '').isprintable()


HOSTILE = "open('ran', 'a').write(__name__ + ' ')\nraise ImportError(__name__)\n"
COMMAND = """
import os, runpy, sys
sys.path[0], sys.argv = os.getcwd(), ['beit_mm', '--version']  # as with -m
try:
    runpy.run_module('beit_mm', run_name='__main__', alter_sys=True)
except SystemExit as end:
    assert end.code == 0
from importlib.util import find_spec
from multiprocessing import get_context
assert all(os.path.dirname(find_spec(name).origin) != os.getcwd() for name in ('timm', 'onnx')), sys.path
assert not find_spec('nowhere_else')
for method in ('spawn', 'forkserver') * (sys.version_info > (3, 11)):  # 3.10 forks, and has no PYTHONSAFEPATH
    process = get_context(method).Process(target=exec, args=('import argparse, random, beit_mm.terminal\\n' + HERE,))
    process.start()
    process.join()
    assert process.exitcode == 0, method
"""


def test_a_folder_of_images_is_no_place_for_modules(tmp_path):
    """Nothing that lies where the user is runs, in the command and in processes that it starts; nor in the script."""
    script = tmp_path / 'bin/beit-mm'
    script.parent.mkdir()
    script.write_text('from beit_mm.__main__ import script\nscript()\n')
    hostile = 'typing argparse runpy opcode timm onnx nowhere_else multiprocessing random'.split()
    for name in hostile if sys.version_info > (3, 11) else set(hostile) - {'runpy'}:  # 3.10 imports it before us
        (tmp_path / f'{name}.py').write_text(HOSTILE)
    for path, *words in (
        (f'{ROOT}', '-c', 'HERE = ""' + COMMAND),
        (f'{ROOT}', '-m', 'beit_mm', '--version'),
        (f'{ROOT}{os.pathsep}', '-m', 'beit_mm', '--version'),  # an empty part means the current folder
        (f'{ROOT}{os.pathsep}', str(script), '--version'),
    ):
        result = run(*words, cwd=tmp_path, PYTHONPATH=path)
        assert result.returncode == 0 and not (tmp_path / 'ran').exists(), result.stderr
        assert result.stdout == f'beit_mm {beit_mm.__version__}\n'


@pytest.mark.long
def test_a_module_of_ones_own_is_found_where_pythonpath_says(tmp_path):
    """Also by a relative path, which Python makes absolute; elsewhere one line says how it would be."""
    (tmp_path / 'mine.py').write_text("raise SystemExit('found')")
    (tmp_path / 'config.py').write_text("custom_imports = dict(imports=['mine'])")
    words = '-m', 'beit_mm', 'train', 'config.py'
    for path, said in (
        (f'{ROOT}:.', 'found\n'),
        (f'{ROOT}', "error: config.py: No module named 'mine'; .*PYTHONPATH.*\n"),
    ):
        assert re.fullmatch(said, run(*words, cwd=tmp_path, PYTHONPATH=path).stderr)


def test_a_checkout_that_is_not_installed_is_one(tmp_path):
    """There the package is found nowhere else, by processes that read images neither."""
    shutil.copytree(ROOT / 'beit_mm', tmp_path / 'beit_mm', ignore=shutil.ignore_patterns('*.pyc', '[a-z]*/'))
    here = f'import beit_mm; assert beit_mm.__file__.startswith({str(tmp_path)!r})'
    result = run('-c', f'HERE = {here!r}' + COMMAND, cwd=tmp_path)
    assert result.returncode == 0, result.stderr

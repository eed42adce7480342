"""A terminal sees what a user can act on, the log files see everything, and nothing stays changed."""

import io
import logging
import re
import subprocess
import sys
import warnings

import pytest
from helpers import ROOT
from PIL import Image

from beit_mm import terminal


def test_only_warnings_that_a_user_can_act_on_are_written():
    stream = io.StringIO()
    logger = logging.Logger('some run')
    logger.addHandler(logging.StreamHandler(stream))
    before = terminal.hush(logger)
    logger.info('Hooks will be executed in the following order')
    logger.warning('"FileClient" will be deprecated in future')
    logger.warning('3 images cannot be read')
    assert stream.getvalue() == 'warning: 3 images cannot be read\n' and [*before] == logger.handlers


def test_log_files_get_everything(tmp_path):
    logger = logging.Logger('some run')
    logger.addHandler(logging.FileHandler(tmp_path / 'run.log'))
    assert terminal.hush(logger) == {}
    logger.info('Hooks')
    assert (tmp_path / 'run.log').read_text() == 'Hooks\n'


def test_quiet_ends(capsys):
    from mmengine.logging import MMLogger

    logger = MMLogger.get_current_instance()
    before = [(handler.level, handler.formatter, list(handler.filters)) for handler in logger.handlers]
    filters = list(warnings.filters)
    with terminal.quiet():
        warnings.warn('meshgrid', stacklevel=1)
        logger.info('nothing to act on')
        print('said by us')
    assert [(handler.level, handler.formatter, list(handler.filters)) for handler in logger.handlers] == before
    assert list(warnings.filters) == filters and capsys.readouterr().out == 'said by us\n'


def test_help_imports_nothing_heavy_and_shows_an_example():
    verbs = 'pretrain finetune classify segment reconstruct attention embed train config'.split()
    code = f"""import sys
from beit_mm.__main__ import parser
for verb in {verbs}:
    sub = parser()._subparsers._group_actions[0].choices[verb]
    assert f'Example: python -m beit_mm {{verb}} ' in ' '.join(sub.format_help().split()), verb
assert not {{'torch', 'mmengine', 'numpy'}} & {{*sys.modules}}"""
    subprocess.run([sys.executable, '-c', code], cwd=ROOT, check=True)


@pytest.mark.slow
def test_the_libraries_say_nothing_when_a_verb_begins(tmp_path):
    """The one line comes after the libraries are imported: the folder is there, and has too few images."""
    (tmp_path / 'images').mkdir()
    Image.new('RGB', (4, 4)).save(tmp_path / 'images/x.png')
    result = subprocess.run(
        [sys.executable, '-m', 'beit_mm', 'pretrain', str(tmp_path / 'images'), '--out', str(tmp_path / 'run')],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 1 and result.stdout == ''
    assert re.fullmatch(r"error: 1 images in '.*' ?; at least 100 are needed to learn from\n", result.stderr), (
        result.stderr
    )


def test_a_bar_shows_how_many_were_taken(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    seen = Terminal()
    monkeypatch.setattr(sys, 'stderr', seen)
    assert list(terminal.with_bar('abc')) == ['a', 'b', 'c'] and '3/3' in seen.getvalue()
    monkeypatch.setattr(sys, 'stderr', io.StringIO())
    assert list(terminal.with_bar('abc')) == ['a', 'b', 'c'] and sys.stderr.getvalue() == ''


def test_an_error_of_a_worker_is_its_last_line():
    text = 'Caught X in DataLoader worker process 0.\nOriginal Traceback:\n  File "x"\nbeit_mm.X: a.png is empty'
    for message, said in ((text, 'a.png is empty'), ('a.png: is empty', 'a.png: is empty')):
        with pytest.raises(OSError) as caught:
            raise OSError(message)
        assert terminal.message_for_user(caught.value) == said

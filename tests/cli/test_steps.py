"""tools/_steps.py: steps run when what they need is there, some at a time, and one that fails stops its own alone."""

import importlib.util
import json
import os
import signal
import sys
import threading
from pathlib import Path
from types import ModuleType

import pytest
from helpers import ROOT


@pytest.fixture(scope='module')
def steps() -> ModuleType:
    spec = importlib.util.spec_from_file_location('_steps', ROOT / 'tools/_steps.py')
    module = sys.modules['_steps'] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules['_steps']


def make(steps: ModuleType, folder: Path, name: str, after: tuple = (), weight: float = 1.0, code: str = ''):
    """A step that writes its name into a list and makes its result."""
    result = folder / name / 'result'
    command = ['sh', '-c', f'echo {name} >> {folder}/order; {code or f"touch {result}"}']
    return steps.Step(name, command, result, list(after), weight, recorded=[name])


def order(folder: Path) -> list[str]:
    return (folder / 'order').read_text().split()


def test_steps_run_after_what_they_need_and_once(steps, tmp_path, capsys):
    first = make(steps, tmp_path, 'first')
    second = make(steps, tmp_path, 'second', (first,))
    third = make(steps, tmp_path, 'third', (second, first))
    found = steps.with_predecessors([third, second])
    assert found == [first, second, third]
    steps.Execution(found, jobs=1, clock=True).run()
    steps.Execution(found, jobs=1, clock=True).run()
    assert order(tmp_path) == ['first', 'second', 'third']
    assert '[3/3] finished third' in capsys.readouterr().out
    assert json.loads((tmp_path / 'third' / steps.RECORD).read_text())['run'] == ['third']


def test_the_longest_way_to_the_end_is_started_first(steps, tmp_path):
    short = make(steps, tmp_path, 'short', weight=3)
    early = make(steps, tmp_path, 'early', weight=1)
    long = make(steps, tmp_path, 'long', (early,), weight=10)
    wait = make(steps, tmp_path, 'wait', weight=5)
    steps.Execution([short, early, long, wait], jobs=2, clock=False).run()
    assert set(order(tmp_path)[:2]) == {'early', 'wait'} and len(order(tmp_path)) == 4


def test_what_fails_is_named_and_the_others_go_on(steps, tmp_path, capsys):
    broken = make(steps, tmp_path, 'broken', code='echo the reason; exit 3')
    behind = make(steps, tmp_path, 'behind', (broken,))
    silent = make(steps, tmp_path, 'silent', code='true')  # ends well and leaves nothing
    other = make(steps, tmp_path, 'other')
    execution = steps.Execution([broken, behind, silent, other], jobs=1, clock=False)
    execution.run()
    assert execution.failed == [broken, silent] and other.finished() and not behind.finished()
    assert 'FAILED with 3: broken: the reason (see ' in capsys.readouterr().out


def test_a_signal_is_passed_on_and_waited_for(steps, tmp_path):
    code = f'trap "echo saved >> {tmp_path}/order; exit 75" TERM; while true; do sleep 0.05; done'
    running = make(steps, tmp_path, 'running', code=code)
    before = signal.getsignal(signal.SIGTERM)
    execution = steps.Execution([running, make(steps, tmp_path, 'never', (running,))], jobs=1, clock=False)
    threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGTERM)).start()
    with pytest.raises(steps.StoppedError):
        execution.run()
    assert order(tmp_path) == ['running', 'saved']
    assert signal.getsignal(signal.SIGTERM) is before


def test_half_a_report_does_not_count(steps, tmp_path):
    test = steps.Step('test', [], tmp_path / 'metrics.json')
    for text, finished in (('{"accuracy', False), ('{"accuracy/top1": 1.0}', True)):
        test.result.write_text(text)
        assert test.finished() is finished

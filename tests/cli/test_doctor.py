"""tools/doctor.py finds what is wrong, names the command, and runs where nothing is installed."""

import importlib
import os
import re
import runpy
import subprocess
import sys
from types import SimpleNamespace

import pytest
from helpers import ROOT, run_tool

doctor = SimpleNamespace(**runpy.run_path(str(ROOT / 'tools/doctor.py')))
BASE = dict.fromkeys((*doctor.NEEDED, 'beit_mm'), '1.2.3') | dict(setuptools='81.0.0')
ONEDL = BASE | dict.fromkeys(doctor.ONEDL, '2.3.6')
OPENMMLAB = BASE | dict.fromkeys((*doctor.OPENMMLAB, 'openmim'), '2.1.0')


@pytest.mark.parametrize(
    'found, python, has_ops, problem, command',
    [
        (ONEDL, (3, 12), True, '', ''),
        (OPENMMLAB, (3, 12), True, '', ''),
        (ONEDL | dict(setuptools='84.0.0'), (3, 11), False, '', ''),  # neither concerns onedl's
        (ONEDL | dict(mmcv='2.1.0'), (3, 11), True, 'mmcv beside onedl-*', 'uninstall -y mmcv &&'),
        (ONEDL | dict(scipy=None, beit_mm=None), (3, 11), True, 'missing: scipy', '.[onedl]'),
        (ONEDL | dict(beit_mm=None), (3, 11), True, 'beit_mm is not installed', '--no-deps -e .'),
        (OPENMMLAB | dict(mmcv='2.2.0+cpu'), (3, 11), True, 'mmcv 2.2.0', 'mmcv==2.1.0'),
        (OPENMMLAB | dict(setuptools='82.0.1'), (3, 11), True, 'found 82.0.1', '"setuptools>=64,<82"'),
        (OPENMMLAB, (3, 11), False, 'mmcv 2.1.0 has no compiled ops', 'MMCV_WITH_OPS=1'),
        (ONEDL, (3, 9), True, 'Python 3.9 is too old', 'run_tests.sh'),
    ],
)
def test_each_problem_alone(found, python, has_ops, problem, command):
    found = {name: version for name, version in found.items() if version}
    problems = list(doctor.version_problems(found, python, has_ops))
    assert len(problems) == bool(problem) and all(problem in what and command in mend for what, mend in problems)


def test_import_that_fails(monkeypatch):
    def refuse(name):
        if name in ('cv2', 'torchvision'):
            raise ImportError(f'{name}: libGL.so.1: cannot open' if name == 'cv2' else 'operator nms does not exist')

    monkeypatch.setattr(importlib, 'import_module', refuse)
    (torchvision, again), (cv2, headless) = doctor.import_problems('openmmlab')
    assert torchvision.startswith('import torchvision fails: ImportError: operator') and 'openmmlab.txt' in again
    assert 'libGL' in cv2 and 'opencv-python-headless' in headless


@pytest.mark.slow
def test_transformers_5_beside_pycocotools(tmp_path):
    """Beside pycocotools, which mmdet needs, mmpretrain also defines its models of transformers 4."""
    if pytest.importorskip('transformers').__version__ < '5':
        pytest.skip('transformers 4 works')
    for file in ('pycocotools/__init__.py', 'pycocotools-2.0.11.dist-info/METADATA'):
        (tmp_path / file).parent.mkdir()
        (tmp_path / file).write_text('' if file.endswith('py') else 'Name: pycocotools\nVersion: 2.0.11\n')
    command = [sys.executable, ROOT / 'tools/doctor.py']
    env = os.environ | dict(PYTHONPATH=str(tmp_path))
    result = subprocess.run(command, capture_output=True, text=True, env=env)
    assert result.returncode == 1 and 'PROBLEM import mmpretrain.models fails' in result.stdout
    assert 'install "transformers>=4.45,<5"' in result.stdout


def test_an_empty_python_and_this_one(capsys):
    result = subprocess.run([sys.executable, '-I', '-S', ROOT / 'tools/doctor.py'], capture_output=True, text=True)
    assert result.returncode == 1 and result.stderr == '' and 'PROBLEM missing: torch, torchvision' in result.stdout
    with pytest.raises(SystemExit) as end:
        run_tool('doctor.py')
    out = capsys.readouterr().out
    assert end.value.code == ('PROBLEM' in out), out
    assert re.search('devices .*: trains in (bfloat16|float16|float32)\n', out)

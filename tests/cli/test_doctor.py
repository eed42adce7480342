"""tools/doctor.py finds what is wrong, names the command, and runs where nothing is installed."""

import importlib.util
import re
import subprocess
import sys

import pytest
from helpers import ROOT, run_tool

DOCTOR = ROOT / 'tools/doctor.py'


def versions(text: str) -> dict[str, str]:
    return dict(item.split('=') for item in text.split())


BASE = versions(
    'torch=2.11.0+cu130 torchvision=0.26.0 numpy=2.4.6 pillow=13.0.0 scipy=1.17.1 '
    'safetensors=0.8.0 matplotlib=3.11.2 tensorboard=2.21.0 setuptools=81.0.0 beit_mm=0.2.0'
)
ONEDL = BASE | versions(
    'onedl-mmengine=0.10.12 onedl-mmcv=2.3.6 onedl-mmpretrain=1.3.6 onedl-mmsegmentation=1.4.2 onedl-mim=0.5.1'
)
OPENMMLAB = BASE | versions('mmengine=0.10.7 mmcv=2.1.0 mmpretrain=1.2.0 mmsegmentation=1.2.2 openmim=0.3.9')


@pytest.fixture(scope='module')
def doctor():
    spec = importlib.util.spec_from_file_location('doctor', DOCTOR)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def without(found: dict[str, str], *names: str) -> dict[str, str]:
    return {k: v for k, v in found.items() if k not in names}


@pytest.mark.parametrize('found, family', [(ONEDL, 'onedl'), (OPENMMLAB, 'openmmlab')])
def test_healthy(doctor, found, family):
    assert doctor.family(found) == family
    assert list(doctor.version_problems(found, (3, 12), True)) == []


@pytest.mark.parametrize(
    'pair, warnings', [('2.6.0 0.21.0', 0), ('2.14.1 0.29.0', 0), ('2.15.0 0.29.2', 0), ('2.16.0 0.31.0', 1)]
)
def test_a_newer_torch_than_tested_is_a_warning(doctor, pair, warnings):
    torch, torchvision = pair.split()
    found = ONEDL | dict(torch=torch, torchvision=torchvision)
    assert list(doctor.version_problems(found, (3, 12), True)) == []
    assert len(list(doctor.version_warnings(found))) == warnings


@pytest.mark.parametrize(
    'found, problem, command',
    [
        (ONEDL | versions('mmcv=2.1.0'), 'mmcv beside onedl-*', 'uninstall -y mmcv &&'),
        (without(ONEDL, 'scipy', 'onedl-mmcv'), 'missing: scipy, onedl-mmcv', '.[onedl]'),
        (without(OPENMMLAB, 'mmpretrain'), 'missing: mmpretrain', '.[openmmlab]'),
        (without(ONEDL, 'beit_mm'), 'beit_mm is not installed', '--no-deps -e .'),
        (ONEDL | versions('torch=2.10.0'), 'not belong to torch 2.10.0', '"torchvision==0.25.*"'),
        (ONEDL | versions('torch=2.15.0'), 'not belong to torch 2.15.0', '"torchvision==0.29.*"'),
        (OPENMMLAB | versions('mmcv=2.2.0'), 'refused by mmseg', 'mmcv==2.1.0'),
        (OPENMMLAB | versions('setuptools=82.0.1'), 'found 82.0.1', '"setuptools>=64,<82"'),
        (OPENMMLAB | versions('setuptools=60.2.0'), 'found 60.2.0', '"setuptools>=64,<82"'),
    ],
)
def test_each_problem_alone(doctor, found, problem, command):
    [(what, mend)] = doctor.version_problems(found, (3, 11), True)
    assert problem in what and command in mend


def test_what_only_some_machines_lack(doctor):
    [(what, mend)] = doctor.version_problems(ONEDL, (3, 9), True)
    assert what.startswith('Python 3.9 is too old') and 'run_tests.sh' in mend
    [(what, mend)] = doctor.version_problems(OPENMMLAB, (3, 11), False)
    assert what.startswith('mmcv 2.1.0 has no compiled ops') and 'MMCV_WITH_OPS=1' in mend
    # which onedl's needs not, nor an old setuptools
    assert list(doctor.version_problems(ONEDL | {'setuptools': '84.0.0'}, (3, 11), False)) == []


def test_import_that_fails(doctor, monkeypatch):
    def refuse(name):
        if name == 'cv2':
            raise ImportError('libGL.so.1: cannot open shared object file: No such file or directory')
        if name == 'mmseg':
            raise AssertionError('MMCV==2.3.6 is used but incompatible.\nPlease install mmcv>=2.0.0rc4.')

    monkeypatch.setattr(doctor.importlib, 'import_module', refuse)
    (cv2, headless), (mmseg, reinstall) = doctor.import_problems('openmmlab')
    assert cv2.startswith('import cv2 fails: ImportError: libGL') and 'opencv-python-headless' in headless
    assert mmseg == 'import mmseg fails: AssertionError: MMCV==2.3.6 is used but incompatible.'
    assert reinstall.endswith('-r requirements/openmmlab.txt')


def test_empty_python():
    result = subprocess.run([sys.executable, '-I', '-S', str(DOCTOR)], capture_output=True, text=True)
    assert result.returncode == 1 and result.stderr == ''
    assert 'family none' in result.stdout and 'No module named' in result.stdout
    assert 'PROBLEM missing: torch, torchvision' in result.stdout and 'MEND' in result.stdout


def test_this_python(capsys):
    with pytest.raises(SystemExit) as end:
        run_tool('doctor.py')
    out = capsys.readouterr().out
    assert out.count('PROBLEM') == out.count('MEND')
    assert end.value.code == (1 if 'PROBLEM' in out else 0), out
    assert 'torch 2.' in out and re.search('devices .*: trains in (bfloat16|float16|float32)\n', out)

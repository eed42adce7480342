"""tools/doctor.py finds what is wrong, names the command, and runs where nothing is installed."""

import importlib.util
import re
import subprocess
import sys

import pytest
from helpers import ROOT, run_tool

SPEC = importlib.util.spec_from_file_location('doctor', ROOT / 'tools/doctor.py')
SPEC.loader.exec_module(doctor := importlib.util.module_from_spec(SPEC))


def versions(text: str) -> dict[str, str]:
    return dict(item.split('=') for item in text.split())


BASE = versions(
    'torch=2.11.0+cu130 torchvision=0.26.0 numpy=2.4.6 pillow=13.0.0 scipy=1.17.1 '
    'safetensors=0.8.0 matplotlib=3.11.2 tensorboard=2.21.0 setuptools=81.0.0 beit_mm=0.2.0'
)
ONEDL = BASE | versions('onedl-mmengine=0.10.12 onedl-mmcv=2.3.6 onedl-mmpretrain=1.3.6 onedl-mmsegmentation=1.4.2')
OPENMMLAB = BASE | versions('mmengine=0.10.7 mmcv=2.1.0 mmpretrain=1.2.0 mmsegmentation=1.2.2 openmim=0.3.9')


def without(found: dict[str, str], *names: str) -> dict[str, str]:
    return {k: v for k, v in found.items() if k not in names}


@pytest.mark.parametrize(
    'found, python, has_ops, problem, command',
    [
        (ONEDL, (3, 12), True, '', ''),
        (OPENMMLAB, (3, 12), True, '', ''),
        (ONEDL | versions('setuptools=84.0.0'), (3, 11), False, '', ''),  # neither concerns onedl's
        (ONEDL | versions('mmcv=2.1.0'), (3, 11), True, 'mmcv beside onedl-*', 'uninstall -y mmcv &&'),
        (without(ONEDL, 'scipy', 'onedl-mmcv'), (3, 11), True, 'missing: scipy, onedl-mmcv', '.[onedl]'),
        (without(ONEDL, 'beit_mm'), (3, 11), True, 'beit_mm is not installed', '--no-deps -e .'),
        (ONEDL | versions('torch=2.15.0'), (3, 11), True, 'not belong to torch 2.15.0', '"torchvision==0.29.*"'),
        (OPENMMLAB | versions('mmcv=2.2.0'), (3, 11), True, 'refused by mmseg', 'mmcv==2.1.0'),
        (OPENMMLAB | versions('setuptools=82.0.1'), (3, 11), True, 'found 82.0.1', '"setuptools>=64,<82"'),
        (OPENMMLAB, (3, 11), False, 'mmcv 2.1.0 has no compiled ops', 'MMCV_WITH_OPS=1'),
        (ONEDL, (3, 9), True, 'Python 3.9 is too old', 'run_tests.sh'),
    ],
)
def test_each_problem_alone(found, python, has_ops, problem, command):
    problems = list(doctor.version_problems(found, python, has_ops))
    assert len(problems) == bool(problem) and all(problem in what and command in mend for what, mend in problems)
    assert not [*doctor.version_warnings(found)]
    newer = found | versions('torch=2.16.0 torchvision=0.31.0')
    assert len([*doctor.version_warnings(newer)]) == 1


def test_import_that_fails(monkeypatch):
    def refuse(name):
        if name == 'cv2':
            raise ImportError('libGL.so.1: cannot open shared object file: No such file or directory')

    monkeypatch.setattr(doctor.importlib, 'import_module', refuse)
    ((cv2, headless),) = doctor.import_problems('openmmlab')
    assert cv2.startswith('import cv2 fails: ImportError: libGL') and 'opencv-python-headless' in headless


def test_an_empty_python_and_this_one(capsys):
    result = subprocess.run([sys.executable, '-I', '-S', ROOT / 'tools/doctor.py'], capture_output=True, text=True)
    assert result.returncode == 1 and result.stderr == '' and 'PROBLEM missing: torch, torchvision' in result.stdout
    with pytest.raises(SystemExit) as end:
        run_tool('doctor.py')
    out = capsys.readouterr().out
    assert end.value.code == (1 if 'PROBLEM' in out else 0), out
    assert re.search('devices .*: trains in (bfloat16|float16|float32)\n', out)

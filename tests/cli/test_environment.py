"""tools/_environment.sh: which Python it takes, what it installs, and that once is enough.

Every Python is made up and writes down how it was called.
"""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LINT = [
    '-m ruff check --output-format concise .',
    '-m ruff format --quiet --check .',
    '-m codespell_lib beit_mm configs docs tests tools',
    '-m mypy --no-error-summary beit_mm',
    '-c import importlinter.cli as cli; raise SystemExit(cli.lint_imports(no_cache=True, no_logo=True))',
]
PYTEST = '-m pytest -n auto --dist loadfile'
# Answers like a Python of a new machine; `-m venv` makes an environment with itself inside.
PYTHON = """#!/bin/bash
echo "$*" >>"{log}"
case "$*" in
  *'-m venv'*) mkdir -p "${{@: -1}}/bin"; cp "$0" "${{@: -1}}/bin/python" ;;
  *importlib.metadata*) exit 1 ;;
  *'import cv2'*) exit {cv2} ;;
esac
exit 0
"""


@pytest.fixture
def machine(tmp_path: Path, request: pytest.FixtureRequest):
    """Runs run_tests.sh without an environment, where the only working Python is python3.11.

    The parameter is the exit status of `import cv2`.
    """
    source = tmp_path / 'source'
    (source / 'tools').mkdir(parents=True)
    shutil.copy(ROOT / 'setup.py', source)
    shutil.copytree(ROOT / 'requirements', source / 'requirements')
    for name in ('_environment.sh', 'run_tests.sh'):
        shutil.copy(ROOT / 'tools' / name, source / 'tools')
    programs = tmp_path / 'programs'
    programs.mkdir()
    for name, text in (
        ('python3.12', '#!/bin/sh\nexit 127\n'),
        ('python3.11', PYTHON.format(log=tmp_path / 'log', cv2=getattr(request, 'param', 0))),
    ):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)

    def run(*arguments: str) -> tuple[subprocess.CompletedProcess, str]:
        (tmp_path / 'log').write_text('')
        env = os.environ | {'PATH': f'{programs}:/usr/bin:/bin'}
        result = subprocess.run(
            ['bash', str(source / 'tools/run_tests.sh'), *arguments],
            env=env,
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
        return result, (tmp_path / 'log').read_text()

    run.source = source
    return run


def test_onedl(machine):
    result, log = machine('tests/models', '-m', 'slow')
    assert result.returncode == 0, result.stderr
    assert 'new environment .venv' in result.stdout
    installs = [line for line in log.splitlines() if 'pip install' in line]
    assert [i.split('--progress-bar off ')[1] for i in installs] == [
        '-r requirements/onedl.txt',
        '--no-build-isolation -e .[onedl]',
        '-r requirements/dev.txt',
        '--no-deps -r requirements/dev_no_deps.txt',
    ]
    assert log.splitlines()[-6:] == [*LINT, f'{PYTEST} tests/models -m slow']


def test_all_runs_what_is_slow_too(machine):
    _, log = machine('--all', '-k', 'demo')
    assert log.splitlines()[-1] == f'{PYTEST} -m slow or not slow -k demo'


def test_openmmlab_builds_mmcv_before_the_rest(machine):
    result, log = machine('--stack', 'openmmlab')
    assert result.returncode == 0, result.stderr
    installs = [line for line in log.splitlines() if 'pip install' in line]
    assert installs[0].endswith('torch torchvision setuptools wheel ninja psutil packaging')
    assert installs[1].endswith('--no-build-isolation -c requirements/openmmlab.txt mmcv')
    assert installs[2].endswith('-r requirements/openmmlab.txt')
    assert (machine.source / '.venv-openmmlab').is_dir() and not (machine.source / '.venv').exists()


def test_the_newest_torch_replaces_that_of_the_stack(machine, tmp_path):
    (tmp_path / 'programs/python3.11').rename(tmp_path / 'programs/python3.13')
    result, log = machine('--stack', 'newest')
    assert result.returncode == 0, result.stderr
    assert '-r requirements/newest.txt -r /dev/fd/' in log and '-e .[onedl]' in log
    assert (machine.source / '.venv-newest').is_dir()


def test_the_oldest_wants_python_3_10(machine):
    result, log = machine('--stack', 'oldest')
    assert result.returncode == 1 and 'python3.10' in result.stderr and log == ''


@pytest.mark.parametrize('machine', [1], indirect=True)
def test_without_libgl_opencv_is_the_headless_one(machine):
    result, log = machine()
    assert 'this machine lacks libGL' in result.stdout
    assert '-m pip uninstall -qq --yes opencv-python\n' in log
    assert 'opencv-python-headless\n' in log


def test_second_call_installs_nothing(machine):
    machine()
    result, log = machine()
    assert 'environment .venv is up to date' in result.stdout
    assert log.splitlines() == [*LINT, PYTEST]


@pytest.mark.parametrize('changed', ['setup.py', 'requirements/dev.txt'])
def test_a_changed_requirement_installs_again_without_a_new_environment(machine, changed):
    machine()
    with open(machine.source / changed, 'a') as file:
        file.write('# changed\n')
    result, log = machine()
    assert 'pip install' in log and 'new environment' not in result.stdout


def test_a_moved_repository_installs_again(machine, tmp_path):
    machine()
    moved = machine.source.rename(tmp_path / 'moved')
    result = subprocess.run(['bash', str(moved / 'tools/run_tests.sh')], capture_output=True, text=True)
    assert 'beit_mm, editable' in result.stdout


def test_unknown_stack(machine):
    result, log = machine('--stack', 'tensorflow')
    assert result.returncode == 2 and 'onedl, openmmlab, oldest or newest' in result.stderr and log == ''


def test_no_python(machine, tmp_path):
    (tmp_path / 'programs/python3.11').unlink()
    for name in ('python3.10', 'python3', 'python3.11'):
        (tmp_path / 'programs' / name).write_text('#!/bin/sh\nexit 1\n')
        (tmp_path / 'programs' / name).chmod(0o755)
    result, _ = machine()
    assert result.returncode != 0 and 'No Python >= 3.10' in result.stderr

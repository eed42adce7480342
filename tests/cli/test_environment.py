"""Scripts that install: which Python they take, what they install, that once is enough; every Python is made up."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from helpers import ROOT

# Answers like a Python of a new machine, or as its pip; `-m venv` makes an environment with itself inside.
PYTHON = """#!/bin/bash
echo "$*" >>"{log}"
case "$*" in
  *'-m venv'*) for name in python pip; do install -D "$0" "${{@: -1}}/bin/$name"; done ;;
  *'pip freeze'*) echo torch==2.15 ;;
  *importlib.metadata*) exit 1 ;;
esac
exit 0
"""


@pytest.fixture
def machine(tmp_path: Path):
    """Runs run_tests.sh, or another script, without an environment; of three Pythons only python3.12 is broken.

    Returns what it said, and the lines with which its Python was called.
    """
    source, programs = tmp_path / 'source', tmp_path / 'programs'
    for folder in ('requirements', 'tools'):
        shutil.copytree(ROOT / folder, source / folder)
    for name in ('setup.py', 'pyproject.toml'):
        shutil.copy(ROOT / name, source / name)
    programs.mkdir()
    works = PYTHON.format(log=tmp_path / 'log')
    for name, text in {'python3.12': '#!/bin/sh\nexit 127\n', 'python3.11': works, 'python3.13': works}.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)

    def run(*arguments: str, script: str = 'run_tests.sh') -> tuple[str, list[str]]:
        (tmp_path / 'log').write_text('')
        path = f'{programs}:{run.source}/.venv/bin:/usr/bin:/bin'
        env = os.environ | dict(PATH=path, PYTHON=str(programs / 'python3.11'))
        command = ['bash', str(run.source / 'tools' / script), *arguments]
        result = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
        return result.stdout + result.stderr, (tmp_path / 'log').read_text().splitlines()

    run.source = source
    return run


def installs(log: list[str]) -> list[str]:
    return [line.split('--progress-bar off ')[1] for line in log if 'pip install' in line]


def test_a_new_machine_is_prepared_once_and_again_when_requirements_change_or_it_moves(machine, tmp_path):
    said, log = machine('tests/models', '-m', 'slow')
    assert 'new environment .venv' in said
    ours = ['-r requirements/onedl.txt', '--no-build-isolation -e .[onedl]']
    of_tests = ['-r requirements/dev.txt -r requirements/docs.txt', '--no-deps -r requirements/dev_no_deps.txt']
    assert installs(log) == [*ours, *of_tests]
    lint = ('-m ruff check', '-m ruff format', '-m codespell_lib', '-m mypy', '-c import importlinter')
    assert all(any(line.startswith(tool) for line in log) for tool in lint)
    assert log[-1].startswith('-m pytest ') and log[-1].endswith(' tests/models -m slow')

    said, log = machine('--all', '-k', 'demo')
    assert 'environment .venv is up to date' in said and not installs(log)
    assert log[-1].startswith('-m pytest ') and log[-1].endswith(' -m slow or not slow -k demo')
    for changed in ('pyproject.toml', 'requirements/dev.txt'):
        with open(machine.source / changed, 'a') as file:
            file.write('# changed\n')
        said, log = machine()
        assert installs(log) and 'new environment' not in said
    machine.source = machine.source.rename(tmp_path / 'moved')
    assert 'beit_mm, editable' in machine()[0]


def test_the_newest_packages_are_not_taken_back_before_the_tests(machine):
    said, log = machine('-k', 'demo', script='dev/check_newest.sh')
    assert 'new environment .venv-newest' in said and 'torch==2.15' in said
    upgrade = next(place for place, line in enumerate(log) if '--upgrade' in line)
    assert '--upgrade-strategy eager' in log[upgrade] and log[upgrade].endswith(' timm transformers')
    assert any('requirements/newest.txt' in line for line in log[:upgrade])
    assert not installs(log[upgrade + 1 :]) and log[-1].endswith(' -k demo')


def test_the_site_is_built_with_the_environments_python(machine):
    machine()
    assert machine('--quiet', script='dev/check_docs.sh')[1] == ['-m mkdocs build --strict --quiet']


def test_wheels_for_a_node_without_network_are_those_of_the_pinned_packages(machine):
    old = machine.source / '.whl/old.whl'
    old.parent.mkdir()
    old.touch()
    _, log = machine('one-more', script='dev/gpu/collect.sh')
    words = next(line for line in log if ' wheel --no-deps ' in line).split()
    pinned = (machine.source / 'requirements/onedl.txt').read_text().split()
    mmcv = next(line for line in pinned if line.startswith('onedl-mmcv=='))
    assert {mmcv, 'addict', 'one-more'} <= {*words} and not old.exists()
    assert sum('==' in word for word in words) == 4

"""tools/_environment.sh: which Python it takes, what it installs, and that once is enough; every Python is made up."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from helpers import ROOT

# Answers like a Python of a new machine; `-m venv` makes an environment with itself inside.
PYTHON = """#!/bin/bash
echo "$*" >>"{log}"
case "$*" in
  *'-m venv'*) mkdir -p "${{@: -1}}/bin"; cp "$0" "${{@: -1}}/bin/python" ;;
  *importlib.metadata*) exit 1 ;;
esac
exit 0
"""


@pytest.fixture
def machine(tmp_path: Path):
    """Runs run_tests.sh without an environment; the only working Python is python3.11, python3.12 is broken.

    Returns what it said, and the lines with which its Python was called.
    """
    source, programs = tmp_path / 'source', tmp_path / 'programs'
    for folder in ('requirements', 'tools'):
        shutil.copytree(ROOT / folder, source / folder)
    for name in ('setup.py', 'pyproject.toml'):
        shutil.copy(ROOT / name, source / name)
    programs.mkdir()
    for name, text in (('python3.12', '#!/bin/sh\nexit 127\n'), ('python3.11', PYTHON.format(log=tmp_path / 'log'))):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)

    def run(*arguments: str) -> tuple[str, list[str]]:
        (tmp_path / 'log').write_text('')
        env = os.environ | {'PATH': f'{programs}:/usr/bin:/bin'}
        command = ['bash', str(run.source / 'tools/run_tests.sh'), *arguments]
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

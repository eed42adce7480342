"""Wheel, sdist and editable install carry what mim looks for, and leave the source tree clean."""

import email
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
NOT_COPIED = shutil.ignore_patterns(
    '.git', '.venv*', '.mim', 'build', 'dist', 'work_dirs', 'data', '*.egg-info', '__pycache__', '.*_cache'
)
BUILD = 'from setuptools import build_meta; build_meta.build_{}("dist")'
SOME_CONFIG = 'configs/some_folder/some_config.py'
FAMILIES = ('mmengine', 'mmcv', 'mmpretrain', 'mmsegmentation', 'mim')


def python(*arguments: object, cwd: Path) -> None:
    command = [sys.executable, *map(str, arguments)]
    subprocess.run(command, cwd=cwd, check=True, capture_output=True, text=True)


def build_wheel(source: Path, target: Path) -> Path:
    target.mkdir()
    python(*'-m pip wheel -q --no-deps --no-build-isolation -w'.split(), target, source, cwd=target.parent)
    return next(target.glob('*.whl'))


def mim_files(folder: Path) -> set[str]:
    """The files that have to be in .mim, by their path in the source tree."""
    found = [*(folder / 'configs').rglob('*'), *(folder / 'tools').rglob('*'), folder / 'model-index.yml']
    files = (path for path in found if path.is_file() and '__pycache__' not in path.parts)
    return {path.relative_to(folder).as_posix() for path in files}


def files_in_wheel(wheel: Path) -> set[str]:
    prefix = 'beit_mm/.mim/'
    return {n.removeprefix(prefix) for n in zipfile.ZipFile(wheel).namelist() if n.startswith(prefix)}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A committed copy of this repository, with one config and one tool whose names are known."""
    copy = tmp_path / 'source'
    shutil.copytree(ROOT, copy, ignore=NOT_COPIED)
    for name in (SOME_CONFIG, 'tools/some_tool.py'):
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).write_text('answer = 42\n')
    git = ['git', '-c', 'user.name=test', '-c', 'user.email=test@localhost']
    for arguments in (['init', '-q'], ['add', '-A'], ['commit', '-q', '-m', 'source']):
        subprocess.run(git + arguments, cwd=copy, check=True)
    return copy


@pytest.fixture(scope='module')
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp('wheel')
    shutil.copytree(ROOT, folder / 'source', ignore=NOT_COPIED)
    return build_wheel(folder / 'source', folder / 'dist')


def test_wheel_holds_what_mim_looks_for_and_forgets_what_is_deleted(source, tmp_path):
    files = files_in_wheel(build_wheel(source, tmp_path / 'first'))
    assert {SOME_CONFIG, 'tools/some_tool.py', 'model-index.yml'} <= files == mim_files(source)
    (source / SOME_CONFIG).unlink()
    assert SOME_CONFIG not in files_in_wheel(build_wheel(source, tmp_path / 'second'))


def test_wheel_serves_demo_outside_of_a_checkout(wheel, tmp_path):
    """Offline: its weights, photos, their attribution and the config; the command is there."""
    python('-m', 'pip', 'install', '-q', '--no-deps', '--target', str(tmp_path / 'site'), str(wheel), cwd=tmp_path)
    package = tmp_path / 'site/beit_mm'
    weights = ROOT / 'beit_mm/weights'
    expected = {file.relative_to(weights) for file in weights.rglob('*') if file.is_file()}
    assert {Path('README.md'), Path('scenes/tree.jpg'), Path('pretrained.safetensors')} <= expected
    assert {file.relative_to(package / 'weights') for file in (package / 'weights').rglob('*.*')} == expected
    code = f"""import socket
socket.socket.connect = socket.getaddrinfo = lambda *_: 1 / 0
import beit_mm
assert beit_mm.__file__.startswith({str(package)!r}) and beit_mm.get_model('demo').target_generator is None
beit_mm.reconstruct('demo', {str(package / 'weights/scenes')!r})"""
    environment = dict(os.environ, PYTHONPATH=str(tmp_path / 'site'))
    subprocess.run([sys.executable, '-W', 'ignore', '-c', code], cwd=tmp_path, env=environment, check=True)
    assert (tmp_path / 'reconstruction.png').is_file()
    script = subprocess.run(
        [tmp_path / 'site/bin/beit-mm', '--help'], env=environment, check=True, capture_output=True, text=True
    )
    assert script.stdout.startswith('usage: beit-mm ')


def test_install_from_sdist(source, tmp_path):
    python('-c', BUILD.format('editable'), cwd=source)  # its links must not be packed
    python('-c', BUILD.format('sdist'), cwd=source)
    archive = next((source / 'dist').glob('*.tar.gz'))
    with tarfile.open(archive) as tar:
        names = {n.split('/', 1)[-1] for n in tar.getnames()}
    parts = {'LICENSE', 'model-index.yml', 'requirements/onedl.txt', 'beit_mm/weights/pretrained.safetensors'}
    assert parts | {'tests/test_packaging.py'} <= names
    assert not any(n.startswith('beit_mm/.mim') for n in names)
    assert files_in_wheel(build_wheel(archive, tmp_path / 'dist')) == mim_files(source)


@pytest.mark.parametrize('links', [True, False], ids=['links', 'no links here'])
def test_editable_install(source, links):
    refuse = 'import pathlib\ndef refuse(*_, **__): raise OSError("none")\npathlib.Path.symlink_to = refuse\n'
    forbid = '' if links else refuse
    for _ in range(2):  # the second one finds what the first one left
        python('-c', forbid + BUILD.format('editable'), cwd=source)
    mim = source / 'beit_mm/.mim'
    assert mim_files(mim) == mim_files(source)
    (source / 'tools/some_tool.py').write_text('answer = 43\n')
    assert ((mim / 'tools/some_tool.py').read_text() == 'answer = 43\n') == links
    status = subprocess.run(['git', 'status', '--porcelain'], cwd=source, capture_output=True, text=True)
    assert status.stdout.split() == ['M', 'tools/some_tool.py']


def test_legacy_develop(source):
    start = 'develop.run = lambda self: None\nsys.argv = ["setup.py", "develop"]\nrunpy.run_path("setup.py")'
    python('-c', f'import runpy, sys\nfrom setuptools.command.develop import develop\n{start}', cwd=source)
    assert mim_files(source / 'beit_mm/.mim') == mim_files(source)


def requirements(wheel: Path) -> list[Requirement]:
    archive = zipfile.ZipFile(wheel)
    name = next(n for n in archive.namelist() if n.endswith('.dist-info/METADATA'))
    return [Requirement(r) for r in email.message_from_bytes(archive.read(name)).get_all('Requires-Dist')]


def test_base_requirements_name_neither_family(wheel):
    base = {r.name for r in requirements(wheel) if r.marker is None}
    assert 'torch' in base
    assert not {n for n in base if n.removeprefix('onedl-').removeprefix('open') in FAMILIES}


@pytest.mark.parametrize('name', ['onedl', 'openmmlab', 'dev'])
def test_pins_lie_in_the_ranges(wheel, name):
    lines = (ROOT / f'requirements/{name}.txt').read_text().splitlines()
    pins = [Requirement(line) for line in lines if line and not line.startswith('#')]
    pins = {canonicalize_name(r.name): str(r.specifier).removeprefix('==') for r in pins}
    checked = set()
    for requirement in requirements(wheel):
        if requirement.marker is None or requirement.marker.evaluate({'extra': name}):
            assert requirement.specifier or requirement.name == 'regex', requirement
            version = pins.get(canonicalize_name(requirement.name))
            if version is not None:
                assert requirement.specifier.contains(version), requirement
                checked.add(canonicalize_name(requirement.name))
    # What only makes a build or a test possible is pinned and not required.
    assert set(pins) - checked <= {'setuptools', 'attrs', 'import-linter', 'mkdocs'}

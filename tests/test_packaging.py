"""Wheel, sdist and editable install carry what users and mim look for."""

import email
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from helpers import NO_WORKERS, ROOT
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

NOT_COPIED = shutil.ignore_patterns(
    '.git', '.venv*', '.mim', 'build', 'dist', 'work_dirs', 'data', '*.egg-info', '__pycache__', '.*_cache'
)
BUILD = 'from setuptools import build_meta; build_meta.build_{}("dist")'


def python(*arguments: object, cwd: Path) -> None:
    command = [sys.executable, *map(str, arguments)]
    subprocess.run(command, cwd=cwd, check=True, capture_output=True, text=True)


def files_of(*places: str) -> set[str]:
    """Files of the repository below folders, or by themselves, that users need."""
    found = (path for place in places for path in (ROOT / place, *(ROOT / place).rglob('*')) if path.is_file())
    names = {path.relative_to(ROOT).as_posix() for path in found if not {'__pycache__', '.mim'} & {*path.parts}}
    return {name for name in names if not name.startswith('tools/dev/')}


@pytest.fixture(scope='module')
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of this repository, with wheel, sdist and editable wheel in `dist`."""
    copy = tmp_path_factory.mktemp('packaging') / 'source'
    shutil.copytree(ROOT, copy, ignore=NOT_COPIED)
    for kind in ('editable', 'sdist'):  # the links of the first must not be packed by the others
        python('-c', BUILD.format(kind), cwd=copy)
    editable = [path.name for path in (copy / 'beit_mm/.mim').iterdir() if path.is_symlink()]
    assert sorted(editable) == ['configs', 'model-index.yml', 'tools']
    assert (copy / 'beit_mm/.mim/tools/train.py').samefile(copy / 'tools/train.py')
    next((copy / 'dist').glob('*editable*.whl')).unlink()
    python(*'-m pip wheel -q --no-deps --no-build-isolation -w dist .'.split(), cwd=copy)
    return copy


def test_the_wheel_and_the_sdist_hold_what_users_need(source):
    wheel = set(zipfile.ZipFile(next(source.glob('dist/*.whl'))).namelist())
    for_checkouts = {'tools/run_demo.sh', 'tools/run_tests.sh', 'tools/_environment.sh'}
    expected = files_of('beit_mm')
    assert {'beit_mm/py.typed', 'beit_mm/weights/pretrained.safetensors', 'beit_mm/weights/README.md'} <= expected
    expected |= {f'beit_mm/.mim/{name}' for name in files_of('configs', 'tools', 'model-index.yml') - for_checkouts}
    assert {name for name in wheel if '.dist-info/' not in name} == expected
    with tarfile.open(next(source.glob('dist/*.tar.gz'))) as archive:
        sdist = {name.split('/', 1)[-1] for name in archive.getnames() if archive.getmember(name).isfile()}
    parts = ('beit_mm', 'configs', 'docs', 'tools', 'requirements', 'setup.py', 'README.md', 'LICENSE', 'CHANGELOG.md')
    assert files_of(*parts) <= sdist
    assert not [name for name in sdist if name.startswith(('tests/', 'tools/dev/', 'beit_mm/.mim', '.'))]


@pytest.mark.slow
def test_the_wheel_serves_outside_of_a_checkout(source, images, tmp_path):
    """Offline: packaged weights, configs by name, in a config of one's own too; trains and tests by the command."""
    wheel = next(source.glob('dist/*.whl'))
    python('-m', 'pip', 'install', '-q', '--no-deps', '--target', tmp_path / 'site', wheel, cwd=tmp_path)
    code = f"""import socket
socket.socket.connect = socket.getaddrinfo = lambda *_: 1 / 0
import beit_mm
assert beit_mm.__file__.startswith({str(tmp_path / 'site')!r})
beit_mm.reconstruct('demo', {str(tmp_path / 'site/beit_mm/weights/scenes')!r})
from mmengine.config import Config
assert Config.fromfile('mine.py').train_cfg.max_iters == 7000"""
    (tmp_path / 'mine.py').write_text("_base_ = str(__import__('beit_mm').find_config('demo/pretrain'))\n")
    environment = os.environ | dict(PYTHONPATH=str(tmp_path / 'site'), CUDA_VISIBLE_DEVICES='')
    subprocess.run([sys.executable, '-W', 'ignore', '-c', code], cwd=tmp_path, env=environment, check=True)
    assert (tmp_path / 'reconstruction.png').is_file()
    options = ['--work-dir', 'run', '--cfg-options', f'data_root={images}', 'model.target_generator.checkpoint=None']
    options += [*NO_WORKERS, *(f'{split}_dataloader.dataset.data_prefix=' for split in ('train', 'val', 'test'))]
    for words in ('train mine.py --no-validate --steps 1', 'test demo/pretrain run/iter_1.pth --out run/out.json'):
        command = [tmp_path / 'site/bin/beit-mm', *words.split(), *options, 'train_dataloader.batch_size=4']
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-2000:]
    assert 'mim_loss' in (tmp_path / 'run/out.json').read_text()


def requirements(source: Path) -> list[Requirement]:
    archive = zipfile.ZipFile(next(source.glob('dist/*.whl')))
    name = next(n for n in archive.namelist() if n.endswith('.dist-info/METADATA'))
    return [Requirement(r) for r in email.message_from_bytes(archive.read(name)).get_all('Requires-Dist')]


def test_base_requirements_name_neither_family(source):
    base = {requirement.name for requirement in requirements(source) if requirement.marker is None}
    assert 'torch' in base and not [name for name in base if 'mm' in name.replace('beit_mm', '') or 'mim' in name]


@pytest.mark.parametrize('name', ['onedl', 'openmmlab', 'dev'])
def test_pins_lie_in_the_ranges(source, name):
    lines = (ROOT / f'requirements/{name}.txt').read_text().splitlines()
    pins = [Requirement(line) for line in lines if '==' in line and not line.startswith('#')]
    pins = {canonicalize_name(r.name): str(r.specifier).removeprefix('==') for r in pins}
    extras = [name, *(('bands', 'onnx') if name == 'dev' else ())]  # which dev has too
    for requirement in requirements(source):
        if requirement.marker is None or any(requirement.marker.evaluate(dict(extra=extra)) for extra in extras):
            assert requirement.specifier or requirement.name in ('regex', 'beit_mm'), requirement
            version = pins.get(canonicalize_name(requirement.name))
            assert version is None or requirement.specifier.contains(version), requirement

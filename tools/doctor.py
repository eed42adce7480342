#!/usr/bin/env python
"""Diagnoses this Python environment and prints the fixes.

It prints versions and devices, then each problem with the command that fixes it, and exits with 1 if there is a
problem. It needs only the standard library.
"""

from __future__ import annotations

import importlib
import shlex
import sys
import warnings
from collections.abc import Iterator
from importlib import metadata

OPENMMLAB = ('mmengine', 'mmcv', 'mmpretrain', 'mmsegmentation')
ONEDL = tuple(f'onedl-{name}' for name in OPENMMLAB)
NEEDED = ('torch', 'torchvision', 'numpy', 'pillow', 'scipy', 'safetensors', 'matplotlib', 'tensorboard')
OTHERS = ('onedl-mim', 'openmim', 'setuptools', 'beit_mm')
IMPORTS = ('torch', 'torchvision', 'cv2', 'mmengine', 'mmcv', 'mmpretrain.models', 'mmseg')
PIP = f'{shlex.quote(sys.executable)} -m pip'
BUILD = '--no-build-isolation --no-deps --no-cache-dir --force-reinstall'
BUILD_MMCV = f'CUDA_VISIBLE_DEVICES= MMCV_WITH_OPS=1 {PIP} install {BUILD} mmcv==2.1.0'


def installed() -> dict[str, str]:
    """Versions of those installed distributions that matter here."""
    found = {}
    for name in NEEDED + ONEDL + OPENMMLAB + OTHERS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            pass
    return found


def numbers(version: str) -> tuple[int, int]:
    """Major and minor number: '2.11.0+cpu' -> (2, 11)."""
    major, minor = version.split('+')[0].split('.')[:2]
    return int(major), int(minor)


def family(found: dict[str, str]) -> str:
    """'onedl', 'openmmlab', 'mixed', or 'none' if no package of either is installed."""
    onedl, openmmlab = any(n in found for n in ONEDL), any(n in found for n in OPENMMLAB)
    return {(1, 1): 'mixed', (1, 0): 'onedl', (0, 1): 'openmmlab'}.get((onedl, openmmlab), 'none')


def version_problems(found: dict[str, str], python: tuple[int, int], mmcv_has_ops: bool) -> Iterator[tuple[str, str]]:
    """Yields each problem that the versions alone show, and the command that fixes it."""
    if python < (3, 10):
        old = f'Python {python[0]}.{python[1]} is too old, 3.10 is needed'
        yield old, 'bash tools/run_tests.sh  # finds a newer Python and makes .venv with it'
    stack = family(found)
    if stack == 'mixed':
        own = ' '.join(n for n in (*OPENMMLAB, 'openmim') if n in found)
        reinstall = f'{PIP} install --force-reinstall --no-deps -r requirements/onedl.txt'
        yield f'{own} beside onedl-*: the two families overwrite each other', f'{PIP} uninstall -y {own} && {reinstall}'
    wanted, extra = (OPENMMLAB, stack) if stack == 'openmmlab' else (ONEDL, 'onedl')
    if missing := [n for n in NEEDED + wanted if n not in found]:
        yield f'missing: {", ".join(missing)}', f'{PIP} install -e ".[{extra}]"'
    elif 'beit_mm' not in found:
        yield 'beit_mm is not installed: mim and other folders cannot find it', f'{PIP} install --no-deps -e .'
    if stack == 'openmmlab' and 'mmcv' in found:
        if not mmcv_has_ops:
            yield f'mmcv {found["mmcv"]} has no compiled ops, which mmseg imports', BUILD_MMCV
        if numbers(found['mmcv']) >= (2, 2):
            yield f'mmcv {found["mmcv"]} is too new for mmseg, which needs < 2.2', BUILD_MMCV
    setuptools = found.get('setuptools', '0.0')
    if 'openmim' in found and not 64 <= numbers(setuptools)[0] < 82:
        needed = f'openmim needs the pkg_resources of setuptools 64 to 81, found {setuptools}'
        yield needed, f'{PIP} install "setuptools>=64,<82"'


def import_problems(stack: str) -> Iterator[tuple[str, str]]:
    """Yields each installed module that cannot be imported, with the reason, and the command that fixes it."""
    warnings.simplefilter('ignore')
    for name in IMPORTS:
        try:
            importlib.import_module(name)
        except Exception as error:  # a broken installation can raise anything
            reason = f'{type(error).__name__}: {error}'.splitlines()[0]
            fix = f'{PIP} install --force-reinstall -r requirements/{stack}.txt'
            if 'libGL' in reason:
                fix = f'{PIP} uninstall -y opencv-python && {PIP} install opencv-python-headless'
            if 'NoneType takes no arguments' in reason:  # mmpretrain's reading of transformers 5, beside pycocotools
                fix = f'{PIP} install "transformers>=4.45,<5"'
            yield f'import {name} fails: {reason}', fix


def devices() -> str:
    """Describes the devices that torch can use and the type in which they train."""
    try:
        import torch

        from beit_mm.precision import usable_dtype

        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        place = ', '.join(names) or f'no CUDA device, {torch.get_num_threads()} CPU threads'
        return f'{place}: trains in {usable_dtype("bfloat16", "cuda" if names else "cpu")}'
    except Exception as error:  # a missing torch and a broken driver alike
        return f'unknown, {type(error).__name__}: {error}'


def main() -> None:
    found = installed()
    files = metadata.files('mmcv') or () if 'mmcv' in found else ()
    has_ops = any(file.name.startswith('_ext') for file in files)
    print(f'python {sys.version.split()[0]} ({sys.executable})')
    print(f'family {family(found)}')
    print('\n'.join(f'  {name} {version}' for name, version in sorted(found.items())))
    print(f'devices {devices()}')
    problems = list(version_problems(found, sys.version_info[:2], has_ops)) or list(import_problems(family(found)))
    for problem, command in problems:
        print(f'\nPROBLEM {problem}\n    FIX {command}')
    print(f'\n{len(problems)} problem(s) found')
    sys.exit(bool(problems))


if __name__ == '__main__':
    main()

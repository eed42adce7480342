"""Imports go down only: what a folder of beit_mm may import of beit_mm, mm* and the rest.

Imports are read off the sources with ast, those inside functions included.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / 'beit_mm'
MAX_LINES = 300

# Folder or file right under beit_mm: (of beit_mm, mm* packages). '*' is everything.
ALLOWED = {
    'functional': (set(), set()),
    'layers': ({'functional'}, set()),
    'checkpoint': ({'registry', 'functional'}, {'mmengine'}),
    'datasets': ({'registry', 'functional'}, {'mmengine', 'mmcv', 'mmpretrain'}),
    'models': ({'registry', 'layers', 'functional', 'checkpoint'}, {'mmengine', 'mmpretrain'}),
    'engine': ({'registry', 'functional', 'checkpoint'}, {'mmengine', 'mmpretrain'}),
    'segmentation': ({'registry', 'models', 'functional', 'engine'}, {'mmengine', 'mmseg'}),
    'visualization': ({'registry', 'models', 'functional'}, {'mmengine'}),
    'apis': ({'*'}, {'mmengine', 'mmcv', 'mmpretrain', 'mmseg'}),
    'registry': (set(), {'mmengine'}),
    '__init__': ({'registry'}, {'mmengine'}),
}
MM = {'mmengine', 'mmcv', 'mmpretrain', 'mmseg'}
# setup.py's install_requires, by import name.
REQUIRED = set('torch torchvision numpy PIL scipy safetensors matplotlib tensorboard'.split())
# Its extra `onnx`, which only apis may import, and only inside functions.
OPTIONAL = {'onnx', 'onnxruntime'}


def absolute(node: ast.ImportFrom, package: str) -> str:
    """The module that a `from` import names, for a file in `package`."""
    if not node.level:
        return node.module
    parents = package.split('.')
    parents = parents[: len(parents) - node.level + 1]
    return '.'.join(parents + ([node.module] if node.module else []))


def imported(tree: ast.AST, package: str) -> Iterator[tuple[int, str, bool]]:
    """Line, dotted name (a.b of `from a import b`), whether it runs when the file is imported."""
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)]
    inner = {id(n) for function in functions for n in ast.walk(function)}
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f'{absolute(node, package)}.{alias.name}' for alias in node.names]
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            if ast.unparse(node.func).split('.')[-1] in ('import_module', '__import__'):
                names = [str(node.args[0].value)]
        for name in names:
            yield node.lineno, name, id(node) not in inner


def violations(path: str, source: str) -> list[str]:
    """What a file `path`, such as beit_mm/models/x.py, with this `source` does wrong."""
    parts = Path(path).with_suffix('').parts
    if parts[1] not in ALLOWED:
        return [f'{path}: {parts[1]} is not in the table of folders']
    ours, mm = ALLOWED[parts[1]]
    found = []
    if len(source.splitlines()) > MAX_LINES:
        found.append(f'{path}: {len(source.splitlines())} lines, at most {MAX_LINES}')
    tree = ast.parse(source, filename=path)
    if ast.get_docstring(tree) is None:
        found.append(f'{path}: no docstring that says what the file holds')
    for line, name, at_import in imported(tree, '.'.join(parts[:-1])):
        top, _, rest = name.partition('.')
        folder = rest.split('.')[0]
        if top == 'beit_mm':
            # `from beit_mm import X` of a public name goes through __init__: nobody below apis may.
            fine = folder in ours | {parts[1]} or '*' in ours
            fine &= not (parts[1] == 'apis' and folder == 'segmentation' and at_import)
        elif top == 'cv2':  # mmcv's image backend, installed with it
            fine = 'mmcv' in mm
        elif top in MM:
            fine = top in mm and not name.startswith('mmcv.ops')
        else:
            fine = top in sys.stdlib_module_names | REQUIRED
            fine |= top in OPTIONAL and parts[1] == 'apis' and not at_import
        if not fine:
            found.append(f'{path}:{line}: may not import {name}')
    return found


def test_the_package_obeys():
    files = sorted(PACKAGE.rglob('*.py'))
    files = [f for f in files if '.mim' not in f.parts]
    assert len(files) > 2
    found = [v for f in files for v in violations(f.relative_to(ROOT).as_posix(), f.read_text())]
    assert not found, '\n' + '\n'.join(found)


@pytest.mark.parametrize(
    'path, line',
    [
        ('beit_mm/functional/x.py', 'import mmengine'),
        ('beit_mm/functional/x.py', 'from beit_mm.layers import y'),
        ('beit_mm/functional/x.py', 'from ..registry import MODELS'),
        ('beit_mm/layers/x.py', 'from beit_mm.registry import MODELS'),
        ('beit_mm/layers/x.py', 'def f():\n    from ..models import y'),
        ('beit_mm/layers/x.py', 'from .. import models'),
        ('beit_mm/layers/x.py', 'from beit_mm import BEiTBackbone'),
        ('beit_mm/checkpoint/x.py', 'import mmpretrain.models'),
        ('beit_mm/datasets/x.py', 'import importlib\nimportlib.import_module("mmseg.datasets")'),
        ('beit_mm/datasets/x.py', 'from mmcv.ops import roi_align'),
        ('beit_mm/datasets/x.py', 'from mmcv import ops'),
        ('beit_mm/models/x.py', 'from beit_mm.datasets import y'),
        ('beit_mm/models/deep/x.py', 'from ...datasets import y'),
        ('beit_mm/models/x.py', 'import beit_mm.engine.hooks as h'),
        ('beit_mm/engine/x.py', 'from beit_mm.models import y'),
        ('beit_mm/engine/x.py', 'from mmseg.structures import y'),
        ('beit_mm/segmentation/x.py', 'from beit_mm.datasets import y'),
        ('beit_mm/segmentation/x.py', 'import mmpretrain'),
        ('beit_mm/visualization/x.py', 'import mmpretrain'),
        ('beit_mm/apis/x.py', 'from beit_mm.segmentation import y'),
        ('beit_mm/registry.py', 'from beit_mm import models'),
        ('beit_mm/__init__.py', 'import mmpretrain'),
        ('beit_mm/models/x.py', 'import timm'),
        ('beit_mm/apis/x.py', 'import onnxruntime'),
        ('beit_mm/models/x.py', 'def f():\n    import onnx'),
        ('beit_mm/elsewhere/x.py', 'import os'),
    ],
)
def test_a_violation_is_found(path, line):
    assert len(violations(path, f'"""Text."""\n{line}\n')) == 1


@pytest.mark.parametrize(
    'path, line',
    [
        (
            'beit_mm/functional/x.py',
            'import math\nimport numpy as np\nfrom .y import z\nfrom beit_mm.functional import z',
        ),
        ('beit_mm/layers/x.py', 'from beit_mm.functional.y import z\nfrom ..functional import z'),
        (
            'beit_mm/models/deep/x.py',
            'from ...layers import y\nfrom ..backbone import z\nfrom mmpretrain import models',
        ),
        ('beit_mm/segmentation/x.py', 'import mmseg\nfrom beit_mm.engine.y import z\nfrom .y import z'),
        (
            'beit_mm/datasets/x.py',
            'from mmcv.transforms import BaseTransform\nfrom beit_mm.registry import TRANSFORMS',
        ),
        (
            'beit_mm/apis/x.py',
            'from beit_mm.models import y\ndef f():\n    from beit_mm.segmentation import z\n    import onnx',
        ),
    ],
)
def test_what_is_allowed_passes(path, line):
    assert violations(path, f'"""Text."""\n{line}\n') == []


def test_a_long_file_and_one_without_docstring_are_found():
    assert 'lines' in violations('beit_mm/models/x.py', '"""Text."""\n' * (MAX_LINES + 1))[0]
    assert 'docstring' in violations('beit_mm/models/x.py', 'import os\n')[0]


def test_import_beit_mm_is_light():
    code = 'import sys, beit_mm; print(sorted({m.split(".")[0] for m in sys.modules}))'
    result = subprocess.run(
        [sys.executable, '-c', code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    loaded = set(ast.literal_eval(result.stdout))
    assert not loaded & {'mmcv', 'mmpretrain', 'mmseg'}


def test_without_mmseg_everything_else_is_found():
    code = """import sys
sys.modules['mmseg'] = None  # as if it were not installed
from beit_mm import registry
assert registry.MODELS.get('BEiTBackbone') and registry.HOOKS.get('FitCheckHook')
assert registry.MODELS.get('SlidingSegmentor') is None
assert 'beit_mm.segmentation' not in sys.modules"""
    subprocess.run([sys.executable, '-W', 'ignore', '-c', code], cwd=ROOT, check=True)

"""Imports go down only, what belongs to mmseg stands apart, and nothing asks by name for what it could import.

Read off the sources with ast, imports inside functions included.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / 'beit_mm'
MAX_LINES = 621
MAX_FILES = 75
MAX_TOTAL = 16186  # lines of the package: may only fall

# From the bottom to the top: a layer may import the layers below it, and itself.
LAYERS = [
    {'registry', 'files', 'precision'},
    {'terminal'},
    {'positions'},
    {'checkpoint'},
    {'datasets'},
    {'models'},
    {'features'},
    {'engine'},
    {'segmentation', 'pictures'},
    {'apis'},
    {'__init__', '__main__'},
]
MM = {'mmengine', 'mmcv', 'mmpretrain', 'mmseg'}
# setup.py's install_requires, by import name; cv2 comes with mmcv.
REQUIRED = set('torch torchvision numpy PIL scipy safetensors matplotlib tensorboard cv2'.split())
# Its extra `onnx`, which only apis may import, and only inside functions.
OPTIONAL = {'onnx', 'onnxruntime'}
# What one file tries first and does without.
TRIED = {
    'beit_mm/datasets/reading.py': ('torchcodec', 'pillow_heif'),
    'beit_mm/checkpoint/find.py': ('huggingface_hub',),
}
# Attributes of ours that heads of the libraries have too, so that one may ask any module for them.
SHARED_ATTRIBUTES = {'backbone', 'num_classes', 'pipeline'}


def sources() -> dict[str, str]:
    files = [file for file in sorted(PACKAGE.rglob('*.py')) if '.mim' not in file.parts]
    return {file.relative_to(ROOT).as_posix(): file.read_text() for file in files}


def imported(tree: ast.AST, package: str) -> Iterator[tuple[int, str, bool]]:
    """Line, dotted name (a.b of `from a import b`), whether it runs when the file is imported."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    inner = {id(node) for function in functions for node in ast.walk(function)}
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ''
            if node.level:
                parents = package.split('.')
                module = '.'.join(parents[: len(parents) - node.level + 1] + ([module] if module else []))
            names = [f'{module}.{alias.name}' for alias in node.names]
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            if ast.unparse(node.func).split('.')[-1] in ('import_module', '__import__'):
                names = [str(node.args[0].value)]
        for name in names:
            yield node.lineno, name, id(node) not in inner


def violations(path: str, source: str) -> list[str]:
    """What a file `path`, such as beit_mm/models/x.py, with this `source` does wrong."""
    parts = Path(path).with_suffix('').parts
    level = next((index for index, layer in enumerate(LAYERS) if parts[1] in layer), None)
    if level is None:
        return [f'{path}: {parts[1]} is in no layer']
    below = set().union(*LAYERS[:level]) | {parts[1]}
    wrong = []
    if len(source.splitlines()) > MAX_LINES:
        wrong.append(f'{path}: {len(source.splitlines())} lines, at most {MAX_LINES}')
    tree = ast.parse(source, filename=path)
    if ast.get_docstring(tree) is None:
        wrong.append(f'{path}: no docstring that says what the file holds')
    for line, name, at_import in imported(tree, '.'.join(parts[:-1])):
        top, _, rest = name.partition('.')
        folder = rest.split('.')[0]
        if top == 'beit_mm':
            # mmseg may be missing, so only functions of apis import segmentation
            right = folder in {*below, '__version__'} and not (folder == 'segmentation' != parts[1] and at_import)
        elif top == 'mmseg':
            right = parts[1] == 'segmentation' or parts[1] == 'apis' and not at_import
        elif top in MM:
            right = level > 2 or top == 'mmengine'
            right &= not name.startswith('mmcv.ops')
        else:
            right = top in sys.stdlib_module_names | REQUIRED
            right |= top in OPTIONAL and parts[1] == 'apis' and not at_import
            right |= top in TRIED.get(path, ())
        if not right:
            wrong.append(f'{path}:{line}: may not import {name}')
    return wrong


def own_attributes() -> set[str]:
    """Public names of methods and attributes that classes of the package define."""
    names = set()
    for source in sources().values():
        for cls in (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef)):
            names |= {node.name for node in cls.body if isinstance(node, ast.FunctionDef)}
            names |= {
                node.attr
                for node in ast.walk(cls)
                if isinstance(node, ast.Attribute)
                and isinstance(node.ctx, ast.Store)
                and ast.unparse(node.value) == 'self'
            }
    return {name for name in names if not name.startswith('_')} - SHARED_ATTRIBUTES


def indirections(path: str, source: str, own: set[str]) -> list[str]:
    """Questions by name for what is ours: hasattr, getattr, registry strings."""
    wrong = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        texts = [
            part.value for part in ast.walk(node) if isinstance(part, ast.Constant) and isinstance(part.value, str)
        ]
        asked = ast.unparse(node.args[1]).strip('\'"') if name in ('hasattr', 'getattr') else None
        if asked in own:
            wrong.append(f'{path}:{node.lineno}: {name} asks for {asked!r}, use isinstance')
        if name.endswith(('.build', '.get')) and any(text.startswith('beit_mm.') for text in texts):
            wrong.append(f'{path}:{node.lineno}: looks {texts} up by name, import it')
    return wrong


def test_the_package_obeys():
    files = sources()
    own = own_attributes()
    assert 10 < len(files) <= MAX_FILES
    assert sum(len(source.splitlines()) for source in files.values()) <= MAX_TOTAL
    assert {'out_indices', 'provenance', 'encode_at', 'get_layer_depth'} <= own
    wrong = [
        line for path, source in files.items() for line in violations(path, source) + indirections(path, source, own)
    ]
    assert not wrong, '\n' + '\n'.join(wrong)


@pytest.mark.parametrize(
    'path, line',
    [
        ('beit_mm/positions.py', 'from mmcv import x'),
        ('beit_mm/positions.py', 'from beit_mm.models import y'),
        ('beit_mm/registry.py', 'from beit_mm import models'),
        ('beit_mm/checkpoint/x.py', 'def f():\n    from ..models import y'),
        ('beit_mm/checkpoint/x.py', 'from beit_mm import BEiTBackbone'),
        ('beit_mm/datasets/x.py', 'import importlib\nimportlib.import_module("mmseg.datasets")'),
        ('beit_mm/datasets/x.py', 'from mmcv.ops import roi_align'),
        ('beit_mm/models/deep/x.py', 'from ...engine import y'),
        ('beit_mm/models/x.py', 'import beit_mm.engine.steps as h'),
        ('beit_mm/engine/x.py', 'from mmseg.structures import y'),
        ('beit_mm/pictures/x.py', 'from beit_mm.apis import y'),
        ('beit_mm/apis/x.py', 'from beit_mm.segmentation import y'),
        ('beit_mm/models/x.py', 'import timm'),
        ('beit_mm/apis/x.py', 'import onnxruntime'),
        ('beit_mm/elsewhere/x.py', 'import os'),
    ],
)
def test_a_violation_is_found(path, line):
    assert len(violations(path, f'"""Text."""\n{line}\n')) == 1


@pytest.mark.parametrize(
    'path, line',
    [
        ('beit_mm/models/deep/x.py', 'from ...positions import y\nfrom ..vit import z\nfrom mmpretrain import models'),
        ('beit_mm/engine/x.py', 'from beit_mm.models.beit import y\nfrom beit_mm.datasets import z'),
        ('beit_mm/segmentation/x.py', 'import mmseg\nfrom beit_mm.engine.y import z\nfrom .y import z'),
        (
            'beit_mm/apis/x.py',
            'from beit_mm.models import y\ndef f():\n    from beit_mm.segmentation import z\n    import onnx',
        ),
    ],
)
def test_what_is_allowed_passes(path, line):
    assert violations(path, f'"""Text."""\n{line}\n') == []


@pytest.mark.parametrize(
    'line', ['hasattr(x, "out_indices")', 'getattr(x, "provenance", None)', 'MODELS.build(dict(type="beit_mm.X"))']
)
def test_an_indirection_is_found(line):
    assert len(indirections('x.py', line, own_attributes())) == 1


def test_a_long_file_and_one_without_docstring_are_found():
    assert 'lines' in violations('beit_mm/models/x.py', '"""Text."""\n' * (MAX_LINES + 1))[0]
    assert 'docstring' in violations('beit_mm/models/x.py', 'import os\n')[0]


def test_importing_is_light_and_works_without_mmseg():
    code = """import sys, beit_mm
assert not {'mmcv', 'mmpretrain', 'mmseg', 'torch'} & {name.split('.')[0] for name in sys.modules}
sys.modules['mmseg'] = None  # as if it were not installed
from beit_mm import registry
assert registry.MODELS.get('BEiTBackbone') and registry.HOOKS.get('FitCheckHook')
assert registry.MODELS.get('SlidingSegmentor') is None
assert 'beit_mm.segmentation' not in sys.modules"""
    subprocess.run([sys.executable, '-W', 'ignore', '-c', code], cwd=ROOT, check=True)

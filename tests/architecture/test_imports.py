"""The package's size, its dependencies, and that nothing asks by name for what it could import.

import-linter holds the order of the layers (pyproject.toml, run by tools/run_tests.sh).
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / 'beit_mm'
MAX_LINES = 496
MAX_FILES = 59
MAX_TOTAL = 12728  # lines of the package: may only fall
MM = {'mmengine', 'mmcv', 'mmpretrain', 'mmseg'}
# setup.py's install_requires, by import name; cv2 comes with mmcv, rich with mmengine.
REQUIRED = set('torch torchvision numpy PIL scipy safetensors matplotlib tensorboard cv2 rich'.split())
# What functions import that can do without it, or say what to install.
OPTIONAL = {'onnx', 'onnxruntime', 'torchcodec', 'pillow_heif', 'huggingface_hub', 'tifffile'}
# Attributes of ours that heads of the libraries have too, so that one may ask any module for them.
SHARED_ATTRIBUTES = {'backbone', 'num_classes', 'pipeline'}


def sources() -> dict[str, str]:
    files = [file for file in sorted(PACKAGE.rglob('*.py')) if '.mim' not in file.parts]
    return {file.relative_to(ROOT).as_posix(): file.read_text() for file in files}


def imported(source: str) -> Iterator[str]:
    """Dotted names, a.b of `from a import b`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield from (f'{node.module}.{alias.name}' for alias in node.names)


def foreign(source: str) -> list[str]:
    """Imports that an installed package cannot count on, and mmcv's compiled operators, which many machines lack."""
    known = sys.stdlib_module_names | REQUIRED | OPTIONAL | MM | {'beit_mm'}
    return [name for name in imported(source) if name.split('.')[0] not in known or name.startswith('mmcv.ops')]


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
    for path, source in files.items():
        assert len(source.splitlines()) <= MAX_LINES and ast.get_docstring(ast.parse(source)), path
        assert not foreign(source), path
        assert not indirections(path, source, own)


def test_a_foreign_import_is_found():
    assert foreign('def f():\n    import timm\nfrom mmcv.ops import roi_align\nfrom mmcv import ops\nimport torch.nn')
    assert len(foreign('import timm')) == len(foreign('from mmcv.ops import x')) == len(foreign('import mmcv.ops')) == 1
    assert len(foreign('from mmcv import ops')) == 1 and not foreign('from mmcv.cnn import x\nfrom . import y')


@pytest.mark.parametrize(
    'line', ['hasattr(x, "out_indices")', 'getattr(x, "provenance", None)', 'MODELS.build(dict(type="beit_mm.X"))']
)
def test_an_indirection_is_found(line):
    assert len(indirections('x.py', line, own_attributes())) == 1


def test_importing_is_light_and_works_without_mmseg():
    code = """import sys, beit_mm
assert not {'mmcv', 'mmpretrain', 'mmseg', 'torch'} & {name.split('.')[0] for name in sys.modules}
from beit_mm import registry
assert registry.MODELS.get('BEiTBackbone') and registry.HOOKS.get('FitCheckHook')
assert 'mmseg' not in sys.modules
sys.modules['mmseg'] = None  # as if it were not installed
assert registry.MODELS.get('SlidingSegmentor') is None
assert 'beit_mm.segmentation' not in sys.modules"""
    subprocess.run([sys.executable, '-W', 'ignore', '-c', code], cwd=ROOT, check=True)

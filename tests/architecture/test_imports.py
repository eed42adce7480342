"""The sizes of package and tests, that the package needs only what is installed with it, and that nothing asks by name
for what it could import. import-linter holds the order of the layers (pyproject.toml, run by tools/run_tests.sh)."""

import ast
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from helpers import ROOT

MAX_LINES = 550  # of a file, to be read in one sitting
# Lines of the plugin, of the application on it and of the tests. Where one is full, something goes; lines are not
# written denser for it. CHANGELOG names what grows.
MAX_PLUGIN, MAX_APPLICATION, MAX_TESTS = 16_100, 6_330, 25_850
# pyproject.toml's dependencies by import name, with what mmcv and mmengine bring; then what a function can do without.
KNOWN = {'beit_mm', 'mmengine', 'mmcv', 'mmpretrain', 'mmseg', *sys.stdlib_module_names}
KNOWN |= set('torch torchvision numpy PIL scipy safetensors matplotlib tensorboard cv2 rich yaml filelock'.split())
KNOWN |= {
    'onnx',
    'onnxruntime',
    'torchcodec',
    'pillow_heif',
    'huggingface_hub',
    'tifffile',
    'rasterio',
    'imagehash',
    'transformers',
    'torchmetrics',
}


def imported(tree: ast.Module) -> Iterator[str]:
    """Dotted names, a.b of `from a import b`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield from (f'{node.module}.{alias.name}' for alias in node.names)


def looked_up_by_name(tree: ast.Module) -> Iterator[str]:
    """What a registry is asked for that is ours."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(('.build', '.get')):
            texts = [part.value for part in ast.walk(node) if isinstance(part, ast.Constant)]
            yield from (text for text in texts if isinstance(text, str) and text.startswith('beit_mm.'))


def lines_of(files: Iterable[Path]) -> int:
    return sum(len(file.read_text().splitlines()) for file in files)


def test_each_house_keeps_to_its_size():
    package = ROOT / 'beit_mm'
    files = {file for file in package.rglob('*.py') if '.mim' not in file.parts}
    application = {file for file in files if file.parent.name == 'own_images'} | {package / '__main__.py'}
    assert len(application) > 5 and lines_of(application) <= MAX_APPLICATION
    assert lines_of(files - application) <= MAX_PLUGIN and max(lines_of([file]) for file in files) <= MAX_LINES
    assert lines_of((ROOT / 'tests').rglob('*.py')) <= MAX_TESTS


def test_the_package_needs_what_is_installed_with_it():
    files = [file for file in sorted((ROOT / 'beit_mm').rglob('*.py')) if '.mim' not in file.parts]
    for file in files:
        tree = ast.parse(file.read_text())
        assert ast.get_docstring(tree), file
        # mmcv's compiled operators are lacking on many machines
        foreign = [name for name in imported(tree) if name.split('.')[0] not in KNOWN or name.startswith('mmcv.ops')]
        assert not foreign and not [*looked_up_by_name(tree)], file


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


# of libraries, without a public way to the same, each with a fallback
PRIVATE = {
    'torch._foreach_lerp_',
    'torch._dynamo.exc.FailOnRecompileLimitHit',
    'torch._dynamo.exc.TorchDynamoException',
}


def test_only_public_names_of_libraries_are_used():
    """A release may rename the others, and files would not be read, or runs not begun."""
    private = set()
    for file in (ROOT / 'beit_mm').rglob('*.py'):
        tree = ast.parse(file.read_text())
        written = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        for name in {*imported(tree), *written}:
            library, *parts = name.split('.')
            if library in ('torch', 'mmengine', 'mmcv', 'mmpretrain', 'mmseg', 'PIL', 'numpy', 'np'):
                private |= {name for part in parts if part.startswith('_') and not part.startswith('__')}
    assert private <= PRIVATE


# of objects of libraries, each with a comment beside it that says what happens without it
PRIVATE_ATTRIBUTES = {
    '_exit': 'os: documented',
    '_iterator': "torch's DataLoader; without it workers end with the process",
    '_shutdown_workers': 'the same',
    '_step_supports_amp_scaling': "torch's optimizers; without it the host decides whether a step is taken",
    '_is_mkldnn_bf16_supported': 'torch.ops; without it the instruction set of the CPU decides',
    '_metadata': "torch's state dicts; without it a file does not say where its weights come from",
    '_metainfo': "mmengine's datasets, for their subclasses",
    '_resume': "mmengine's Runner; without it the config says so",
    '_load_from': 'the same',
    '_non_blocking': "mmengine's data preprocessors; without it the host waits for copies",
}


def private_attributes(tree: ast.Module) -> Iterator[str]:
    """Names with one underscore that are asked of an object, as `x._name` or by getattr and its like."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            names = [node.attr]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ('getattr', 'hasattr', 'setattr', 'delattr'):
            names = [part.value for part in node.args[1:2] if isinstance(part, ast.Constant)]
        else:
            continue
        yield from (name for name in names if name.startswith('_') and not name.startswith('__'))


def test_private_names_of_objects_are_those_of_this_package_or_have_a_reason():
    trees = [ast.parse(file.read_text()) for file in (ROOT / 'beit_mm').rglob('*.py')]
    kinds = ast.FunctionDef, ast.ClassDef
    own = {node.name for tree in trees for node in ast.walk(tree) if isinstance(node, kinds)}
    found = {name for tree in trees for name in private_attributes(tree)}
    assert found - own == {*PRIVATE_ATTRIBUTES}

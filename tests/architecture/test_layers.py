"""Names of modules in strings count as imports: they too go down in the layers of pyproject.toml, and in no circle.

import-linter sees neither a string that is imported later nor a circle inside of a layer.
"""

import ast
import re
from collections.abc import Iterator
from graphlib import TopologicalSorter

from helpers import ROOT

FILES = {
    '.'.join(path.relative_to(ROOT).with_suffix('').parts).removesuffix('.__init__'): path
    for path in (ROOT / 'beit_mm').rglob('*.py')
    if '.mim' not in path.parts
}
MODULE = re.compile(r'beit_mm(\.[a-z_]\w*)+(\.\w+)?')  # perhaps with a class; 'beit_mm.SyncBN' is a registered type
CONTRACT = re.compile(r'^containers = (\[.*?\])\nlayers = (\[.*?^\])', re.MULTILINE | re.DOTALL)


def named(module: str) -> Iterator[str]:
    """Modules of the package that a file imports, anywhere in it, or names in a string."""
    package = module.split('.') if FILES[module].stem == '__init__' else module.split('.')[:-1]
    for node in ast.walk(ast.parse(FILES[module].read_text())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) + 1 - node.level] if node.level else []
            source = '.'.join([*above, *filter(None, [node.module])])
            names = [f'{source}.{alias.name}' for alias in node.names]
        elif isinstance(node, ast.Constant) and MODULE.fullmatch(str(node.value)):
            names = [node.value]
        for name in names:
            yield from {name if name in FILES else name.rpartition('.')[0]} & FILES.keys()


NAMED = {module: {*named(module)} - {module} for module in FILES}


def test_no_file_names_a_module_of_a_higher_layer():
    contracts = CONTRACT.findall((ROOT / 'pyproject.toml').read_text())
    assert contracts and 'beit_mm.segmentation' in NAMED['beit_mm']  # both are read; the package may name all folders
    for containers, layers in contracts:
        for container in ast.literal_eval(containers):
            heights, depth = {}, container.count('.') + 2
            for height, layer in enumerate(reversed(ast.literal_eval(layers))):
                heights |= {f'{container}.{name}': height for name in re.findall(r'\w+', layer)}
            for module, others in NAMED.items():
                for other in others:
                    here, there = ('.'.join(name.split('.')[:depth]) for name in (module, other))
                    if here != there and {here, there} <= heights.keys():
                        assert heights[here] > heights[there], f'{module} names {other}'


def test_no_circle_of_files():
    TopologicalSorter(NAMED).prepare()  # raises CycleError

"""tools/dev/mutate.py tells changes that a test notices from those that none does."""

import json
import subprocess
import sys

from helpers import ROOT

PACKAGE = """
def larger(a, b):
    if a > b:
        return a
    return b
def area(width, height):
    assert width > 0
    return width * height
"""
TESTS = """
import toy
def test_sees_every_change():
    assert toy.larger(1, 2) == 2 and toy.larger(2, 1) == 2

def test_looks_at_no_result():
    toy.area(2, 3)
"""


def test_changes_of_what_no_test_looks_at_survive(tmp_path):
    for name, text in {'toy.py': PACKAGE, 'test_toy.py': TESTS, 'pyproject.toml': '[tool.pytest.ini_options]'}.items():
        (tmp_path / name).write_text(text)
    command = [sys.executable, ROOT / 'tools/dev/mutate.py', 'toy.py', '--tests', 'test_toy.py', '--preload']
    subprocess.run([*command, '--out', 'out/found.jsonl'], cwd=tmp_path, check=True, timeout=240)
    found = [json.loads(line) for line in (tmp_path / 'out/found.jsonl').read_text().splitlines()]
    killers = {result['change'].split(' ', 1)[1]: result['killed_by'] for result in found}
    survivors = {change for change, killer in killers.items() if killer is None}
    assert survivors == {'width * height -> width / height', 'return width * height -> return None', '0 -> 1'}
    assert killers['a > b -> a <= b'] == 'test_toy.py::test_sees_every_change'
    assert killers['width > 0 -> width <= 0'] == 'test_toy.py::test_looks_at_no_result'

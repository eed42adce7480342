"""tools/dev/mutate.py tells changes that a test notices from those that none does."""

import json
import subprocess
import sys

from helpers import ROOT

TOY = """
def area(width, height):
    assert width > 0
    return width * height

def test_looks_at_no_result():
    area(2, 3)
"""


def test_changes_of_what_no_test_looks_at_survive(tmp_path):
    for name, text in {'test_toy.py': TOY, 'pyproject.toml': '[tool.pytest.ini_options]'}.items():
        (tmp_path / name).write_text(text)
    words = 'test_toy.py --tests test_toy.py --preload --out found.jsonl'.split()
    subprocess.run([sys.executable, ROOT / 'tools/dev/mutate.py', *words], cwd=tmp_path, check=True, timeout=240)
    found = [json.loads(line) for line in (tmp_path / 'found.jsonl').read_text().splitlines()]
    killers = {result['change'].split(' ', 1)[1]: result['killed_by'] for result in found}
    assert killers['width > 0 -> width <= 0'] == 'test_toy.py::test_looks_at_no_result'
    assert killers['width * height -> width / height'] is killers['return width * height -> return None'] is None

"""tools/dev/flops.py, against the formulas of a Transformer's arithmetic."""

import re

import pytest
from helpers import ROOT, run_tool


def test_a_classifier_is_counted_by_the_formulas_at_any_size(capsys):
    run_tool('dev/flops.py', ROOT / 'configs/beit/finetune_in1k_100e.py', '--shape', 160, 320)
    rows = [re.split('  +', line) for line in capsys.readouterr().out.splitlines()]
    found = {row[0]: float(row[2]) for row in rows[2:] if len(row) == 4}
    width, depth, patch, tokens = 768, 12, 16 * 16 * 3, 1 + 160 * 320 // 256
    macs = {'patch embedding': (tokens - 1) * patch * width, 'head': width * 1000}
    macs['attention'] = depth * (4 * tokens * width**2 + 2 * tokens**2 * width)  # projections, scores and their sums
    macs['MLP'] = depth * 2 * tokens * width * 4 * width
    assert {part: found[part] for part in macs} == pytest.approx({part: n / 1e9 for part, n in macs.items()}, abs=6e-4)
    assert rows[-3][1] == '86,558,440'

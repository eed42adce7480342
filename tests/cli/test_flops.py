"""tools/dev/flops.py, against the formulas of a Transformer's arithmetic."""

import runpy

import pytest
from helpers import ROOT, load_config, run_tool

count_config = runpy.run_path(str(ROOT / 'tools/dev/flops.py'))['count_config']
WIDTH, DEPTH, PATCH = 768, 12, 16 * 16 * 3


@pytest.mark.parametrize('shape', [(224, 224), (160, 320)])
def test_a_classifier_is_counted_by_the_formulas_at_any_size(shape):
    tokens = 1 + shape[0] * shape[1] // 256
    numbers, flops, _ = count_config(load_config('beit/finetune_in1k_100e.py'), shape)
    macs = dict(
        {'patch embedding': (tokens - 1) * PATCH * WIDTH, 'head': WIDTH * 1000},
        attention=DEPTH * (4 * tokens * WIDTH**2 + 2 * tokens**2 * WIDTH),  # four projections, scores and their sums
        MLP=DEPTH * 2 * tokens * WIDTH * 4 * WIDTH,
    )
    for part, expected in macs.items():
        assert flops[part] == pytest.approx(2 * expected)
    assert numbers.total() == 86_558_440


def test_the_tool_prints_a_table(capsys):
    run_tool('dev/flops.py', ROOT / 'configs/demo/caltech101_beit_dino.py')
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert rows[1] == ['parameters', 'GMAC', 'GFLOP'] and 'teacher' in [row[0] for row in rows]

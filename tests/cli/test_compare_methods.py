"""The comparison with other methods: its tables are those that are published, and its rows train."""

import json
import shutil

import pytest
from helpers import ROOT, run_tool


def test_the_published_tables_are_those_of_the_published_figures(tmp_path, capsys):
    record = sorted((ROOT / 'docs/records').glob('*-compare-methods.json'))[-1]
    shutil.copy(record, tmp_path / 'results.json')
    run_tool('dev/compare_methods.py', tmp_path, '--table', '--out', tmp_path)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith('|')]
    assert len(lines) > 20 and not set(lines) - set((ROOT / 'docs/results.md').read_text().splitlines())
    assert (tmp_path / 'rows.png').stat().st_size > 10_000


@pytest.mark.slow
@pytest.mark.parametrize('row', ['pixels', 'dino', 'mae_ours', 'simmim_theirs', 'features_two'])
def test_a_row_trains_without_a_tokenizer(row, images, tmp_path):
    """And what is finished, with its minutes, is not run again; `features_two` has a first stage."""
    for number in range(6):  # a batch has 64 photos
        shutil.copytree(images, tmp_path / f'data/train/{number}')
    words = [tmp_path / 'data', '--rows', row, '--seeds', 0, '--steps', 4, '--stages', 'pretrain', '--out', tmp_path]
    run_tool('dev/compare_methods.py', *words)
    figures = json.loads((tmp_path / 'results.json').read_text())
    run_tool('dev/compare_methods.py', *words)
    assert json.loads((tmp_path / 'results.json').read_text()) == figures
    assert len(figures) == 1 + (row == 'features_two')

"""The comparison of segmentation heads: its table is the one that is published, and its rows train."""

import json
import shutil

import cv2
import numpy as np
import pytest
from helpers import ROOT, run_tool


def test_the_published_table_is_that_of_the_published_figures(tmp_path, capsys):
    record = sorted((ROOT / 'docs/records').glob('*-compare-heads.json'))[-1]
    shutil.copy(record, tmp_path / 'results.json')
    run_tool('dev/compare_heads.py', tmp_path, '--table', '--out', tmp_path)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith('|')]
    assert len(lines) > 5 and not set(lines) - set((ROOT / 'docs/results.md').read_text().splitlines())


@pytest.mark.slow
def test_every_row_trains_and_what_is_finished_is_not_run_again(tmp_path):
    random = np.random.default_rng(0)
    for split in ('training', 'validation'):
        for kind, shape, most, ending in (('images', (60, 80, 3), 256, 'jpg'), ('annotations', (60, 80), 12, 'png')):
            (tmp_path / f'data/{kind}/{split}').mkdir(parents=True)
            for number in range(8):
                pixels = random.integers(0, most, shape, np.uint8)
                cv2.imwrite(str(tmp_path / f'data/{kind}/{split}/{number}.{ending}'), pixels)
    (tmp_path / 'data/classes.txt').write_text('Idx\tName\n' + ''.join(f'{i}\tclass {i}\n' for i in range(1, 12)))
    words = [tmp_path / 'data', '--out', tmp_path / 'out', '--steps', 2, '--seeds', 0, '--rates', 1e-3]
    run_tool('dev/compare_heads.py', *words)
    figures = json.loads((tmp_path / 'out/results.json').read_text())
    assert len(figures) == 8
    # A frozen backbone trains the head alone, low-rank matrices are far fewer than the backbone's million parameters
    assert all(name.endswith('-0-2') for name in figures)  # seed and steps
    trained = {name.partition('-')[0]: figure['trained'] for name, figure in figures.items()}
    assert trained['masks_decoder'] - trained['masks_frozen'] == trained['upernet'] - trained['upernet_frozen'] > 1e6
    assert 0 < trained['upernet_lora'] - trained['upernet_frozen'] < 1e5
    for folder in (tmp_path / 'data/images', tmp_path / 'data/annotations'):
        shutil.rmtree(folder)  # a second training would fail
    run_tool('dev/compare_heads.py', *words)
    assert json.loads((tmp_path / 'out/results.json').read_text()) == figures

"""The comparison of what pays with few photos: its table is the published one, and its samples are as it says."""

import runpy
import shutil
from collections import Counter

from helpers import ROOT, run_tool


def test_the_published_table_is_that_of_the_published_figures(tmp_path, capsys):
    record = sorted((ROOT / 'docs/records').glob('*-own-photos.json'))[-1]
    shutil.copy(record, tmp_path / 'results.json')
    run_tool('dev/compare_own_photos.py', tmp_path, '--table', '--out', tmp_path)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith('|')]
    assert len(lines) > 5 and not set(lines) - set((ROOT / 'docs/own_images.md').read_text().splitlines())


def test_photos_are_spread_over_classes_whose_held_out_photos_are_all_there(tmp_path, monkeypatch):
    for label in range(12):
        for part, number in (('train', 10 + label), ('val', 3)):
            folder = tmp_path / f'data/{part}/{label}'
            folder.mkdir(parents=True)
            for index in range(number):
                (folder / f'{index}.jpg').touch()
    monkeypatch.syspath_prepend(ROOT / 'tools/dev')
    sample = runpy.run_path(str(ROOT / 'tools/dev/compare_own_photos.py'))['sample']
    sample(tmp_path / 'data', 40, 0, tmp_path / 'few')
    few = Counter(path.parent.name for path in tmp_path.glob('few/train/*/*'))
    assert len(few) == 4 and {*few.values()} == {10}
    assert Counter(path.parent.name for path in tmp_path.glob('few/val/*/*')) == dict.fromkeys(few, 3)
    sample(tmp_path / 'data', 1000, 0, tmp_path / 'all')
    assert Counter(path.parent.name for path in tmp_path.glob('all/train/*/*')) == {str(i): 10 + i for i in range(12)}

"""Pictures of features: components are those of a singular value decomposition, neighbours the nearest."""

import runpy

import numpy as np
from helpers import ROOT
from PIL import Image

from beit_mm import pictures

tool = runpy.run_path(str(ROOT / 'tools/visualization/features.py'))


def test_colours_are_the_components_of_a_singular_value_decomposition_jointly_for_all_images():
    rng = np.random.default_rng(0)
    rows = (np.exp(rng.normal(size=(200, 6))) @ rng.normal(size=(6, 6))).astype(np.float32)
    found = tool['pca_colours']([rows[:80].reshape(8, 10, 6), rows[80:].reshape(10, 12, 6)])
    assert [tuple(colours.shape) for colours in found] == [(3, 8, 10), (3, 10, 12)]
    centred = rows - rows.mean(axis=0)
    left, scale, _ = np.linalg.svd(centred.astype(float), full_matrices=False)
    parts = left[:, :3] * scale[:3]
    parts *= np.sign((parts**3).sum(axis=0))  # rarer values are the larger ones
    low, high = np.quantile(parts, 0.01, axis=0), np.quantile(parts, 0.99, axis=0)
    expected = np.clip((parts - low) / (high - low), 0, 1)
    np.testing.assert_allclose(np.concatenate([c.flatten(1).T for c in found]), expected, atol=1e-4)


def test_neighbours_are_the_nearest_and_never_the_image_itself(tmp_path, monkeypatch):
    angles, paths = [0, 10, 100, 30, 200, 150, 310], []
    for number, level in enumerate((10, 60, 110, 160, 210, 220, 230)):
        paths.append(str(tmp_path / f'{number}.png'))
        Image.new('RGB', (8, 8), (level, level, level)).save(paths[-1])
    features = np.stack([np.cos(np.deg2rad(angles)), np.sin(np.deg2rad(angles))], axis=1).astype(np.float32)
    bank = dict(features=features, paths=paths)
    drawn = []
    monkeypatch.setattr(pictures, 'sheet', drawn.extend)
    pictures.draw_neighbours(dict(features=features[:2], paths=paths[:2]), bank, {paths[1]: 'cat'})
    levels = [[round(255 * float(image[0, 0, 0])) for _, image in row] for row in drawn]
    assert levels == [[10, 60, 160, 230, 110, 220], [60, 10, 160, 230, 110, 220]]
    assert [title for title, _ in drawn[0][:3]] == ['', 'cat 0.985', ' 0.866'] and drawn[1][0][0] == 'cat'
    one = dict(features=features[:1], paths=paths[:1])
    drawn.clear()
    pictures.draw_neighbours(one, one, {})
    assert [len(row) for row in drawn] == [1]

"""Pictures of features: components are those of a singular value decomposition, neighbours the nearest."""

import runpy
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import ROOT
from PIL import Image

tool = SimpleNamespace(**runpy.run_path(str(ROOT / 'tools/visualization/features.py')))


def test_components_are_those_of_a_singular_value_decomposition():
    rows = torch.randn(200, 6).exp() @ torch.randn(6, 6)
    found = tool.principal_components(rows, 3).numpy()
    centred = rows.numpy() - rows.numpy().mean(axis=0)
    left, scale, _ = np.linalg.svd(centred, full_matrices=False)
    expected = left[:, :3] * scale[:3]
    expected *= np.sign((expected**3).sum(axis=0))  # rarer values are the larger ones
    np.testing.assert_allclose(found, expected, atol=1e-3)


def test_colours_are_joint_for_all_images_and_keep_their_places():
    rng = np.random.default_rng(0)
    sky, ground = rng.normal(size=(2, 12))
    maps = []
    for rows in (2, 5):  # of sky, of 8
        labels = (np.arange(8) >= rows)[:, None].repeat(6, 1)
        maps.append(np.where(labels[..., None], ground, sky) + 0.01 * rng.normal(size=(8, 6, 12)))
    first, second = tool.pca_colours([values.astype(np.float32) for values in maps])
    assert first.shape == second.shape == (3, 8, 6) and float(first.min()) >= 0 and float(first.max()) <= 1
    assert abs(float(first[0, :2].mean() - second[0, :5].mean())) < 0.1  # the same colour in both
    assert abs(float(first[0, 2:].mean() - second[0, :5].mean())) > 0.8


@pytest.mark.parametrize('sign', [1, -1])
def test_the_middle_is_foreground_and_the_rest_black(sign):
    rng = np.random.default_rng(1)
    values = 0.1 * rng.normal(size=(9, 9, 8))
    values[3:6, 3:6, 0] += 5 * sign
    (colours,) = tool.pca_colours([values.astype(np.float32)], foreground=0.5)
    drawn = colours.sum(dim=0) > 0
    expected = torch.zeros(9, 9, dtype=torch.bool)
    expected[3:6, 3:6] = True
    assert torch.equal(drawn, expected)
    with pytest.raises(ValueError, match='foreground level 0.9999999 leaves . patches'):
        tool.pca_colours([values[:2, :2].astype(np.float32)], foreground=0.9999999)
    with pytest.raises(ValueError, match='features of 2 channels'):
        tool.pca_colours([values[..., :2].astype(np.float32)])


def test_neighbours_are_the_nearest_and_never_the_image_itself(tmp_path):
    angles, paths = [0, 10, 100, 30, 200], []
    for number, level in enumerate((10, 60, 110, 160, 210)):
        Image.new('RGB', (8, 8), (level, level, level)).save(tmp_path / f'{number}.png')
        paths.append(str(tmp_path / f'{number}.png'))
    features = np.stack([np.cos(np.deg2rad(angles)), np.sin(np.deg2rad(angles))], axis=1).astype(np.float32)
    bank = dict(features=features, paths=paths)
    figure = tool.draw_neighbours(dict(features=features[:2], paths=paths[:2]), bank, number=3)
    levels = [round(255 * float(axes.images[0].get_array()[0, 0, 0])) for axes in figure.axes]
    assert levels == [10, 60, 160, 110] + [60, 10, 160, 110]
    assert figure.axes[1].get_title('left').endswith(f'{tmp_path.name[-9:]} 0.985')
    one = dict(features=features[:1], paths=paths[:1])
    assert len(tool.draw_neighbours(one, one).axes) == 1


def test_points_are_drawn_with_a_legend():
    (axes,) = tool.draw_points(np.random.default_rng(0).normal(size=(20, 2)), ['a', 'b'] * 10).axes
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ['a', 'b']
    assert sum(len(points.get_offsets()) for points in axes.collections) == 20

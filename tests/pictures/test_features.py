"""Pictures of features: components are those of a singular value decomposition, neighbours the nearest."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from beit_mm.pictures.features import draw_neighbours, draw_points, pca_colours, principal_components, sheet
from beit_mm.pictures.pictures import MARGIN, SIDE, TITLE_HEIGHT


def test_components_are_those_of_a_singular_value_decomposition():
    rows = torch.randn(200, 6).exp() @ torch.randn(6, 6)
    found = principal_components(rows, 3).numpy()
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
    first, second = pca_colours([values.astype(np.float32) for values in maps])
    assert first.shape == second.shape == (3, 8, 6) and float(first.min()) >= 0 and float(first.max()) <= 1
    assert abs(float(first[0, :2].mean() - second[0, :5].mean())) < 0.1  # the same colour in both
    assert abs(float(first[0, 2:].mean() - second[0, :5].mean())) > 0.8


@pytest.mark.parametrize('sign', [1, -1])
def test_the_middle_is_foreground_and_the_rest_black(sign):
    rng = np.random.default_rng(1)
    values = 0.1 * rng.normal(size=(9, 9, 8))
    values[3:6, 3:6, 0] += 5 * sign
    (colours,) = pca_colours([values.astype(np.float32)], foreground=0.5)
    drawn = colours.sum(dim=0) > 0
    expected = torch.zeros(9, 9, dtype=torch.bool)
    expected[3:6, 3:6] = True
    assert torch.equal(drawn, expected)
    with pytest.raises(ValueError, match='foreground level 0.9999999 leaves . patches'):
        pca_colours([values[:2, :2].astype(np.float32)], foreground=0.9999999)
    with pytest.raises(ValueError, match='features of 2 channels'):
        pca_colours([values[..., :2].astype(np.float32)])


def test_tiles_stand_in_their_rows_in_their_own_shape():
    red, wide = torch.zeros(3, 4, 4), torch.ones(3, 10, 20) * torch.tensor([0, 0, 1.0])[:, None, None]
    red[0] = 1
    picture = sheet([[('a', red), ('b', wide)], [('c', None), ('d', red)]])
    cell, high = SIDE + MARGIN, SIDE + TITLE_HEIGHT + MARGIN
    assert picture.size == (MARGIN + 2 * cell, MARGIN + 2 * high)
    top = MARGIN + TITLE_HEIGHT
    assert picture.getpixel((MARGIN + 80, top + 150)) == (255, 0, 0)
    assert picture.getpixel((MARGIN + cell + 155, top + 75)) == (0, 0, 255)
    assert picture.getpixel((MARGIN + cell + 155, top + 85)) == (255, 255, 255)  # half as high as wide
    assert picture.getpixel((MARGIN + 80, top + high + 80)) == (255, 255, 255)
    assert picture.getpixel((MARGIN + cell + 80, top + high + 80)) == (255, 0, 0)


def test_neighbours_are_the_nearest_and_never_the_image_itself(tmp_path):
    angles, paths = [0, 10, 100, 30, 200], []
    for number, level in enumerate((10, 60, 110, 160, 210)):
        Image.new('RGB', (8, 8), (level, level, level)).save(tmp_path / f'{number}.png')
        paths.append(str(tmp_path / f'{number}.png'))
    features = np.stack([np.cos(np.deg2rad(angles)), np.sin(np.deg2rad(angles))], axis=1).astype(np.float32)
    bank = dict(features=features, paths=paths)
    picture = draw_neighbours(dict(features=features[:2], paths=paths[:2]), bank, number=3)
    levels = [
        [picture.getpixel((MARGIN + 80 + column * (SIDE + MARGIN), MARGIN + 96 + row * 180))[0] for column in range(4)]
        for row in range(2)
    ]
    assert levels == [[10, 60, 160, 110], [60, 10, 160, 110]]
    alone = draw_neighbours(dict(features=features[:1], paths=paths[:1]), dict(features=features[:1], paths=paths[:1]))
    assert alone.size[0] == MARGIN + SIDE + MARGIN


def test_points_are_drawn_with_a_legend(tmp_path):
    figure = draw_points(np.random.default_rng(0).normal(size=(20, 2)), ['a', 'b'] * 10)
    figure.savefig(tmp_path / 'points.png')
    assert [text.get_text() for text in figure.axes[0].get_legend().get_texts()] == ['a', 'b']
    assert Path(tmp_path / 'points.png').stat().st_size > 1000

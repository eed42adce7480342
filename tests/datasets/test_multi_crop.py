"""DINO's crops: sizes and areas, what is drawn how often, and the pixels of its augmentation."""

import random

import numpy as np
import pytest
from PIL import Image
from scenes import paint_scene
from torchvision.transforms.functional import adjust_hue

from beit_mm.datasets import MultiCrop, PackViews, TwoViewRandomResizedCrop, multi_crop
from beit_mm.datasets.multi_crop import shift_hue

CROPS = ('images', 'second_images', 'local_images')
Y, X = np.mgrid[:200, :250]
RAMP = np.stack([X, Y, 0 * X], -1).astype(np.uint8)  # red tells the column, green the row
FLAT = np.full((40, 40, 3), 200, np.uint8)


@pytest.fixture(scope='module')
def image():
    return paint_scene(0, 240, np.random.default_rng(3))[0]


@pytest.fixture
def plain(monkeypatch):
    """Crops without flip and augmentation, but for those of a given name."""

    def switch_off(kept=None):
        for name in {'FLIP_PROB', 'JITTER_PROB', 'GRAY_PROB', 'SOLARIZE_PROB'} - {kept}:
            monkeypatch.setattr(multi_crop, name, 0.0)
        if kept != 'BLUR_PROBS':
            monkeypatch.setattr(multi_crop, 'BLUR_PROBS', dict(first=0.0, second=0.0, local=0.0))

    return switch_off


def crops_of(image, seed=0, **settings):
    random.seed(seed)
    return MultiCrop(**settings).transform(dict(img=image))


def test_sizes_and_a_first_crop_that_is_there_stays(image):
    crops = crops_of(image)
    assert all(crops[name].dtype == np.uint8 for name in CROPS)
    shapes = {name: tuple(view.shape) for name, view in PackViews()(crops)['inputs'].items() if name != 'unreadable'}
    assert shapes == dict(images=(224, 224, 3), second_images=(224, 224, 3), local_images=(8, 96, 96, 3))
    none = crops_of(image, size=(32, 48), num_local=0)
    assert none['second_images'].shape == (32, 48, 3) and 'local_images' not in none
    results = TwoViewRandomResizedCrop(64, 32).transform(dict(img=image))
    first = results['images']
    assert MultiCrop(64, num_local=0).transform(results)['images'] is first


def test_areas_of_the_boxes(plain):
    """The range of a crop's colours is its size."""
    plain()
    areas = {name: [] for name in CROPS}
    for seed in range(100):
        crops = crops_of(RAMP, seed, size=64, scale=(0.3, 0.9), local_size=32, local_scale=(0.05, 0.2), num_local=2)
        for name in areas:
            for crop in crops[name].reshape(-1, *crops[name].shape[-3:]).astype(float):
                width, height = (np.ptp(crop[..., channel]) + 1 for channel in (0, 1))
                areas[name].append(width * height / X.size)
                assert 0.6 < width / height < 1.6  # 3/4 to 4/3, less what the filter rounds off
    for name, (smallest, largest) in zip(CROPS, ((0.3, 0.9), (0.3, 0.9), (0.05, 0.2)), strict=True):
        spread = largest - smallest
        assert smallest - 0.02 < min(areas[name]) < smallest + 0.15 * spread, name
        assert largest - 0.3 * spread < max(areas[name]) < largest + 0.03, name


@pytest.mark.parametrize(
    ('name', 'picture', 'changed', 'expected'),
    [
        ('FLIP_PROB', RAMP, lambda crop: crop[0, 0, 0] > crop[0, -1, 0], (0.5, 0.5, 0.5)),
        ('JITTER_PROB', FLAT, lambda crop: (crop != 200).any(), (0.8, 0.8, 0.8)),
        ('GRAY_PROB', RAMP, lambda crop: np.ptp(crop, axis=-1).max() == 0, (0.2, 0.2, 0.2)),
        ('BLUR_PROBS', FLAT, lambda crop: not crop.any(), (1.0, 0.1, 0.5)),
        ('SOLARIZE_PROB', FLAT, lambda crop: (crop == 55).all(), (0, 0.2, 0)),
    ],
)
def test_how_often_crops_are_changed(plain, monkeypatch, name, picture, changed, expected):
    plain(kept=name)
    sigmas, draws = [], 400
    monkeypatch.setattr(multi_crop.cv2, 'GaussianBlur', lambda crop, size, sigma: (sigmas.append(sigma), crop * 0)[1])
    transform = MultiCrop(size=16, local_size=16, num_local=1)
    random.seed(0)
    crops = [transform.transform(dict(img=picture)) for _ in range(draws)]
    for crop, share in zip(CROPS, expected, strict=True):
        found = np.mean([changed(views[crop].reshape(16, 16, 3)) for views in crops])
        assert abs(found - share) <= 4 * (share * (1 - share) / draws) ** 0.5, (crop, found)
    assert not sigmas or 0.1 <= min(sigmas) < 0.15 and 1.95 < max(sigmas) <= 2.0


def test_hue_is_torchvisions(image):
    for shift in (-0.1, -0.03, 0.0, 0.05, 0.1):
        expected = np.asarray(adjust_hue(Image.fromarray(image), shift)).astype(int)
        difference = np.abs(shift_hue(image, shift) - expected)
        assert difference.mean() < 1.5 and difference.max() <= 16

"""DINO's crops: sizes and areas, what is drawn how often, and the pixels of its augmentation."""

import random

import numpy as np
import pytest
from PIL import Image, ImageOps
from scenes import paint_scene
from torchvision.transforms.functional import adjust_hue

from beit_mm.datasets import MultiCrop, PackViews, TwoViewRandomResizedCrop, multi_crop
from beit_mm.datasets.multi_crop import shift_hue


@pytest.fixture(scope='module')
def image():
    return paint_scene(0, 240, np.random.default_rng(3))[0]


@pytest.fixture
def plain(monkeypatch):
    """Crops without flip and augmentation."""
    for name in ('FLIP_PROB', 'JITTER_PROB', 'GRAY_PROB', 'SOLARIZE_PROB'):
        monkeypatch.setattr(multi_crop, name, 0.0)
    monkeypatch.setattr(multi_crop, 'BLUR_PROBS', dict(first=0.0, second=0.0, local=0.0))


def crops_of(image: np.ndarray, seed: int = 0, **kwargs: object) -> dict:
    random.seed(seed)
    np.random.seed(seed)
    return MultiCrop(**kwargs).transform(dict(img=image))


def test_sizes(image):
    crops = crops_of(image)
    assert crops['images'].shape == crops['second_images'].shape == (224, 224, 3)
    assert crops['local_images'].shape == (8, 96, 96, 3)
    assert all(crops[name].dtype == np.uint8 for name in ('images', 'second_images', 'local_images'))
    none = crops_of(image, size=(32, 48), num_local=0)
    assert none['second_images'].shape == (32, 48, 3) and 'local_images' not in none
    packed = PackViews().transform(dict(crops, unreadable=''))['inputs']
    assert packed['local_images'].shape == (8, 96, 96, 3) and packed['second_images'].shape == (224, 224, 3)


def test_the_same_seed_gives_the_same_crops(image):
    one, two, other = (crops_of(image, seed, num_local=3) for seed in (4, 4, 5))
    for name in ('images', 'second_images', 'local_images'):
        assert np.array_equal(one[name], two[name]) and not np.array_equal(one[name], other[name])


def test_a_first_crop_that_is_there_stays(image):
    random.seed(0)
    results = TwoViewRandomResizedCrop(64, 32, scale=(0.4, 1.0)).transform(dict(img=image))
    first, second = results['images'], results['tokenizer_images']
    results = MultiCrop(64, local_size=32, num_local=2).transform(results)
    assert results['images'] is first and results['tokenizer_images'] is second
    assert results['second_images'].shape == (64, 64, 3)


def test_areas_of_the_boxes(plain):
    """Red tells the column, green the row, so that a crop's range of colours is its size."""
    y, x = np.mgrid[:200, :250]
    ramp = np.stack([x, y, 0 * x], -1).astype(np.uint8)
    areas = dict(images=[], second_images=[], local_images=[])
    for seed in range(150):
        crops = crops_of(ramp, seed, size=64, scale=(0.3, 0.9), local_size=32, local_scale=(0.05, 0.2), num_local=2)
        for name in areas:
            for crop in crops[name].reshape(-1, *crops[name].shape[-3:]).astype(float):
                width, height = (np.ptp(crop[..., channel]) + 1 for channel in (0, 1))
                areas[name].append(width * height / ramp[..., 0].size)
                assert 0.6 < width / height < 1.6  # 3/4 to 4/3, less what the filter rounds off
    for name, (smallest, largest) in dict(
        images=(0.3, 0.9), second_images=(0.3, 0.9), local_images=(0.05, 0.2)
    ).items():
        spread = largest - smallest
        assert smallest - 0.02 < min(areas[name]) < smallest + 0.15 * spread, name
        assert largest - 0.3 * spread < max(areas[name]) < largest + 0.03, name


def frequencies(image: np.ndarray, changed, draws: int = 400) -> dict[str, float]:
    """Part of the first, second and local crops of which `changed(crop, kind)` is true."""
    transform = MultiCrop(size=16, local_size=16, num_local=1)
    random.seed(0)
    counts = dict(images=0, second_images=0, local_images=0)
    for _ in range(draws):
        crops = transform.transform(dict(img=image))
        for name in counts:
            counts[name] += bool(changed(crops[name].reshape(16, 16, 3)))
    return {name: count / draws for name, count in counts.items()}


def check(found: dict[str, float], first: float, second: float, local: float) -> None:
    for name, expected in dict(images=first, second_images=second, local_images=local).items():
        assert abs(found[name] - expected) <= 4 * (expected * (1 - expected) / 400) ** 0.5, (name, found)


def test_how_often_crops_are_gray(image, monkeypatch):
    found = frequencies(image, lambda crop: np.ptp(crop.astype(int), axis=-1).max() == 0)
    check(found, 0.2, 0.2, 0.2)


def test_how_often_crops_are_solarized(monkeypatch):
    """White becomes black; jitter leaves none of it that dark."""
    white = np.full((40, 40, 3), 255, np.uint8)
    check(frequencies(white, lambda crop: crop.max() < 110), 0, 0.2, 0)


def test_how_often_crops_are_blurred(plain, monkeypatch):
    monkeypatch.setattr(multi_crop, 'BLUR_PROBS', dict(first=1.0, second=0.1, local=0.5))
    calls = []
    monkeypatch.setattr(multi_crop.cv2, 'GaussianBlur', lambda crop, size, sigma: (calls.append(sigma), crop * 0)[1])
    bright = np.full((40, 40, 3), 200, np.uint8)
    check(frequencies(bright, lambda crop: not crop.any()), 1.0, 0.1, 0.5)
    assert 0.1 <= min(calls) < 0.15 and 1.95 < max(calls) <= 2.0


def test_hue_is_torchvisions(image):
    for shift in (-0.1, -0.03, 0.0, 0.05, 0.1):
        expected = np.asarray(adjust_hue(Image.fromarray(image), shift)).astype(int)
        difference = np.abs(shift_hue(image, shift) - expected)
        assert difference.mean() < 1.5 and difference.max() <= 16


def test_solarization_is_pillows(image, plain, monkeypatch):
    crop = crops_of(image, num_local=0)['second_images']
    monkeypatch.setattr(multi_crop, 'SOLARIZE_PROB', 1.0)
    assert np.array_equal(crops_of(image, num_local=0)['second_images'], ImageOps.solarize(Image.fromarray(crop)))


@pytest.mark.parametrize(
    'wrong',
    [
        dict(size=0),
        dict(local_size=(8, 0)),
        dict(scale=(0, 1)),
        dict(local_scale=(0.5, 1.5)),
        dict(num_local=-1),
        dict(blur_sigma=(2, 1)),
        dict(blur_sigma=0.1),
    ],
)
def test_impossible_settings_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong)).replace('local_size', 'size')):
        MultiCrop(**wrong)

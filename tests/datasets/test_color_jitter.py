"""Jitter of both views after the crop: Pillow's arithmetic, and how far from jitter before it."""

import random

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance
from scenes import paint_scene

from beit_mm.datasets.transforms import (
    TwoViewColorJitter,
    contrast_level,
    draw_box,
    jitter_images,
    jitter_pixels,
    resize_bicubic,
)


def draw_params():
    return [random.uniform(0.6, 1.4) for _ in range(3)], random.sample(range(3), 3)


def pillow_jitter(image, factors, order, level=None):
    """Pillow's three enhancers in the drawn order; contrast with its own or a given gray level."""
    for operation in order:
        enhancer = (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color)[operation]
        if operation == 1 and level is not None:
            plain = Image.new('RGB', image.size, (level, level, level))
            image = Image.blend(plain, image, factors[1])
        else:
            image = enhancer(image).enhance(factors[operation])
    return image


@pytest.fixture(scope='module')
def originals():
    return [paint_scene(i, 200, np.random.default_rng(i))[0] for i in range(10)]


def test_arithmetic_is_pillows(originals):
    random.seed(0)
    differences = []
    for original in originals * 3:
        factors, order = draw_params()
        expected = pillow_jitter(Image.fromarray(original), factors, order, level=110)
        mine = jitter_pixels(original, factors, 110, order)
        differences.append(np.abs(mine - np.asarray(expected).astype(int)))
    assert max(d.max() for d in differences) <= 3
    assert np.mean([d.mean() for d in differences]) < 0.01


def test_contrast_level_is_the_gray_mean_that_pillow_would_use(originals):
    random.seed(0)
    for original in originals * 3:
        factors, order = draw_params()
        before = pillow_jitter(Image.fromarray(original), factors, order[: order.index(1)])
        expected = np.asarray(before.convert('L')).mean()
        assert abs(contrast_level(original, factors, order) - expected) < 1.5


def test_distance_to_the_released_order(originals):
    """Released: jitter the whole original, then crop and resize. Here: crop, resize, jitter."""
    random.seed(0)
    differences = []
    for original in originals * 3:
        factors, order = draw_params()
        top, left, height, width = draw_box(*original.shape[:2], (0.08, 1), (3 / 4, 4 / 3))
        box = np.s_[top : top + height, left : left + width]
        before = np.asarray(pillow_jitter(Image.fromarray(original), factors, order))[box]
        before = resize_bicubic(np.ascontiguousarray(before), (224, 224)).astype(int)
        after = resize_bicubic(np.ascontiguousarray(original[box]), (224, 224))
        after = jitter_pixels(after, factors, contrast_level(original, factors, order), order)
        differences.append(np.abs(after - before).mean())
    assert np.mean(differences) < 0.8  # of 255; measured 0.5


def test_views_get_the_same_jitter(originals):
    random.seed(0)
    views = dict(img=originals[0], images=originals[0][:64, :64], tokenizer_images=originals[0][:32, :32])
    result = TwoViewColorJitter().transform(dict(views))
    assert np.array_equal(result['images'][:32, :32], result['tokenizer_images'])
    assert not np.array_equal(result['images'], views['images'])


def test_jitter_on_the_device_is_the_same_jitter(originals):
    view = originals[0][:64, :64]
    for seed in range(12):
        random.seed(seed)
        expected = TwoViewColorJitter().transform(dict(img=originals[0], images=view))['images']
        random.seed(seed)
        deferred = TwoViewColorJitter(device='model').transform(dict(img=originals[0], images=view))
        assert deferred['jitter'].dtype == np.float32 and deferred['jitter'].shape == (7,)
        assert np.array_equal(deferred['images'], view)
        images = torch.tensor(view).permute(2, 0, 1)[None].float()
        images = jitter_images(images, torch.from_numpy(deferred['jitter'])[None])
        difference = images[0].permute(1, 2, 0).numpy() - expected
        assert np.abs(difference).max() < 4 and np.abs(difference).mean() < 1.8


def test_wrong_settings_are_refused():
    with pytest.raises(ValueError, match='1.5'):
        TwoViewColorJitter(contrast=1.5)
    with pytest.raises(ValueError, match='cuda'):
        TwoViewColorJitter(device='cuda')

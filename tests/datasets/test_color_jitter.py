"""Jitter of both views after the crop: Pillow's arithmetic."""

import random
from collections import Counter

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance
from scenes import paint_scene

from beit_mm.datasets.transforms import TwoViewColorJitter, jitter_images


@pytest.fixture(scope='module')
def originals():
    return [paint_scene(i, 200, np.random.default_rng(i))[0] for i in range(10)]


def pillow_jitter(pixels, factors, order, level=None):
    """Pillow's three enhancers in the drawn order; contrast with its own or a given gray level."""
    image = Image.fromarray(pixels)
    for operation in map(int, order):
        if operation == 1 and level is not None:
            image = Image.blend(Image.new('RGB', image.size, (level, level, level)), image, factors[1])
        else:
            enhancer = (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color)[operation]
            image = enhancer(image).enhance(factors[operation])
    return np.asarray(image).astype(int)


def draw(seed, image, **settings):
    random.seed(seed)
    return TwoViewColorJitter(**settings)(dict(img=image, images=image, tokenizer_images=image[:32, :32]))


def test_both_views_get_pillows_jitter_here_and_in_a_batch_on_the_models_device(originals):
    params, expected, means = [], [], []
    for seed, original in enumerate(originals * 3):
        found, deferred = draw(seed, original), draw(seed, original, device='model')
        assert np.array_equal(deferred['images'], original)
        params.append(deferred['jitter'])
        factors, level, order = np.split(deferred['jitter'].astype(float), (3, 4))
        expected.append(pillow_jitter(original, factors, order, int(level[0])))
        difference = np.abs(found['images'] - expected[-1])
        means.append(difference.mean())
        assert difference.max() <= 3
        assert np.array_equal(found['images'][:32, :32], found['tokenizer_images'])
        # contrast uses the gray mean of the whole image after what comes before
        before = pillow_jitter(original, factors, order[: order.tolist().index(1)]).astype(np.uint8)
        assert abs(level[0] - np.asarray(Image.fromarray(before).convert('L')).mean()) < 1.5
    assert np.mean(means) < 0.01 and len({tuple(param[4:]) for param in params}) == 6
    # Pillow cuts off up to a level in each of three steps, later factors stretch it
    views, params = (torch.from_numpy(np.stack(x)).float() for x in ([i[:64, :64] for i in originals * 3], params))
    difference = jitter_images(views.permute(0, 3, 1, 2), params).permute(0, 2, 3, 1).numpy()
    difference -= np.stack([image[:64, :64] for image in expected])
    assert np.abs(difference).max() < 5 and np.abs(difference).mean() < 1.8


def test_factors_are_uniform_and_all_orders_equally_likely():
    random.seed(0)
    jitter, image = TwoViewColorJitter(0.4, 0.2, 0.1, device='model'), np.zeros((2, 2, 3), np.uint8)
    params = np.array([jitter(dict(img=image))['jitter'] for _ in range(3000)])
    for factors, strength in zip(params[:, :3].T, (0.4, 0.2, 0.1), strict=True):
        quartiles = np.quantile((factors - 1) / strength, (0, 0.25, 0.5, 0.75, 1))
        assert np.abs(quartiles - (-1, -0.5, 0, 0.5, 1)).max() < 0.07
    orders = Counter(map(tuple, params[:, 4:]))
    assert len(orders) == 6 and all(abs(count - 500) < 100 for count in orders.values())

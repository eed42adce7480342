"""Jitter of a batch with given parameters, beside Pillow's ImageEnhance."""

import itertools

import numpy as np
import torch
from PIL import Image, ImageEnhance

from beit_mm.datasets.transforms import jitter_images


def pillow_jitter(pixels, factors, level, order):
    image = Image.fromarray(pixels)
    for operation in order:
        if operation == 0:
            image = ImageEnhance.Brightness(image).enhance(factors[0])
        elif operation == 1:
            plain = Image.new('RGB', image.size, (int(level),) * 3)
            image = Image.blend(plain, image, factors[1])
        else:
            image = ImageEnhance.Color(image).enhance(factors[2])
    return np.asarray(image).astype(float)


def test_batch_with_all_orders_equals_pillow():
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (6, 20, 24, 3), dtype=np.uint8)
    factors, levels = rng.uniform(0.6, 1.4, (6, 3)), rng.integers(60, 200, (6, 1))
    orders = list(itertools.permutations(range(3)))
    params = torch.from_numpy(np.concatenate([factors, levels, np.array(orders)], 1)).float()
    images = torch.from_numpy(pixels).permute(0, 3, 1, 2).float()
    jittered = jitter_images(images, params)
    assert jittered.shape == (6, 3, 20, 24) and jittered.dtype == torch.float32
    for i, order in enumerate(orders):
        expected = pillow_jitter(pixels[i], factors[i], levels[i, 0], order)
        difference = jittered[i].permute(1, 2, 0).numpy() - expected
        # Pillow cuts off up to a level in each of three steps, later factors stretch it
        assert np.abs(difference).max() < 5 and 0 < difference.mean() < 2


def test_levels_are_clamped_between_operations():
    image = torch.full((1, 3, 1, 1), 200.0)
    params = torch.tensor([[1.4, 0.6, 1.0, 100.0, 0, 1, 2]])  # 200 * 1.4 is cut to 255 first
    assert torch.allclose(jitter_images(image, params), torch.tensor(100 + 0.6 * (255 - 100.0)))


def test_factors_of_one_change_nothing():
    images = torch.rand(2, 3, 5, 4) * 255
    params = torch.tensor([[1, 1, 1, 99, 2, 0, 1], [1, 1, 1, 5, 0, 1, 2]], dtype=torch.float32)
    assert torch.allclose(jitter_images(images, params), images, atol=1e-3)

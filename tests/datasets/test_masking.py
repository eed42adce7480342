"""Blockwise masks: the law of the released generator, the variants, the slots of positions."""

import random

import numpy as np
import pytest

from beit_mm.datasets.masking import BlockwiseMask, RandomMask
from beit_mm.datasets.transforms import PackViews

IMAGE = dict(images=np.zeros((1, 1, 3), np.uint8))


def draw(count, transform):
    random.seed(0)
    return np.stack([transform.transform({})['mask'] for _ in range(count)])


@pytest.mark.parametrize(
    ('variant', 'limit', 'mean', 'least', 'most', 'rates'),
    [
        ('released', 75, 74.47, range(61, 68), range(75, 76), (0.040, 0.189, 0.716, 0.135)),
        ('paper', 0.4 * 196, 82.49, range(79, 80), range(95, 106), (0.002, 0.025, 0.801, 0.204)),
    ],
)
def test_numbers_of_the_released_code_and_of_the_paper(variant, limit, mean, least, most, rates):
    """Measured there: how many patches are masked, and how often those at some places."""
    masks = draw(20_000, BlockwiseMask((14, 14), limit, variant=variant))
    assert masks.dtype == np.bool_ and masks.shape == (20_000, 14, 14)
    counts, rate = masks.sum((1, 2)), masks.mean(0)
    assert abs(counts.mean() - mean) < 0.05 and counts.min() in least and counts.max() in most
    assert abs((counts == 75).mean() - 0.666) < 0.015 if variant == 'released' else abs(counts.std() - 3.25) < 0.1
    found = rate[0, 0], rate[0, 7], rate[7, 7], rate[-1].mean()
    assert np.abs(np.array(found) - rates).max() < 0.015


@pytest.mark.parametrize(
    ('transform', 'slots', 'middle'),
    [
        (BlockwiseMask((14, 14), 75), 75, 0.716),
        (BlockwiseMask(np.array([224, 224]) // 16, 75, variant='exact'), 75, 0.716),  # still blocks
        (RandomMask((6, 8), 18), 18, 18 / 48),
    ],
)
def test_positions_list_the_masked_patches_in_slots_whose_number_never_changes(transform, slots, middle):
    masks = draw(2000, transform)
    counts, rate = masks.sum((1, 2)), masks.mean(0)
    exact = getattr(transform, 'variant', 'exact') == 'exact'
    assert counts.max() == slots and (counts.min() == slots) == exact  # the released law stops early at times
    assert abs(rate[rate.shape[0] // 2, rate.shape[1] // 2] - middle) < 0.04
    if isinstance(transform, RandomMask):
        assert np.abs(rate - middle).max() < 0.045
    for _ in range(20):
        inputs = PackViews()(transform.transform(dict(IMAGE)))['inputs']
        masked = inputs['mask'].flatten().nonzero().flatten().tolist()
        assert inputs['positions'].tolist() == masked + [-1] * (slots - len(masked))


def test_a_mask_without_a_limit_has_no_positions():
    results = BlockwiseMask((14, 14), 78.4, variant='paper').transform(dict(IMAGE))
    assert 'positions' not in PackViews()(results)['inputs']

"""Blockwise masks: the law of the released generator, the variants, settings that cannot be met."""

import random

import numpy as np
import pytest

from beit_mm.datasets.masking import BlockwiseMask, RandomMask
from beit_mm.datasets.transforms import PackViews

IMAGE = dict(images=np.zeros((1, 1, 3), np.uint8))


def draw(count, transform):
    random.seed(0)
    return np.stack([transform.transform({})['mask'] for _ in range(count)])


def test_numbers_of_the_released_code():
    """Measured there."""
    masks = draw(20_000, BlockwiseMask((14, 14), 75))
    assert masks.dtype == np.bool_ and masks.shape == (20_000, 14, 14)
    counts, rate = masks.sum((1, 2)), masks.mean(0)
    assert abs(counts.mean() - 74.47) < 0.03 and abs((counts == 75).mean() - 0.666) < 0.015
    assert counts.max() == 75 and 60 < counts.min() < 68
    found = rate[0, 0], rate[0, 7], rate[7, 7], rate[-1].mean()
    assert np.abs(np.array(found) - (0.040, 0.189, 0.716, 0.135)).max() < 0.015


def test_exact_always_has_the_number():
    masks = draw(2000, BlockwiseMask((14, 14), 75, variant='exact'))
    assert (masks.sum((1, 2)) == 75).all()
    assert abs(masks.mean(0)[7, 7] - 0.716) < 0.04  # still blocks


def test_paper_overshoots():
    masks = draw(20_000, BlockwiseMask((14, 14), 0.4 * 196, variant='paper'))
    counts, rate = masks.sum((1, 2)), masks.mean(0)
    assert abs(counts.mean() - 82.49) < 0.1 and abs(counts.std() - 3.25) < 0.1
    assert counts.min() == 79 and 95 <= counts.max() <= 105
    found = rate[0, 7], rate[7, 7], rate[-1].mean()
    assert np.abs(np.array(found) - (0.025, 0.801, 0.204)).max() < 0.015
    assert rate[0, 0] < 0.005 and abs(rate[0].mean() - 0.016) < 0.005


def test_random_mask_is_uniform():
    masks = draw(5000, RandomMask((5, 8), 15))
    assert masks.shape == (5000, 5, 8) and (masks.sum((1, 2)) == 15).all()
    assert np.abs(masks.mean(0) - 15 / 40).max() < 0.03


@pytest.mark.parametrize(
    ('transform', 'slots'),
    [(BlockwiseMask((14, 14), 75), 75), (BlockwiseMask((6, 9), 20, 4, 'exact'), 20), (RandomMask((5, 8), 15), 15)],
)
def test_positions_list_the_masked_patches_in_slots_whose_number_never_changes(transform, slots):
    counts = set()
    for _ in range(50):
        inputs = PackViews()(transform.transform(dict(IMAGE)))['inputs']
        masked = inputs['mask'].flatten().nonzero().flatten().tolist()
        assert inputs['positions'].tolist() == masked + [-1] * (slots - len(masked))
        counts.add(len(masked))
    assert max(counts) == slots and len(counts) > (slots == 75)  # the law of the released code stops early at times


def test_a_mask_without_a_limit_has_no_slots_and_one_beyond_its_limit_is_refused():
    results = RandomMask((5, 8), 15).transform(dict(IMAGE))
    results['mask'][:] = True  # a transform of a user's
    with pytest.raises(ValueError, match='40 patches are masked, the mask transform said at most 15; .*num_slots'):
        PackViews()(dict(results))
    results = BlockwiseMask((14, 14), 78.4, variant='paper').transform(results)
    assert 'positions' not in PackViews()(results)['inputs']


@pytest.mark.parametrize(
    ('settings', 'named'),
    [
        (dict(num_masked=197), 'num_masked is 197'),
        (dict(num_masked=74.5), "74.5; only variant='paper'"),
        (dict(min_block=0), 'min_block is 0'),
        (dict(variant='unilm'), 'unilm'),
        (dict(grid=(0, 14), num_masked=5), r'\(0, 14\)'),
        (dict(num_masked=196, min_block=190), '190'),  # round(sqrt(190)) = 14
        (dict(grid=(1, 14), num_masked=5), '1x14'),  # no block is lower than one row
    ],
)
def test_impossible_settings_are_refused(settings, named):
    with pytest.raises(ValueError, match=named):
        BlockwiseMask(**dict(dict(grid=(14, 14), num_masked=75), **settings))


@pytest.mark.timeout(20)
@pytest.mark.parametrize('variant', ['released', 'exact', 'paper'])
def test_every_accepted_setting_ends(variant):
    for *settings, most, block in ((14, 14, 196, 150), (2, 2, 4, 1), (4, 4, 8, 16), (14, 14, 1, 1)):
        counts = draw(50, BlockwiseMask(settings, most, block, variant)).sum((1, 2))
        if variant != 'paper':
            assert (counts <= most).all() and (variant == 'released' or (counts == most).all())

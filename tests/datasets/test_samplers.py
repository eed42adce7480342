"""Which sample comes when: seeds of its own for each, dealt alike to any number of ranks, DeiT's repetitions."""

import random
from collections import Counter

import numpy as np
import pytest
import torch

from beit_mm.datasets import RepeatedAugmentationSampler, SeededSampler
from beit_mm.datasets.samplers import SampleKey, mixed_seed, seed_generators

WORLDS = [1, 2, 8, 16]
IMAGES = 1000


@pytest.fixture
def deal(monkeypatch):
    """What each rank gets in one epoch."""

    def ranks(world, images=IMAGES, epoch=0, kind=RepeatedAugmentationSampler, **settings):
        dealt = []
        for rank in range(world):
            monkeypatch.setattr('mmengine.dataset.sampler.get_dist_info', lambda rank=rank: (rank, world))
            sampler = kind(range(images), **dict(dict(seed=5), **settings))
            sampler.set_epoch(epoch)
            dealt.append(list(sampler))
            assert len(dealt[-1]) == len(sampler)
        return dealt

    return ranks


@pytest.mark.parametrize('images', [IMAGES, 1024])
@pytest.mark.parametrize('world', WORLDS)
def test_repeated_indices_are_deits(deal, world, images):
    order = torch.randperm(images, generator=torch.Generator().manual_seed(5 + 2)).numpy()
    repeated = np.repeat(order, 3)
    for rank, keys in enumerate(deal(world, images, epoch=2)):
        selected = images // 256 * 256 // world
        assert [key.index for key in keys] == repeated[rank::world][:selected].tolist()


@pytest.mark.parametrize(
    'settings', [dict(kind=SeededSampler), *(dict(num_repeats=repeats) for repeats in (1, 3, 4))], ids=str
)
def test_any_number_of_ranks_is_dealt_the_same_epoch_in_turn(deal, settings):
    ((*alone,),) = deal(1, **settings)
    counts = Counter(key.index for key in alone)
    assert len(set(alone)) == len(alone)  # no two appearances draw the same
    assert sorted(counts.values())[1:] == [settings.get('num_repeats', 1)] * (len(counts) - 1)  # the last may be cut
    for world in WORLDS:
        dealt = [key for keys in zip(*deal(world, **settings), strict=True) for key in keys]
        assert dealt == alone[: len(alone) // world * world]


def test_a_validation_shows_everything_in_order_and_the_first_again_to_fill_up(deal):
    dealt = deal(2, images=5, kind=SeededSampler, shuffle=False)
    assert dealt == [[SampleKey(5, 0, index) for index in rank] for rank in ((0, 2, 4), (1, 3, 0))]


def test_a_resumed_epoch_leaves_its_first_samples_out_and_the_next_none():
    sampler = SeededSampler(range(9), seed=5)
    whole = list(sampler)
    sampler.skip(4)
    assert list(sampler) == whole[4:] and list(sampler) == whole


def test_small_datasets_are_shown_whole(deal):
    assert [len(keys) for keys in deal(8, images=20)] == [2] * 8


def test_what_a_key_draws_does_not_change_between_versions():
    """A resumed run must draw what the interrupted one would have drawn."""
    assert mixed_seed(*SampleKey(7, 3, 12345), 0) == 2016577477655178880
    assert mixed_seed(0, 0, 0, 0) == 11619761522075635141 != mixed_seed(0, 0, 0, 1)
    seed_generators(SampleKey(7, 3, 12345))
    assert random.random() == random.Random(2016577477655178880).random()
    assert np.random.rand() == np.random.RandomState(2016577477655178880 >> 32).rand()

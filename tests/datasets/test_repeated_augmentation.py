"""Repeated augmentation against DeiT's sampler, at any number of ranks."""

import random
from collections import Counter

import numpy as np
import pytest
import torch

from beit_mm.datasets import RepeatedAugmentationSampler
from beit_mm.datasets.samplers import SampleKey, mixed_seed, seed_generators
from beit_mm.registry import DATA_SAMPLERS, DATASETS

WORLDS = [1, 2, 8, 16]
IMAGES = 1000


@pytest.fixture
def deal(monkeypatch):
    """What each rank gets in one epoch."""

    def ranks(world: int, images: int = IMAGES, epoch: int = 0, **kwargs) -> list[list[SampleKey]]:
        dealt = []
        for rank in range(world):
            monkeypatch.setattr('mmengine.dataset.sampler.get_dist_info', lambda rank=rank: (rank, world))
            sampler = RepeatedAugmentationSampler(range(images), **dict(dict(seed=5), **kwargs))
            sampler.set_epoch(epoch)
            dealt.append(list(sampler))
            assert len(dealt[-1]) == len(sampler)
        return dealt

    return ranks


@pytest.mark.parametrize('world', WORLDS)
def test_indices_are_deits(deal, world):
    order = torch.randperm(IMAGES, generator=torch.Generator().manual_seed(5 + 2)).numpy()
    repeated = np.repeat(order, 3)
    for rank, keys in enumerate(deal(world, epoch=2)):
        selected = IMAGES // 256 * 256 // world
        assert [key.index for key in keys] == repeated[rank::world][:selected].tolist()


@pytest.mark.parametrize('repeats', [1, 3, 4])
def test_an_epoch_is_the_same_at_any_world_size(deal, repeats):
    epochs = {world: deal(world, num_repeats=repeats) for world in WORLDS}
    alone = epochs[1][0]
    assert len(alone) == 768
    counts = Counter(key.index for key in alone)
    assert sorted(counts.values())[1:] == [repeats] * (len(counts) - 1)  # the last image may be cut
    for world, ranks in epochs.items():
        assert {len(keys) for keys in ranks} == {768 // world}
        dealt = [key for keys in ranks for key in keys]
        assert len(set(dealt)) == 768 and set(dealt) == set(alone)
        per_rank = 32 // world
        for step in range(768 // 32):  # every step of all ranks together, too
            together = [key for keys in ranks for key in keys[step * per_rank : (step + 1) * per_rank]]
            assert set(together) == set(alone[step * 32 : (step + 1) * 32])


@pytest.mark.parametrize('world', [4, 8, 16])
def test_copies_go_to_different_ranks(deal, world):
    holders = Counter((key.index, rank) for rank, keys in enumerate(deal(world)) for key in keys)
    assert max(holders.values()) == 1


def test_no_two_appearances_are_augmented_alike(deal):
    keys = [key for epoch in range(3) for key in deal(1, epoch=epoch)[0]]
    assert len({mixed_seed(*key, 0) for key in keys}) == len(keys) == 3 * 768
    draws = []
    for key in keys[:3]:  # copies of one image
        seed_generators(key)
        draws.append((random.random(), np.random.rand()))
    assert len({key.index for key in keys[:3]}) == 1 and len(set(draws)) == 3


def test_other_epochs_and_seeds_show_other_images(deal):
    first = {key.index for key in deal(1)[0]}
    for other in (deal(1, epoch=1), deal(1, seed=6)):
        assert len(first & {key.index for key in other[0]}) < 0.5 * len(first)
    assert len(set().union(*({k.index for k in deal(1, epoch=e)[0]} for e in range(30)))) == IMAGES


def test_copies_of_a_image_differ_in_pixels(images):
    dataset = DATASETS.build(
        dict(
            type='beit_mm.UnlabeledImages',
            data_root=str(images),
            pipeline=[
                dict(type='beit_mm.LoadImage'),
                dict(type='beit_mm.TwoViewRandomResizedCrop', size=32, second_size=16),
                dict(type='beit_mm.PackViews'),
            ],
        )
    )
    sampler = DATA_SAMPLERS.build(dict(type='beit_mm.RepeatedAugmentationSampler', dataset=dataset, seed=0))
    keys = list(sampler)
    assert len(keys) == 12  # all, where there are fewer than 256
    views = [dataset[key]['inputs']['images'] for key in keys[:3]]
    assert not any(torch.equal(views[i], views[j]) for i, j in ((0, 1), (0, 2), (1, 2)))
    assert torch.equal(dataset[keys[1]]['inputs']['images'], views[1])


def test_small_datasets_and_wrong_settings(deal):
    assert [len(keys) for keys in deal(8, images=20)] == [2] * 8
    with pytest.raises(ValueError, match='7 images for 8 ranks'):
        deal(8, images=7)
    with pytest.raises(ValueError, match='num_repeats is 0'):
        deal(1, num_repeats=0)

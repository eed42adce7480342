"""Which sample comes when, and with which randomness.

What is drawn for an image depends on its SampleKey only, not on workers, ranks, batch size or the order of loading. So
a resumed run draws what the uninterrupted one would have drawn.
"""

import hashlib
import random
import struct
from collections.abc import Iterator, Sized
from typing import NamedTuple

import numpy as np
import torch
from mmengine.dataset import DefaultSampler

from beit_mm.registry import DATA_SAMPLERS


class SampleKey(NamedTuple):
    """Names one appearance of one sample."""

    seed: int  # of the run
    epoch: int  # from 0; stays 0 in validation, so that masks there are fixed
    index: int  # type: ignore[assignment]  # position in the dataset; a tuple has a method of that name


def mixed_seed(*numbers: int) -> int:
    """64 bits from 64-bit integers; near numbers give unrelated seeds."""
    packed = struct.pack(f'<{len(numbers)}q', *numbers)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), 'little')


def seed_generators(key: SampleKey) -> None:
    """Seeds `random` and `numpy.random` for the transforms; torch's generator is the model's own (drop path)."""
    seed = mixed_seed(*key, 0)
    random.seed(seed)
    np.random.seed(seed >> 32)


@DATA_SAMPLERS.register_module()
class SeededSampler(DefaultSampler):
    """Deals the samples of an epoch to the ranks in turn, each as `SampleKey(seed, epoch, index)`.

    One step of all ranks together takes the same samples for any number of ranks. mmengine calls `set_epoch` in
    training only: in validation the epoch stays 0 and every pass draws the same masks (in every run, too, with
    `seed=0`).

    Args:
        shuffle: True, for training: another order in each epoch; up to ranks - 1 samples of it are dropped, so that all
            ranks get equally many. False: the dataset's order; the first samples come again at the end.
        seed: of the order and of what is drawn for the samples; None: one that the ranks agree on.
    """

    num_repeats = 1  # copies of a sample, one after the other

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int | None = None) -> None:
        super().__init__(dataset, shuffle, seed, round_up=True)
        if shuffle:
            self.num_samples = len(dataset) // self.world_size
            self.total_size = self.num_samples * self.world_size
        self.skipped = 0

    def skip(self, num_samples: int) -> None:
        """Leaves out this rank's first samples of the next epoch, on resuming."""
        self.skipped = num_samples

    def __iter__(self) -> Iterator[SampleKey]:
        skipped, self.skipped = self.skipped, 0
        yield from self.keys(skipped)

    def keys(self, first: int = 0) -> Iterator[SampleKey]:
        """This rank's samples of the epoch from the `first` on."""
        order = np.arange(len(self.dataset))
        if self.shuffle:
            order = torch.randperm(len(order), generator=torch.Generator().manual_seed(self.seed + self.epoch)).numpy()
        for place in range(self.rank + first * self.world_size, self.total_size, self.world_size):
            image, copy = divmod(place, self.num_repeats)
            yield SampleKey(self.seed, self.epoch * self.num_repeats + copy, int(order[image % len(order)]))


@DATA_SAMPLERS.register_module()
class RepeatedAugmentationSampler(SeededSampler):
    """Shows each image of the epoch several times in a row, each time augmented differently.

    The shuffled images, each one `num_repeats` times, are dealt to the ranks in turn, each as
    `SampleKey(seed, epoch * num_repeats + copy, index)`. An epoch is as long as without copies: it shows
    len // 256 * 256 images (all, where there are fewer than 256), so with three copies each a third of the dataset,
    another third every time. Up to ranks - 1 images are dropped, so that all ranks show equally many.

    Args:
        num_repeats: copies of an image.
        seed: as SeededSampler.

    Source: facebookresearch/deit `samplers.py`; the released BEiT has none.
    """

    def __init__(self, dataset: Sized, num_repeats: int = 3, seed: int | None = None) -> None:
        super().__init__(dataset, seed=seed)
        self.num_repeats = num_repeats
        self.num_samples = (len(dataset) // 256 * 256 or len(dataset)) // self.world_size  # 256: DeiT's
        self.total_size = self.num_samples * self.world_size

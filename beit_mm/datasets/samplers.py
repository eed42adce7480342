"""The order of the samples, and the seed of each.

The random numbers of a sample depend only on its SampleKey. torch's DataLoader reads a batch by `__getitems__`, which
seeds the generators for each key. Datasets of other libraries and wrappers are seeded too, but get plain numbers.
"""

import hashlib
import random
import struct
from collections.abc import Iterator, Sequence, Sized
from contextvars import ContextVar
from functools import partial
from itertools import count, islice
from typing import Any, NamedTuple

import numpy as np
import torch
from mmengine.dataset import DefaultSampler

from beit_mm.registry import DATA_SAMPLERS


class SampleKey(NamedTuple):
    """Identifies one use of one sample."""

    seed: int  # of the run
    epoch: int  # from 0; stays 0 in validation, so that masks are fixed
    index: int  # type: ignore[assignment]  # position in the dataset; tuple has a method of this name


def mixed_seed(*numbers: int) -> int:
    """Hashes 64-bit integers to a seed of 64 bits."""
    packed = struct.pack(f'<{len(numbers)}q', *numbers)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), 'little')


def seed_generators(key: SampleKey) -> None:
    """Seeds `random` and `numpy.random` for the transforms; torch's generator belongs to the model (drop path)."""
    seed = mixed_seed(*key, 0)
    random.seed(seed)
    np.random.seed(seed >> 32)


_current_key: ContextVar[SampleKey | None] = ContextVar('sample', default=None)  # of the outermost dataset


def key_of(index: int) -> SampleKey:
    """Key of an image that is requested by number: by a wrapping dataset, or outside a run."""
    outer = _current_key.get()
    return SampleKey(0, 0, index) if outer is None else SampleKey(mixed_seed(*outer) >> 1, outer.epoch, index)


def read_samples(dataset: Any, keys: Sequence[SampleKey | int]) -> list:
    """Reads the samples of a batch from any dataset; all random numbers, torch's too, depend only on the keys."""
    samples = []
    for key in keys:
        if not isinstance(key, SampleKey):  # a number from another sampler: nothing is seeded
            samples.append(dataset[key])
            continue
        seed_generators(key)
        before = _current_key.set(key)
        try:
            with torch.random.fork_rng(devices=[]):  # without workers this generator is the model's
                torch.default_generator.manual_seed(mixed_seed(*key, 0))
                samples.append(dataset[key if getattr(dataset, 'takes_keys', False) else key.index])
        finally:
            _current_key.reset(before)
    return samples


@DATA_SAMPLERS.register_module()
class SeededSampler(DefaultSampler):
    """Deals the samples of an epoch to the ranks in turn, each as `SampleKey(seed, epoch, index)`.

    For one total batch size, a step takes the same samples on any number of ranks. mmengine calls `set_epoch` only in
    training, so each validation draws the same masks. Any dataset that is indexed by numbers will do.

    Args:
        shuffle: True: a new order in each epoch; up to ranks - 1 samples are dropped, so that all ranks get equally
            many. False: the dataset's order; the first samples are repeated at the end.
        seed: for the order and for the samples; None: a random one that the ranks share.
    """

    num_repeats = 1  # copies of each sample in a row
    per_epoch: int | None = None  # samples of a rank per epoch, if epochs follow each other without end

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int | None = None) -> None:
        super().__init__(dataset, shuffle, seed, round_up=True)
        if shuffle:
            self.num_samples = len(dataset) // self.world_size
            self.total_size = self.num_samples * self.world_size
        self.skipped = 0
        if hasattr(dataset, '__dict__'):
            dataset.__getitems__ = partial(read_samples, dataset)  # type: ignore[attr-defined]

    def skip(self, num_samples: int) -> None:
        """Skips this rank's first samples of the next epoch, when a run is resumed."""
        self.skipped = num_samples

    def __iter__(self) -> Iterator[SampleKey]:
        per_epoch, skipped, self.skipped = self.per_epoch, self.skipped, 0
        if per_epoch is None:
            yield from self.keys(self.epoch, skipped)
            return
        for epoch in count(self.epoch):
            yield from islice(self.keys(epoch, skipped), per_epoch - skipped)
            skipped = 0

    def keys(self, epoch: int, first: int = 0) -> Iterator[SampleKey]:
        """This rank's samples of an epoch, from its sample number `first` on."""
        order = np.arange(len(self.dataset))
        if self.shuffle:
            order = torch.randperm(len(order), generator=torch.Generator().manual_seed(self.seed + epoch)).numpy()
        for position in range(self.rank + first * self.world_size, self.total_size, self.world_size):
            image, copy = divmod(position, self.num_repeats)
            yield SampleKey(self.seed, epoch * self.num_repeats + copy, int(order[image % len(order)]))


@DATA_SAMPLERS.register_module()
class RepeatedAugmentationSampler(SeededSampler):
    """Deals `num_repeats` copies of each shuffled image in a row to the ranks in turn, each augmented differently.

    A copy is `SampleKey(seed, epoch * num_repeats + copy, index)`. An epoch has len // 256 * 256 samples (all, if there
    are fewer than 256), so with three copies it shows a third of the images. `seed`: as in SeededSampler.

    Source: facebookresearch/deit `samplers.py`; the released BEiT does not use it.
    """

    def __init__(self, dataset: Sized, num_repeats: int = 3, seed: int | None = None) -> None:
        super().__init__(dataset, seed=seed)
        self.num_repeats = num_repeats
        self.num_samples = (len(dataset) // 256 * 256 or len(dataset)) // self.world_size  # 256 as in DeiT
        self.total_size = self.num_samples * self.world_size

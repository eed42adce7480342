"""Which sample comes when, and with which randomness.

What is drawn for an image depends on its SampleKey only, not on workers, ranks, batch size or the order of loading. So
a resumed run draws what the uninterrupted one would have drawn. Datasets of other libraries, and datasets that
wrap others, get plain numbers: torch's DataLoader reads a batch by `__getitems__`, where the key seeds the generators.
"""

import hashlib
import random
import struct
from collections.abc import Iterator, Sequence, Sized
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple

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


_under_way: ContextVar[SampleKey | None] = ContextVar('sample', default=None)  # of the outermost dataset


def key_of(index: int) -> SampleKey:
    """Key of an image that is asked for by its number: by a dataset around its own, or outside of a run."""
    outer = _under_way.get()
    return SampleKey(0, 0, index) if outer is None else SampleKey(mixed_seed(*outer) >> 1, outer.epoch, index)


def read_samples(dataset: Any, keys: Sequence[SampleKey | int]) -> list:
    """The samples of a batch. What any dataset draws for one depends on its key, also what it draws by torch."""
    samples = []
    for key in keys:
        if not isinstance(key, SampleKey):  # another sampler's number: nothing is seeded
            samples.append(dataset[key])
            continue
        seed_generators(key)
        before = _under_way.set(key)
        try:
            with torch.random.fork_rng(devices=[]):  # without workers the generator is the model's
                torch.default_generator.manual_seed(mixed_seed(*key, 0))
                samples.append(dataset[key if getattr(dataset, 'takes_keys', False) else key.index])
        finally:
            _under_way.reset(before)
    return samples


@DATA_SAMPLERS.register_module()
class SeededSampler(DefaultSampler):
    """Deals the samples of an epoch to the ranks in turn, each as `SampleKey(seed, epoch, index)`.

    One step of all ranks together takes the same samples for any number of ranks. mmengine calls `set_epoch` in
    training only: in validation the epoch stays 0 and every pass draws the same masks (in every run, too, with
    `seed=0`).

    Any dataset that is indexed by numbers can be dealt, also one of another library or around others (ConcatDataset).

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
        if hasattr(dataset, '__dict__'):
            dataset.__getitems__ = partial(read_samples, dataset)  # type: ignore[attr-defined]

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

"""Loops: the batches of a run of iterations."""

from itertools import chain, islice
from types import SimpleNamespace

import pytest
from mmengine.dataset import DefaultSampler
from torch.utils.data import BatchSampler, DataLoader, Dataset, SequentialSampler

from beit_mm.datasets.samplers import RepeatedAugmentationSampler, SeededSampler
from beit_mm.engine.loops import EpochLoop, IterLoop, batches


class Keys(Dataset):
    """Samples that are their keys, and which of them were read."""

    takes_keys = True

    def __init__(self):
        self.read: list[tuple] = []

    def __len__(self) -> int:
        return 10

    def __getitem__(self, key: tuple) -> tuple:
        self.read.append(tuple(key))
        return tuple(key)


class Positions(Dataset):
    def __getitem__(self, key: object) -> object:
        return key


class Loader(DataLoader):
    begun = 0

    def __iter__(self):
        self.begun += 1
        return super().__iter__()


def loader_of(kind: type, workers: int, drop_last: bool = True) -> Loader:
    dataset = Keys()
    more = dict(persistent_workers=True) if workers else {}
    return Loader(
        dataset, 3, sampler=kind(dataset, seed=1), num_workers=workers, drop_last=drop_last, collate_fn=list, **more
    )


@pytest.mark.parametrize('workers', [0, 2])
@pytest.mark.parametrize('kind', [SeededSampler, RepeatedAugmentationSampler])
@pytest.mark.parametrize('done', [0, 2, 3, 7])
def test_workers_go_on_from_one_epoch_to_the_next(kind, workers, done):
    expected, reference = [], loader_of(kind, 0)
    for epoch in range(5):
        reference.sampler.set_epoch(epoch)
        expected += reference
    loader = loader_of(kind, workers)
    loop = SimpleNamespace(dataloader=loader, iter=done)
    stream = IterLoop.endless_batches(loop)
    assert [*islice(stream, len(expected) - done)] == expected[done:] and loader.begun == 1
    if not workers:  # a hook that iterates the loader gets one epoch
        assert len([*loader]) == len(reference)


def test_an_incomplete_batch_ends_an_epoch_where_it_is_kept():
    """And nothing is read to get to the second batch of the second epoch."""
    loader = loader_of(SeededSampler, 0, drop_last=False)
    stream = IterLoop.endless_batches(SimpleNamespace(dataloader=loader, iter=5))
    first = [*islice(stream, 7)]
    assert [len(batch) for batch in first] == [3, 3, 1, 3, 3, 3, 1]
    loader.sampler.set_epoch(1)
    assert loader.dataset.read == [*chain(*first)] and first[:3] == [*loader][1:]
    loader.sampler.set_epoch(2)
    assert first[3:] == [*loader]


@pytest.mark.parametrize('kind', [SeededSampler, DefaultSampler, SequentialSampler])
def test_batches_of_a_batch_sampler_are_those_of_its_sampler(kind):
    """torch keeps no `sampler` beside it; and one without `set_epoch` has the same order in each epoch."""
    options = {} if kind is SequentialSampler else dict(seed=1)
    expected, samplers = [], [kind(Keys(), **options) for _ in range(2)]
    for epoch in range(3):
        if options:
            samplers[0].set_epoch(epoch)
        keys = [*samplers[0]]
        expected += [keys[start : start + 3] for start in range(0, 10, 3)]
    batch_sampler = BatchSampler(samplers[1], 3, drop_last=False)
    loader = DataLoader(Positions(), batch_sampler=batch_sampler, collate_fn=list)
    for done in (0, 5):
        stream = IterLoop.endless_batches(SimpleNamespace(dataloader=loader, iter=done))
        assert [*islice(stream, len(expected) - done)] == expected[done:]


def test_batches_in_a_list():
    """mmpretrain's vis_scheduler.py gives them to the loop, to draw a config's schedules."""

    class Batches(list):
        dataset = None

    loop = EpochLoop(SimpleNamespace(), Batches('ab'), max_epochs=1)
    assert [*batches(loop.dataloader, epoch=0)] == ['a', 'b']

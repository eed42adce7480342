"""The sampler that tells the dataset which epoch a sample is drawn for."""
from collections.abc import Iterator

from mmengine.dataset import DefaultSampler

from beit_mm.functional.sample_seed import SampleKey
from beit_mm.registry import DATA_SAMPLERS


@DATA_SAMPLERS.register_module()
class SeededSampler(DefaultSampler):
    """mmengine's DefaultSampler, yielding `SampleKey(seed, epoch, index)` instead of the bare
    index.

    Persistent workers keep their first copy of the dataset, so the epoch has to travel with the
    index. mmengine calls `set_epoch` in training only: in validation the epoch stays 0 and every
    pass draws the same masks (give `seed=0` there to have them the same in every run).

    Args: as DefaultSampler.
    """

    def __iter__(self) -> Iterator[SampleKey]:
        for index in super().__iter__():
            yield SampleKey(self.seed, self.epoch, index)

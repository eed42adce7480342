"""mmengine's two training loops, which tell the sampler at which batch to begin."""

from collections.abc import Iterator

from mmengine.runner import EpochBasedTrainLoop, IterBasedTrainLoop
from torch import nn
from torch.utils.data import DataLoader

from beit_mm.datasets.samplers import SeededSampler
from beit_mm.engine.checks import check_number_of_images
from beit_mm.engine.interruption import signals_handled
from beit_mm.engine.steps import threads_warn
from beit_mm.registry import LOOPS


def batches(loader: DataLoader, epoch: int, first: int = 0) -> Iterator:
    """The batches of an epoch from the `first` on; with a sampler of another library the others are read in vain."""
    if isinstance(loader, DataLoader):  # mmpretrain's vis_scheduler.py has a list instead
        loader.sampler.set_epoch(epoch)
    seeks = isinstance(loader, DataLoader) and isinstance(loader.sampler, SeededSampler)
    if seeks:
        loader.sampler.skip(first * loader.batch_size)
    for number, batch in enumerate(loader, start=first if seeks else 0):
        if number >= first:
            yield batch


@LOOPS.register_module()
class EpochLoop(EpochBasedTrainLoop):
    """mmengine's EpochBasedTrainLoop, which also resumes in the middle of an epoch."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        check_number_of_images(self.dataloader)  # before schedules are built, which count in epochs

    def run(self) -> nn.Module:
        with signals_handled(self.runner), threads_warn(self.runner):
            return super().run()

    def run_epoch(self) -> None:
        self.runner.call_hook('before_train_epoch')
        self.runner.model.train()
        first = self._iter - self._epoch * len(self.dataloader)
        for index, batch in enumerate(batches(self.dataloader, self._epoch, first), start=first):
            self.run_iter(index, batch)
        self.runner.call_hook('after_train_epoch')
        self._epoch += 1


@LOOPS.register_module()
class IterLoop(IterBasedTrainLoop):
    """mmengine's IterBasedTrainLoop, which resumes at any iteration without reading what was seen."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        # mmengine 0.10.7 has started the workers here: too early, and for an iterator that is not used.
        self.dataloader_iterator = self.dataloader._iterator = None

    def run(self) -> nn.Module:
        check_number_of_images(self.dataloader)
        with signals_handled(self.runner), threads_warn(self.runner):
            self.runner.call_hook('before_train')
            self.runner.call_hook('before_train_epoch')
            stream = self.endless_batches()
            while self._iter < self._max_iters and not self.stop_training:
                self.runner.model.train()
                self.run_iter(next(stream))
                self._decide_current_val_interval()
                due = self._iter % self.val_interval == 0 or self._iter == self._max_iters
                if self.runner.val_loop is not None and self._iter >= self.val_begin and due:
                    self.runner.val_loop.run()
            self.runner.call_hook('after_train_epoch')
            self.runner.call_hook('after_train')
        return self.runner.model

    def endless_batches(self) -> Iterator:
        epoch, first = divmod(self._iter, len(self.dataloader))
        while True:
            yield from batches(self.dataloader, epoch, first)
            epoch, first = epoch + 1, 0

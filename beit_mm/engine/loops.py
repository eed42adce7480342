"""Training loops that resume at any iteration."""

import bisect
import copy
import math
from collections.abc import Iterator, Sequence
from itertools import islice

from mmengine.dataset import BaseDataset
from mmengine.dist import get_world_size
from mmengine.runner import EpochBasedTrainLoop, IterBasedTrainLoop, Runner
from torch import nn
from torch.utils.data import DataLoader

from beit_mm.datasets.samplers import SeededSampler
from beit_mm.engine.checkpoints import VALIDATED
from beit_mm.engine.checks import check_number_of_images
from beit_mm.engine.resuming import sampler_of
from beit_mm.engine.signals import end_workers, signals_handled
from beit_mm.errors import warn
from beit_mm.registry import LOOPS


@LOOPS.register_module()
class EpochLoop(EpochBasedTrainLoop):
    """An EpochBasedTrainLoop of mmengine that also resumes in the middle of an epoch."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.epochs_done = 0  # in this call
        check_number_of_images(self.dataloader)  # before schedules that count in epochs are built

    @property
    def epoch(self) -> int:
        return super().epoch + self.epochs_done  # mmengine's number is the one that the run resumed with

    def run(self) -> nn.Module:
        if is_past_end(self.runner):
            return self.runner.model
        with signals_handled(self.runner):
            self.runner.call_hook('before_train')
            if self.epoch and self.iter == self.epoch * len(self.dataloader):  # resumed between two epochs
                validate(self, self.epoch, self.max_epochs)
            while self.epoch < self.max_epochs and not self.stop_training:
                self.run_epoch()
                validate(self, self.epoch, self.max_epochs)
            self.runner.call_hook('after_train')
        return self.runner.model

    def run_epoch(self) -> None:
        self.runner.call_hook('before_train_epoch')
        self.runner.model.train()
        first = self.iter - self.epoch * len(self.dataloader)
        for index, batch in enumerate(batches(self.dataloader, self.epoch, first), start=first):
            self.run_iter(index, batch)
        self.runner.call_hook('after_train_epoch')
        self.epochs_done += 1


@LOOPS.register_module()
class IterLoop(IterBasedTrainLoop):
    """An IterBasedTrainLoop of mmengine that resumes at any iteration; val_begin=0 validates before the first.

    Args:
        shortened_from: the recipe's length, dict(max_epochs=...) or dict(max_iters=...), if `--steps` shortened this
            run. Validations then use the same share of the held-out images, evenly spread, but at least one batch.
    """

    def __init__(self, *args, shortened_from: dict[str, int] | None = None, **kwargs):
        super().__init__(*args, **kwargs)
        self.length = super().max_iters  # which ClockHook changes
        self.shortened_from = shortened_from
        # mmengine 0.10.7 has already started the workers: too early, and for an iterator that is never used.
        end_workers(self.dataloader)
        self.dataloader_iterator = None

    @property
    def max_iters(self) -> int:
        return self.length

    def run(self) -> nn.Module:
        check_number_of_images(self.dataloader)
        if is_past_end(self.runner):
            return self.runner.model
        if self.shortened_from and self.runner.val_loop is not None:
            self.scale_validation(**self.shortened_from)
        with signals_handled(self.runner):
            self.runner.call_hook('before_train')
            self.runner.call_hook('before_train_epoch')
            stream = self.endless_batches()
            validate(self, self.iter, self.max_iters)
            while self.iter < self.max_iters and not self.stop_training:
                self.runner.model.train()
                self.run_iter(next(stream))
                validate(self, self.iter, self.max_iters)
            self.runner.call_hook('after_train_epoch')
            self.runner.call_hook('after_train')
        return self.runner.model

    def scale_validation(self, max_epochs: int = 0, max_iters: int = 0) -> None:
        loader = self.runner.val_dataloader
        images, full_length = len(loader.dataset), max_iters or max_epochs * len(self.dataloader)
        number = max(math.ceil(self.max_iters / full_length * images), get_world_size() * (loader.batch_size or 1))
        if number < images and isinstance(loader.dataset, BaseDataset):
            warn(f'Validating on {number:,} of {images:,} held-out images; train_cfg.shortened_from=None takes all.')
            validate_on(self.runner, [position * images // number for position in range(number)])

    def endless_batches(self) -> Iterator:
        """The batches from this iteration on; the workers do not pause between epochs."""
        loader = self.dataloader
        epoch, first = divmod(self.iter, len(loader))
        sampler = getattr(loader, 'sampler', None)
        if isinstance(sampler, SeededSampler) and loader.drop_last:  # drop_last, so that no batch mixes two epochs
            sampler.set_epoch(epoch)
            sampler.skip(first * loader.batch_size)
            sampler.per_epoch = len(loader) * loader.batch_size
            stream = iter(loader)
            yield next(stream)
            sampler.per_epoch = None  # `stream` goes on without end; later iterators end after one epoch
            yield from stream
        while True:
            yield from batches(loader, epoch, first)
            epoch, first = epoch + 1, 0


def batches(loader: DataLoader, epoch: int, first: int = 0) -> Iterator:
    """An epoch's batches from number `first` on; where the sampler cannot skip, earlier ones are read and dropped."""
    sampler = sampler_of(loader)
    if hasattr(sampler, 'set_epoch'):
        sampler.set_epoch(epoch)
    if isinstance(sampler, SeededSampler) and loader.batch_size:  # a batch sampler may take more than a batch at a time
        sampler.skip(first * loader.batch_size)
        yield from loader
    else:
        yield from islice(loader, first, None)


def validate(loop: EpochBasedTrainLoop | IterBasedTrainLoop, position: int, end: int) -> None:
    """Validates when it is due, and at the end of a run, but never before val_begin.

    A resumed run calls it first: its checkpoint may have been written before or during a validation.
    """
    since = bisect.bisect(loop.dynamic_milestones, position + 1)
    loop.val_interval = loop.dynamic_intervals[since - 1]
    is_due = position >= loop.val_begin and (position % loop.val_interval == 0 or position == end)
    is_done = loop.runner.message_hub.get_info(VALIDATED) == loop.iter  # before the run was stopped and resumed
    if loop.runner.val_loop is not None and is_due and not is_done:
        loop.runner.val_loop.run()


def validate_on(runner: Runner, indices: Sequence[int]) -> None:
    """Limits the validations of a run to these held-out images."""
    dataset = runner.val_dataloader.dataset.get_subset(indices)
    config = dict(copy.deepcopy(runner.cfg.val_dataloader), dataset=dataset)
    runner.val_loop.dataloader = runner.build_dataloader(config, seed=runner.seed)


def is_past_end(runner: Runner) -> bool:
    """Whether a resumed run is past its end; exactly at its end it still validates. Warns if no step is left."""
    if runner.iter >= runner.max_iters:
        warn(
            f'The checkpoint has {runner.iter} iterations, the config asks for {runner.max_iters}; to go on, raise '
            'max_epochs or max_iters.'
        )
    return runner.iter > runner.max_iters

"""Stops a run whose gradients stay infinite or NaN, and leaves its state and the names of the images."""

import copy
import json
import logging
from itertools import islice
from typing import Any

from mmengine.dist import barrier, get_rank, get_world_size
from mmengine.hooks import Hook
from mmengine.logging import print_log
from mmengine.runner import Runner
from torch.utils.data import DataLoader

from beit_mm.datasets.samplers import SeededSampler
from beit_mm.engine.checkpoints import CheckpointHook, at_boundary, checkpoint_hook_of
from beit_mm.engine.optim import MAX_SKIPPED_IN_A_ROW, AutocastOptimWrapper, SkippedSteps
from beit_mm.engine.steps import fetch_logs, look_due
from beit_mm.registry import HOOKS
from beit_mm.terminal import UserError


@HOOKS.register_module()
class BadStepHook(Hook):
    """Stops a run after 25 skipped steps in a row, and leaves what is needed to find out why.

    It looks at the counters of AutocastOptimWrapper where the logger writes a line, at least every 50 steps, and at the
    end. In `bad_step_ITER/` in the checkpoints' folder are then, ITER being the iteration of the first of these steps:

    - `checkpoint.pth`: the run as it is now, to resume from. Its weights are those before that step.
    - `rank{rank}.json`: the samples of that step on this rank, and the losses from it on.
    """

    def __init__(self):
        self.skipped = SkippedSteps()

    def after_train_iter(self, runner: Runner, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        if look_due(runner, batch_idx) and isinstance(runner.optim_wrapper, AutocastOptimWrapper):
            self.skipped = runner.optim_wrapper.look()

    def before_train_iter(self, runner: Runner, batch_idx: int, data_batch: dict | None = None) -> None:
        if self.skipped.in_a_row >= MAX_SKIPPED_IN_A_ROW and at_boundary(runner):
            self.stop(runner)

    def after_train(self, runner: Runner) -> None:
        if isinstance(runner.optim_wrapper, AutocastOptimWrapper):
            self.skipped = runner.optim_wrapper.look()
            if self.skipped.in_a_row >= MAX_SKIPPED_IN_A_ROW:
                self.stop(runner)

    def stop(self, runner: Runner) -> None:
        first, loader = self.skipped.first, runner.train_dataloader
        hook = checkpoint_hook_of(runner) or CheckpointHook()
        folder = hook.folder(runner) / f'bad_step_{first}'
        fetch_logs(runner)
        losses = runner.message_hub.get_scalar('train/loss').data[0]
        iterations = range(first, first + runner.optim_wrapper.accumulative_counts)
        content = dict(iteration=first, rank=get_rank(), world_size=get_world_size(), seed=runner.seed)
        content |= dict(
            skipped_steps=self.skipped.in_a_row,
            losses=[str(loss) for loss in losses[first - runner.iter :]],  # JSON has no NaN
            samples=[dict(sample, iteration=i) for i in iterations for sample in samples_of(loader, i)],
        )
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f'rank{get_rank()}.json').write_text(json.dumps(content, indent=1))
        except OSError as error:
            print_log(f'{folder} could not be written ({error}).', logger='current', level=logging.WARNING)
        hook.save(runner, f'{folder.name}/checkpoint.pth', epoch=runner.iter // len(loader), iter=runner.iter)
        barrier()  # the first rank to end would end the others while they write
        raise UserError(
            f'the gradient was not finite in {self.skipped.in_a_row} steps in a row. {folder} has the run, and the '
            f'names of the images of the first of them: resume (--resume {folder}/checkpoint.pth) with a smaller '
            'learning rate, with optim_wrapper.dtype=float32, or without a broken image'
        )


def samples_of(loader: DataLoader, iteration: int) -> list[dict]:
    """The samples of this rank's batch: `key` (seed, epoch, index) and `img_path`; with our samplers only."""
    if not isinstance(loader.sampler, SeededSampler) or loader.batch_size is None:
        return []
    epoch, batch = divmod(iteration, len(loader))
    sampler = copy.copy(loader.sampler)
    sampler.set_epoch(epoch)
    keys = list(islice(sampler.keys(batch * loader.batch_size), loader.batch_size))
    info = getattr(loader.dataset, 'get_data_info', lambda index: {})
    return [dict(key=list(key), img_path=info(key.index).get('img_path')) for key in keys]

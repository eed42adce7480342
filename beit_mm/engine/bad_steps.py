"""What a run does when its numbers stay bad: it stops, and leaves its state and the names of the images.

AutocastOptimWrapper skips and counts the steps. A step's data and random draws follow from its number
(datasets.samplers, engine.steps.StepSeedHook), so a run resumed from the weights before it takes the same step.
"""

import copy
import json
import logging
from collections import deque
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from mmengine.dist import barrier, get_rank, get_world_size
from mmengine.hooks import Hook
from mmengine.logging import print_log
from mmengine.runner import Runner
from torch.utils.data import DataLoader

from beit_mm.datasets.samplers import SeededSampler
from beit_mm.engine.checkpoints import CheckpointHook, checkpoint_hook_of
from beit_mm.engine.optim import MAX_SKIPPED_IN_A_ROW, STEPS_BETWEEN_LOOKS, AutocastOptimWrapper, SkippedSteps
from beit_mm.engine.steps import fetch_logs, look_intervals
from beit_mm.registry import HOOKS
from beit_mm.terminal import UserError


class Moment(NamedTuple):
    """What changes in a run though a step is skipped, as it was before a step."""

    iteration: int
    groups: list[dict]  # settings of the optimizer's parameter groups
    schedules: list[dict]


@HOOKS.register_module()
class BadStepHook(Hook):
    """Stops a run after 25 skipped steps in a row, and leaves what is needed to find out why.

    It looks at the counters of AutocastOptimWrapper where the logger writes a line, at least every 50 steps, and at the
    end; the weights do not change between the 25th step and the look. In `bad_step_ITER/` in the folder of the
    checkpoints are then, ITER being the first iteration of the first of these steps:

    - `checkpoint.pth`: the run as it was before that step, to resume from. Only a moving
      average of the weights (EMAHook) is further on.
    - `rank{rank}.json`: the samples of the step on this rank, the losses from it on, the loss scale before it.

    Raises:
        ValueError: on all ranks.
    """

    def __init__(self):
        self.moments: deque[Moment] = deque(maxlen=2 * STEPS_BETWEEN_LOOKS)  # before each of the last steps
        self.intervals = [STEPS_BETWEEN_LOOKS]

    def before_train(self, runner: Runner) -> None:
        """Takes over the logger's interval."""
        self.intervals = look_intervals(runner)

    def before_train_iter(self, runner: Runner, batch_idx: int, data_batch: dict | None = None) -> None:
        """Remembers rates and schedules, which go on while steps are skipped."""
        wrapper = runner.optim_wrapper
        if isinstance(wrapper, AutocastOptimWrapper) and wrapper.should_update():  # the first batch of a step
            groups = [
                {k: v for k, v in group.items() if k not in ('params', 'names')} for group in wrapper.param_groups
            ]
            schedules = [schedule.state_dict() for schedule in runner.param_schedulers or []]
            self.moments.append(Moment(runner.iter, groups, schedules))

    def after_train_iter(
        self, runner: Runner, batch_idx: int, data_batch: Any = None, outputs: dict | None = None
    ) -> None:
        """Looks where a line of the log is due."""
        due = any(self.every_n_inner_iters(batch_idx, interval) for interval in self.intervals)
        if due or self.end_of_epoch(runner.train_dataloader, batch_idx):
            self.look(runner)

    def after_train(self, runner: Runner) -> None:
        """Looks once more."""
        self.look(runner)

    def look(self, runner: Runner) -> None:
        """Logs what was skipped, and stops the run if that was too much."""
        wrapper = runner.optim_wrapper
        if not isinstance(wrapper, AutocastOptimWrapper):
            return
        skipped = wrapper.look()
        if skipped.in_a_row < MAX_SKIPPED_IN_A_ROW:
            return
        folder = self.write(runner, skipped)
        barrier()  # a rank that ends would end the others while they write
        raise UserError(
            f'the gradient was not finite in {skipped.in_a_row} steps in a row. The run before the first of them is in '
            f'{folder}, with the names of its images: resume from there (--resume {folder}/checkpoint.pth) with a '
            'smaller learning rate, with optim_wrapper.dtype=float32, or without a broken image'
        )

    def write(self, runner: Runner, skipped: SkippedSteps) -> Path:
        """Takes the run back to the first of the skipped steps, and writes it and each rank's part in it."""
        # A run that was resumed within the row knows only the later of its steps.
        moment = next(moment for moment in self.moments if moment.iteration >= skipped.first)
        wrapper = runner.optim_wrapper
        for group, settings in zip(wrapper.param_groups, moment.groups, strict=True):
            group.update(settings)
        for schedule, state in zip(runner.param_schedulers or [], moment.schedules, strict=True):
            schedule.load_state_dict(state)
        wrapper.forget_row()
        hook = checkpoint_hook_of(runner) or CheckpointHook(out_dir=runner.work_dir)
        name = f'bad_step_{moment.iteration}'
        folder = Path(hook.out_dir, name)
        loader = runner.train_dataloader
        iterations = range(moment.iteration, moment.iteration + wrapper.accumulative_counts)
        fetch_logs(runner)
        losses = runner.message_hub.get_scalar('train/loss').data[0]
        part = dict(
            iteration=moment.iteration,
            rank=get_rank(),
            world_size=get_world_size(),
            seed=runner.seed,
            skipped_steps=skipped.in_a_row,
            loss_scale=skipped.scale,
            losses=[str(loss) for loss in losses[-(runner.iter + 1 - moment.iteration) :]],  # JSON has no NaN
            samples=[dict(sample, iteration=i) for i in iterations for sample in samples_of(loader, i)],
        )
        try:
            folder.mkdir(exist_ok=True)
            (folder / f'rank{get_rank()}.json').write_text(json.dumps(part, indent=1))
        except OSError as error:
            print_log(f'{folder} could not be written ({error}).', logger='current', level=logging.WARNING)
        hook.save(runner, f'{name}/checkpoint.pth', epoch=moment.iteration // len(loader), iter=moment.iteration)
        return folder


def samples_of(loader: DataLoader, iteration: int) -> list[dict]:
    """The samples of this rank's batch: `key` (seed, epoch, index) and `img_path`; with our samplers only."""
    if not isinstance(loader.sampler, SeededSampler) or loader.batch_size is None:
        return []
    epoch, place = divmod(iteration, len(loader))
    sampler = copy.copy(loader.sampler)
    sampler.set_epoch(epoch)
    keys = list(islice(sampler.keys(place * loader.batch_size), loader.batch_size))
    info = getattr(loader.dataset, 'get_data_info', lambda index: {})
    return [dict(key=list(key), img_path=info(key.index).get('img_path')) for key in keys]

"""How much of a run is done, from 0 to 1, by its steps or by a clock; and the clock that ends a run in time."""

import math
import time
from collections.abc import Callable
from typing import Any

from mmengine.hooks import Hook, LoggerHook, ParamSchedulerHook
from mmengine.logging import MessageHub
from mmengine.runner import Runner

from beit_mm.engine.checkpoints import CheckpointHook
from beit_mm.engine.steps import unwrap
from beit_mm.models.tokenizers.discrete_vae import DiscreteVAE

MIN_STEPS = 20  # of a timed run, however short its time; with fewer, it learns hardly anything
NOMINAL_STEPS = 1000  # length of the schedules of a timed run
KNOWN_PROGRESS = 0.03  # of a timed run; after it, the number of its steps is known well enough to set intervals
BY_CLOCK = 'progress_by_clock'  # in the message hub of a timed run, but in no checkpoint
STORED_PROGRESS, STORED_SECONDS = 'schedule_share', 'training_seconds'  # in both


def progress_of(runner: Runner | None = None, steps: int | None = None) -> float:
    """The share of a training that is done, from 0 to 1: its clock's, or the share of its steps before the current one.

    Args:
        runner: None: the one that runs, for a model, which has no runner.
        steps: number of steps to count instead; a clock counts a step when it ends.
    """
    hub = MessageHub.get_current_instance() if runner is None else runner.message_hub
    by_clock = hub.get_info(BY_CLOCK)
    if by_clock is not None:
        return by_clock
    done = hub.get_info('iter', 0) if runner is None else runner.iter
    length = hub.get_info('max_iters', 1) if runner is None else runner.max_iters
    return min((done if steps is None else steps) / max(length, 1), 1.0)


class ClockHook(Hook):
    """Ends a training when its time is up, and sets its schedules by the time that has passed.

    How many steps fit into the time is not known in advance, and changes with the load of the machine. So schedules are
    built for NOMINAL_STEPS, and at the end of each step the progress grows by the step's share of what remains:

        (1 - progress) * (seconds of the step) / (seconds from its beginning to the deadline)

    The training ends with the first step that ends after the deadline, but not before step MIN_STEPS, and at the latest
    with step `most_steps`. Schedules move to their place at this progress, DiscreteVAE's temperature too; others ask
    `progress_of`. Checkpoints hold progress and time, so that a resumed run goes on with the time that is left.

    Args:
        seconds: time for the training, all calls together.
        began: time.monotonic() when this call began to use the time.
        most_steps: math.inf for any number.
        intervals_for: gives dict(validation=, checkpoint=, log=), in steps, for an expected number of steps.
    """

    priority = 'HIGHEST'  # other hooks ask which step is the last

    def __init__(self, seconds: float, began: float, most_steps: float, intervals_for: Callable[[int], dict[str, int]]):
        self.seconds, self.began, self.most_steps, self.intervals_for = seconds, began, most_steps, intervals_for
        self.seconds_before = 0.0  # of earlier calls

    def register_in(self, runner: Runner) -> None:
        """Registers this hook in place of mmengine's ParamSchedulerHook, which would move the schedules too."""
        runner.hooks[:] = [hook for hook in runner.hooks if not isinstance(hook, ParamSchedulerHook)]
        runner.register_hook(self)

    def after_load_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        # beyond the steps already done, because otherwise the loop would end at once
        runner.train_loop.length = max(NOMINAL_STEPS, checkpoint['meta']['iter'] + 1)

    def before_train(self, runner: Runner) -> None:
        info = runner.message_hub.runtime_info
        self.seconds_before = info.get(STORED_SECONDS, 0.0)
        self.deadline = self.began + self.seconds - self.seconds_before
        self.step_began = math.nan  # not known of the first step of a call
        self.progress = 0.0
        self.set_progress(runner, info.get(STORED_PROGRESS, 0.0), steps=runner.iter)

    def after_val_epoch(self, runner: Runner, metrics: dict[str, float] | None = None) -> None:
        self.step_began = time.monotonic()

    def after_train_iter(self, runner: Runner, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        now, steps, before = time.monotonic(), runner.iter + 1, self.progress
        progress = min(self.progress_at(now), steps / MIN_STEPS)  # below 1 before step MIN_STEPS
        progress = max(progress, steps / self.most_steps)  # 1 at step most_steps
        self.step_began = now
        self.move_schedules(runner, int(before * NOMINAL_STEPS), int(progress * NOMINAL_STEPS))
        runner.message_hub.update_info(STORED_SECONDS, self.seconds_before + now - self.began)
        self.set_progress(runner, progress, steps)

    def progress_at(self, now: float) -> float:
        """The progress at the end of a step, by the clock alone."""
        if now >= self.deadline:
            return 1.0
        if math.isnan(self.step_began):
            return self.progress
        return self.progress + (1 - self.progress) * (now - self.step_began) / (self.deadline - self.step_began)

    def move_schedules(self, runner: Runner, place_before: int, place: int) -> None:
        for _ in range(place - place_before):
            for scheduler in runner.param_schedulers:
                scheduler.step()
        model = unwrap(runner)
        if isinstance(model, DiscreteVAE):
            model.steps.fill_(place)  # its temperature is a schedule too

    def set_progress(self, runner: Runner, progress: float, steps: int) -> None:
        """Sets the progress after a number of steps, the loop's length and, once the rate is known, the intervals."""
        becomes_known = self.progress < KNOWN_PROGRESS <= progress
        self.progress = progress
        # not resumed, because an untimed run may go on from the checkpoint
        runner.message_hub.update_info(BY_CLOCK, progress, resumed=False)
        runner.message_hub.update_info(STORED_PROGRESS, progress)
        expected = NOMINAL_STEPS if progress == 0 else round(steps / progress)
        runner.train_loop.length = steps if progress >= 1 else max(steps + 1, expected)
        if not becomes_known:
            return
        intervals = self.intervals_for(expected)
        runner.train_loop.dynamic_intervals = [intervals['validation']]  # which IterLoop asks after each step
        for hook in runner.hooks:
            if isinstance(hook, CheckpointHook):
                hook.interval = intervals['checkpoint']
            if isinstance(hook, LoggerHook):
                hook.interval = intervals['log']

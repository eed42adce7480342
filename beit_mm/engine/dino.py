"""Schedules of teachers that are moving averages of their students."""

import math
from typing import Any

import torch
from mmengine.hooks import Hook
from mmengine.runner import Runner

from beit_mm.engine.optim import AutocastOptimWrapper
from beit_mm.engine.progress import progress_of
from beit_mm.engine.steps import unwrap
from beit_mm.registry import HOOKS


@HOOKS.register_module()
class TeacherMomentumHook(Hook):
    """After each step of the optimizer, except one that AutocastOptimWrapper skips, the teacher follows the student.

    Args:
        momentum: the teacher's momentum at the first step; it rises to 1 at the end of the run, along half a cosine.

    Source: facebookresearch/dino `main_dino.py`.
    """

    def __init__(self, momentum: float = 0.996):
        self.momentum = momentum

    def after_train_iter(self, runner: Runner, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        if (wrapper := runner.optim_wrapper).should_update():
            half_cosine = (1 + math.cos(math.pi * progress_of(runner))) / 2
            momentum = 1 - (1 - self.momentum) * half_cosine
            taken = wrapper.taken if isinstance(wrapper, AutocastOptimWrapper) else None  # others do not say
            unwrap(runner).update_teacher(momentum, taken)
            runner.message_hub.update_scalar('train/teacher_momentum', momentum)


@HOOKS.register_module()
class DINOHook(TeacherMomentumHook):
    """Schedules of a DINOPretrainer, which depend only on the number of the step, so a resumed run needs no state.

    Args:
        momentum: see TeacherMomentumHook.
        temperature: the teacher's in the first epoch, and after the warm-up.
        warmup_epochs: epochs in which the temperature rises, by equal steps.
        freeze_last_layer: epochs in which the last layer of the student's head is not trained.

    Source: facebookresearch/dino `main_dino.py`.
    """

    def __init__(
        self,
        momentum: float = 0.996,
        temperature: tuple[float, float] = (0.04, 0.04),
        warmup_epochs: int = 0,
        freeze_last_layer: int = 1,
    ):
        super().__init__(momentum)
        self.temperature = temperature
        self.warmup_epochs, self.freeze_last_layer = warmup_epochs, freeze_last_layer

    def before_train(self, runner: Runner) -> None:
        model = unwrap(runner)

        def drop_gradients(*_: object) -> None:
            # After clipping. Without a gradient the optimizer skips a parameter; a zero one would still decay it.
            if epoch_of(runner) < self.freeze_last_layer:
                for parameter in model.dino_head.last_layer.parameters():
                    parameter.grad = None

        runner.optim_wrapper.optimizer.register_step_pre_hook(drop_gradients)

    def before_train_iter(self, runner: Runner, batch_idx: int, data_batch: dict | None = None) -> None:
        epoch, (first, last) = epoch_of(runner), self.temperature
        warm = epoch >= self.warmup_epochs
        temperature = last if warm else first + (last - first) * epoch / max(self.warmup_epochs - 1, 1)
        unwrap(runner).teacher_temperature = torch.tensor(temperature)  # a number would be a constant of compiled code
        runner.message_hub.update_scalar('train/teacher_temperature', temperature)


def epoch_of(runner: Runner) -> int:
    """The epoch of the current step, counted from 0, also in loops that count iterations."""
    return runner.iter // len(runner.train_dataloader)

"""Logs of a run: numbers, files, throughput, and lines of progress in a terminal."""

import logging
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from numbers import Real
from pathlib import Path
from typing import Any

import torch
from mmengine.dist import get_world_size, is_main_process
from mmengine.hooks import Hook
from mmengine.hooks import LoggerHook as EngineLoggerHook
from mmengine.hooks import RuntimeInfoHook as EngineRuntimeInfoHook
from mmengine.logging import MMLogger
from mmengine.runner import Runner, find_latest_checkpoint
from torch import Tensor

from beit_mm.engine.checkpoints import in_main_process
from beit_mm.engine.optim import STEPS_BETWEEN_FETCHES, AutocastOptimWrapper
from beit_mm.engine.progress import progress_of
from beit_mm.engine.signals import InterruptionHook
from beit_mm.errors import warn
from beit_mm.registry import HOOKS
from beit_mm.terminal import hush, printable, printable_record

HISTORY = 10_000  # steps whose logged numbers are kept
SECONDS = 10.0  # between two lines of progress
FORMATS = {  # of the numbers in a line of progress, in their order
    'train/loss': 'loss {:.3f}',
    'train/mim_acc': 'mim_acc {:.3f}',
    'train/lr': 'lr {:.1e}',
    'train/images_per_second': '{:,.0f} images/s',
    'train/data_time': 'data {:.3f} s',
}


@HOOKS.register_module()
class RuntimeInfoHook(EngineRuntimeInfoHook):
    """mmengine's, except that a step's numbers stay on the device until a line of the log needs them.

    mmengine fetches each loss at each step: the host waits for the device, then the device for the next step.
    `lr` is the highest rate of all parameter groups, the last layer's. mmengine logs the first layer's, and a `base_lr`
    that auto_scale_lr never scales. The counters of AutocastOptimWrapper are fetched with the losses.
    """

    def __init__(self):
        self.waiting: list[dict[str, Any]] = []  # outputs of the steps since the last fetch

    def before_train_iter(self, runner: Runner, batch_idx: int, data_batch: Any = None) -> None:
        runner.message_hub.update_info('iter', runner.iter)
        for name, rates in runner.optim_wrapper.get_lr().items():
            if not name.endswith('base_lr'):
                runner.message_hub.update_scalar(f'train/{name}', max(rates))

    def after_train_iter(self, runner: Runner, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        held = {key: value.detach() if isinstance(value, Tensor) else value for key, value in (outputs or {}).items()}
        self.waiting.append(held)
        if fetch_due(runner, batch_idx):
            self.fetch(runner)
            if isinstance(runner.optim_wrapper, AutocastOptimWrapper):
                runner.optim_wrapper.read_counters()

    def after_train(self, runner: Runner) -> None:
        self.fetch(runner)
        super().after_train(runner)

    def fetch(self, runner: Runner) -> None:
        """Adds the numbers of all steps since the last fetch to the history, with one wait for the device."""
        waiting, self.waiting = self.waiting, []
        tensors = [value for step in waiting for value in step.values() if isinstance(value, Tensor)]
        together = [tensor.reshape(()).to(tensors[0].device, torch.float32) for tensor in tensors]
        numbers = iter(torch.stack(together).tolist() if together else [])
        for step in waiting:
            for key, value in step.items():
                runner.message_hub.update_scalar(f'train/{key}', next(numbers) if isinstance(value, Tensor) else value)


def fetch_due(runner: Runner, batch_idx: int) -> bool:
    """Whether to fetch numbers from the device, or from other ranks, after this batch; the same on all ranks.

    True where a line of the log is due, every 50 batches, and at the end of an epoch and of the run.
    """
    loggers = [hook for hook in runner.hooks if isinstance(hook, EngineLoggerHook)]
    is_logged = any(logger.every_n_inner_iters(batch_idx, logger.interval) for logger in loggers)
    is_last = batch_idx + 1 == len(runner.train_dataloader) or runner.iter + 1 == runner.max_iters
    return is_logged or is_last or (batch_idx + 1) % STEPS_BETWEEN_FETCHES == 0


@contextmanager
def written_if_possible(folder: str | Path) -> Iterator[None]:
    """Turns the error of a full disk or deleted folder into a warning, for logs and pictures."""
    try:
        yield
    except OSError as error:
        warn_unwritten(folder, error)


def warn_unwritten(folder: str | Path, error: BaseException | None) -> None:
    reason = getattr(error, 'strerror', None) or error  # without a path, so that mmengine logs it once
    warn(f'Some logs and pictures cannot be written to {folder}: {reason}. The training continues.')


@HOOKS.register_module()
class LoggerHook(EngineLoggerHook):
    """mmengine's, except that files that cannot be written (log, scalars, TensorBoard's) cause one warning."""

    def before_run(self, runner: Runner) -> None:
        super().before_run(runner)
        for handler in runner.logger.handlers:  # which write the text log
            handler.addFilter(printable_record)  # escapes what a terminal would obey
            if isinstance(handler, logging.FileHandler):
                handler.handleError = lambda record: warn_unwritten(runner.work_dir, sys.exc_info()[1])  # type: ignore[method-assign]

    def after_train_iter(self, runner: Runner, *args: Any, **kwargs: Any) -> None:
        with written_if_possible(runner.work_dir):
            super().after_train_iter(runner, *args, **kwargs)

    def after_val_epoch(self, runner: Runner, metrics: dict[str, float] | None = None) -> None:
        with written_if_possible(runner.work_dir):
            super().after_val_epoch(runner, metrics)

    def after_run(self, runner: Runner) -> None:
        with written_if_possible(runner.work_dir):
            super().after_run(runner)


@HOOKS.register_module()
class ThroughputHook(Hook):
    """Logs `images_per_second` of all processes over the last 50 steps, including waits for data, not validation.

    It also limits mmengine's histories of logged numbers to 10,000 entries, because each step copies them.
    """

    def __init__(self):
        self.steps: deque[tuple[int, float]] = deque(maxlen=50)  # images, seconds
        self.last = 0.0

    def before_train_epoch(self, runner: Runner) -> None:
        self.last = time.perf_counter()

    def after_val_epoch(self, runner: Runner, metrics: dict | None = None) -> None:
        self.before_train_epoch(runner)  # iteration-based runs validate in the middle of an epoch

    def after_train_iter(self, runner: Runner, batch_idx: int, data_batch: dict, outputs: dict) -> None:
        now = time.perf_counter()
        inputs = data_batch['inputs']  # a dict in pretraining, the images themselves in classification
        images = inputs['images'] if isinstance(inputs, dict) else inputs
        self.steps.append((len(images) * get_world_size(), now - self.last))
        self.last = now
        count, seconds = map(sum, zip(*self.steps, strict=True))
        runner.message_hub.update_scalar('train/images_per_second', count / seconds)
        for history in runner.message_hub.log_scalars.values():
            history.max_length = HISTORY


class LockingRunner(Runner):
    """A Runner whose InterruptionHook's lock is taken before logs and the config are written to its folder."""

    def setup_env(self, env_cfg: dict) -> None:
        super().setup_env(env_cfg)
        if 'InterruptionHook' in str(self.cfg.get('custom_hooks')):
            self.first = InterruptionHook()  # the run's own is not built yet
            in_main_process(lambda: self.first.take_lock(Path(self.work_dir)))


class QuietRunner(LockingRunner):
    """A Runner that leaves the terminal to its ProgressHook, except for warnings; its log files have everything."""

    def build_logger(self, *args: Any, **kwargs: Any) -> MMLogger:
        logger = super().build_logger(*args, **kwargs)
        for handler in hush(logger):
            if isinstance(handler, logging.StreamHandler):
                handler.setStream(sys.stderr)  # the standard output is for results
        return logger


class ProgressHook(Hook):
    """Prints a line of progress every few seconds, and the numbers of validations.

    The time left is what the rest of the run would take at the pace so far, validations included.
    """

    priority = 'VERY_LOW'

    def __init__(self, title: str, seconds: float = SECONDS):
        self.title, self.seconds = title, seconds
        self.stream = sys.stdout  # as it is when the hook is built
        self.due = 0.0  # when the next line is due

    def before_train(self, runner: Runner) -> None:
        self.begin, self.progress_before = time.monotonic(), progress_of(runner)
        self.due = self.begin + min(self.seconds, 2)  # the first line comes soon

    def after_train_iter(self, runner: Runner, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        done = runner.iter + 1
        if self.is_due() or done == runner.max_iters:
            for hook in runner.hooks:
                if isinstance(hook, RuntimeInfoHook):
                    hook.fetch(runner)
            progress = progress_of(runner, steps=done)
            left = time_left(self.begin, progress - self.progress_before, 1 - progress)
            self.say('  '.join([f'{self.title} {done:,}/{runner.max_iters:,}', *recent_numbers(runner), left]))

    def begin_batches(self, runner: Runner | None = None) -> None:
        self.batches_begin = time.monotonic()

    before_val = before_test = begin_batches

    def after_val_iter(self, runner: Runner, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        self.show_batch(batch_idx + 1, len(runner.val_dataloader))

    def after_val_epoch(self, runner: Runner, metrics: dict[str, float] | None = None) -> None:
        shown = {name.removeprefix(f'{self.title}/'): value for name, value in (metrics or {}).items()}
        shown = {name: value for name, value in shown.items() if not name.startswith('IoU/')}  # one for each class
        numbers = [f'{name} {value:.4g}' for name, value in shown.items() if isinstance(value, Real)]
        self.say('  '.join([f'{self.title} {runner.iter:,}, held-out images:', *numbers]))

    def after_train(self, runner: Runner) -> None:
        if runner.iter < runner.max_iters:  # a hook has set stop_training; only the log may say why
            best = ', '.join(map(str, sorted(Path(runner.work_dir).glob('best_*.pth'))))
            weights = find_latest_checkpoint(runner.work_dir) or best or 'not saved'  # CheckpointHook has already run
            steps = f'{runner.iter:,} of {runner.max_iters:,}'
            self.say(f'{self.title}: ended by a hook after step {steps}; weights: {weights}')

    def after_test_iter(self, runner: Runner, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        self.show_batch(batch_idx + 1, len(runner.test_dataloader))

    def show_batch(self, done: int, batches: int, what: str = 'held-out images') -> None:
        if self.is_due():
            left = time_left(self.batches_begin, done, batches - done)
            self.say(f'{self.title}, {what}, batch {done:,}/{batches:,}  {left}')

    def is_due(self) -> bool:
        """Whether a line is due; if so, sets when the next one will be."""
        now = time.monotonic()
        if now < self.due:
            return False
        self.due = now + self.seconds
        return True

    def say(self, line: str) -> None:
        if is_main_process():
            print(printable(line), file=self.stream, flush=True)


def time_left(begin: float, done: float, remaining: float) -> str:
    """How long the rest of a task takes at its pace since `begin`, as text."""
    if done <= 0:  # a clock does not count the first step of a call
        return 'time left unknown'
    return f'{timedelta(seconds=round((time.monotonic() - begin) / done * remaining))} left'


def recent_numbers(runner: Runner) -> list[str]:
    """The latest logged numbers of a run and its memory on a GPU, as text."""
    scalars = runner.message_hub.log_scalars
    numbers = [form.format(scalars[name].current()) for name, form in FORMATS.items() if name in scalars]
    if torch.cuda.is_available():
        numbers.append(f'{torch.cuda.memory_reserved() / 2**30:.3g} GiB')  # not the peak, which mmengine's log resets
    return [number.replace('e-0', 'e-') for number in numbers]

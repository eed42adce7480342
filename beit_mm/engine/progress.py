"""A training in a terminal: one short line now and then, and the whole log in a file beside the run's folder."""

import logging
import resource
import shutil
import sys
import time
from numbers import Real
from pathlib import Path
from typing import Any

import torch
from mmengine.dist import is_main_process
from mmengine.hooks import Hook
from mmengine.logging import MMLogger
from mmengine.runner import Runner

from beit_mm.engine.steps import fetch_logs
from beit_mm.terminal import hush, printable

SECONDS = 10.0  # between two lines
FIRST_SECONDS = 2.0  # until the first one
WIDTH = 120  # columns, where there is no terminal


def with_quiet_terminal(runner: type[Runner]) -> type[Runner]:
    """A kind of runner that leaves the terminal to its ProgressHook; its log files have everything."""

    class QuietRunner(runner):  # type: ignore[valid-type, misc]
        def build_logger(self, log_level: int | str = 'INFO', log_file: str | None = None, **kwargs: Any) -> MMLogger:
            """mmengine's logger, which says nothing on the terminal but warnings, as errors are said."""
            logger = super().build_logger(log_level, log_file, **kwargs)
            for handler in hush(logger):
                if isinstance(handler, logging.StreamHandler):
                    handler.setStream(sys.stderr)  # the standard output may be shut, see terminal.without_output
            return logger

    return QuietRunner


class TerminalRunner(with_quiet_terminal(Runner)):  # type: ignore[misc]
    """A Runner for a run in a folder of its own: quiet, with its log in `<work_dir>.log`."""

    def build_logger(self, log_level: int | str = 'INFO', log_file: str | None = None, **kwargs: Any) -> MMLogger:
        """See `with_quiet_terminal`."""
        return super().build_logger(log_level, log_file or f'{Path(self.work_dir)}.log', **kwargs)


class ProgressHook(Hook):
    """Prints step, loss, accuracy, learning rate, speed, memory and the time that is left, as far as the terminal is
    wide; after a validation its numbers.

    Args:
        title: what is being trained.
        seconds: between two lines.

    It writes to the standard output of the time when it is built.
    """

    priority = 'VERY_LOW'

    def __init__(self, title: str, seconds: float = SECONDS):
        self.title = title
        self.seconds = seconds
        self.begin = self.due = 0.0
        self.stream = sys.stdout
        self.first = 0

    def before_train(self, runner: Runner) -> None:
        """Starts the clock."""
        self.begin, self.first = time.monotonic(), runner.iter
        self.due = self.begin + min(self.seconds, FIRST_SECONDS)

    def after_train_iter(
        self, runner: Runner, batch_idx: int, data_batch: Any = None, outputs: dict | None = None
    ) -> None:
        """Prints a line where one is due."""
        now = time.monotonic()
        done = runner.iter + 1
        if now < self.due and done < runner.max_iters:
            return
        self.due = now + self.seconds
        fetch_logs(runner)
        left = (now - self.begin) / (done - self.first) * (runner.max_iters - done)
        self.say(progress_line(self.title, done, runner.max_iters, recent_numbers(runner), left))

    def after_val_epoch(self, runner: Runner, metrics: dict[str, float] | None = None) -> None:
        """Prints what a validation found."""
        line = f'{self.title} {runner.iter:,}, held-out images:'
        numbers = {name: value for name, value in (metrics or {}).items() if isinstance(value, Real)}
        for name, value in numbers.items():
            entry = f'  {name.removeprefix(f"{self.title}/")} {value:.4g}'
            line += entry if len(line + entry) <= columns() else ''
        self.say(line)

    def say(self, line: str) -> None:
        """Prints a line, of all processes once."""
        if is_main_process():
            print(printable(line), file=self.stream, flush=True)


def columns() -> int:
    """Of the terminal."""
    return shutil.get_terminal_size((WIDTH, 0)).columns


def recent_numbers(runner: Runner) -> dict[str, float]:
    """The latest numbers of a run, and the memory that it takes, in GiB."""
    scalars = runner.message_hub.log_scalars
    names = ('loss', 'mim_acc', 'lr', 'images_per_second', 'data_time')
    found = {name: scalars[f'train/{name}'].current() for name in names if f'train/{name}' in scalars}
    if torch.cuda.is_available():
        memory = torch.cuda.max_memory_allocated()
    else:  # the peak, which macOS counts in bytes
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == 'darwin' else 1024)
    return dict(found, memory=memory / 2**30)


def progress_line(title: str, step: int, steps: int, numbers: dict[str, float], seconds_left: float) -> str:
    """One line, in which what comes last in `numbers` is left out where the terminal has no room for it.

    Args:
        title: what is being trained.
        step, steps: done, and in all.
        numbers: `loss`, `mim_acc`, `lr`, `images_per_second`, `data_time` in seconds, `memory` in GiB; what is not
            there is left out.
        seconds_left: of the training.
    """
    shown = dict(
        loss='loss {:.3f}',
        mim_acc='mim_acc {:.3f}',
        lr='lr {:.1e}',
        images_per_second='{:,.0f} images/s',
        data_time='data {:.3f} s',
        memory='{:.3g} GiB',
    )
    parts = [form.format(numbers[name]) for name, form in shown.items() if name in numbers]
    while True:
        line = '  '.join([f'{title} {step:,}/{steps:,}', *parts, f'{clock(seconds_left)} left']).replace('e-0', 'e-')
        if len(line) <= columns() or not parts:
            return line[: columns()]
        parts.pop()


def clock(seconds: float) -> str:
    """62 as 1:02, 3723 as 1:02:03."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f'{hours}:{minutes:02}:{seconds:02}' if hours else f'{minutes}:{seconds:02}'

"""What happens around the steps of a run: seeds, logs, throughput, compilation."""

import logging
import os
import random
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from mmengine.dist import get_rank, get_world_size
from mmengine.hooks import Hook
from mmengine.hooks import LoggerHook as EngineLoggerHook
from mmengine.hooks import RuntimeInfoHook as EngineRuntimeInfoHook
from mmengine.logging import print_log
from mmengine.runner import Runner
from torch import Tensor, nn
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

from beit_mm.datasets.samplers import mixed_seed
from beit_mm.engine.checks import unwrap
from beit_mm.engine.optim import STEPS_BETWEEN_LOOKS
from beit_mm.models.beit import BEiTPretrainer
from beit_mm.registry import HOOKS
from beit_mm.terminal import UserError, printable_record

STEPS_TO_JUDGE = 20  # before it is said that reading limits a training
HISTORY = 10_000  # steps of which the logged numbers are kept
DETERMINISTIC = (
    'Deterministic: on the same machine the same run gives the same bits. It costs time on a GPU: cuDNN chooses '
    'convolutions without measuring, gradients of indexing (bias tables, masked positions) and of attention are summed '
    'in a fixed order. Where a GPU has no such kernel, as for segmentation losses, torch names the operation and stops.'
)


@HOOKS.register_module()
class StepSeedHook(Hook):
    """Seeds all random generators before each training step, from the run's seed, the rank and the step's number.

    What a step draws (mixup, drop path, erasing) then follows from these alone: a run that goes on draws what it would
    have drawn, whatever was loaded, validated or drawn meanwhile, and a single step can be run again. Weights are drawn
    before and samples by their own keys (see datasets.samplers), so both are the same for any number of processes.
    """

    priority = 'VERY_HIGH'

    def before_run(self, runner: Runner) -> None:
        """Completes mmengine's `randomness.deterministic`, before the first multiplication of matrices on a GPU."""
        if runner.deterministic:
            os.environ.setdefault('CUBLAS_WORKSPACE_CONFIG', ':4096:8')  # without it cuBLAS is refused
            print_log(DETERMINISTIC, logger='current')

    def before_train_iter(self, runner: Runner, batch_idx: int, data_batch: dict | None = None) -> None:
        """Seeds the generators that a step may draw from."""
        seed = mixed_seed(runner.seed, get_rank(), runner.iter)
        random.seed(seed)
        np.random.seed(seed >> 32)
        torch.default_generator.manual_seed(seed >> 1)  # torch.manual_seed takes 1 ms where there is no GPU
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed(seed >> 1)


@HOOKS.register_module()
class RuntimeInfoHook(EngineRuntimeInfoHook):
    """mmengine's, with a step's numbers left on the device until a line of the log, or a checkpoint, needs them.

    mmengine fetches each loss at each step. The host then waits until the device is done, and the device until the host
    has sent the next step.
    """

    def __init__(self):
        self.waiting: list[dict[str, Any]] = []  # what the steps since the last fetch gave

    def before_train(self, runner: Runner) -> None:
        """Takes over the logger's interval."""
        super().before_train(runner)
        self.waiting = []
        self.intervals = look_intervals(runner)

    def after_train_iter(
        self, runner: Runner, batch_idx: int, data_batch: Any = None, outputs: dict | None = None
    ) -> None:
        """Keeps the numbers, and fetches them where a line of the log is due."""
        held = {key: value.detach() if isinstance(value, Tensor) else value for key, value in (outputs or {}).items()}
        self.waiting.append(held)
        if (
            any(self.every_n_inner_iters(batch_idx, interval) for interval in self.intervals)
            or self.end_of_epoch(runner.train_dataloader, batch_idx)
            or runner.iter + 1 == runner.max_iters
        ):
            self.fetch(runner)

    def after_train(self, runner: Runner) -> None:
        """Fetches the last numbers."""
        self.fetch(runner)
        super().after_train(runner)

    def fetch(self, runner: Runner) -> None:
        """Brings the numbers of all steps since the last fetch into the history, with one wait for the device."""
        waiting, self.waiting = self.waiting, []
        tensors = [value for step in waiting for value in step.values() if isinstance(value, Tensor)]
        together = [tensor.reshape(()).to(tensors[0].device, torch.float32) for tensor in tensors]
        numbers = iter(torch.stack(together).tolist() if together else [])
        for step in waiting:
            for key, value in step.items():
                runner.message_hub.update_scalar(f'train/{key}', next(numbers) if isinstance(value, Tensor) else value)


def look_intervals(runner: Runner) -> list[int]:
    """Steps between two lines of the log, and the 50 after which numbers on the device are fetched at the latest."""
    return [STEPS_BETWEEN_LOOKS, *(hook.interval for hook in runner.hooks if isinstance(hook, EngineLoggerHook))]


def fetch_logs(runner: Runner) -> None:
    """Makes the history of logged numbers complete."""
    for hook in runner.hooks:
        if isinstance(hook, RuntimeInfoHook):
            hook.fetch(runner)


@contextmanager
def written_if_possible(runner: Runner) -> Iterator[None]:
    """Where logs or pictures are written: a full disk, or a folder that is gone, is a warning and not the run's end."""
    try:
        yield
    except OSError as error:
        warn_unwritten(runner, error)


def warn_unwritten(runner: Runner, error: BaseException | None) -> None:
    """Says that logs and pictures are lost; mmengine logs a warning of the same words once in a run."""
    reason = getattr(error, 'strerror', None) or error
    message = f'Some logs and pictures cannot be written to {runner.work_dir}: {reason}. The training goes on.'
    print_log(message, logger='current', level=logging.WARNING)


@contextmanager
def threads_warn(runner: Runner) -> Iterator[None]:
    """The time of a training loop, in which TensorBoard's thread warns of a full disk, once, instead of a traceback."""
    before = threading.excepthook

    def of_thread(args: threading.ExceptHookArgs) -> None:
        if isinstance(args.exc_value, OSError) and type(args.thread).__module__.startswith('tensorboard.'):
            warn_unwritten(runner, args.exc_value)
        else:
            before(args)

    threading.excepthook = of_thread
    try:
        yield
    finally:
        threading.excepthook = before


@HOOKS.register_module()
class LoggerHook(EngineLoggerHook):
    """mmengine's, for which a file that cannot be written, log, scalars or TensorBoard's, is one warning.

    What a name holds that a terminal would obey is logged in letters.
    """

    def before_run(self, runner: Runner) -> None:
        """Sees to the text log, which the logging module writes."""
        super().before_run(runner)
        for handler in runner.logger.handlers:
            handler.addFilter(printable_record)
            if isinstance(handler, logging.FileHandler):
                handler.handleError = lambda record: warn_unwritten(runner, sys.exc_info()[1])  # type: ignore[method-assign]

    def after_train_iter(self, runner: Runner, *args: Any, **kwargs: Any) -> None:
        """Logs a step."""
        with written_if_possible(runner):
            super().after_train_iter(runner, *args, **kwargs)

    def after_val_epoch(self, runner: Runner, metrics: dict[str, float] | None = None) -> None:
        """Logs a validation."""
        with written_if_possible(runner):
            super().after_val_epoch(runner, metrics)

    def after_run(self, runner: Runner) -> None:
        """Closes the files."""
        with written_if_possible(runner):
            super().after_run(runner)


@HOOKS.register_module()
class ThroughputHook(Hook):
    """Logs `images_per_second` of all processes in the last 50 steps, with the wait for data, without validation.

    Where more than half of that time is the wait, it says so once.

    It also keeps mmengine's histories of logged numbers to 10,000 entries. They are copied whole at every step: at a
    million of them that takes 14 ms, and 64 MB in each checkpoint.
    """

    def __init__(self):
        self.steps: deque[tuple[int, float]] = deque(maxlen=50)  # images, seconds
        self.waits: deque[tuple[float, float]] = deque(maxlen=50)  # seconds of waiting for images, of all the step
        self.last = self.begun = 0.0
        self.warned = False

    def before_train_epoch(self, runner: Runner) -> None:
        """Starts the clock."""
        self.last = time.perf_counter()

    def after_val_epoch(self, runner: Runner, metrics: dict | None = None) -> None:
        """Starts the clock again; iteration-based runs validate in the middle of an epoch."""
        self.last = time.perf_counter()

    def before_train_iter(self, runner: Runner, batch_idx: int, data_batch: Any = None) -> None:
        """Ends the wait for data."""
        self.begun = time.perf_counter()

    def after_train_iter(self, runner: Runner, batch_idx: int, data_batch: dict, outputs: dict) -> None:
        """Counts the images of this step."""
        now = time.perf_counter()
        inputs = data_batch['inputs']  # a dict in pretraining, the images themselves in classification
        images = inputs['images'] if isinstance(inputs, dict) else inputs
        self.steps.append((len(images) * get_world_size(), now - self.last))
        if batch_idx:  # for the first one workers had to start
            self.waits.append((self.begun - self.last, now - self.last))
        self.last = now
        if not self.warned and len(self.waits) >= STEPS_TO_JUDGE:
            waiting, seconds = map(sum, zip(*self.waits, strict=True))
            self.warned = waiting > seconds / 2
            if self.warned:
                print_log(f'{waits_for_images(waiting / seconds)}.', logger='current', level=logging.WARNING)
        count, seconds = map(sum, zip(*self.steps, strict=True))
        runner.message_hub.update_scalar('train/images_per_second', count / seconds)
        for history in runner.message_hub.log_scalars.values():
            history.max_length = HISTORY


def waits_for_images(share: float) -> str:
    """What to say where a training waits for its images for a share of its time."""
    return (
        f'Reading images limits the training: {share:.0%} of the time is spent waiting for them. More workers help, or '
        'smaller copies of the images (tools/datasets/prepare_resized.py)'
    )


@HOOKS.register_module()
class CompileHook(Hook):
    """Compiles the model's part of a training step, as one graph for one shape.

    mmengine's `compile` takes all of a step, logs included: it falls into many graphs. Validation, which has other
    sizes, runs as ever. Where compilation fails, the run goes on without it and the log says why. So it does where
    shapes change with every batch, as with masks of variant 'paper' or of mmpretrain, after eight compilations. With
    several processes torch cuts the graph where gradients are exchanged. The graph draws random numbers of its own:
    with drop path a compiled run is another one than that which is not compiled, but it can be repeated and resumed
    like it.

    Args:
        method: of the model. Without it 'loss' of a BEiTPretrainer, else 'extract_feat', which classifiers and
            segmentors have: their losses work on lists of samples.
        options: of torch.compile: backend, mode, options.

    Raises:
        ValueError: the model has no such method.
    """

    def __init__(self, method: str | None = None, **options: Any):
        self.method = method
        self.options = options

    def before_train(self, runner: Runner) -> None:
        """Puts the compiled method in the plain one's place."""
        model = unwrap(runner)
        self.method = self.method or ('loss' if isinstance(model, BEiTPretrainer) else 'extract_feat')
        plain = getattr(model, self.method, None)
        if not callable(plain):
            raise UserError(f'a {type(model).__name__} has no method {self.method!r} that CompileHook could compile')
        setattr(model, self.method, compiled_in_training(model, plain, self.options))
        print_log(f'{self.method} will be compiled; the first step takes minutes.', logger='current')

    def after_train(self, runner: Runner) -> None:
        """Puts the plain method back."""
        vars(unwrap(runner)).pop(self.method, None)


def compiled_in_training(model: nn.Module, plain: Callable, options: dict) -> Callable:
    """A method of a model that is compiled while the model is being trained, until that fails."""
    compiled = torch.compile(plain, **dict(fullgraph=True, dynamic=False) | options)
    usable = True

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal usable
        if not (usable and model.training):
            return plain(*args, **kwargs)
        try:
            return compiled(*args, **kwargs)
        except (TorchDynamoException, FailOnRecompileLimitHit) as error:
            usable = False
            reason = ' '.join(str(error).split())[:300]
            message = f'{plain.__name__} could not be compiled and runs as it is ({type(error).__name__}: {reason})'
            print_log(message, logger='current', level=logging.WARNING)
        return plain(*args, **kwargs)  # out here, where nothing holds on to the failed attempt's tensors

    return call

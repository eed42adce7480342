"""Runs that stop at any step and resume there: training loops, signals, workers, and one run a folder."""

import contextlib
import copy
import fcntl
import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist
from mmengine.dataset import BaseDataset
from mmengine.dist import all_gather_object, get_rank, get_world_size, is_main_process
from mmengine.hooks import EMAHook, Hook
from mmengine.runner import BaseLoop, EpochBasedTrainLoop, IterBasedTrainLoop, Runner
from torch import nn
from torch.utils.data import DataLoader

from beit_mm.datasets.samplers import SeededSampler
from beit_mm.engine.checkpoints import VALIDATED, at_boundary, checkpoint_hook_of, in_main_process
from beit_mm.engine.checks import check_number_of_images
from beit_mm.errors import UserError, log, warn
from beit_mm.registry import HOOKS, LOOPS
from beit_mm.terminal import typed

EXIT_CODES = dict.fromkeys((signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP), os.EX_TEMPFAIL) | {signal.SIGINT: 130}
SECONDS_TO_CONNECT = 60.0  # for all processes together


@HOOKS.register_module()
class InterruptionHook(Hook):
    """Ends a run that is told to stop so that it can be resumed; refuses two runs in one folder.

    SIGTERM, SIGUSR1, SIGINT and SIGHUP (a closed terminal, unless `nohup` ignores it) let the run finish its step, with
    all batches that it accumulates, or the batch of its validation, which the resumed run begins anew. Then it writes
    `interrupted.pth`, which the next numbered checkpoint replaces, and ends all processes with one exit code: 130 after
    SIGINT, else 75 (EX_TEMPFAIL: requeue me). A second SIGINT stops at once. A validation between accumulated batches,
    and what hooks measure after one (KNNHook), is finished first. In the last step of a run without validation a signal
    has no effect. Needs our CheckpointHook, and EpochLoop or IterLoop; elsewhere signals do what they did.

    The main process locks `run.lock` in the work directory; the kernel releases it however the process ends.
    """

    priority = 'HIGHEST'  # locks the folder before CheckpointHook cleans it, stops before a step has changed anything

    def __init__(self):
        self.locks: list[IO[str]] = []
        self.code = 0  # exit code that a signal to this process asks for
        self.agreed = 0  # of all processes
        self.asked_at = 0.0
        self.group: Any = None
        self.pending: tuple[Any, torch.Tensor] | None = None  # an exchange under way
        self.handlers: dict[signal.Signals, Any] = {}
        self.validates = False

    def before_run(self, runner: Runner) -> None:
        if isinstance(runner._train_loop, BaseLoop):  # it is built where the run trains
            in_main_process(lambda: self.take_lock(Path(runner.work_dir)))

    def take_lock(self, folder: Path) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            # A link could lead to any file. Locks of this kind are the process's own: no forked worker keeps one.
            number = os.open(folder / 'run.lock', os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
            lock = open(number, 'r+', errors='replace')
            self.locks.append(lock)
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            lock.truncate(0)
            since = time.strftime('%Y-%m-%d %X')
            lock.write(f'process {os.getpid()} on {socket.gethostname()} since {since}')
            lock.flush()
        except BlockingIOError:
            raise UserError(f'{folder} has a run already: {lock.read()}; choose another --work-dir') from None
        except OSError as error:
            warn(f'{folder} cannot be locked ({error}): make sure that no other run writes there.')

    def after_run(self, runner: Runner) -> None:
        end_workers(runner)  # after a test; a training loop has ended its own
        for lock in self.locks:
            lock.close()

    def before_train_epoch(self, runner: Runner) -> None:
        shield_workers(runner.train_dataloader)  # here, since hooks may replace a loader in before_train
        if runner.val_loop is not None:
            shield_workers(runner.val_dataloader)

    def start(self, runner: Runner) -> None:
        self.code, self.agreed, self.pending = 0, 0, None
        self.group = connect() if get_world_size() > 1 else None
        if threading.current_thread() is threading.main_thread() and checkpoint_hook_of(runner) is not None:
            for number in EXIT_CODES:
                if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # as nohup sets it
                    self.handlers[number] = signal.signal(number, self.receive) or signal.SIG_DFL

    def close(self) -> None:
        for number, handler in self.handlers.items():
            signal.signal(number, handler)
        self.handlers = {}

    def receive(self, number: int, frame: Any) -> None:
        if number == signal.SIGINT and self.code == EXIT_CODES[signal.SIGINT]:
            if time.monotonic() - self.asked_at < 1:  # the terminal's and a launcher's
                return
            self.close()
            raise KeyboardInterrupt
        if not self.code:
            self.asked_at = time.monotonic()
        self.code = max(self.code, EXIT_CODES[signal.Signals(number)])
        if number == signal.SIGINT and is_main_process():
            os.write(2, b'\nStopping after this batch; Ctrl-C again stops at once.\n')

    def before_train_iter(self, runner: Runner, batch_idx: int, data_batch: Any = None) -> None:
        self.agreed = self.agreed or self.exchange()
        if self.agreed and at_boundary(runner):
            self.stop(runner)

    def before_val_epoch(self, runner: Runner) -> None:
        self.validates = bool(self.handlers)  # else no training is under way

    def before_val_iter(self, runner: Runner, batch_idx: int, data_batch: Any = None) -> None:
        if not self.validates:
            return
        if self.group is not None and batch_idx >= common_batches(runner.val_dataloader):
            return  # another process may be done, and would not answer
        self.agreed = self.agreed or self.exchange()
        if self.agreed and at_boundary(runner):
            for hook in runner.hooks:  # an EMAHook has put the averaged weights into the model
                if isinstance(hook, EMAHook) and getattr(hook, 'evaluate_on_ema', True):
                    EMAHook.after_val_epoch(hook, runner)  # mmpretrain's own would validate once more
            self.stop(runner)

    def after_val_epoch(self, runner: Runner, metrics: dict[str, float] | None = None) -> None:
        self.validates = False  # an EMAHook comes next

    def exchange(self) -> int:
        """The exit code that any process was told before the last step began; no process waits for another."""
        if self.group is None:
            return self.code
        if self.pending is not None:
            work, told = self.pending
            work.wait()
            if told:
                return int(told)
        told = torch.tensor(self.code)
        self.pending = dist.all_reduce(told, dist.ReduceOp.MAX, group=self.group, async_op=True), told
        return 0

    def stop(self, runner: Runner) -> None:
        path = checkpoint_hook_of(runner).save_interrupted(runner)
        runner.visualizer.close()
        if self.group is not None:
            dist.barrier(group=self.group)  # the first process to exit has the others killed
            self.handlers = dict.fromkeys(self.handlers, signal.SIG_IGN)
        saved = 'nothing could be saved' if path is None else f'{path} is saved'
        log(f'Stopped before iteration {runner.iter + 1}, {saved}. Resume with: {resuming_command()}')
        sys.exit(self.agreed)


def connect() -> Any:
    """A gloo group for CPU messages; None on all ranks if one cannot join."""
    error = None
    try:
        # First one that gives up soon: a rank without a way to the others would leave them waiting.
        dist.barrier(group=dist.new_group(backend='gloo', timeout=timedelta(seconds=SECONDS_TO_CONNECT)))
    except RuntimeError as caught:
        error = f'rank {get_rank()}: {str(caught).splitlines()[0]}'
    errors = list(filter(None, all_gather_object(error)))
    if not errors:
        return dist.new_group(backend='gloo')
    warn(
        f'No gloo group ({errors[0]}): signals need every process to be told, each stops by itself. Set '
        'GLOO_SOCKET_IFNAME to the network interface between the nodes.'
    )
    return None


@contextlib.contextmanager
def signals_handled(runner: Runner) -> Iterator[None]:
    """The time of a training loop, in which the run's InterruptionHook handles signals; its workers end with it."""
    hooks = [hook for hook in runner.hooks if isinstance(hook, InterruptionHook)]
    for hook in hooks:
        hook.start(runner)
    try:
        yield
    finally:
        end_workers(runner)  # also of a run that stops or fails
        for hook in hooks:
            hook.close()


def end_if_told(runner: Runner) -> None:
    """Ends this process if a signal has come before the first step, when there is nothing to save."""
    for hook in runner.hooks:
        if isinstance(hook, InterruptionHook) and hook.code:
            sys.exit(hook.code)


def resuming_command() -> str:
    """What a user types to resume; a scheduler that starts the same again need not."""
    given = os.environ.get('BEIT_MM_COMMAND')  # by dist_train.sh and slurm_train.sh
    command = given or (get_world_size() == 1 and typed()) or 'the same command'
    has_option = given or Path(sys.argv[0]).name == 'train.py' or sys.argv[1:2] == ['train']  # others resume without
    return command if '--resume' in command or not has_option else f'{command} --resume'


class WorkerInit:
    """A loader's `worker_init_fn`: calls the one that it had, then leaves the run's signals to the main process.

    Schedulers, terminals and torchrun signal the workers too, but the main process stops them: they obey SIGTERM from
    it alone, and ignore SIGINT, SIGUSR1 and SIGHUP.
    """

    def __init__(self, first: Callable[[int], None] | None):
        self.first, self.main_process = first, os.getpid()

    def __call__(self, worker: int) -> None:
        if self.first is not None:
            self.first(worker)
        if os.isatty(2):  # libjpeg writes there of each flawed image; errors go to the main process
            with open(os.devnull, 'wb') as nothing:
                os.dup2(nothing.fileno(), 2)
        for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        if hasattr(signal, 'sigwaitinfo'):
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
            threading.Thread(target=self._obey, daemon=True).start()

    def _obey(self) -> None:
        while signal.sigwaitinfo({signal.SIGTERM}).si_pid != self.main_process:  # tells who sent it
            pass
        os._exit(0)


def shield_workers(loader: DataLoader) -> None:
    """Has a loader's future workers ignore the run's signals."""
    if loader.num_workers and not isinstance(loader.worker_init_fn, WorkerInit):
        loader.worker_init_fn = WorkerInit(loader.worker_init_fn)


def end_workers(runner: Runner) -> None:
    """Ends the persistent workers of all loops that a run has built.

    Otherwise torch ends them when the process exits. Where batches are pinned it waits five seconds for each worker in
    turn: 70 seconds with 14 workers, in which a GPU stands idle.
    """
    for loop in (runner._train_loop, runner._val_loop, runner._test_loop):
        if isinstance(loop, BaseLoop):  # otherwise it has not been built
            # No public name as of torch 2.13; without it, they end with the process.
            iterator = getattr(loop.dataloader, '_iterator', None)
            if hasattr(iterator, '_shutdown_workers'):
                iterator._shutdown_workers()
                loop.dataloader._iterator = None  # a next loop starts its own


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


def common_batches(loader: DataLoader) -> int:
    """How many batches every process has: samplers may share out a remainder unevenly."""
    images = len(loader.dataset)
    return images // get_world_size() // (loader.batch_size or images)


def validate(loop: EpochBasedTrainLoop | IterBasedTrainLoop, place: int, end: int) -> None:
    """Validates where it is due, and a config says how; at the end of a run always, unless that is before val_begin.

    A resumed run calls it first: its checkpoint may have been written before a validation, or in one.
    """
    is_due = place >= loop.val_begin and (place % loop.val_interval == 0 or place == end)
    is_done = loop.runner.message_hub.get_info(VALIDATED) == loop.iter
    if loop.runner.val_loop is not None and is_due and not is_done:
        loop.runner.val_loop.run()


def nothing_left(runner: Runner) -> bool:
    """Whether a run is resumed at its end, which a line says, and has made its last validation too."""
    iteration, end, hook = runner.iter, runner.max_iters, checkpoint_hook_of(runner)
    if iteration >= end:
        advice = 'make it longer (--steps, train_cfg), or choose another --work-dir'
        warn(f'The run is finished: the checkpoint has {iteration} iterations, the config {end}; {advice}.')
    return iteration > end or (iteration == end and hook is not None and hook.finished)


def validate_on(runner: Runner, indices: Sequence[int]) -> None:
    """Lets the validations of a run look at these held-out images alone."""
    dataset = runner.val_dataloader.dataset.get_subset(indices)
    config = dict(copy.deepcopy(runner.cfg.val_dataloader), dataset=dataset)
    runner.val_loop.dataloader = runner.build_dataloader(config, seed=runner.seed)


@LOOPS.register_module()
class EpochLoop(EpochBasedTrainLoop):
    """mmengine's EpochBasedTrainLoop, which also resumes in the middle of an epoch."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        check_number_of_images(self.dataloader)  # before schedules are built, which count in epochs

    def run(self) -> nn.Module:
        if nothing_left(self.runner):
            return self.runner.model
        with signals_handled(self.runner):
            self.runner.call_hook('before_train')
            if self._epoch and self._iter == self._epoch * len(self.dataloader):
                self._decide_current_val_interval()
                validate(self, self._epoch, self._max_epochs)
            while self._epoch < self._max_epochs and not self.stop_training:
                self.run_epoch()
                self._decide_current_val_interval()
                validate(self, self._epoch, self._max_epochs)
            self.runner.call_hook('after_train')
        return self.runner.model

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
    """mmengine's IterBasedTrainLoop, which resumes at any iteration, and validates before the first if val_begin=0.

    Args:
        args, kwargs: as of mmengine's.
        shortened_from: length of the recipe, dict(max_epochs=...) or dict(max_iters=...), where `--steps` made this run
            of it. The run validates on its share of the held-out images, evenly spread, at least one batch.
    """

    def __init__(self, *args, shortened_from: dict[str, int] | None = None, **kwargs):
        super().__init__(*args, **kwargs)
        self.shortened_from = shortened_from
        # mmengine 0.10.7 has started the workers here: too early, and for an iterator that is not used.
        self.dataloader_iterator = self.dataloader._iterator = None

    def run(self) -> nn.Module:
        check_number_of_images(self.dataloader)
        if nothing_left(self.runner):
            return self.runner.model
        if self.shortened_from and self.runner.val_loop is not None:
            self.shorten_validation(**self.shortened_from)
        with signals_handled(self.runner):
            self.runner.call_hook('before_train')
            self.runner.call_hook('before_train_epoch')
            stream = self.endless_batches()
            self._decide_current_val_interval()
            validate(self, self._iter, self._max_iters)
            while self._iter < self._max_iters and not self.stop_training:
                self.runner.model.train()
                self.run_iter(next(stream))
                self._decide_current_val_interval()
                validate(self, self._iter, self._max_iters)
            self.runner.call_hook('after_train_epoch')
            self.runner.call_hook('after_train')
        return self.runner.model

    def set_length(self, steps: int) -> None:
        self._max_iters = steps

    def shorten_validation(self, max_epochs: int = 0, max_iters: int = 0) -> None:
        loader, share = self.runner.val_dataloader, self._max_iters / (max_iters or max_epochs * len(self.dataloader))
        images = len(loader.dataset)
        number = max(math.ceil(share * images), get_world_size() * (loader.batch_size or 1))
        if number < images and isinstance(loader.dataset, BaseDataset):
            share_said = f'{number:,} of {images:,} held-out images, its share of the recipe'
            warn(f'The run validates on {share_said}; train_cfg.shortened_from=None takes all.')
            validate_on(self.runner, [place * images // number for place in range(number)])

    def endless_batches(self) -> Iterator:
        epoch, first = divmod(self._iter, len(self.dataloader))
        while True:
            yield from batches(self.dataloader, epoch, first)
            epoch, first = epoch + 1, 0

"""What ends a run before its time: signals, a data loader worker that dies, another run in the same folder."""

import contextlib
import fcntl
import logging
import os
import shlex
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist
from mmengine.dist import all_gather_object, broadcast_object_list, get_rank, get_world_size, is_main_process
from mmengine.hooks import Hook
from mmengine.logging import print_log
from mmengine.runner import BaseLoop, Runner

from beit_mm.engine.checkpoints import INTERRUPTED, at_boundary, checkpoint_hook_of
from beit_mm.engine.workers import LOST_CONNECTION, WorkerInit, check_dead_worker, watch_workers
from beit_mm.files import atomic_file
from beit_mm.registry import HOOKS
from beit_mm.terminal import UserError

EXIT_CODES = dict.fromkeys((signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP), os.EX_TEMPFAIL) | {signal.SIGINT: 130}
SECONDS_BETWEEN_EXCHANGES = 0.4  # each takes 0.4 ms
LONG_STEP = 0.1  # seconds; of longer ones each has its exchange
SECONDS_TO_CONNECT = 60.0  # for all processes together


@HOOKS.register_module()
class InterruptionHook(Hook):
    """Ends a run that is told to stop so that it can be resumed; refuses two runs in one folder.

    SIGTERM, SIGUSR1, SIGINT and SIGHUP (a terminal that is closed, unless `nohup` ignores it) let the run finish its
    step (where gradients are accumulated, all batches of it; of a validation all, and one more step), write
    `interrupted.pth` and end all processes with one exit code: 130 after SIGINT, else 75 (EX_TEMPFAIL, requeue me). A
    second SIGINT stops at once. `--resume` takes the file as any other; it goes when a newer one to resume from is
    written. Under torchrun all of this has 30 seconds, and torchrun itself exits with 1. Needs our CheckpointHook;
    without it the signals do what they did.

    Several processes agree on the step to stop at, in an exchange every 0.4 s, or before each step where steps take
    longer than 0.1 s; its outcome is known one step later. So they stop within about half a second, or after one step
    more than the one that the signal came in. Of a signal in the last steps of the training nothing is seen: it comes
    to its end, with its last checkpoint and code 0.

    The main process holds a lock on `run.lock` in the work directory, and in the checkpoints' folder where that is
    another, which the kernel takes back when the process ends, however it ends. mmengine's Runner writes its config
    before it asks any hook: a run that is refused puts the other one's back. Where the file system has no locks, a
    warning says so. Tests and validations alone, which write no checkpoints, take no lock and are refused by none.

    Signals are attended to in EpochLoop and IterLoop, where a worker that dies is named with its image too.

    Raises:
        ValueError: another process has a run in the work directory.
    """

    priority = 'HIGHEST'  # takes the lock before CheckpointHook cleans up, stops before a step has changed anything

    def __init__(self):
        self.locks: list[IO[str]] = []
        self.code = 0  # exit code that a signal to this process asks for
        self.agreed = 0  # of all processes
        self.asked_at = 0.0
        self.group: Any = None
        self.pending: tuple[Any, torch.Tensor] | None = None  # an exchange under way
        self.every = 1  # steps between two exchanges
        self.steps, self.since = 0, 0.0  # steps after the last exchange, and when that began; 0: not yet
        self.handlers: dict[signal.Signals, Any] = {}
        self.workers: list[WorkerInit] = []

    # --- one run in a folder ----------------------------------------------------------------------

    def before_run(self, runner: Runner) -> None:
        """Takes the lock, in a run that trains: its loop is built by now."""
        if not isinstance(runner._train_loop, BaseLoop):
            return
        refusals = [self.take_locks(runner) if is_main_process() else None]
        broadcast_object_list(refusals)
        if refusals[0] is not None:
            raise UserError(refusals[0])

    def take_locks(self, runner: Runner) -> str | None:
        """Locks the work directory, and the checkpoints' folder where that is another; returns why not."""
        folder, checkpoint = Path(runner.work_dir), checkpoint_hook_of(runner)
        name = os.path.basename(runner.cfg.filename or '')
        refusal = self.take_lock(folder, f'{name}\n{runner.cfg.pretty_text}' if name.endswith('.py') else '')
        others = {checkpoint.folder(runner).resolve()} - {folder.resolve()} if checkpoint is not None else set()
        return next(filter(None, map(self.take_lock, others)), None) if refusal is None else refusal

    def take_lock(self, folder: Path, config: str = '') -> str | None:
        """Locks a folder; returns why not if another process has it, whose config file is put back.

        Args:
            folder: is made.
            config: name and text of the run's config file.
        """
        try:
            folder.mkdir(parents=True, exist_ok=True)
            # A link could lead to any file. Locks of this kind are the process's own: no forked worker keeps one.
            number = os.open(folder / 'run.lock', os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
            lock = open(number, 'r+', errors='replace')
            self.locks.append(lock)
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            lock.truncate(0)
            since = time.strftime('%Y-%m-%d %X')
            lock.write(f'process {os.getpid()} on {socket.gethostname()} since {since}\n{config}')
            lock.flush()
        except BlockingIOError:
            holder, name, text = [*lock.read().split('\n', 2), '', ''][:3]
            if name and name == config.partition('\n')[0]:  # which this run has written over
                with contextlib.suppress(OSError), atomic_file(folder / name) as file:
                    file.write(text.encode())
            return f'{folder} has a run already: {holder}; stop that one, or choose another folder with --work-dir'
        except OSError as error:
            message = f'{folder} cannot be locked ({error}): see to it that no other run writes there.'
            print_log(message, logger='current', level=logging.WARNING)
        return None

    def after_run(self, runner: Runner) -> None:
        """Gives the locks back."""
        for lock in self.locks:
            lock.close()

    def before_train_epoch(self, runner: Runner) -> None:
        """Follows the workers, before they start; other hooks may replace a loader in before_train."""
        loaders = [runner.train_dataloader] + ([runner.val_dataloader] if runner.val_loop is not None else [])
        self.workers = watch_workers(loaders)

    # --- signals ----------------------------------------------------------------------------------

    def start(self, runner: Runner) -> None:
        """Attends to signals."""
        self.code = self.agreed = self.steps = 0
        self.every, self.pending, self.since = 1, None, 0.0
        self.group = connect() if get_world_size() > 1 else None
        if threading.current_thread() is threading.main_thread() and checkpoint_hook_of(runner) is not None:
            for number in EXIT_CODES:
                if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # as nohup sets it
                    self.handlers[number] = signal.signal(number, self.receive) or signal.SIG_DFL

    def close(self) -> None:
        """Puts the handlers back."""
        for number, handler in self.handlers.items():
            signal.signal(number, handler)
        self.handlers = {}

    def receive(self, number: int, frame: Any) -> None:
        """The handler."""
        if number == signal.SIGINT and self.code == EXIT_CODES[signal.SIGINT]:
            if time.monotonic() - self.asked_at < 1:  # the terminal's and a launcher's
                return
            self.close()
            raise KeyboardInterrupt
        if not self.code:
            self.asked_at = time.monotonic()
        self.code = max(self.code, EXIT_CODES[signal.Signals(number)])
        if number == signal.SIGINT and is_main_process():
            os.write(2, b'\nStopping after this step; Ctrl-C again stops at once.\n')

    def before_train_iter(self, runner: Runner, batch_idx: int, data_batch: Any = None) -> None:
        """Stops the run here, between two steps, if any process was told to."""
        self.agreed = self.agreed or self.exchange()
        if self.agreed and at_boundary(runner):
            self.stop(runner)

    def exchange(self) -> int:
        """What any process was told before the last step began, so that none waits for another; 0: nothing yet."""
        if self.group is None:
            return self.code
        if not self.since:  # before the first step, whose time is not known yet
            self.since = time.monotonic()
            return 0
        self.steps += 1
        if self.pending is not None:
            work, told = self.pending
            self.pending = None
            work.wait()
            code, seconds = told.tolist()  # the same in all processes, and so is what follows from them
            if code:
                return int(code)
            self.every = 1 if seconds > LONG_STEP else int(SECONDS_BETWEEN_EXCHANGES / max(seconds, 1e-3))
        if self.steps >= self.every:
            now = time.monotonic()
            told = torch.tensor([self.code, (now - self.since) / self.steps], dtype=torch.float64)
            self.pending = dist.all_reduce(told, dist.ReduceOp.MAX, group=self.group, async_op=True), told
            self.steps, self.since = 0, now
        return 0

    def stop(self, runner: Runner) -> None:
        """Saves and exits."""
        checkpoint = checkpoint_hook_of(runner)
        path = checkpoint.save(runner, INTERRUPTED)
        runner.visualizer.close()
        if self.group is not None:
            dist.barrier(group=self.group)  # the first process to exit has the others killed
            self.handlers = dict.fromkeys(self.handlers, signal.SIG_IGN)
        saved = f'{path} is saved' if path is not None and path.is_file() else 'nothing could be saved'
        message = f'Stopped before iteration {runner.iter + 1}, {saved}. Go on with: {resuming_command()}'
        print_log(message, logger='current')
        sys.exit(self.agreed)


def connect() -> Any:
    """A gloo group of all processes for exchanges of the hosts; None in all where any one cannot have it."""
    error = None
    try:
        # First one that gives up soon: who has no way to the others would leave them waiting.
        trial = dist.new_group(backend='gloo', timeout=timedelta(seconds=SECONDS_TO_CONNECT))
        dist.barrier(group=trial)
    except RuntimeError as caught:
        error = f'rank {get_rank()}: {str(caught).splitlines()[0]}'
    errors = list(filter(None, all_gather_object(error)))
    if not errors:
        return dist.new_group(backend='gloo')
    message = (
        f'No gloo group ({errors[0]}): signals need every process to be told, each stops by itself. '
        'Set GLOO_SOCKET_IFNAME to the network interface between the nodes.'
    )
    print_log(message, logger='current', level=logging.WARNING)
    return None


@contextlib.contextmanager
def attended(runner: Runner) -> Iterator[None]:
    """The time of a training loop, in which the run's InterruptionHook is at work."""
    hook = next((hook for hook in runner.hooks if isinstance(hook, InterruptionHook)), None)
    if hook is None:
        yield
        return
    hook.start(runner)
    try:
        yield
    except (RuntimeError, *LOST_CONNECTION) as error:
        check_dead_worker(error, hook.workers)
        raise
    finally:
        hook.close()


def resuming_command() -> str:
    """What a user types to go on; a scheduler that starts the same again need not."""
    command = os.environ.get('BEIT_MM_COMMAND', '')  # set by dist_train.sh and slurm_train.sh
    if not command and get_world_size() == 1 and Path(sys.argv[0]).name == 'train.py':
        command = shlex.join(sys.orig_argv)
    if not command:
        return 'the same command and --resume'
    return command if '--resume' in command else f'{command} --resume'

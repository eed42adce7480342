"""Ends a run on a signal, guards its data workers, and allows one run per folder."""

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from filelock import BaseFileLock, FileLock, Timeout
from mmengine.dist import all_gather_object, get_rank, get_world_size, is_main_process
from mmengine.hooks import EMAHook, Hook
from mmengine.runner import Runner
from torch.utils.data import DataLoader

from beit_mm.engine.checkpoints import checkpoint_hook_of, in_main_process, is_training
from beit_mm.errors import UserError, log, warn
from beit_mm.registry import HOOKS
from beit_mm.terminal import typed

LOCK = 'run.lock'
# 75, EX_TEMPFAIL, asks a scheduler to requeue the run. A closed terminal sends SIGHUP, which `nohup` ignores. Windows
# has neither SIGUSR1 nor SIGHUP.
EXIT_CODES = {getattr(signal, name): 75 for name in ('SIGTERM', 'SIGUSR1', 'SIGHUP') if hasattr(signal, name)}
EXIT_CODES[signal.SIGINT] = 130
SECONDS_TO_CONNECT = 60.0  # for all processes together


@HOOKS.register_module()
class InterruptionHook(Hook):
    """Ends a run on a signal, so that it can be resumed; refuses two runs in one folder.

    After a signal the run finishes its step, accumulated batches included, or its validation batch. Then it saves
    `interrupted.pth`, and all processes end with the same exit code. In the last step of a run without validation a
    signal has no effect. Needs a beit_mm.CheckpointHook, and EpochLoop or IterLoop.

    The main process locks `run.lock` in the work directory; the kernel releases it however the process ends.
    """

    priority = 'HIGHEST'  # to lock the folder before CheckpointHook cleans it, and to stop before a step begins

    def __init__(self):
        self.lock: BaseFileLock | None = None
        self.code = 0  # exit code that a signal to this process asks for
        self.agreed = 0  # exit code that all processes agree on
        self.asked_at = 0.0
        self.group: Any = None
        self.pending: tuple[Any, torch.Tensor] | None = None  # an exchange under way
        self.handlers: dict[signal.Signals, Any] = {}  # those before the training; empty unless one is under way
        self.validates = False

    def before_run(self, runner: Runner) -> None:
        if is_training(runner):
            in_main_process(lambda: self.take_lock(Path(runner.work_dir)))

    def take_lock(self, folder: Path) -> None:
        self.lock = lock_folder(folder)

    def after_run(self, runner: Runner) -> None:
        if self.lock is not None:
            self.lock.release(force=True)

    def start(self, can_save: bool) -> None:
        self.code, self.agreed, self.pending = 0, 0, None
        self.group = connect() if get_world_size() > 1 else None
        self.handlers = handle_signals(self.receive) if can_save else {}

    def close(self) -> None:
        put_back(self.handlers)
        self.handlers = {}

    def receive(self, number: int, frame: Any) -> None:
        if number == signal.SIGINT and self.code == EXIT_CODES[signal.SIGINT]:
            if time.monotonic() - self.asked_at < 1:  # one Ctrl-C, sent by both the terminal and a launcher
                return
            self.close()
            raise KeyboardInterrupt
        if not self.code:
            self.asked_at = time.monotonic()
        self.code = max(self.code, EXIT_CODES[signal.Signals(number)])
        if number == signal.SIGINT and is_main_process():
            os.write(2, b'\nStopping after this batch; Ctrl-C again stops at once.\n')

    def before_train_epoch(self, runner: Runner) -> None:
        shield_workers(runner.train_dataloader)  # here, since hooks may replace a loader in before_train
        if runner.val_loop is not None:
            shield_workers(runner.val_dataloader)

    def before_train_iter(self, runner: Runner, batch_idx: int, data_batch: Any = None) -> None:
        if self.must_stop(runner):
            self.stop(runner)

    def before_val_epoch(self, runner: Runner) -> None:
        self.validates = bool(self.handlers)  # False in a validation outside a training

    def before_val_iter(self, runner: Runner, batch_idx: int, data_batch: Any = None) -> None:
        # Beyond the batches that every process has, another process may have finished and would not answer.
        answered = self.group is None or batch_idx < common_batches(runner.val_dataloader)
        if self.validates and answered and self.must_stop(runner):
            restore_trained_weights(runner)
            self.stop(runner)

    def after_val_epoch(self, runner: Runner, metrics: dict[str, float] | None = None) -> None:
        self.validates = False  # before mmpretrain's EMAHook validates again, with the trained weights

    def after_test(self, runner: Runner) -> None:
        end_workers(runner.test_dataloader)

    def must_stop(self, runner: Runner) -> bool:
        self.agreed = self.agreed or self.exchange()
        return self.agreed != 0 and runner.optim_wrapper.should_update()  # not between accumulated batches

    def exchange(self) -> int:
        """The highest exit code among all processes when the last step began, not waiting for the current step."""
        if self.group is None:
            return self.code
        if self.pending is not None:
            work, code = self.pending
            work.wait()
            if code:
                return int(code)
        code = torch.tensor(self.code)
        self.pending = dist.all_reduce(code, dist.ReduceOp.MAX, group=self.group, async_op=True), code
        return 0

    def stop(self, runner: Runner) -> None:
        path = checkpoint_hook_of(runner).save_interrupted(runner)
        runner.visualizer.close()
        if self.group is not None:
            dist.barrier(group=self.group)  # because the launcher kills the others once one exits
            self.handlers = dict.fromkeys(self.handlers, signal.SIG_IGN)
        saved = 'nothing could be saved' if path is None else f'{path} is saved'
        log(f'Stopped before iteration {runner.iter + 1}, {saved}. Resume with: {resuming_command()}')
        sys.exit(self.agreed)


def handle_signals(handler: Callable) -> dict[signal.Signals, Any]:
    """Has a function handle signals that ask this process to end; returns the handlers before, for `put_back`."""
    if threading.current_thread() is not threading.main_thread():  # the only one that Python gives signals to
        return {}
    by_nohup = 'SIGHUP', signal.SIG_IGN
    numbers = [number for number in EXIT_CODES if (number.name, signal.getsignal(number)) != by_nohup]
    return {number: signal.signal(number, handler) or signal.SIG_DFL for number in numbers}


def put_back(handlers: Mapping[signal.Signals, Any]) -> None:
    for number, handler in handlers.items():
        signal.signal(number, handler)


@contextlib.contextmanager
def exit_on_signals() -> Iterator[None]:
    """Inside, a signal raises SystemExit with its exit code, except in a training, which its InterruptionHook ends."""
    handlers = handle_signals(lambda number, frame: sys.exit(EXIT_CODES[signal.Signals(number)]))
    try:
        yield
    finally:
        put_back(handlers)


def lock_folder(folder: Path) -> BaseFileLock:
    """Locks a run's folder for this process, and makes it if needed; UserError if another process has locked it."""
    path = folder / LOCK
    # one for the process, as a failed run may hold it yet; no soft lock, whose marker the line below would overwrite
    lock = FileLock(path, is_singleton=True, thread_local=False, fallback_to_soft=False)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire(blocking=False)
        path.write_text(f'process {os.getpid()} on {socket.gethostname()} since {time.strftime("%Y-%m-%d %X")}')
    except Timeout:
        holder = 'another process'
        with contextlib.suppress(OSError):  # Windows does not let others read a locked file
            holder = path.read_text(errors='replace')
        raise UserError(f'{folder} has a run already: {holder}; choose another --work-dir or --out') from None
    except OSError as error:
        if not lock.is_locked:
            warn(f'{folder} cannot be locked ({error}): make sure that no other run writes there.')
    return lock


def restore_trained_weights(runner: Runner) -> None:
    """Puts back the trained weights, which an EMAHook replaced with averaged ones for a validation."""
    for hook in runner.hooks:
        if isinstance(hook, EMAHook):
            vars(hook)['evaluate_on_origin'] = False  # mmpretrain's hook would validate again
            hook.after_val_epoch(runner)


def connect() -> Any:
    """A gloo group for CPU messages; None on all ranks if any of them cannot join."""
    error = None
    try:
        # First a group with a short timeout, because a rank that cannot reach the others would keep them waiting.
        dist.barrier(group=dist.new_group(backend='gloo', timeout=timedelta(seconds=SECONDS_TO_CONNECT)))
    except RuntimeError as caught:
        error = f'rank {get_rank()}: {str(caught).splitlines()[0]}'
    errors = [one for one in all_gather_object(error) if one]
    if errors:
        warn(
            f'No gloo group ({errors[0]}): a signal stops only the process that receives it; set GLOO_SOCKET_IFNAME to '
            'the network interface between the nodes.'
        )
        return None
    return dist.new_group(backend='gloo')


@contextlib.contextmanager
def signals_handled(runner: Runner) -> Iterator[None]:
    """Has the run's InterruptionHook handle signals inside the block; ends the data workers after it."""
    hooks = [hook for hook in runner.hooks if isinstance(hook, InterruptionHook)]
    for hook in hooks:
        hook.start(can_save=checkpoint_hook_of(runner) is not None)
    try:
        yield
    finally:
        end_workers(runner.train_dataloader)  # even if the run stops or fails
        if runner.val_loop is not None:
            end_workers(runner.val_dataloader)
        for hook in hooks:
            hook.close()


def resuming_command() -> str:
    """The command for a user to resume the run; a scheduler that requeues it needs no --resume."""
    given = os.environ.get('BEIT_MM_COMMAND')  # set by dist_train.sh and slurm_train.sh
    command = given or ('' if get_world_size() > 1 else typed()) or 'the same command'
    has_option = given or Path(sys.argv[0]).name == 'train.py' or sys.argv[1:2] == ['train']  # others have none
    return command if '--resume' in command or not has_option else f'{command} --resume'


class WorkerInit:
    """A loader's `worker_init_fn`: calls the previous one, then leaves the run's signals to the main process.

    Terminals, schedulers and torchrun signal the workers too, but a worker obeys only the main process's SIGTERM.
    """

    def __init__(self, first: Callable[[int], None] | None):
        self.first, self.main_process = first, os.getpid()

    def __call__(self, worker: int) -> None:
        if self.first is not None:
            self.first(worker)
        for number in EXIT_CODES.keys() - {signal.SIGTERM}:
            signal.signal(number, signal.SIG_IGN)
        if hasattr(signal, 'sigwaitinfo'):
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
            threading.Thread(target=self._obey, daemon=True).start()

    def _obey(self) -> None:
        while signal.sigwaitinfo({signal.SIGTERM}).si_pid != self.main_process:  # si_pid is the sender
            pass
        os._exit(0)


def shield_workers(loader: DataLoader) -> None:
    """Makes a loader's future workers ignore the run's signals."""
    if loader.num_workers and not isinstance(loader.worker_init_fn, WorkerInit):
        loader.worker_init_fn = WorkerInit(loader.worker_init_fn)


def end_workers(loader: DataLoader) -> None:
    """Ends a loader's persistent workers, because at exit torch waits five seconds for each of them in turn."""
    # No public way as of torch 2.13. Where these names are gone, the workers end with the process.
    iterator = getattr(loader, '_iterator', None)
    if hasattr(iterator, '_shutdown_workers'):
        iterator._shutdown_workers()
        loader._iterator = None  # the next loop starts its own workers


def common_batches(loader: DataLoader) -> int:
    """The number of batches that every process has: samplers may divide a remainder unevenly."""
    images = len(loader.dataset)
    return images // get_world_size() // (loader.batch_size or images)

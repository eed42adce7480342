"""What ends a run before its time: signals, processes that are lost or frozen, another run in the same folder."""

import contextlib
import fcntl
import json
import logging
import multiprocessing
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
from beit_mm.engine.workers import WorkerInit, check_dead_worker, watch_workers
from beit_mm.registry import HOOKS

EXIT_CODES = {signal.SIGTERM: os.EX_TEMPFAIL, signal.SIGUSR1: os.EX_TEMPFAIL, signal.SIGINT: 130}
SECONDS_BETWEEN_EXCHANGES = 0.4  # each takes 0.4 ms
LONG_STEP = 0.1  # seconds; of longer ones each has its exchange
SECONDS_TO_CONNECT = 60.0  # for all processes together
WAITING = 'waiting for data'
LOST = 1  # exit code of a process that found another one, or its own workers, frozen


@HOOKS.register_module()
class InterruptionHook(Hook):
    """Ends a run that is told to stop, or that hangs, so that it can go on later; refuses two runs in one folder.

    SIGTERM, SIGUSR1 and SIGINT let the run finish its step (where gradients are accumulated, all batches of it; of a
    validation all, and one more step), write `interrupted.pth` and end all processes with one exit code: 75
    (EX_TEMPFAIL, requeue me) after SIGTERM and SIGUSR1, 130 after SIGINT. A second SIGINT stops at once. `--resume`
    takes the file as any other; it goes when a newer one to resume from is written. Under torchrun all of this has 30
    seconds, and torchrun itself exits with 1. Needs our CheckpointHook; without it the signals do what they did.

    Several processes agree on the step to stop at, in an exchange every 0.4 s, or before each step where steps take
    longer than 0.1 s; its outcome is known one step later. So they stop within about half a second, or after one step
    more than the one that the signal came in. Of a signal in the last steps of the training nothing is seen: it comes
    to its end, with its last checkpoint and code 0.

    A hang ends the run with code 1 and a line that names rank, host, iteration and what was done there (see Watch).

    The main process holds a lock on `run.lock` in the work directory, which the kernel takes back when the process
    ends, however it ends. Where the file system has no locks, a warning says so. Tests and validations alone, which
    write no checkpoints, take no lock and are refused by none.

    Signals and hangs are attended to in EpochLoop and IterLoop.

    Args:
        timeout: seconds without a sign of life, or without data, that are a hang.

    Raises:
        RuntimeError: another process has a run in the work directory.
    """

    priority = 'HIGHEST'  # takes the lock before CheckpointHook cleans up, stops before a step has changed anything

    def __init__(self, timeout: float = 600.0):
        self.timeout = timeout
        self.lock: IO[str] | None = None
        self.code = 0  # exit code that a signal to this process asks for
        self.agreed = 0  # of all processes
        self.asked_at = 0.0
        self.group: Any = None
        self.pending: tuple[Any, torch.Tensor] | None = None  # an exchange under way
        self.every = 1  # steps between two exchanges
        self.steps, self.since = 0, 0.0  # steps after the last exchange, and when that began; 0: not yet
        self.workers: list[WorkerInit] = []
        self.handlers: dict[signal.Signals, Any] = {}

    # --- one run in a folder ----------------------------------------------------------------------

    def before_run(self, runner: Runner) -> None:
        """Takes the lock, in a run that trains: its loop is built by now."""
        if not isinstance(runner._train_loop, BaseLoop):
            return
        refusals = [self.take_lock(Path(runner.work_dir)) if is_main_process() else None]
        broadcast_object_list(refusals)
        if refusals[0] is not None:
            raise RuntimeError(refusals[0])

    def take_lock(self, folder: Path) -> str | None:
        """Locks a folder; returns why not if another process has it."""
        try:
            # Locks of this kind are the process's own: no forked worker keeps one after it.
            self.lock = open(folder / 'run.lock', 'a+')
            fcntl.lockf(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.lock.truncate(0)
            self.lock.write(f'process {os.getpid()} on {socket.gethostname()} since {time.strftime("%Y-%m-%d %X")}')
            self.lock.flush()
        except BlockingIOError:
            self.lock.seek(0)  # type: ignore[union-attr]
            holder = self.lock.read()  # type: ignore[union-attr]
            return f'{folder} has a run already: {holder}; stop that one, or choose another folder with --work-dir'
        except OSError as error:
            message = f'{folder} cannot be locked ({error}): see to it that no other run writes there.'
            print_log(message, logger='current', level=logging.WARNING)
        return None

    def after_run(self, runner: Runner) -> None:
        """Gives the lock back."""
        if self.lock is not None:
            self.lock.close()

    # --- signals ----------------------------------------------------------------------------------

    def start(self, runner: Runner) -> None:
        """Attends to signals."""
        self.code = self.agreed = self.steps = 0
        self.every, self.pending, self.since = 1, None, 0.0
        self.group = connect() if get_world_size() > 1 else None
        if threading.current_thread() is threading.main_thread() and checkpoint_hook_of(runner) is not None:
            for number in EXIT_CODES:
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
        checkpoint.wait()
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
        # First one that gives up soon: who has no way to the others would leave them waiting for a day.
        trial = dist.new_group(backend='gloo', timeout=timedelta(seconds=SECONDS_TO_CONNECT))
        dist.barrier(group=trial)
    except RuntimeError as caught:
        error = f'rank {get_rank()}: {str(caught).splitlines()[0]}'
    errors = list(filter(None, all_gather_object(error)))
    if not errors:
        # It is only asked for what has long arrived; frozen processes are the watch's affair.
        return dist.new_group(backend='gloo', timeout=timedelta(days=1))
    message = (
        f'No gloo group ({errors[0]}): signals need every process to be told, each stops by itself, and frozen '
        'processes are not found. Set GLOO_SOCKET_IFNAME to the network interface between the nodes.'
    )
    print_log(message, logger='current', level=logging.WARNING)
    return None


@contextlib.contextmanager
def watched(runner: Runner) -> Iterator[None]:
    """The time of a training loop, in which the run's InterruptionHook is at work."""
    hook = next((hook for hook in runner.hooks if isinstance(hook, InterruptionHook)), None)
    if hook is None:
        yield
        return
    hook.start(runner)
    watch = Watch(hook.timeout, hook.group)
    runner.register_hook(watch)
    try:
        yield
    except RuntimeError as error:
        check_dead_worker(error, watch.workers)
        raise
    finally:
        runner.hooks.remove(watch)
        watch.stopped.set()
        hook.close()


def resuming_command() -> str:
    """What a user types to go on; a scheduler that starts the same again need not."""
    command = os.environ.get('BEIT_MM_COMMAND', '')  # set by dist_train.sh and slurm_train.sh
    if not command and get_world_size() == 1 and Path(sys.argv[0]).name == 'train.py':
        command = shlex.join(sys.orig_argv)
    if not command:
        return 'the same command and --resume'
    return command if '--resume' in command else f'{command} --resume'


class Watch(Hook):
    """Ends a run that hangs.

    - A process that shows no sign of life for `timeout` seconds: stopped, or on a node that is gone. A thread of each
      process gives these signs, however long a step, a compilation, a validation or the writing of a file takes.
    - A process that has waited `timeout` seconds for one batch, of training or validation, while none of its workers
      began an image; the line names the images that the workers are at.

    Time in which this process itself stood still, as one of a suspended job does, does not count. A step that never
    ends in processes that live is left to the timeout of the collective operations.

    The first process looks at all others and they look at the first; launchers end the rest. Of two threads one gives
    and takes the signs, which hangs when the first process does, the other looks how old they are.

    Args:
        timeout: seconds without a sign.
        group: of all processes, for exchanges at the beginning; None: this one looks at no other.
    """

    priority = 'LOWEST'  # what other hooks do after a step is no wait for data

    def __init__(self, timeout: float, group: Any):
        self.timeout = timeout
        self.workers: list[WorkerInit] = []
        self.interval = min(timeout / 10, 10.0)
        self.phase, self.iteration, self.batches = 'starting', 0, 0  # written by the main thread
        self.rank, self.host = get_rank(), socket.gethostname()
        self.seen: dict[int, bytes] = {}  # the last sign of each process that this one looks at
        self.stopped = threading.Event()
        targets = [self.look]
        if group is not None:
            self.store = self.connect(group)
            self.seen = dict.fromkeys(range(1, get_world_size()) if self.rank == 0 else [0], b'')
            self.store.set(str(self.rank), self.sign(0))
            dist.barrier(group=group)
            targets.append(self.exchange)
        for target in targets:
            threading.Thread(target=target, daemon=True).start()

    # --- what this process is doing ---------------------------------------------------------------

    def before_train(self, runner: Runner) -> None:
        """The loaders are final now: other hooks may replace one until here."""
        self.workers = watch_workers(
            [runner.train_dataloader] + ([runner.val_dataloader] if runner.val_loop is not None else [])
        )

    def before_train_epoch(self, runner: Runner) -> None:
        self.phase, self.iteration = WAITING, runner.iter

    def before_train_iter(self, runner: Runner, batch_idx: int, data_batch: Any = None) -> None:
        self.phase = 'in a step'
        self.batches += 1

    def after_train_iter(self, runner: Runner, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        self.phase, self.iteration = WAITING, runner.iter + 1

    def after_train_epoch(self, runner: Runner) -> None:
        self.phase = 'ending an epoch'

    def before_save_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        self.phase = 'saving'

    def before_val_epoch(self, runner: Runner) -> None:
        self.phase = WAITING

    def before_val_iter(self, runner: Runner, batch_idx: int, data_batch: Any = None) -> None:
        self.phase = 'validating'
        self.batches += 1

    def after_val_iter(self, runner: Runner, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        if batch_idx + 1 < len(runner.val_dataloader):
            self.phase = WAITING

    def after_val(self, runner: Runner) -> None:
        self.phase = WAITING

    # --- the threads ------------------------------------------------------------------------------

    def connect(self, group: Any) -> dist.TCPStore:
        """A store of the watch's own: who waits in the run's holds it up for all threads."""
        address: list[Any] = [os.environ.get('MASTER_ADDR', self.host), 0]
        if self.rank == 0:
            store = dist.TCPStore(*address, is_master=True, wait_for_workers=False)
            address[1] = store.port
        dist.broadcast_object_list(address, src=0, group=group)
        return store if self.rank == 0 else dist.TCPStore(*address, is_master=False)

    def sign(self, count: int) -> str:
        return json.dumps(dict(count=count, iteration=self.iteration, phase=self.phase, host=self.host))

    def exchange(self) -> None:
        """Gives and takes signs; hangs for good when the first process does."""
        count = 0
        while not self.stopped.wait(self.interval):
            with contextlib.suppress(RuntimeError):  # the first process has ended
                self.store.set(str(self.rank), self.sign(count := count + 1))
                for rank in self.seen:
                    self.seen[rank] = self.store.get(str(rank))
        self.phase = 'done'
        with contextlib.suppress(RuntimeError):
            self.store.set(str(self.rank), self.sign(-1))

    def look(self) -> None:
        """Ends the process when another one, or its own data loader, is frozen."""
        before, last = time.monotonic(), {}
        silence: dict[Any, float] = {}
        while not self.stopped.wait(self.interval):
            now = time.monotonic()
            passed, before = min(now - before, 2 * self.interval), now  # a suspended process counts nothing
            at_work = [init.at_work() for init in self.workers]
            for place, sign in [*self.seen.items(), ('data', (self.phase, self.batches, at_work))]:
                silence[place] = silence.get(place, 0.0) + passed if last.get(place) == sign else 0.0
                last[place] = sign
                if silence[place] >= self.timeout:
                    self.judge(place, sign, at_work)

    def judge(self, place: Any, sign: Any, at_work: list[dict[int, str]]) -> None:
        """Ends the process where a silence of `timeout` seconds means that something is frozen."""
        if place == 'data':
            if self.phase == WAITING:
                images = ', '.join(path for notes in at_work for path in notes.values())
                here = f'Rank {self.rank} on {self.host} has waited {self.timeout:g} s for data at iteration'
                end(f'{here} {self.iteration + 1}; its workers are at {images or "no image"}.')
        elif sign:
            told = json.loads(sign)
            if told['phase'] != 'done':
                here = f'Rank {place} on {told["host"]} has shown no sign of life for {self.timeout:g} s, last seen'
                end(f'{here} at iteration {told["iteration"] + 1}, {told["phase"]}.')


def end(message: str) -> None:
    """Ends the process from any thread, with its workers, which may be frozen too."""
    # Not by the logger: the main thread may be frozen while it holds that.
    os.write(2, f'error: {message} The run ends; go on with: {resuming_command()}\n'.encode(errors='replace'))
    for worker in multiprocessing.active_children():
        worker.kill()
    os._exit(LOST)

"""Data loader workers that outlive the signals meant for the run, and that leave word of the image they are at."""

import inspect
import multiprocessing
import os
import re
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.sharedctypes import RawArray
from typing import Any

from torch.utils.data import DataLoader, get_worker_info
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from beit_mm.terminal import UserError

LOST_CONNECTION = (ConnectionError, EOFError)
SLOT = 1024  # bytes for a worker's process id and the path of its image


class DeadWorkerError(UserError):
    """A data loader worker has died; names the image that it was at."""


class WorkerInit:
    """A loader's `worker_init_fn`: the one that it had, then signals, then notes of the images.

    A scheduler, a terminal and torchrun send their signals to the workers too, but it is the main process that stops
    them. So they take SIGTERM from the main process alone, and no SIGINT, SIGUSR1 and SIGHUP.

    Args:
        loader: has workers that are not started yet.
    """

    def __init__(self, loader: DataLoader):
        self.first: Callable[[int], None] | None = loader.worker_init_fn
        self.main_process = os.getpid()
        self.slots = RawArray('c', SLOT * loader.num_workers)

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
        note = partial(self._note, memoryview(self.slots).cast('B')[SLOT * worker : SLOT * (worker + 1)])
        note('')
        for dataset in datasets_of(get_worker_info().dataset):
            dataset.pipeline = _Noting(dataset.pipeline, note)

    def _obey(self) -> None:
        """Ends the worker at the main process's SIGTERM; the sender shows here only."""
        while signal.sigwaitinfo({signal.SIGTERM}).si_pid != self.main_process:
            pass
        os._exit(0)

    def _note(self, slot: memoryview, path: str) -> None:
        """Takes a microsecond."""
        text = b'%d\n%s' % (os.getpid(), os.fsencode(path))
        slot[:] = text[:SLOT].ljust(SLOT, b'\0')

    def at_work(self) -> dict[int, str]:
        """The image of each worker that is at one, by the worker's process id."""
        raw = self.slots.raw
        notes = (raw[start : start + SLOT].rstrip(b'\0').partition(b'\n') for start in range(0, len(raw), SLOT))
        return {int(process): os.fsdecode(path) for process, _, path in notes if path}


class _Noting:
    """A dataset's pipeline that notes which image it is at."""

    def __init__(self, pipeline: Callable[[dict], Any], note: Callable[[str], None]):
        self.pipeline, self.note = pipeline, note

    def __call__(self, sample: dict) -> Any:
        self.note(sample.get('img_path', ''))
        result = self.pipeline(sample)
        self.note('')
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self.pipeline, name)


def datasets_of(dataset: Any) -> Iterator[Any]:
    """The datasets with a pipeline in what may be a repetition, a part or a chain of some."""
    parts = vars(dataset)
    if 'pipeline' in parts:
        yield dataset
    for part in [parts['dataset']] if 'dataset' in parts else parts.get('datasets', []):
        yield from datasets_of(part)


def watch_workers(loaders: list[DataLoader]) -> list[WorkerInit]:
    """Gives each loader with workers a WorkerInit."""
    for loader in loaders:
        if loader.num_workers and not isinstance(loader.worker_init_fn, WorkerInit):
            loader.worker_init_fn = WorkerInit(loader)
    return [loader.worker_init_fn for loader in loaders if loader.num_workers]


def check_dead_worker(error: Exception, inits: list[WorkerInit]) -> None:
    """Raises DeadWorkerError where an error is torch's about a worker that died, or that a loader's `timeout` met.

    Or Python's about the connection to one, which is met first where the worker was about to hand a batch over.
    """
    if isinstance(error, DeadWorkerError):
        return
    at_work = {process: path for init in inits for process, path in init.at_work().items()}
    if found := re.search(r'DataLoader worker \(pid(?:\(s\))? ([\d, ]+)\)[^.\n]*', str(error)):
        dead, said = set(map(int, re.findall(r'\d+', found[1]))), found[0].strip()
    elif str(error).startswith('DataLoader timed out'):
        dead, said = set(at_work), str(error)
    elif isinstance(error, LOST_CONNECTION) and _is_loaders(error):
        time.sleep(0.1)  # its connection ends before itself
        dead = set(at_work) - {worker.pid for worker in multiprocessing.active_children()}
        said = f'DataLoader worker (pid {", ".join(map(str, dead)) or "unknown"}) has ended'
    else:
        return
    images = [path for process, path in at_work.items() if process in dead]
    raise DeadWorkerError(
        f'{said} while it was at {", ".join(images) or "no image"}. Want of memory and broken images do '
        'this; --resume goes on from the last checkpoint'
    ) from error


def _is_loaders(error: Exception) -> bool:
    frames = traceback.walk_tb(error.__traceback__)
    return any(frame.f_code.co_filename == inspect.getfile(DataLoader) for frame, _ in frames)


def end_workers(loader: DataLoader) -> None:
    """Ends a loader's workers, as its own end would, which waits five seconds for each of them."""
    iterator = loader._iterator
    if isinstance(iterator, _MultiProcessingDataLoaderIter):
        for worker in iterator._workers:
            worker.terminate()  # see WorkerInit._obey: they exit in order
        iterator._shutdown_workers()
    loader._iterator = None

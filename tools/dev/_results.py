"""What the comparisons share: results.json of a folder, trainings side by side, how many steps they make, spread."""

import json
import os
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from threading import Lock
from typing import Any

from beit_mm.errors import UserError
from beit_mm.files import atomic_file

ROOT = Path(__file__).resolve().parents[2]


def read_results(out: Path) -> dict[str, Any]:
    path = out / 'results.json'
    return json.loads(path.read_text()) if path.exists() else {}


def add_result(out: Path, name: str, figures: dict[str, Any], lock: Lock) -> None:
    """Adds a run's numbers to results.json, and prints them."""
    with lock:
        results = read_results(out)
        results.setdefault(name, {}).update(figures)
        with atomic_file(out / 'results.json') as file:
            file.write((json.dumps(results, indent=1) + '\n').encode())
    print(f'{time.strftime("%H:%M:%S")} {name} {figures}', flush=True)


def run_all(function: Callable, calls: Iterable[tuple], jobs: int) -> None:
    """Calls a function with each tuple of arguments, `jobs` at a time; after an error or Ctrl-C none begins."""
    with ThreadPoolExecutor(jobs) as pool:
        futures = [pool.submit(function, *arguments) for arguments in calls]
        try:
            for future in as_completed(futures):
                future.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def run_command(command: Iterable[object], log: Path) -> float:
    """Runs a command of this repository on one thread; returns the minutes of CPU time that it took."""
    environment = dict(os.environ, OMP_NUM_THREADS='1', PYTHONPATH=f'{ROOT}:{os.environ.get("PYTHONPATH", "")}')
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open('a') as file:
        outputs: dict[str, Any] = dict(stdout=file, stderr=subprocess.STDOUT)
        process = subprocess.Popen([*map(str, command)], cwd=ROOT, env=environment, **outputs)
        _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise UserError(f'a command failed: {log} says why')
    return (usage.ru_utime + usage.ru_stime) / 60


def step_of(runner: Any) -> Callable[[], object]:
    """A step of the training that a runner of mmengine would make, with the reading of its batch."""
    model, batches = runner.model.train(), iter(runner.build_dataloader(runner.cfg.train_dataloader))
    wrapper = runner.build_optim_wrapper(runner.cfg.optim_wrapper)
    wrapper.initialize_count_status(model, 0, 1000)
    return lambda: model.train_step(next(batches), wrapper)


def print_steps(steps: dict[str, Callable[[], object]], number: int, minutes: float) -> None:
    """Prints how many steps each row makes in `minutes` of a core: by medians, in rounds of `number` steps of all."""
    seconds: dict[str, list[float]] = {row: [] for row in steps}
    for is_measured in (False, True, True, True):
        for row, step in steps.items():
            for _ in range(number):
                start = time.process_time()
                step()
                seconds[row] += [time.process_time() - start] * is_measured
    for row, taken in seconds.items():
        median = statistics.median(taken)
        print(f'    {row}={60 * minutes / median:.0f},  # {median:.3f} s a step')


def pooled_variance(groups: Iterable[list[float]]) -> float:
    """Variance over seeds, pooled over the groups of one row each; 0 if no group has two values."""
    groups = [group for group in groups if group]
    free = sum(len(group) - 1 for group in groups)
    squares = sum((value - statistics.mean(group)) ** 2 for group in groups for value in group)
    return squares / free if free else 0.0

"""What the benchmarks share: interleaved timing, memory; a training step's options, tables, record; a GPU's limit."""

import argparse
import json
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import torch
from mmengine.logging import MMLogger
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

T = TypeVar('T')
POLL = 0.0005  # seconds between two looks at a process's memory
OURS = 'beit_mm'  # the ratios printed are to this contender


def step_parser(description: str, large: bool = True) -> argparse.ArgumentParser:
    """Options of a step's benchmark; `large`: it knows the large model, and compiled steps, too."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.set_defaults(arch='base')
    if large:
        parser.add_argument('--arch', choices=['base', 'large'], default='base')
        parser.add_argument('--compile', action='store_true', help='time our step compiled by CompileHook too')
    parser.add_argument('--batch', type=int, nargs='+', default=[8], help='images a step')
    parser.add_argument('--precision', choices=['bfloat16', 'float16', 'float32'], default='bfloat16')
    parser.add_argument('--rounds', type=int, default=7)
    parser.add_argument('--threads', type=int, default=2, help='CPU threads')
    parser.add_argument(
        '--profile', type=int, default=0, metavar='N', help='print the N operations that take most of our step'
    )
    parser.add_argument('--json', type=Path, metavar='FILE', help='write all that is printed, and each time, there too')
    return parser


@contextmanager
def stops_at_full_memory(size: int) -> Iterator[None]:
    """Goes on after a batch that does not fit, so that the smaller ones' figures are kept."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        print(f'\nbatch {size} does not fit: {str(error).splitlines()[0]}')
    torch.cuda.empty_cache()


def profile_step(step: Callable[[], None], number: int) -> None:
    """Prints the operations, on a GPU the kernels, that take most of a step."""
    if not number:
        return
    on_gpu = torch.cuda.is_available()
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]) as found:
        step()
        if on_gpu:
            torch.cuda.synchronize()
    key = 'self_device_time_total' if on_gpu else 'self_cpu_time_total'
    rows = sorted(found.key_averages(), key=lambda row: getattr(row, key), reverse=True)
    total = sum(getattr(row, key) for row in rows)
    print(f'\n{"of our step":>12s} {"ms":>9s} {"calls":>6s}  operation')
    for row in rows[:number]:
        value = getattr(row, key)
        print(f'{value / total:12.1%} {value / 1000:9.2f} {row.count:6d}  {row.key[:90]}')


class Record(dict):
    """What a benchmark found: how it was called and on what, then a list of tables; `write` makes it a file."""

    def add(self, title: str, **table: object) -> None:
        self['tables'].append(dict(title=title, **table))

    def write(self, path: Path | None) -> None:
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(self, indent=1) + '\n')


def prepare(args: argparse.Namespace, gflop: float) -> tuple[float | None, Record]:
    """Sets up torch and prints what it runs on.

    Args:
        gflop: GFLOP an image of the step.

    Returns:
        The GPU's measured limit in GFLOP/s, and the record to be filled.
    """
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = True  # as the configs have it
    MMLogger.get_instance('benchmark', log_level='WARNING')  # mmpretrain lists every parameter it initialises
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f'CPU, {args.threads} threads'
    limit = measured_limit() if torch.cuda.is_available() else None
    print(f'{device}; torch {torch.__version__}; {args.arch}; {args.precision}; {args.rounds} rounds')
    if limit:
        print(f'measured bf16 matrix rate {limit / 1000:.0f} TFLOP/s; limit {limit / gflop:.0f} images/s')
    options = {key: value for key, value in vars(args).items() if key != 'json'}
    record = Record(**options, device=device, torch=torch.__version__, commit=commit(), limit_gflops=limit, tables=[])
    return limit, record


def commit() -> str | None:
    """The checkout's commit, where there is one and git is installed."""
    try:
        run = subprocess.run(['git', 'rev-parse', 'HEAD'], capture_output=True, text=True, cwd=Path(__file__).parent)
    except FileNotFoundError:
        return None
    return run.stdout.strip() or None


def seconds(run: Callable[[], T], clock: Callable[[], float] = time.perf_counter) -> tuple[float, T]:
    """Time of one call and what it returned: CUDA events on a GPU, `clock` on a CPU."""
    if not torch.cuda.is_available():
        start = clock()
        result = run()
        return clock() - start, result
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    result = run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1000, result


def interleave(
    runs: dict[str, Callable[[], T]], rounds: int, warmup: int = 2, clock: Callable[[], float] = time.perf_counter
) -> tuple[dict[str, list[float]], dict[str, float], dict]:
    """Calls each contender once a round, after some rounds of warm-up.

    Returns:
        Their times in seconds; the memory in GiB that a call takes on a GPU above what stands before it (weights and
        optimizers of all); what the last calls returned.
    """
    times: dict[str, list[float]] = {name: [] for name in runs}
    memory = dict.fromkeys(runs, 0.0)
    results: dict[str, T] = {}
    for round_ in range(rounds + warmup):
        for name, run in runs.items():
            results.pop(name, None)
            if torch.cuda.is_available():
                torch.cuda.reset_peak_memory_stats()
                standing = torch.cuda.memory_allocated()
            elapsed, results[name] = seconds(run, clock)
            if round_ >= warmup:
                times[name].append(elapsed)
            if torch.cuda.is_available():
                memory[name] = (torch.cuda.max_memory_allocated() - standing) / 2**30
    return times, memory, results


def anonymous_bytes(pid: int) -> int:
    """Memory of a process that is no file's.

    ru_maxrss would count the pages of a mapped file too. Those are the system's cache of the file: all processes share
    them, and they are given up when memory is short.
    """
    status = Path(f'/proc/{pid}/status').read_text()
    return 1024 * int(status.split('RssAnon:')[1].split()[0])


def measured_limit() -> float:
    """bf16 matrix rate of this GPU in GFLOP/s: an 8192-cubed product, median of ten."""
    a, b = (torch.randn(8192, 8192, device='cuda', dtype=torch.bfloat16) for _ in range(2))
    times = [seconds(lambda: a @ b)[0] for _ in range(13)][3:]
    return 2 * 8192**3 / statistics.median(times) / 1e9


def compiled(model: nn.Module, method: str, step: Callable[[], None]) -> Callable[[], None]:
    """A step of the same model with one of its methods compiled as CompileHook does it."""
    call = torch.compile(getattr(model, method), fullgraph=True, dynamic=False)  # raises where it fails

    def compiled_step() -> None:
        setattr(model, method, call)
        try:
            step()
        finally:
            delattr(model, method)

    return compiled_step


class Marks:
    """Times between marks within one call: CUDA events on a GPU, the clock on a CPU."""

    def __init__(self):
        self.names: list[str] = []
        self.moments: list = [self._now()]

    def __call__(self, name: str) -> None:
        self.names.append(name)
        self.moments.append(self._now())

    def seconds(self) -> dict[str, float]:
        """Time of each part, which ends at its mark."""
        pairs = zip(self.names, self.moments, self.moments[1:], strict=False)
        if not torch.cuda.is_available():
            return {name: end - start for name, start, end in pairs}
        torch.cuda.synchronize()
        return {name: start.elapsed_time(end) / 1000 for name, start, end in pairs}

    @staticmethod
    def _now() -> object:
        if not torch.cuda.is_available():
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def time_parts(
    run: Callable[[Callable[[str], None]], None], rounds: int, warmup: int = 2
) -> tuple[dict[str, float], dict[str, float]]:
    """Median time and counted GFLOP of each part of a call that marks where its parts end.

    Args:
        run: called with a function of a name, which it calls at the end of each part.
    """
    measured = []
    for _ in range(rounds + warmup):
        marks = Marks()
        run(marks)
        measured.append(marks.seconds())
    counted = [0.0]
    names: list[str] = []
    with FlopCounterMode(display=False) as counter:
        run(lambda name: (names.append(name), counted.append(counter.get_total_flops())))
    gflop = {name: (after - before) / 1e9 for name, before, after in zip(names, counted, counted[1:], strict=False)}
    medians = {name: statistics.median(times[name] for times in measured[warmup:]) for name in names}
    return medians, gflop


def report_parts(
    title: str, times: dict[str, float], gflop: dict[str, float], size: int, limit: float | None, record: Record
) -> None:
    """Prints the parts of a step of `size` images, and the share that each has of its time."""
    print(f'\n{title}\n{"":12}{"median s":>10}{"of step":>10}{"GFLOP/image":>13}{"TFLOP/s":>10}{"of limit":>10}')
    for name, seconds_ in times.items():
        rate = gflop[name] / seconds_ / 1000
        share = f'{1000 * rate / limit:10.0%}' if limit else f'{"-":>10}'
        of_step = seconds_ / sum(times.values())
        print(f'{name:12}{seconds_:10.4f}{of_step:10.0%}{gflop[name] / size:13.1f}{rate:10.2f}{share}')
    record.add(title, batch=size, seconds=times, gflop=gflop)


def report(
    title: str,
    times: dict[str, list[float]],
    memory: dict[str, float],
    size: int,
    gflop: float | None,
    limit: float | None,
    record: Record,
) -> None:
    """Prints the contenders beside each other; ratios are to ours."""
    print(f'\n{title}\n{"":18}{"median s":>10}{"images/s":>10}{"GiB":>8}{"of limit":>10}')
    for name, values in times.items():
        median = statistics.median(values)
        share = f'{gflop * size / median / limit:10.0%}' if gflop and limit else f'{"-":>10}'
        gigabytes = f'{memory[name]:8.1f}' if memory[name] else f'{"-":>8}'
        print(f'{name:18}{median:10.4f}{size / median:10.1f}{gigabytes}{share}')
    for peer in [name for name in times if name != OURS]:
        ratios = [theirs / ours for ours, theirs in zip(times[OURS], times[peer], strict=True)]
        ratio = statistics.median(times[peer]) / statistics.median(times[OURS])
        print(f'{peer} / {OURS}: ratio of medians {ratio:.2f} (rounds: {min(ratios):.2f} to {max(ratios):.2f})')
    record.add(title, batch=size, gflop_per_image=gflop, seconds=times, gibibytes=memory)

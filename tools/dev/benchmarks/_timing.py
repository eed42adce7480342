"""What the benchmarks share: interleaved rounds, memory, the parts of a call, tables, a GPU's limit."""

import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

T = TypeVar('T')
Clock = Callable[[], float]
GPU = torch.cuda.is_available()
OURS = 'beit_mm'


def machine(threads: int) -> dict[str, object]:
    """Sets up torch, and says what it runs on."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = True  # as the configs have it
    device = torch.cuda.get_device_name() if GPU else f'CPU, {threads} threads'
    try:
        command = ['git', 'rev-parse', 'HEAD']
        commit = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent).stdout.strip()
    except FileNotFoundError:
        commit = ''
    return dict(device=device, torch=torch.__version__, commit=commit)


def measured_limit() -> float:
    """bf16 matrix rate of this GPU in GFLOP/s: an 8192-cubed product, median of ten."""
    a, b = (torch.randn(8192, 8192, device='cuda', dtype=torch.bfloat16) for _ in range(2))
    times = [seconds(lambda: a @ b)[0] for _ in range(13)][3:]
    return 2 * 8192**3 / statistics.median(times) / 1e9


def seconds(run: Callable[[], T], clock: Clock = time.perf_counter) -> tuple[float, T]:
    """Time of one call and what it returned: CUDA events on a GPU, `clock` on a CPU."""
    if not GPU:
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
    runs: dict[str, Callable[[], T]], rounds: int, warmup: int = 2, clock: Clock = time.perf_counter
) -> tuple[dict[str, list[float]], dict[str, float], dict[str, T]]:
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
            if GPU:
                torch.cuda.reset_peak_memory_stats()
                standing = torch.cuda.memory_allocated()
            elapsed, results[name] = seconds(run, clock)
            if round_ >= warmup:
                times[name].append(elapsed)
            if GPU:
                memory[name] = (torch.cuda.max_memory_allocated() - standing) / 2**30
    return times, memory, results


def report(
    title: str, times: dict[str, list[float]], memory: dict[str, float], size: int = 1, flop_share: float = 0
) -> None:
    """Prints the contenders beside each other; ratios are to the first.

    Args:
        size: images of a call.
        flop_share: seconds that a call takes at the GPU's limit, 0 where that is unknown.
    """
    print(f'\n{title}\n{"":18}{"median s":>10}{"images/s":>10}{"GiB":>8}{"of limit":>10}{"ratio":>8}  (rounds)')
    first = next(iter(times.values()))
    for name, values in times.items():
        median = statistics.median(values)
        gigabytes = f'{memory[name]:.1f}' if memory[name] else '-'
        share = f'{flop_share / median:.0%}' if flop_share else '-'
        ratios = [one / other for one, other in zip(values, first, strict=True)]
        ratio = f'{median / statistics.median(first):8.2f}  ({min(ratios):.2f} to {max(ratios):.2f})'
        print(f'{name:18}{median:10.4f}{size / median:10.2f}{gigabytes:>8}{share:>10}{ratio}', flush=True)


def time_parts(
    run: Callable[[Callable[[str], None]], None], rounds: int, warmup: int = 2
) -> tuple[dict[str, float], dict[str, float]]:
    """Median time and counted GFLOP of each part of a call.

    Args:
        run: called with a function of a name, which it calls at the end of each part.
    """

    def now() -> object:
        if not GPU:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    measured: list[list[float]] = []
    for _ in range(rounds + warmup):
        moments = [now()]
        run(lambda name, moments=moments: moments.append(now()))
        if GPU:
            torch.cuda.synchronize()
        pairs = zip(moments, moments[1:], strict=False)
        measured.append([start.elapsed_time(end) / 1000 if GPU else end - start for start, end in pairs])
    gflop, counted = {}, 0.0
    with FlopCounterMode(display=False) as counter:

        def count(name: str) -> None:
            nonlocal counted
            gflop[name], counted = (counter.get_total_flops() - counted) / 1e9, counter.get_total_flops()

        run(count)
    medians = map(statistics.median, zip(*measured[warmup:], strict=True))
    return dict(zip(gflop, medians, strict=True)), gflop


def report_parts(title: str, times: dict[str, float], gflop: dict[str, float], size: int, limit: float | None) -> None:
    """Prints the parts of a step of `size` images, and the share that each has of its time."""
    print(f'\n{title}\n{"":12}{"median s":>10}{"of step":>10}{"GFLOP/image":>13}{"TFLOP/s":>10}{"of limit":>10}')
    for name, seconds_ in times.items():
        rate, of_step = gflop[name] / seconds_, seconds_ / sum(times.values())
        share = f'{rate / limit:.0%}' if limit else '-'
        print(f'{name:12}{seconds_:10.4f}{of_step:10.0%}{gflop[name] / size:13.1f}{rate / 1000:10.2f}{share:>10}')


def profile_step(step: Callable[[], None], number: int) -> None:
    """Prints the operations, on a GPU the kernels, that take most of a step."""
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if GPU else [])]) as found:
        step()
        if GPU:
            torch.cuda.synchronize()
    key = 'self_device_time_total' if GPU else 'self_cpu_time_total'
    print(found.key_averages().table(sort_by=key, row_limit=number, max_name_column_width=60))


def anonymous_bytes(pid: int) -> int:
    """Memory of a process that is no file's.

    ru_maxrss would count the pages of a mapped file too. Those are the system's cache of the file: all processes share
    them, and they are given up when memory is short.
    """
    status = Path(f'/proc/{pid}/status').read_text()
    return 1024 * int(status.split('RssAnon:')[1].split()[0])

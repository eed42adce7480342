"""What the benchmarks share: interleaved timing and memory; of a training step options, a GPU's limit and the table."""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
from mmengine.logging import MMLogger

T = TypeVar('T')
POLL = 0.0005  # seconds between two looks at a process's memory
OURS = 'beit_mm'  # the ratios printed are to this contender


def step_parser(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--arch', choices=['base', 'large'], default='base')
    parser.add_argument('--batch', type=int, nargs='+', default=[8], help='images a step')
    parser.add_argument('--precision', choices=['bfloat16', 'float16', 'float32'], default='bfloat16')
    parser.add_argument('--rounds', type=int, default=7)
    parser.add_argument('--threads', type=int, default=2, help='CPU threads')
    return parser


def prepare(args: argparse.Namespace, gflop: float) -> float | None:
    """Sets up torch and prints what it runs on; returns the GPU's measured limit in GFLOP/s.

    Args:
        gflop: GFLOP an image of the step.
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
    return limit


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


def report(
    title: str,
    times: dict[str, list[float]],
    memory: dict[str, float],
    size: int,
    gflop: float | None,
    limit: float | None,
) -> None:
    print(f'\n{title}\n{"":12}{"median s":>10}{"images/s":>10}{"GiB":>8}{"of limit":>10}')
    for name, values in times.items():
        median = statistics.median(values)
        share = f'{gflop * size / median / limit:10.0%}' if gflop and limit else f'{"-":>10}'
        gigabytes = f'{memory[name]:8.1f}' if memory[name] else f'{"-":>8}'
        print(f'{name:12}{median:10.4f}{size / median:10.1f}{gigabytes}{share}')
    for peer in [name for name in times if name != OURS]:
        ratios = [theirs / ours for ours, theirs in zip(times[OURS], times[peer], strict=True)]
        ratio = statistics.median(times[peer]) / statistics.median(times[OURS])
        print(f'{peer} / {OURS}: ratio of medians {ratio:.2f} (rounds: {min(ratios):.2f} to {max(ratios):.2f})')

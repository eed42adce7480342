"""What the benchmarks share: interleaved rounds, memory, the parts of a call, profiles, tables, a GPU's limit."""

import gzip
import json
import os
import statistics
import subprocess
import tempfile
import time
import warnings
from collections import Counter, defaultdict
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
DEVICE_EVENTS = ('kernel', 'gpu_memcpy', 'gpu_memset') if GPU else ('cpu_op',)  # categories in torch's traces
LARGEST = 15  # kernels that a profile prints
KERNEL_GROUPS = dict(  # words in names of kernels; the first group with one of them counts
    triton=['triton'],
    attention=['fmha', 'attention', 'flash', 'sdpa'],
    convolution=['conv', 'fprop', 'dgrad', 'wgrad', 'implicit', 'nchw', 'nhwc'],
    product=['gemm', 'cutlass', 'nvjet', 'xmma', 'addmm', 'bmm', '::mm', 'splitk'],
    norm=['layer_norm', 'layernorm', 'gammabeta'],
    optimizer=['adam', 'multi_tensor', 'lpnorm'],
    softmax=['softmax', 'nll', 'cross_entropy'],
    copy=['memcpy', 'memset'],
    elementwise=['elementwise', 'reduce', 'index', 'cat', 'copy', 'gather', 'scatter'],
)


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


def add_line(file: Path | None, **figures: object) -> None:
    """Appends figures to a file with one JSON object a line, at once: a run that is cut short has left them."""
    if file:
        if name := os.environ.get('PART'):  # tools/dev/gpu/check.sh calls benchmarks under several names
            figures = dict(part=name, **figures)
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open('a') as lines:
            lines.write(json.dumps(figures, default=str) + '\n')


def measured_limit(dtype: torch.dtype = torch.bfloat16) -> float:
    """Matrix rate of this GPU in GFLOP/s: an 8192-cubed product, median of ten."""
    a, b = (torch.randn(8192, 8192, device='cuda', dtype=dtype) for _ in range(2))
    return 2 * 8192**3 / median_seconds(lambda: a @ b) / 1e9


def median_seconds(run: Callable[[], object], rounds: int = 10, warmup: int = 3) -> float:
    return statistics.median([seconds(run)[0] for _ in range(rounds + warmup)][warmup:])


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


def profile_steps(name: str, step: Callable[[], object], number: int, folder: Path | None = None) -> dict[str, object]:
    """Prints and returns where the time of some steps goes: idle share, groups of kernels, the largest kernels.

    Args:
        name: of the profile, also of its trace.
        folder: where the trace is kept, for Perfetto or chrome://tracing; None: nowhere.
    """
    step()
    asked, done = host_and_device_seconds(step, number)
    with profile(activities=[ProfilerActivity.CUDA if GPU else ProfilerActivity.CPU]) as found:
        for _ in range(number):
            step()
        synchronize()
    with tempfile.TemporaryDirectory() as temporary:
        trace = (folder or Path(temporary)) / f'{name.replace(" ", "_")}.json.gz'
        trace.parent.mkdir(parents=True, exist_ok=True)
        found.export_chrome_trace(str(trace))
        events = json.loads(gzip.decompress(trace.read_bytes()))['traceEvents']
    events = [event for event in events if event.get('cat') in DEVICE_EVENTS and 'dur' in event]
    wall, busy = wall_and_busy(events)
    spent, calls, groups = Counter(), Counter(), Counter()
    for event, own in own_times(events):
        spent[event['name']] += own
        calls[event['name']] += 1
        groups[group_of(event['name'])] += own
    total = sum(spent.values())
    shares = {group: time_ / total for group, time_ in groups.most_common()}
    per_step = 1e3 * number  # microseconds of all steps to milliseconds of one
    print(f'\nprofile of {number} steps: {name}')
    print(f'{1e3 * done:.1f} ms a step without the profiler, of which the host needs {1e3 * asked:.1f}')
    print(f'{wall / per_step:.1f} ms with it, idle {1 - busy / wall:.1%}, {len(events) / number:.0f} kernels')
    print(', '.join(f'{group} {share:.0%}' for group, share in shares.items()))
    kernels = [(kernel, time_ / per_step, calls[kernel] / number) for kernel, time_ in spent.most_common(LARGEST)]
    for kernel, milliseconds, count in kernels:
        print(f'{milliseconds * per_step / total:7.1%}{milliseconds:9.3f} ms{count:8.1f} x  {kernel[:100]}', flush=True)
    figures = dict(ms=1e3 * done, host_ms=1e3 * asked, profiled_ms=wall / per_step, idle=1 - busy / wall)
    return dict(figures, groups=shares, kernels=kernels)


def synchronize() -> None:
    if GPU:
        torch.cuda.synchronize()


def host_and_device_seconds(step: Callable[[], object], number: int) -> tuple[float, float]:
    """Time of a step until the host has asked for all of it, and until the device has done it."""
    synchronize()
    start = time.perf_counter()
    for _ in range(number):
        step()
    asked = time.perf_counter() - start
    synchronize()
    return asked / number, (time.perf_counter() - start) / number


def wall_and_busy(events: list[dict]) -> tuple[float, float]:
    """Microseconds from the first event to the end of the last one, and those of them with any event."""
    spans = sorted((event['ts'], event['ts'] + event['dur']) for event in events)
    first = end = spans[0][0]
    busy = 0.0
    for start, stop in spans:
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return end - first, busy


def own_times(events: list[dict]) -> list[tuple[dict, float]]:
    """Microseconds of each event without those of events inside of it: CPU operations call others, kernels do not."""
    threads = defaultdict(list)
    for event in sorted(events, key=lambda event: (event['ts'], -event['dur'])):
        threads[event['pid'], event['tid']].append(event)
    found = []
    for thread in threads.values():
        own, around = [event['dur'] for event in thread], []  # indices of the events that the next may be in
        for index, event in enumerate(thread):
            while around and event['ts'] >= thread[around[-1]]['ts'] + thread[around[-1]]['dur']:
                around.pop()
            if around:
                own[around[-1]] -= event['dur']
            around.append(index)
        found += zip(thread, own, strict=True)
    return found


def group_of(kernel: str) -> str:
    lower = kernel.lower()
    return next((group for group, words in KERNEL_GROUPS.items() if any(word in lower for word in words)), 'other')


def count_waits(step: Callable[[], object], number: int = 3) -> dict[str, float] | None:
    """Prints and returns how often in a step, and in which line, the host waits for the GPU; None without a GPU."""
    if not GPU:
        print('\nwaits for the device: not counted on a CPU')
        return None
    for _ in range(3):  # kernels are chosen, and the first step decides some things on the host
        step()
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter('always')
        torch.cuda.set_sync_debug_mode('warn')
        try:
            for _ in range(number):
                step()
        finally:
            torch.cuda.set_sync_debug_mode('default')
    waits = [warning for warning in found if 'called a synchronizing' in str(warning.message)]
    lines = Counter(f'{"/".join(Path(warning.filename).parts[-3:])}:{warning.lineno}' for warning in waits)
    print(f'\nwaits for the device: {len(waits) / number:g} a step')
    for line, count in lines.most_common():
        print(f'{count / number:8.1f} x  {line}')
    return {line: count / number for line, count in lines.items()}


def anonymous_bytes(pid: int) -> int:
    """Memory of a process that belongs to no file.

    ru_maxrss would count the pages of a mapped file too. Those are the system's cache of the file: all processes share
    them, and they are given up when memory is short.
    """
    status = Path(f'/proc/{pid}/status').read_text()
    return 1024 * int(status.split('RssAnon:')[1].split()[0])

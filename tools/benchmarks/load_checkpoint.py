"""Times loading a checkpoint into a model of base size beside plain reading of the file and beside torch's reader.

    python tools/benchmarks/load_checkpoint.py --rounds 20

Each file (zip and legacy .pth, .safetensors; 343 MB of random weights, in a temporary folder) is read into a buffer
that was there before, read into a new one, and loaded into a BEiTBackbone by beit_mm's reader and by the peer:
torch.load(weights_only=True), or safetensors' load_file. Numbers in a legacy file lie at multiples of their size by
chance only; of both kinds there is one. These runs are interleaved in one process; the ratios of the
medians carry over to machines with other disks. The files are in the system's cache, or, with --cold, dropped from it
before each run.

Memory is measured in a process of its own for each: what it holds at most during the loading above what it held
before, with the model built, as a multiple of the file's size.
"""
import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from mmengine.logging import MMLogger
from safetensors.torch import load_file, save_file

from beit_mm.checkpoint.loading import load_from_file
from beit_mm.models import BEiTBackbone

READERS = {
    'beit_mm': lambda path: load_from_file(path)['state_dict'],
    'peer': lambda path: load_file(path) if path.endswith('.safetensors') else torch.load(path, weights_only=True),
}
MEASURED = 'beit_mm'  # the ratios printed are its own
POLL = 0.0005         # seconds between two looks at the memory


def write_files(folder: str) -> list[str]:
    weights = BEiTBackbone('base').state_dict()
    paths = [os.path.join(folder, name) for name in (
        'zip.pth', 'legacy, in place.pth', 'legacy, out of place.pth', 'weights.safetensors')]
    torch.save(weights, paths[0])
    for path, remainder in zip(paths[1:3], (0, 1), strict=True):
        padding = ''
        while not os.path.exists(path) or os.path.getsize(path) % 4 != remainder:  # float32 numbers end it
            torch.save(dict(weights, padding=padding), path, _use_new_zipfile_serialization=False)
            padding += 'x'
    save_file(weights, paths[3])
    for path in paths:
        with open(path, 'rb') as file:
            os.fsync(file.fileno())  # only what is on the disk can be dropped from the cache
    return paths


def read_into(path: str, buffer: bytearray) -> None:
    with open(path, 'rb', buffering=0) as file, memoryview(buffer) as view:
        done = 0
        while count := file.readinto(view[done:]):
            done += count


def load(model: torch.nn.Module, reader: str, path: str) -> None:
    weights = READERS[reader](path)
    weights.pop('padding', None)
    model.load_state_dict(weights)


def contenders(path: str, model: torch.nn.Module) -> dict[str, Callable[[], object]]:
    buffer = bytearray(os.path.getsize(path))
    return {
        'read into a buffer': lambda: read_into(path, buffer),
        'read': lambda: Path(path).read_bytes(),
        **{name: lambda name=name: load(model, name, path) for name in READERS},
    }


def interleave(path: str, runs: dict[str, Callable[[], object]], rounds: int, cold: bool) -> dict[str, list[float]]:
    """Seconds of each contender, one call each a round, after one round of warm-up."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for round_ in range(rounds + 1):
        for name, run in runs.items():
            if cold:
                with open(path, 'rb') as file:
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            start = time.perf_counter()
            run()
            if round_:
                times[name].append(time.perf_counter() - start)
    return times


def anonymous_bytes(pid: int) -> int:
    """Memory of a process that is no file's.

    ru_maxrss would count the pages of a mapped file too. Those are the system's cache of the file: all processes
    share them, plain reading fills them as well, and they are given up when memory is short.
    """
    status = Path(f'/proc/{pid}/status').read_text()
    return 1024 * int(status.split('RssAnon:')[1].split()[0])


def peak_of_loading(reader: str, path: str) -> int:
    """Bytes that a fresh process takes for loading, above what it has with a model."""
    child = subprocess.Popen([sys.executable, __file__, '--child', reader, path], stdin=subprocess.PIPE,
                             stdout=subprocess.PIPE, text=True)
    assert child.stdout.readline() == 'ready\n'
    before = peak = anonymous_bytes(child.pid)
    child.stdin.write('go\n')
    child.stdin.flush()
    os.set_blocking(child.stdout.fileno(), False)
    while not child.stdout.readline():  # polled from outside, so that its own locks cannot hide a peak
        peak = max(peak, anonymous_bytes(child.pid))
        time.sleep(POLL)
    child.communicate('end\n')
    return peak - before


def run_child(reader: str, path: str) -> None:
    """What `peak_of_loading` looks at: waits, loads, says so, and stays until told."""
    model = BEiTBackbone('base')
    print('ready', flush=True)
    sys.stdin.readline()
    load(model, reader, path)
    print('done', flush=True)
    sys.stdin.readline()


def report(path: str, times: dict[str, list[float]]) -> None:
    size = os.path.getsize(path)
    medians = {name: statistics.median(values) for name, values in times.items()}
    print(f'\n{os.path.basename(path)}, {size / 1e6:.0f} MB\n{"":20}{"median s":>10}{"beit_mm /":>12}'
          f'{"(rounds)":>16}{"memory":>10}')
    for name, values in times.items():
        ratios = [ours / other for ours, other in zip(times[MEASURED], values, strict=True)]
        spread = f'{min(ratios):.2f} to {max(ratios):.2f}'
        memory = f'{peak_of_loading(name, path) / size:10.2f}' if name in READERS else f'{"-":>10}'
        print(f'{name:20}{medians[name]:10.4f}{medians[MEASURED] / medians[name]:12.2f}{spread:>16}{memory}')


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--rounds', type=int, default=15)
    parser.add_argument('--threads', type=int, default=2, help='CPU threads')
    parser.add_argument('--cold', action='store_true', help="drop the file from the system's cache before each run")
    parser.add_argument('--folder', help='on the disk to be measured; default the system\'s for temporary files')
    parser.add_argument('--child', nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    MMLogger.get_instance('benchmark', log_level='WARNING')  # the backbone says what it loads
    if args.child:
        run_child(*args.child)
        return
    print(f'CPU, {args.threads} threads; torch {torch.__version__}; {args.rounds} rounds; '
          f'files {"dropped from" if args.cold else "in"} the cache')
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        model = BEiTBackbone('base')
        for path in write_files(folder):
            report(path, interleave(path, contenders(path, model), args.rounds, args.cold))


if __name__ == '__main__':
    main()

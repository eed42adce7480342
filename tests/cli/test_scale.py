"""tools/dev/scale.py: what it counts is what DistributedDataParallel exchanges between sixteen processes."""

import runpy
from pathlib import Path

import pytest
import torch
from helpers import ROOT, run_ranks
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

SCALE = runpy.run_path(str(ROOT / 'tools/dev/scale.py'))
LOOPBACK = Path('/proc/net/dev')


def sent() -> int:
    """Bytes that this machine has sent to itself."""
    line = next(line for line in LOOPBACK.read_text().splitlines() if line.strip().startswith('lo:'))
    return int(line.split(':')[1].split()[8])


@pytest.mark.slow
@pytest.mark.skipif(not LOOPBACK.exists(), reason='bytes are counted by Linux')
def test_sixteen_processes_send_what_is_counted(tmp_path):
    """Of eight layers of a million parameters, 32 MB, each process sends 60 MB in a step."""

    def step(rank: int) -> tuple[int, int]:
        torch.set_num_threads(1)
        model = DistributedDataParallel(nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(8))))
        buckets = []

        def hook(group, bucket):
            buckets.append(bucket.buffer().numel() * bucket.buffer().element_size())
            return allreduce_hook(group, bucket)

        model.register_comm_hook(None, hook)
        for _ in range(3):  # the second step forms the buckets anew
            torch.distributed.barrier()
            buckets.clear()
            before = sent()
            model(torch.ones(1, 1024)).sum().backward()
            torch.distributed.barrier()
        return sent() - before, sum(buckets)

    expected = SCALE['sent_bytes'](8 * 2**20, 16)
    for found, payload in run_ranks(step, tmp_path, 16):
        assert payload == 4 * 8 * 2**20
        assert 0.95 * 16 * expected < found < 1.5 * 16 * expected  # other tests may send too


def test_the_record_has_what_the_tool_prints(monkeypatch, capsys):
    monkeypatch.setattr('sys.argv', ['scale.py'])
    SCALE['main']()
    printed, record = capsys.readouterr().out, (ROOT / 'docs/records/2026-11-26-scale.md').read_text()
    for name in ('step of a GPU alone, ms', 'GB that a GPU sends in a step', 'hours for 800 epochs'):
        found, recorded = (cells_of(text, name) for text in (printed, record))
        assert [number.split(' ')[0] for number in found] == recorded[:2]


def cells_of(table: str, name: str) -> list[str]:
    (line,) = [line for line in table.splitlines() if line.startswith(f'| {name} |')]
    return line.strip('| ').split(' | ')[1:]

"""Checkpoints are written completely or not at all, and others can read them."""
import contextlib
import json
import os
import resource
import signal
import subprocess
import sys

import pytest
import safetensors
import torch
from helpers import ROOT
from safetensors.torch import load_file
from torch import nn

from beit_mm.checkpoint.errors import CheckpointError
from beit_mm.checkpoint.reader import read_checkpoint
from beit_mm.checkpoint.writing import write_checkpoint

SUFFIXES = ['.pth', '.pt', '.bin', '.safetensors']
BASE = torch.arange(12.0)
WEIGHTS = {
    'w': torch.rand(3, 5), 'scalar': torch.tensor(2.5), 'empty': torch.empty(0, 3), 'half': torch.rand(3).bfloat16(),
    'flags': torch.tensor([True, False]), 'count': torch.tensor([2**40]), 'bytes': torch.arange(7, dtype=torch.uint8),
    'shared': BASE, 'again': BASE, 'part': BASE[4:].view(2, 4), 'transposed': BASE.view(3, 4).t(),
    'parameter': nn.Parameter(torch.rand(2, dtype=torch.float64))}
META = {'epoch': 3, 'preprocessing': {'mean': [127.5], 'size': [224, 224]}, 'name': 'Öl "x"', 'none': None}


def assert_same(found, expected=WEIGHTS):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor)


@pytest.mark.parametrize('suffix', SUFFIXES)
def test_read_back(tmp_path, suffix):
    path = tmp_path / 'new' / 'folder' / f'w{suffix}'
    write_checkpoint(path, dict(state_dict=WEIGHTS, meta=META))
    found = read_checkpoint(path)
    assert_same(found['state_dict'])
    assert found['meta'] == META
    assert os.listdir(path.parent) == [path.name]


@pytest.mark.parametrize('suffix', SUFFIXES)
def test_flat_state_dict(tmp_path, suffix):
    write_checkpoint(tmp_path / f'w{suffix}', WEIGHTS)
    assert_same(read_checkpoint(tmp_path / f'w{suffix}'))


@pytest.mark.parametrize(('content', 'metadata'), [
    (WEIGHTS, {'format': 'pt'}),  # transformers reads no file without it
    (dict(state_dict=WEIGHTS, meta=META), {'beit_mm': json.dumps(META)}),
], ids=['flat', 'with meta'])
def test_safetensors_library_reads_it(tmp_path, content, metadata):
    path = tmp_path / 'w.safetensors'
    write_checkpoint(path, content)
    assert_same(load_file(path))
    with safetensors.safe_open(path, framework='pt') as file:
        assert file.metadata() == metadata


def test_torch_reads_it(tmp_path):
    """Attributes of tensors and state dicts, pickled, would be foreign objects to it."""
    weights = nn.BatchNorm2d(4).state_dict()
    weights['weight'].origin = contextlib.nullcontext()
    write_checkpoint(tmp_path / 'w.pth', dict(state_dict=weights, groups=[{'lr': 0.1}]))
    found = torch.load(tmp_path / 'w.pth', weights_only=True)
    assert_same(found['state_dict'], weights)
    assert found['groups'] == [{'lr': 0.1}]


@pytest.mark.parametrize('suffix', ['.pth', '.safetensors'])
def test_equal_content_gives_equal_files(tmp_path, suffix):
    """Whatever they are called: published files have their hash in their name."""
    paths = [tmp_path / f'{name}{suffix}' for name in ('a', 'b', 'c', 'd')]
    for path in paths:
        write_checkpoint(path, dict(state_dict=WEIGHTS, meta=META))
    assert len({path.read_bytes() for path in paths}) == 1


@pytest.mark.parametrize('suffix', ['.pth', '.safetensors'])
def test_permissions_are_those_of_other_new_files(tmp_path, suffix):
    (tmp_path / 'other').touch()
    write_checkpoint(tmp_path / f'w{suffix}', WEIGHTS)
    assert (tmp_path / f'w{suffix}').stat().st_mode == (tmp_path / 'other').stat().st_mode


@pytest.mark.parametrize('suffix', ['.pth', '.safetensors'])
def test_file_replaced_by_what_is_mapped_from_it(tmp_path, suffix):
    path = tmp_path / f'w{suffix}'
    first = dict(state_dict={name: torch.rand(1000, 100) for name in 'abc'}, meta={})
    write_checkpoint(path, first)
    mapped = read_checkpoint(path)
    changed = dict(c=mapped['state_dict']['a'], a=mapped['state_dict']['c'])
    write_checkpoint(path, dict(state_dict=changed, meta={}))
    assert_same(mapped['state_dict'], first['state_dict'])
    assert_same(read_checkpoint(path)['state_dict'],
                dict(c=first['state_dict']['a'], a=first['state_dict']['c']))


@contextlib.contextmanager
def files_of_at_most(size):
    """Like a full disk: the system refuses to write more."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize('suffix', ['.pth', '.safetensors'])
def test_full_disk_leaves_the_old_file(tmp_path, suffix):
    path = tmp_path / f'w{suffix}'
    write_checkpoint(path, WEIGHTS)
    before = path.read_bytes()
    with files_of_at_most(4 << 20), pytest.raises(OSError, match='File too large'):
        write_checkpoint(path, dict(w=torch.rand(2 << 20), v=torch.rand(3)))
    assert path.read_bytes() == before and os.listdir(tmp_path) == [path.name]


KILLED = '''
import os, signal, sys, torch
from beit_mm.checkpoint.writing import write_checkpoint
os.fsync = lambda _: os.kill(os.getpid(), signal.SIGKILL)  # when all is written
write_checkpoint(sys.argv[1], dict(w=torch.rand(1000)))
'''


def test_kill_leaves_the_old_file(tmp_path):
    path = tmp_path / 'w.pth'
    write_checkpoint(path, WEIGHTS)
    before = path.read_bytes()
    assert subprocess.run([sys.executable, '-c', KILLED, str(path)], cwd=ROOT).returncode == -signal.SIGKILL
    assert path.read_bytes() == before


@pytest.mark.parametrize(('name', 'content', 'said'), [
    ('w.ckpt', WEIGHTS, r'must end in \.pth, \.pt, \.bin, \.safetensors'),
    ('w', WEIGHTS, 'must end in'),
    ('w.safetensors', dict(state_dict=WEIGHTS, meta={'x': torch.ones(2)}), 'meta is not made of plain values'),
    ('w.safetensors', dict(state_dict=WEIGHTS, meta={}, optimizer={}), "'state_dict' is a dict; write a .pth"),
    ('w.safetensors', dict(w=torch.ones(2), epoch=3), "'epoch' is a int; write a .pth"),
    ('w.safetensors', dict(w=torch.ones(2, dtype=torch.complex64)), "'w' is torch.complex64"),
    ('w.safetensors', dict(w=torch.eye(2).to_sparse()), 'torch.sparse_coo'),
])
def test_what_cannot_be_written(tmp_path, name, content, said):
    with pytest.raises(CheckpointError, match=said) as caught:
        write_checkpoint(tmp_path / name, content)
    assert str(tmp_path / name) in str(caught.value)
    assert not os.listdir(tmp_path)

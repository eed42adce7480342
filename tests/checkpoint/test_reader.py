"""Files that hold weights are read whatever their form; programs with tricks, and files that are no
checkpoints at all, are refused by name."""
import argparse
import hashlib
import json
import pickle
import zipfile
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
import torch
from mmengine.config import ConfigDict
from safetensors.torch import save_file
from torch import nn

from beit_mm.checkpoint.errors import CheckpointError
from beit_mm.checkpoint.reader import file_sha256, read_checkpoint

WEIGHTS = {'a.w': torch.arange(6.0).view(2, 3), 'a.b': torch.tensor([1, 2]),
           'half': torch.ones(3, dtype=torch.bfloat16),
           'transposed': torch.arange(6.0).view(2, 3).t()}


def assert_same(found, expected=WEIGHTS):
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor)


# --- what is read ---------------------------------------------------------------------------------

@pytest.mark.parametrize('name', ['w.pth', 'w.bin', 'w.pkl'])
@pytest.mark.parametrize('zipped', [True, False])
def test_state_dict(tmp_path, name, zipped):
    torch.save({'state_dict': WEIGHTS, 'meta': {'epoch': 3}}, tmp_path / name,
               _use_new_zipfile_serialization=zipped)
    found = read_checkpoint(tmp_path / name)
    assert_same(found['state_dict'])
    assert found['meta'] == {'epoch': 3}


@pytest.mark.parametrize('zipped', [True, False])
def test_state_dict_of_a_module(tmp_path, zipped):
    """An OrderedDict with the attribute `_metadata`."""
    weights = nn.BatchNorm2d(4).state_dict()
    torch.save(weights, tmp_path / 'w.pth', _use_new_zipfile_serialization=zipped)
    assert_same(read_checkpoint(tmp_path / 'w.pth'), weights)


def test_optimizer_and_schedule(tmp_path):
    module = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(module.parameters())
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 5])
    module(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    run = {'model': module.state_dict(), 'optimizer': optimizer.state_dict(), 'schedule': schedule.state_dict(),
           'rng': torch.get_rng_state(), 'dtype': torch.float16}
    torch.save(run, tmp_path / 'run.pth')
    found = read_checkpoint(tmp_path / 'run.pth')
    assert_same(found['model'], run['model'])
    assert_same(found['optimizer']['state'][0], run['optimizer']['state'][0])
    assert found['schedule']['milestones'] == {3: 1, 5: 1} and found['dtype'] == 'float16'
    assert torch.equal(found['rng'], run['rng'])


def test_safetensors_under_any_name(tmp_path):
    weights = {name: tensor.contiguous() for name, tensor in WEIGHTS.items()}
    save_file(weights, tmp_path / 'w.pth')
    found = read_checkpoint(tmp_path / 'w.pth')
    assert_same({name: found[name] for name in weights}, weights)


@pytest.mark.parametrize('zipped', [True, False])
def test_whole_module_becomes_its_state_dict(tmp_path, zipped):
    norm = nn.BatchNorm2d(4)
    module = nn.Sequential(nn.Conv2d(3, 4, 3), norm, nn.Upsample(scale_factor=2), nn.Linear(4, 2))
    norm.register_buffer('scratch', torch.ones(2), persistent=False)
    module[3].weight = nn.Parameter(module[0].weight.detach().flatten()[2:10].view(2, 4))  # shared
    torch.save(module, tmp_path / 'm.pkl', _use_new_zipfile_serialization=zipped)
    assert_same(read_checkpoint(tmp_path / 'm.pkl'), module.state_dict())


def test_training_checkpoint_with_foreign_objects(tmp_path):
    """A run's file: mmengine's history buffers, numpy numbers, an argparse namespace."""
    from mmengine.logging import MessageHub
    hub = MessageHub('test_reader')
    hub.update_scalar('train/loss', np.float64(0.5))
    torch.save({'state_dict': WEIGHTS, 'message_hub': hub.state_dict(),
                'args': argparse.Namespace(lr=0.1)}, tmp_path / 'epoch_1.pth')
    found = read_checkpoint(tmp_path / 'epoch_1.pth')
    assert_same(found['state_dict'])
    assert found['args'] == {'lr': 0.1}


@pytest.mark.parametrize('meta', [{'epoch': 3, 'preprocessing': {'mean': [0.5, 1.5], 'size': None}}, {}])
def test_meta_in_safetensors(tmp_path, meta):
    path = tmp_path / 'w.safetensors'
    save_file({'w': torch.ones(2)}, path, {'format': 'pt', 'beit_mm': json.dumps(meta)})
    found = read_checkpoint(path)
    assert list(found) == ['state_dict', 'meta'] and found['meta'] == meta
    assert_same(found['state_dict'], {'w': torch.ones(2)})


def test_metadata_of_others_in_safetensors(tmp_path):
    path = tmp_path / 'w.safetensors'
    save_file({'w': torch.ones(2)}, path, {'format': 'pt', 'epoch': '3'})
    assert_same(read_checkpoint(path), {'w': torch.ones(2)})


@pytest.mark.parametrize(('text', 'said'), [
    ('{"epoch": ', 'no JSON'), ('[' * 100_000, 'no JSON'), ('[' + '9' * 10_000 + ']', 'no JSON'), ('[1]', 'no dict')])
def test_broken_meta_in_safetensors(tmp_path, text, said):
    path = tmp_path / 'w.safetensors'
    save_file({'w': torch.ones(2)}, path, {'beit_mm': text})
    with pytest.raises(CheckpointError, match=f"{path} is damaged: its metadata 'beit_mm' is {said}"):
        read_checkpoint(path)


def test_hash(tmp_path):
    torch.save(WEIGHTS, tmp_path / 'w.pth')
    digest = hashlib.sha256((tmp_path / 'w.pth').read_bytes()).hexdigest()
    assert file_sha256(tmp_path / 'w.pth') == digest
    read_checkpoint(tmp_path / 'w.pth', sha256=digest.upper())
    with pytest.raises(CheckpointError, match=f'has SHA-256 {digest}, expected 00ff'):
        read_checkpoint(tmp_path / 'w.pth', sha256='00ff')


# --- what is refused ------------------------------------------------------------------------------

def write(path, *opcodes):
    """A pickle written by hand, as torch.save would store it in a zip file."""
    with zipfile.ZipFile(path, 'w') as archive:
        archive.writestr('archive/data.pkl', b'\x80\x02' + b''.join(opcodes) + b'.')


# Hand-written programs: c = name, ( = mark, t = tuple, R = call, b = build, \x81 = new object.
REBUILD = b'ctorch._utils\n_rebuild_tensor_v2\n'
RECORD = b'cdall_e.encoder\nEncoder\n'
SET_X = b'}X\x01\x00\x00\x00xK\x01s'            # {'x': 1}
STORAGE = b'(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x04tQ'
SETSTATE = b'X\x0c\x00\x00\x00__setstate__'


@pytest.mark.parametrize('program', [
    [REBUILD, SET_X, b'b'],                                             # attributes of a function
    [REBUILD, b'N', SET_X, b'\x86b'],                                   # the same, as slots
    [b'ccollections\nOrderedDict\n', b'N', SET_X, b'\x86b'],
    [RECORD, b'N', SET_X, b'\x86b'],                                    # attributes of a class
    [RECORD, b')\x81', b'}', SETSTATE, REBUILD, b's', b'b', b')R'],     # call of a record
    [b'ccopyreg\n_reconstructor\n', b')R'],
    [b'cdall_e.encoder\nEncoder.__init__.__globals__\n', b')R', b')R'],
    [b'ctorch.nn.modules.container\nSequential\n', b')R', b')R'],
    [REBUILD, b'(K\x00K\x00K\x01\x85K\x01\x85\x89NtR'],                 # a tensor of no storage
    [REBUILD, b'(', STORAGE, b'))\x85)\x89NtR'],                        # a tensor whose offset is a tuple
    [b'X\x05\x00\x00\x00otherQ'],                                       # a persistent object
    [b'cbuiltins\ngetattr\nX\x04\x00\x00\x00textX\x06\x00\x00\x00format\x86R'],
])
def test_levers_of_the_pickle_machine_are_gone(tmp_path, program):
    path = tmp_path / 'weights.pkl'
    write(path, *program)
    with pytest.raises(CheckpointError, match=str(path)):
        read_checkpoint(path)


def test_replaced_setstate_is_never_called(tmp_path):
    """BUILD looks for `__setstate__` on the object: a record has no place to put one."""
    path = tmp_path / 'weights.pkl'
    eval_state = b'}' + SETSTATE + REBUILD + b's'
    write(path, b'}', b'X\x01\x00\x00\x00m', RECORD, b')\x81', eval_state, b'b', SET_X, b'b', b's')
    assert read_checkpoint(path) == {'m': {'x': 1}}


@pytest.mark.parametrize('offset', [5, 2**62])
def test_tensor_beyond_its_storage(tmp_path, offset):
    """A file that points outside its own numbers must not reach foreign memory."""
    torch.save(nn.Linear(4, 1, bias=False), tmp_path / 'm.pkl')
    code = (b'\x80\x02}X\x01\x00\x00\x00m' + RECORD + b')Rs' + b'X\x01\x00\x00\x00w' + REBUILD + b'(' + STORAGE
            + b'\x8a\x08' + offset.to_bytes(8, 'little') + b'K\x04\x85K\x01\x85\x89NtRs.')
    with zipfile.ZipFile(tmp_path / 'm.pkl') as archive:
        data = archive.read('m/data/0')
    with zipfile.ZipFile(tmp_path / 'bad.pkl', 'w') as archive:
        archive.writestr('m/data.pkl', code)
        archive.writestr('m/data/0', data)
    with pytest.raises(CheckpointError, match='storage'):
        read_checkpoint(tmp_path / 'bad.pkl')


# --- what is no checkpoint ------------------------------------------------------------------------

@pytest.mark.parametrize(('content', 'said'), [
    (b'', 'is empty'),
    (b'\n<!DOCTYPE html><html><body>404</body></html>', 'a web page'),
    (b'--2021-06-30 10:11:12--  https://host/encoder.pkl\nResolving host...', 'a log of wget'),
    (b'version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n', 'a git-lfs pointer'),
    (b'Access denied\n', "a text file beginning with 'Access denied'"),
    (b'cposix\nsystem\n(S"true"\ntR.', "a text file beginning with 'cposix'"),
    (b'\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x03', 'of an unknown kind'),
])
def test_named(tmp_path, content, said):
    path = tmp_path / 'encoder.pkl'
    path.write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        read_checkpoint(path)
    assert said in str(caught.value) and str(path) in str(caught.value)


@pytest.mark.parametrize('kind', ['zip', 'legacy', 'module', 'legacy module', 'safetensors'])
@pytest.mark.parametrize('part', [0.1, 0.5, 0.99])
def test_cut_short(tmp_path, kind, part):
    path = tmp_path / 'w.pth'
    if kind == 'safetensors':
        save_file({'w': torch.rand(1000)}, path)
    else:
        content = nn.Linear(50, 20) if 'module' in kind else {'w': torch.rand(1000)}
        torch.save(content, path, _use_new_zipfile_serialization='legacy' not in kind)
    whole = path.read_bytes()
    path.write_bytes(whole[:int(part * len(whole))])
    with pytest.raises(CheckpointError, match='cut short'):
        read_checkpoint(path)


def test_zip_archives_of_others(tmp_path):
    path = tmp_path / 'w.pth'
    with zipfile.ZipFile(path, 'w') as archive:
        archive.writestr('readme.txt', 'hello')
    with pytest.raises(CheckpointError, match='not a file of torch.save'):
        read_checkpoint(path)
    with zipfile.ZipFile(path, 'w', zipfile.ZIP_DEFLATED) as archive:
        archive.writestr('w/data.pkl', pickle.dumps('0' * 10**6))
    with pytest.raises(CheckpointError, match='is compressed'):
        read_checkpoint(path)


def test_not_a_dict(tmp_path):
    torch.save([torch.ones(2)], tmp_path / 'w.pth')
    with pytest.raises(CheckpointError, match='holds a list'):
        read_checkpoint(tmp_path / 'w.pth')


@pytest.mark.parametrize('legacy', [False, True])
def test_harmless_objects_beside_weights(tmp_path, legacy):
    """Paths, configs and defaults in a training script's file, and attributes on its tensors."""
    weight = torch.rand(3)
    weight.note = 'mine'
    content = dict(model=dict(weight=weight), folder=Path('runs'), counts=defaultdict(int, a=1),
                   cfg=ConfigDict(lr=0.1))
    torch.save(content, tmp_path / 'run.pth', _use_new_zipfile_serialization=not legacy)
    found = read_checkpoint(tmp_path / 'run.pth')
    assert torch.equal(found['model']['weight'], weight) and found['counts'] == dict(a=1)

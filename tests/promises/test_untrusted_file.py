"""Reading a file runs nothing in it, and what it says of itself is data: what asks for more is refused and named."""

import argparse
import copy
import pickle
import re
import shutil
import subprocess
import zipfile
from collections import OrderedDict
from pathlib import Path, PurePath

import numpy as np
import pytest
import torch
from helpers import put
from mmengine.config import ConfigDict
from mmengine.logging import HistoryBuffer
from mmengine.runner import load_checkpoint
from safetensors.torch import save_file

from beit_mm.checkpoint.checkpoint import load_from_file
from beit_mm.checkpoint.convert import convert_checkpoint
from beit_mm.checkpoint.read import STAND_INS, CheckpointError, read_checkpoint, write_checkpoint
from beit_mm.models import BEiTBackbone

ARCH = dict(embed_dims=8, num_layers=1, num_heads=2)
READERS = [
    read_checkpoint,
    lambda path: load_checkpoint(BEiTBackbone(ARCH), str(path)),  # load_from, --resume, init_cfg, mim
    lambda path: convert_checkpoint(path, path.with_suffix('.pth')),
]


class Calls:
    """Pickles as a call of `function`, and with a `state` for what it returns."""

    def __init__(self, function, *args, state=None):
        self.call = (function, args) if state is None else (function, args, state)

    def __reduce__(self):
        return self.call


def saved(path, content):
    torch.save(content, path)
    return path


def weights_of(**options):
    return {f'backbone.{name}': tensor for name, tensor in BEiTBackbone(ARCH, **options).state_dict().items()}


def refused(path, said):
    """Every reader refuses a file in one short line."""
    for reader in READERS:
        with pytest.raises(CheckpointError, match=said) as caught:
            reader(path)
        assert str(path) in str(caught.value) and len(str(caught.value)) < 600 and str(caught.value).isprintable()


def attack(command):
    return {'x': Calls(subprocess.Popen, ['sh', '-c', command])}


def foreign_encoder(command):
    """OpenAI's encoder.pkl with one foreign object between its weights."""
    encoder = pytest.importorskip('dall_e').Encoder(n_hid=8, vocab_size=16)
    encoder.blocks.input.hook = attack(command)
    return encoder


@pytest.mark.filterwarnings('ignore')
@pytest.mark.parametrize(
    ('make', 'container'), [(attack, 'zip'), (attack, 'legacy'), (attack, 'pickle'), (foreign_encoder, 'zip')]
)
def test_code_is_refused_and_not_run(tmp_path, make, container):
    victim, path = tmp_path / 'made_by_the_file', tmp_path / 'weights.pkl'
    content = make(f'touch {victim}')
    if container == 'pickle':
        path.write_bytes(pickle.dumps(content))
    else:  # protocol 2 would write the names that modules had in Python 2
        torch.save(content, path, pickle_protocol=3, _use_new_zipfile_serialization=container == 'zip')
    refused(path, 'subprocess.Popen' if container != 'pickle' else '')  # torch reads no bare pickle
    assert not victim.exists()
    # Otherwise the above would prove nothing: the same files run where nobody refuses them.
    found = pickle.loads(path.read_bytes()) if container == 'pickle' else torch.load(path, weights_only=False)
    (found if make is attack else found.blocks.input.hook)['x'].wait()
    assert victim.exists()


def test_nothing_of_a_library_is_allowed_beside_what_torch_allows():
    """Whatever else a file names, it gets a stand-in."""
    assert all(stand_in.__module__ == read_checkpoint.__module__ for stand_in in STAND_INS.values())


def test_what_others_allow_changes_nothing_and_stays_allowed(tmp_path):
    """A function that copies files, under its own name and under one that checkpoints have."""
    before, allowed = torch.serialization.get_safe_globals(), [shutil.copy, (shutil.copy, 'argparse.Namespace')]
    path = saved(tmp_path / 'w.pth', dict(args=argparse.Namespace(a=1)))
    attack = saved(tmp_path / 'attack.pth', dict(x=Calls(shutil.copy, str(path), str(tmp_path / 'copy'))))
    torch.serialization.add_safe_globals(allowed)
    try:
        assert read_checkpoint(path) == dict(args=dict(a=1))
        refused(attack, 'shutil.copy')
        assert not (tmp_path / 'copy').exists()
        assert {*torch.serialization.get_safe_globals()} == {*before, *allowed}
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(before)


@pytest.mark.parametrize('name', ['mc.py', 'w/mc.py', 'w/data/0.py', '../../w/version', 'w/data/\x1b[2J'])
def test_a_zip_file_holds_what_torch_writes_and_no_more(tmp_path, name):
    """Python imports modules out of zip files: a path in a config would be enough to run one."""
    path = saved(tmp_path / 'w.pth', {'w': torch.ones(3)})
    with zipfile.ZipFile(path, 'a') as archive:
        archive.writestr(name, 'import os')
    refused(path, re.escape(ascii(name)))


@pytest.mark.filterwarnings('ignore')
def test_only_dense_tensors_come_in(tmp_path):
    """Nobody compares the indices of a sparse tensor with its size: adding it would write anywhere in memory."""
    ones = torch.ones(2)
    sparse = torch.sparse_coo_tensor([[10**9], [0]], [1.0], (12, 2), check_invariants=False)
    quantized = torch.quantize_per_tensor(ones, 0.1, 0, torch.qint8)
    for tensor in (sparse, quantized, torch.nested.nested_tensor([ones, torch.ones(3)]), ones.to('meta')):
        path, content = tmp_path / 'w.pth', dict(state_dict=weights_of(), meta=[tensor])
        # torch 2.6 compares the indices itself, torch 2.13 knows no nested tensors
        refused(
            saved(path, content),
            'sparse, nested, quantized or without values|inconsistent with indices|nested_tensor; it is refused',
        )


SCALAR, RECONSTRUCT = np.float64(0).__reduce__()[0], np.zeros(0).__reduce__()[0]
INT = np.dtype('i8')
VOID = Calls(SCALAR, Calls(HistoryBuffer, state=dict(dtype='V20')), bytes(20))


def array_of(shape, kind, content):
    return Calls(RECONSTRUCT, np.ndarray, (0,), b'b', state=(1, shape, kind, False, content))


def history_of(**attributes):
    history = HistoryBuffer([1.0], [1])
    vars(history).update(attributes, mean=torch.Size)
    return history


HELD = [
    # objects in an array would be pointers that the file chooses
    ("NumPy type 'O'", Calls(SCALAR, Calls(np.dtype, 'O'), bytes(8))),
    ('byte order', array_of((1,), np.dtype('>i8'), bytes(8))),
    ('utf-32', array_of((1,), np.dtype('U2'), b'\xff' * 8)),
    ('utf-32', array_of((1,), np.dtype('U2'), b'\0\0\xfe\xff\0\0\0A')),  # begins with the mark of another byte order
    ('.', array_of((10**9,), INT, b'x')),  # more than there are bytes
    # a log history in the place of a dtype or a storage
    ('instead of a NumPy type', VOID),
    ('instead of a NumPy type', array_of((1,), VOID.call[1][0], bytes(20))),
    ('.', Calls(torch._utils._rebuild_tensor, Calls(HistoryBuffer, state=dict(dtype=torch.float64)), 0, (4,), (1,))),
]


@pytest.mark.parametrize(('said', 'content'), HELD)
def test_no_file_reaches_memory_that_is_not_its_own(tmp_path, said, content):
    refused(saved(tmp_path / 'w.pth', dict(meta=content)), f'is (refused|damaged).*{said}')


def test_the_state_of_a_numpy_type_is_not_believed(tmp_path):
    """Its fields and flags would make pointers of the bytes of numbers."""
    kind = Calls(np.dtype, 'f8', state=(3, '<', None, ('a',), {'a': (INT, 0)}, 8, 1, 63))
    content = [array_of((1,), kind, bytes(8)), Calls(SCALAR, kind, bytes(8))]
    found = read_checkpoint(saved(tmp_path / 'w.pth', dict(meta=content)))['meta']
    assert found == [0, 0] and not any(value.dtype.fields or value.dtype.hasobject for value in found)


@pytest.mark.parametrize('value', [set, OrderedDict, torch.Size, torch._utils._rebuild_tensor_v2, HistoryBuffer])
def test_functions_and_classes_are_no_content(tmp_path, value):
    """torch's reader hands out what it may call, also where nothing is called."""
    for content in (dict(state_dict=value), dict(state_dict=dict(w=value)), dict(meta=[{value: 1}])):
        refused(saved(tmp_path / 'w.pth', content), 'function, class or object')


def test_a_legacy_file_leaves_no_values_unset(tmp_path):
    """It names the storages whose values follow, and may leave one out."""
    path = tmp_path / 'w.pth'
    torch.save(dict(w=torch.full((7,), 42.0)), path, _use_new_zipfile_serialization=False)
    content = path.read_bytes()
    path.write_bytes(content[: content.rindex(b'\x80\x02]')] + b'\x80\x02].')
    assert not read_checkpoint(path)['w'].any()
    torch.save(dict(w=Calls(torch._utils._rebuild_tensor, torch.zeros(7).storage(), 0, (4000,), (1,))), path)
    refused(path, 'not resizable')


def test_a_small_file_takes_little_memory(tmp_path):
    """Values of a gigabyte, of a few bytes: expanded, compressed, or named by a file of torch before 1.6."""
    path, number = tmp_path / 'w.pth', 250_000_000
    refused(saved(path, dict(state_dict=dict(w=torch.zeros(1).expand(number)))), 'expanded')
    refused(saved(path, dict(state_dict={str(i): torch.zeros(1).expand(10**6) for i in range(20)})), 'expanded')
    buffers = dict(mask=torch.ones(4).expand(3, 4), half=torch.zeros(10)[::2])
    assert read_checkpoint(saved(path, buffers))['mask'].sum() == 12
    torch.save(dict(w=torch.zeros(3)), path, _use_new_zipfile_serialization=False)
    content, small = path.read_bytes(), b'cpuq\x06K\x03N'
    assert content.count(small) == 1
    path.write_bytes(content.replace(small, b'cpuq\x06J' + number.to_bytes(4, 'little') + b'N'))
    refused(path, 'larger storages')
    saved(path, dict(w=torch.zeros(10**6)))
    with zipfile.ZipFile(path) as archive, zipfile.ZipFile(tmp_path / 'x.pth', 'w', zipfile.ZIP_DEFLATED) as compressed:
        for name in archive.namelist():
            compressed.writestr(name, archive.read(name))
    refused(tmp_path / 'x.pth', 'would unpack to 4,000')


def test_what_a_file_sets_on_objects_is_taken_off(tmp_path):
    """An attribute would stand in the place of a method, as `get` of a state dict or `clone` of a tensor."""
    weights, parameter = OrderedDict(w=torch.ones(3)), torch.nn.Parameter(torch.ones(2))
    weights.get = parameter.clone = torch.Size
    weights._metadata = OrderedDict({'': dict(version=1)})
    weights['parameter'] = parameter
    hooks, state = OrderedDict({0: torch.Size}), dict(grad=torch.ones(2))
    weights['hooked'] = Calls(torch._utils._rebuild_parameter_with_state, parameter.data, True, hooks, state)
    content = read_checkpoint(saved(tmp_path / 'w.pth', dict(state_dict=weights, history=history_of())))
    assert type(content['history']) is HistoryBuffer and content['history'].mean() == 1
    found = content['state_dict']
    assert found.get('w') is found['w'] and [*found] == ['w', 'parameter', 'hooked']
    assert found._metadata == {'': dict(version=1)} and torch.equal(found['parameter'].clone(), torch.ones(2))
    assert found['hooked'].grad is None and found['hooked']._backward_hooks is None
    assert not vars(found['parameter']) and not vars(found['hooked'])
    weights._metadata = [1, 2]
    found = load_from_file(str(saved(tmp_path / 'w.pth', dict(state_dict=weights))))['state_dict']
    assert found._metadata.keys() == {'', 'backbone', 'module.backbone'}
    weights._metadata = {'': dict(version=torch._utils._rebuild_tensor_v2)}
    refused(saved(tmp_path / 'w.pth', dict(state_dict=weights)), 'function')


def test_what_a_file_names_is_printed_as_python_writes_it(tmp_path):
    for name in ('w\x1b]0;title\x07', 'w' * 400):
        refused(saved(tmp_path / 'w.pth', {name: torch.ones(2)}), 'it names a tensor')
        module = torch.nn.Sequential()
        module._parameters[name] = torch.nn.Parameter(torch.ones(2))
        refused(saved(tmp_path / 'module.pkl', module), 'it names a tensor')
        save_file({name: torch.ones(2)}, tmp_path / 'w.safetensors')
        refused(tmp_path / 'w.safetensors', 'it names a tensor')


def test_values_that_checkpoints_hold_beside_tensors(tmp_path):
    path, circle = tmp_path / 'w.pth', []
    circle.append(circle)
    content = dict(
        kinds=[torch.float16, torch.device('cpu'), torch.strided, torch.Size([1, 2]), 1j, {1, 2}, 2**70],
        path=Path('a/b'),
        config=ConfigDict(a=dict(b=ConfigDict(c=2))),
        args=argparse.Namespace(a=argparse.Namespace(b=1)),
        numbers=[np.float32(2), np.bool_(True), np.str_('text')],
    )
    found = read_checkpoint(saved(path, content))
    assert found == content | dict(args=dict(a=dict(b=1)), path=PurePath('a/b'))
    assert {type(found['args']), type(found['args']['a']), type(found['config']['a']['b'])} == {dict}
    arrays = [np.arange(6, dtype=code).reshape(2, 3) for code in 'bhilqBHILQefd'] + [np.array(['a', 'bcd'])]
    found = read_checkpoint(saved(path, argparse.Namespace(circle=circle, arrays=arrays)))
    assert type(found) is dict and found['circle'][0] is found['circle']
    for one, other in zip(torch.load(saved(path, found), weights_only=False)['arrays'], arrays, strict=True):
        assert type(one) is np.ndarray and one.dtype == other.dtype and np.array_equal(one, other)


def test_odd_content_is_one_line(tmp_path):
    weights = 'state_dict/backbone'
    for place, value in (
        ('state_dict', 'text'),
        (f'{weights}.patch_embed.proj.weight', torch.tensor(1)),
        (f'{weights}.blocks.0.mlp.fc1.bias', {1: 2}),
        (f'{weights}.blocks.{10**15}.norm1.weight', torch.zeros(8)),
    ):
        path = saved(tmp_path / 'w.pth', put(dict(state_dict=weights_of()), place, value))
        with pytest.raises(CheckpointError) as caught:
            convert_checkpoint(path, tmp_path / 'converted.pth')
        assert str(caught.value).isprintable() and len(str(caught.value)) < 700


def test_weights_that_are_no_numbers_are_no_weights(tmp_path):
    path, name = tmp_path / 'w.safetensors', 'blocks.0.mlp.fc1.weight'
    backbone, weights = BEiTBackbone(ARCH), BEiTBackbone(ARCH).state_dict()
    before = copy.deepcopy(backbone.state_dict())
    for value in (float('nan'), float('inf')):
        weights[name].view(-1)[-1] = value
        write_checkpoint(path, weights)
        with pytest.raises(CheckpointError, match=f'NaN or infinity: {name}'):
            load_checkpoint(backbone, str(path))
    assert all(torch.equal(before[name], tensor) for name, tensor in backbone.state_dict().items())
    weights[name].fill_(3e38)  # large is not infinite, though the sum is
    write_checkpoint(path, weights)
    load_checkpoint(backbone, str(path))

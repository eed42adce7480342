"""Reading a file runs nothing in it, and what it says of itself is data: what asks for more is refused and named."""

import argparse
import copy
import io
import os
import pickle
import subprocess
import zipfile
from collections import Counter, OrderedDict
from pathlib import Path, PurePath

import numpy as np
import pytest
import torch
from helpers import put
from mmengine.config import ConfigDict
from mmengine.logging import HistoryBuffer
from mmengine.runner import load_checkpoint

from beit_mm.apis.inferencers import ClassificationInferencer
from beit_mm.checkpoint.checkpoint import Checkpoint, load_from_file
from beit_mm.checkpoint.convert import convert_checkpoint
from beit_mm.checkpoint.names import IMAGENET
from beit_mm.checkpoint.read import ALLOWED, CheckpointError, check_content, read_checkpoint, write_checkpoint
from beit_mm.features.extractor import FeatureExtractor
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


def foreign_encoder(command):
    """OpenAI's encoder.pkl with one foreign object between its weights."""
    encoder = pytest.importorskip('dall_e').Encoder(n_hid=8, vocab_size=16)
    encoder.blocks.input.hook = Calls(os.system, command)
    return encoder


SYSTEM = f'{os.system.__module__}.system'
ATTACKS = {
    SYSTEM: lambda command: {'x': Calls(os.system, command)},
    'subprocess.Popen': lambda command: {'x': Calls(subprocess.Popen, ['sh', '-c', command])},
    # a second pickle inside the first, opened by torch itself
    'torch.storage._load_from_bytes': lambda command: Calls(
        torch.storage._load_from_bytes, saved(io.BytesIO(), Calls(os.system, command)).getvalue()
    ),
}


@pytest.mark.filterwarnings('ignore')
@pytest.mark.parametrize('container', ['zip', 'legacy', 'pickle'])
@pytest.mark.parametrize(('asked_for', 'attack'), [*ATTACKS.items(), (SYSTEM, foreign_encoder)])
def test_code_is_refused_and_not_run(tmp_path, asked_for, attack, container):
    victim, path = tmp_path / 'made_by_the_file', tmp_path / 'weights.pkl'
    content = attack(f'touch {victim}')
    if container == 'pickle':
        path.write_bytes(pickle.dumps(content))
    else:  # protocol 2 would write the names that modules had in Python 2
        torch.save(content, path, pickle_protocol=3, _use_new_zipfile_serialization=container == 'zip')
    # torch's reader stops at the container of a bare pickle and of a whole module in a legacy file
    met = container == 'zip' or container == 'legacy' and attack is not foreign_encoder
    refused(path, rf'it asks for {asked_for}\.' if met else '')
    assert not victim.exists()
    # Otherwise the above would prove nothing: the same files run where nobody refuses them.
    found = pickle.loads(path.read_bytes()) if container == 'pickle' else torch.load(path, weights_only=False)
    if asked_for == 'subprocess.Popen':
        found['x'].wait()
    assert victim.exists()


CALLED = """
    mmengine.logging.history_buffer.HistoryBuffer mmengine.config.config.ConfigDict argparse.Namespace
    collections.Counter collections.OrderedDict builtins.bytearray builtins.complex builtins.getattr builtins.set
    _codecs.encode torch.Size torch.Tensor torch.device torch.serialization._get_layout numpy.dtype numpy.ndarray
    torch._tensor._rebuild_from_type_v2 torch._utils._rebuild_tensor torch._utils._rebuild_tensor_v2
    torch._utils._rebuild_tensor_v3 torch._utils._rebuild_parameter torch._utils._rebuild_parameter_with_state
    numpy.core.multiarray.scalar numpy.core.multiarray._reconstruct numpy._core.multiarray.scalar
    numpy._core.multiarray._reconstruct pathlib.PosixPath pathlib.WindowsPath pathlib._local.PosixPath
    pathlib._local.WindowsPath dall_e.encoder.Encoder dall_e.encoder.EncoderBlock dall_e.decoder.Decoder
    dall_e.decoder.DecoderBlock dall_e.utils.Conv2d torch.nn.modules.activation.ReLU torch.nn.modules.conv.Conv2d
    torch.nn.modules.container.Sequential torch.nn.modules.linear.Identity torch.nn.modules.pooling.MaxPool2d
    torch.nn.modules.upsampling.Upsample
""".split()


def test_what_may_be_called_is_a_short_list():
    names = {name for name, kind in ALLOWED.items() if isinstance(kind, (torch.dtype, torch.serialization.StorageType))}
    assert ALLOWED.keys() - names == set(CALLED)
    # what a file can build or set attributes on: no class of a library but these, which have none or are looked at
    classes = {kind for kind in ALLOWED.values() if isinstance(kind, type) and 'beit_mm' not in kind.__module__}
    assert classes == {OrderedDict, torch.Size, torch.device, bytearray, complex, set, PurePath}


@pytest.mark.parametrize('name', ['mc.py', 'w/mc.py', 'w/data/0.py', '../../w/version', 'w/data/\x1b[2J'])
def test_a_zip_file_holds_what_torch_writes_and_no_more(tmp_path, name):
    """Python imports modules out of zip files: a path in a config would be enough to run one."""
    path = saved(tmp_path / 'w.pth', {'w': torch.ones(3)})
    with zipfile.ZipFile(path, 'a') as archive:
        archive.writestr(name, 'import os')
    refused(path, 'it holds ' + ascii(name).replace('\\', r'\\').replace('[', r'\['))


@pytest.mark.filterwarnings('ignore')
def test_only_dense_tensors_come_in(tmp_path):
    """Nobody compares the indices of a sparse tensor with its size: adding it would write anywhere in memory."""
    for tensor in (
        torch.sparse_coo_tensor([[10**9], [0]], [1.0], (12, 2), check_invariants=False),
        torch.eye(3).to_sparse_csr(),
        torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
        torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        torch.empty(3, device='meta'),
    ):
        path, content = tmp_path / 'w.pth', dict(state_dict=weights_of(), meta=[tensor])
        refused(saved(path, content), r'it asks for torch\._utils\._rebuild_(sparse_|q|nested_|meta_)tensor')
        with pytest.raises(CheckpointError, match='it holds a tensor that is sparse, nested, quantized or without'):
            check_content(content)  # where another way led to it


SCALAR, RECONSTRUCT = np.float64(0).__reduce__()[0], np.zeros(0).__reduce__()[0]
INT = np.dtype('i8')
SPARSE = torch.sparse_coo_tensor([[10**12]], [42.0], (4,), check_invariants=False)
ELSEWHERE = {'__array_interface__': dict(data=(16, True), shape=(4,), typestr='|u1', version=3)}  # an address
VOID = Calls(SCALAR, Calls(HistoryBuffer, state=dict(dtype='V20')), bytes(20))


def array_of(shape, kind, content):
    return Calls(RECONSTRUCT, np.ndarray, (0,), b'b', state=(1, shape, kind, False, content))


def history_of(**attributes):
    history = HistoryBuffer([1.0], [1])
    vars(history).update(attributes, mean=torch.Size)
    return history


def with_attributes(value, *attributes):
    """What torch's reader makes of a value and the attributes that a file sets on it."""
    return Calls(type(value), dict(value), state=attributes if len(attributes) > 1 else attributes[0])


HELD = [
    # objects in an array would be pointers that the file chooses
    ("a NumPy type 'O'", Calls(SCALAR, Calls(np.dtype, 'O'), bytes(8))),
    (r"a NumPy type '\(10", Calls(SCALAR, Calls(np.dtype, '(1000000000,)i8'), b'x')),
    ('expected string or bytes-like object', Calls(np.dtype, [('a', 'O')])),
    ('.', array_of((10**9,), INT, b'x')),  # more than there are bytes
    ('byte order', array_of((1,), np.dtype('>i8'), bytes(8))),
    ('utf-32', array_of((1,), np.dtype('U2'), b'\xff' * 8)),
    # dense + sparse would write 42 at any address: the update of a ConfigDict calls that of the Counter in it
    ('.', with_attributes(ConfigDict(k=Counter(a=SPARSE)), dict(k=dict(a=torch.zeros(4))))),
    (
        '.',
        Calls(
            torch._tensor._rebuild_from_type_v2,
            *(HistoryBuffer, HistoryBuffer, (), dict(_statistics_methods=Counter(a=SPARSE))),
            state=dict(statistics_methods=dict(a=torch.zeros(4))),
        ),
    ),
    ('.', with_attributes(Counter(a=1), ELSEWHERE, {'__class__': ConfigDict})),
    # a log history that lies elsewhere, with text, in the place of a dtype or a storage
    ('.', Calls(HistoryBuffer, with_attributes(OrderedDict(), ELSEWHERE), {})),
    ('more than numbers', history_of(_log_history=np.array(['1']))),
    ('in the place of a PickledType', VOID),
    ('in the place of a PickledType', array_of((1,), VOID.call[1][0], bytes(20))),
    (
        'in the place of a TypedStorage',
        Calls(torch._utils._rebuild_tensor, Calls(HistoryBuffer, state=dict(dtype=torch.float64)), 0, (4,), (1,)),
    ),
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
        refused(saved(tmp_path / 'w.pth', content), rf"holds the function, class or object '\S+\.{value.__name__[:15]}")


def test_a_legacy_file_leaves_no_values_unset(tmp_path):
    """It names the storages whose values follow, and may leave one out."""
    path = tmp_path / 'w.pth'
    torch.save(dict(w=torch.full((7,), 42.0)), path, _use_new_zipfile_serialization=False)
    content = path.read_bytes()
    path.write_bytes(content[: content.rindex(b'\x80\x02]')] + b'\x80\x02].')
    assert not read_checkpoint(path)['w'].any()
    torch.save(dict(w=Calls(torch._utils._rebuild_tensor, torch.zeros(7).storage(), 0, (4000,), (1,))), path)
    refused(path, 'not resizable')


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
    assert found['hooked'].grad is None and found['hooked']._backward_hooks is None and found['hooked'].requires_grad
    check_content(dict(w=parameter))  # where another way led to it
    assert not vars(parameter)
    weights._metadata = [1, 2]
    found = load_from_file(str(saved(tmp_path / 'w.pth', dict(state_dict=weights))))['state_dict']
    assert found._metadata.keys() == {'', 'backbone', 'module.backbone'}


def test_what_a_file_names_is_printed_as_python_writes_it(tmp_path):
    path = tmp_path / 'w.pth'
    for name in ('w\x1b]0;title\x07', 'w' * 400):
        refused(saved(path, {name: torch.ones(2)}), 'it names a tensor')
    with zipfile.ZipFile(path, 'w') as archive:
        archive.writestr('w/version', '3\n')
        archive.writestr('w/data.pkl', b'\x80\x02cos\x1b]0;x\x07\nsystem\n.')
    refused(path, r'it asks for os\\x1b\]0;x\\x07\.system')
    with pytest.raises(CheckpointError, match=r"has format '\\x1b"):
        Checkpoint.open(saved(path, dict(w=torch.ones(1), meta=dict(beit_mm_format='\x1b'))))


def test_a_pipe_is_no_checkpoint(tmp_path):
    os.mkfifo(tmp_path / 'w.pth')
    with pytest.raises(CheckpointError, match='is no file'):
        read_checkpoint(tmp_path / 'w.pth')


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


# Of a BEiT of 32 x 32 pixels: where something odd stands, and what, beside ODD
ODD = 'text', {1: 2}, torch.tensor(1), torch.zeros(0)
LEVELS = [dict(mean=[1, 2], size=[-1, 5]), dict(std=[1, 0, 1]), dict(std=[-1.0]), dict(mean=[1] * 4, std=[1]), [1]]
LEVELS += [dict(mean='0.5', std=[float('nan')], size=[224]), dict(mean=[[1], 2], size=[float('inf')] * 2)]
PLACES = dict.fromkeys(
    f"""
    state_dict meta meta/dataset_meta meta/config_dict meta/dataset_meta/classes
    state_dict/backbone.patch_embed.proj.weight state_dict/backbone.blocks.0.mlp.fc1.bias
    state_dict/backbone.blocks.{10**15}.norm1.weight state_dict/5
    """.split(),
    (),
)
PLACES |= {'meta/preprocessing': LEVELS, 'meta/preprocessing/size': [[16_000] * 2]}
PLACES |= {'meta/architecture/num_heads': [-2, 3, [2]]}
OPENERS = [
    *READERS,
    lambda path: convert_checkpoint(path, path.with_suffix(''), 'hf'),
    lambda path: FeatureExtractor(path, 'cpu'),
    lambda path: ClassificationInferencer(path, 'cpu'),
]


@pytest.mark.filterwarnings('ignore')
@pytest.mark.parametrize('place', PLACES)
def test_odd_content_is_one_line(tmp_path, place):
    """Or of no use to the reader, which then does without; sizes are those of the tensors."""
    weights = weights_of(img_size=32) | {'head.fc.weight': torch.ones(3, 8), 'head.fc.bias': torch.ones(3)}
    meta = dict(preprocessing=dict(IMAGENET, size=[32, 32]), architecture=dict(num_heads=2))
    content = dict(state_dict=weights, meta=dict(meta, dataset_meta=dict(classes=['a', 'b', 'c'])))
    for value in (*ODD, *PLACES[place]):
        path = saved(tmp_path / 'w.pth', put(content, place, value))
        for opener in OPENERS:
            try:
                found = opener(path)
            except ValueError as error:
                assert isinstance(error, CheckpointError) or 'give another' in str(error)
                assert '\n' not in str(error) and len(str(error)) < 700
            else:
                if isinstance(found, FeatureExtractor):
                    assert found.backbone.grid == (2, 2) and found.mean.isfinite().all() and (found.std > 0).all()


def test_weights_that_are_no_numbers_are_no_weights(tmp_path):
    path, name = tmp_path / 'w.safetensors', 'blocks.0.mlp.fc1.weight'
    backbone, weights = BEiTBackbone(ARCH), BEiTBackbone(ARCH).state_dict()
    before = copy.deepcopy(backbone.state_dict())
    for value in (float('nan'), float('inf')):
        weights[name].view(-1)[-1] = value
        write_checkpoint(path, weights)
        with pytest.raises(CheckpointError, match=f'1 of .* tensors hold NaN or infinity: {name}. Nothing was loaded'):
            load_checkpoint(backbone, str(path))
    assert all(torch.equal(before[name], tensor) for name, tensor in backbone.state_dict().items())
    weights[name].fill_(3e38)  # large is not infinite, though the sum is
    write_checkpoint(path, weights)
    load_checkpoint(backbone, str(path))

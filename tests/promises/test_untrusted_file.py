"""Reading a file runs nothing in it, and what it says of itself is data.

Files that want to run code are refused, and say what they asked for; so are archives of other things.
"""

import argparse
import io
import os
import pickle
import subprocess
import tracemalloc
import zipfile
from collections import Counter, OrderedDict
from pathlib import Path, PurePath

import numpy as np
import pytest
import torch
from mmengine.config import ConfigDict
from mmengine.logging import HistoryBuffer
from mmengine.runner import load_checkpoint

from beit_mm.apis.inferencers import ClassificationInferencer
from beit_mm.checkpoint.checkpoint import Checkpoint, load_from_file
from beit_mm.checkpoint.convert import convert_checkpoint
from beit_mm.checkpoint.names import IMAGENET, describe_source
from beit_mm.checkpoint.read import ALLOWED, CheckpointError, UnsafeCheckpointError, read_checkpoint, write_checkpoint
from beit_mm.features.extractor import FeatureExtractor
from beit_mm.models import BEiTBackbone

ARCH = dict(embed_dims=8, num_layers=1, num_heads=2)
READERS = {
    'read_checkpoint': read_checkpoint,
    # load_from, --resume, init_cfg, mim
    'mmengine': lambda path: load_checkpoint(BEiTBackbone(ARCH), str(path)),
    'convert_checkpoint': lambda path: convert_checkpoint(path, path.with_suffix('.pth')),
}


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
    for reader in READERS.values():
        with pytest.raises(CheckpointError, match=said) as caught:
            reader(path)
        assert str(path) in str(caught.value) and len(str(caught.value)) < 600 and str(caught.value).isprintable()


# --- code -----------------------------------------------------------------------------------------


def system(command):
    return {'x': Calls(os.system, command)}


def evaluated(command):
    return Calls(eval, f'__import__("os").system({command!r})')


def nested(command):
    """A second pickle inside the first, opened by torch itself."""
    return Calls(torch.storage._load_from_bytes, saved(io.BytesIO(), Calls(os.system, command)).getvalue())


def foreign_encoder(command):
    """OpenAI's encoder.pkl with one foreign object between its weights."""
    encoder = pytest.importorskip('dall_e').Encoder(n_hid=8, vocab_size=16)
    encoder.blocks.input.hook = Calls(os.system, command)
    return encoder


SYSTEM = f'{os.system.__module__}.system'
ATTACKS = {system: SYSTEM, evaluated: 'builtins.eval', nested: 'torch.storage._load_from_bytes'}
ATTACKS[foreign_encoder] = SYSTEM


@pytest.mark.filterwarnings('ignore')
@pytest.mark.parametrize('container', ['zip', 'legacy', 'pickle'])
@pytest.mark.parametrize(('attack', 'asked_for'), ATTACKS.items())
def test_code_is_refused_and_not_run(tmp_path, attack, container, asked_for):
    victim, path = tmp_path / 'made_by_the_file', tmp_path / 'weights.pkl'
    content = attack(f'touch {victim}')
    if container == 'pickle':
        path.write_bytes(pickle.dumps(content))
    else:
        torch.save(content, path, _use_new_zipfile_serialization=container == 'zip')
    # torch's reader stops at the container of a bare pickle and of a whole module in a legacy file
    met = container == 'zip' or container == 'legacy' and attack is not foreign_encoder
    refused(path, rf'it asks for {asked_for}\.' if met else '')
    assert not victim.exists()
    # Otherwise the above would prove nothing: the same files run where nobody refuses them.
    pickle.loads(path.read_bytes()) if container == 'pickle' else torch.load(path, weights_only=False)
    assert victim.exists()


def test_a_file_starts_no_process(tmp_path):
    path, victim = tmp_path / 'weights.pth', tmp_path / 'made_by_the_file'
    # protocol 2 would write the module's name of Python 2
    torch.save(dict(x=Calls(subprocess.Popen, ['touch', str(victim)])), path, pickle_protocol=3)
    for reader in READERS.values():
        with pytest.raises(UnsafeCheckpointError, match='it asks for subprocess.Popen'):
            reader(path)
    assert torch.load(path, weights_only=False)['x'].wait() == 0 and victim.exists()


def test_what_may_be_called_is_a_short_list():
    """Names of dtypes and storages, a few of torch's and Python's, and stand-ins for what checkpoints name."""
    dall_e = {'dall_e.decoder.Decoder', 'dall_e.decoder.DecoderBlock', 'dall_e.encoder.Encoder', 'dall_e.utils.Conv2d'}
    modules = ('activation.ReLU', 'container.Sequential', 'conv.Conv2d', 'linear.Identity', 'pooling.MaxPool2d')
    paths = {f'{module}.{kind}Path' for module in ('pathlib', 'pathlib._local') for kind in ('Posix', 'Windows')}
    names = {name for name, kind in ALLOWED.items() if isinstance(kind, (torch.dtype, torch.serialization.StorageType))}
    assert ALLOWED.keys() - names == {
        'mmengine.logging.history_buffer.HistoryBuffer',
        'mmengine.config.config.ConfigDict',
        'argparse.Namespace',
        'collections.Counter',
        'collections.OrderedDict',
        *(f'builtins.{name}' for name in ('bytearray', 'complex', 'getattr', 'set')),
        '_codecs.encode',
        'torch.Size',
        'torch.Tensor',
        'torch.device',
        'torch.serialization._get_layout',
        'torch._tensor._rebuild_from_type_v2',
        *(f'torch._utils._rebuild_{name}' for name in ('tensor', 'tensor_v2', 'tensor_v3')),
        *(f'torch._utils._rebuild_{name}' for name in ('parameter', 'parameter_with_state')),
        'numpy.dtype',
        'numpy.ndarray',
        *(f'numpy.{core}.multiarray.{name}' for core in ('core', '_core') for name in ('scalar', '_reconstruct')),
        *(dall_e | {'dall_e.encoder.EncoderBlock', 'torch.nn.modules.upsampling.Upsample'}),
        *(f'torch.nn.modules.{name}' for name in modules),
        *paths,
    }
    # what a file can build or set attributes on: no class of a library but these, which have none or are looked at
    classes = {kind for kind in ALLOWED.values() if isinstance(kind, type) and 'beit_mm' not in kind.__module__}
    assert classes == {OrderedDict, torch.Size, torch.device, bytearray, complex, set, PurePath}


# --- what a file may hold -------------------------------------------------------------------------


@pytest.mark.parametrize('name', ['mc.py', 'w/mc.py', 'w/data/0.py', '../../w/version', 'w/data/\x1b[2J'])
def test_a_zip_file_holds_what_torch_writes_and_no_more(tmp_path, name):
    """Python imports modules out of zip files: a path in a config would be enough to run one."""
    path = saved(tmp_path / 'w.pth', {'w': torch.ones(3)})
    with zipfile.ZipFile(path, 'a') as archive:
        archive.writestr(name, 'import os')
    refused(path, 'it holds ' + ascii(name).replace('\\', r'\\').replace('[', r'\['))


@pytest.mark.filterwarnings('ignore')
@pytest.mark.parametrize(
    'make',
    [
        lambda: torch.sparse_coo_tensor([[10**9], [0]], [1.0], (12, 2), check_invariants=False),
        lambda: torch.eye(3).to_sparse_csr(),
        lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        lambda: torch.empty(3, device='meta'),
    ],
    ids=['coo', 'csr', 'quantized', 'nested', 'meta'],
)
def test_only_dense_tensors_come_in(tmp_path, make):
    """Nobody compares the indices of a sparse tensor with its size: adding it would write anywhere in memory."""
    table = {'backbone.rel_pos_bias.relative_position_bias_table': make()}
    for content in (weights_of() | table, dict(meta=[make()])):
        path = saved(tmp_path / 'w.pth', dict(state_dict=content))
        refused(path, r'it asks for torch\._utils\._rebuild_(sparse_|q|nested_|meta_)tensor')


SCALAR, RECONSTRUCT = np.float64(0).__reduce__()[0], np.zeros(0).__reduce__()[0]
INT = np.dtype('i8')
SPARSE = torch.sparse_coo_tensor([[10**12]], [42.0], (4,), check_invariants=False)
ELSEWHERE = {'__array_interface__': dict(data=(16, True), shape=(4,), typestr='|u1', version=3)}  # an address
VOID = Calls(SCALAR, Calls(HistoryBuffer, state=dict(dtype='V20')), bytes(20))


def array_of(*state):
    return Calls(RECONSTRUCT, np.ndarray, (0,), b'b', state=state)


def history_of(*numbers):
    history = HistoryBuffer([1.0], [1])
    history.mean = torch.Size
    history._log_history = list(numbers) or history._log_history
    return history


def with_attributes(value, attributes, *slots):
    """What torch's reader makes of a value and the attributes that a file sets on it."""
    return Calls(type(value), dict(value), state=(attributes, *slots) if slots else attributes)


HELD = {
    # objects in an array would be pointers that the file chooses
    'a void type': Calls(SCALAR, np.dtype('V20')),
    'an object': Calls(SCALAR, Calls(np.dtype, 'O')),
    'a type with a shape': Calls(SCALAR, Calls(np.dtype, '(1000000000,)i8'), b'x'),
    'a record': Calls(np.dtype, [('a', 'O')]),
    'more than the bytes': array_of(1, (10**9,), INT, False, b'x'),
    'an array of objects': array_of(1, (2,), np.dtype('O'), False, [0, 0]),
    'the other byte order': array_of(1, (1,), np.dtype('>i8'), False, bytes(8)),
    'a large array': Calls(np.ndarray, (4 * 10**8,), 'O'),
    'no characters': Calls(SCALAR, np.dtype('U2'), b'\xff' * 8),
    'an array of no characters': array_of(1, (1,), np.dtype('U2'), False, b'\xff' * 8),
    # dense + sparse would write 42 at any address: the update of a ConfigDict calls that of the Counter in it
    'write by ConfigDict': with_attributes(ConfigDict(k=Counter(a=SPARSE)), dict(k=dict(a=torch.zeros(4)))),
    'write by HistoryBuffer': Calls(
        torch._tensor._rebuild_from_type_v2,
        *(HistoryBuffer, HistoryBuffer, (), dict(_statistics_methods=Counter(a=SPARSE))),
        state=dict(statistics_methods=dict(a=torch.zeros(4))),
    ),
    'update of ConfigDict': with_attributes(ConfigDict(k=Counter(a=torch.zeros(4))), dict(k=dict(a=torch.ones(4)))),
    'read by HistoryBuffer': Calls(HistoryBuffer, with_attributes(OrderedDict(), ELSEWHERE), {}),
    'storage': Calls(torch.UntypedStorage, 16, state=ELSEWHERE),
    'another class': with_attributes(Counter(a=1), ELSEWHERE, {'__class__': ConfigDict}),
    'a dtype of a history': VOID,
    'a dtype of a scalar': array_of(1, (1,), VOID, False, bytes(20)),
    'a storage of a history': Calls(
        torch._utils._rebuild_tensor,
        Calls(HistoryBuffer, state=dict(_untyped_storage=Calls(torch.UntypedStorage, 8), dtype=torch.float64)),
        *(0, (4,), (1,)),
    ),
    'memory by Tensor': Calls(torch.Tensor, 64),
    'memory by UntypedStorage': Calls(bytearray, Calls(torch.UntypedStorage, 64)),
    'numbers that are none': history_of(torch.Size),
}


@pytest.mark.parametrize('content', HELD.values(), ids=HELD.keys())
def test_no_file_reaches_memory_that_is_not_its_own(tmp_path, content):
    refused(saved(tmp_path / 'w.pth', dict(meta=content)), 'is refused|is damaged')


def test_the_state_of_a_numpy_type_is_not_believed(tmp_path):
    """Its fields and flags would make pointers of the bytes of numbers."""
    kind = Calls(np.dtype, 'f8', state=(3, '<', None, ('a',), {'a': (INT, 0)}, 8, 1, 63))
    content = [array_of(1, (1,), kind, False, bytes(8)), Calls(SCALAR, kind, bytes(8))]
    found = read_checkpoint(saved(tmp_path / 'w.pth', dict(meta=content)))['meta']
    assert all(type(value.dtype) is type(np.dtype('f8')) and value.dtype.fields is None for value in found)
    assert not any(value.dtype.hasobject for value in found) and found == [0, 0]


@pytest.mark.parametrize('value', [set, OrderedDict, torch.Size, torch._utils._rebuild_tensor_v2, HistoryBuffer])
def test_functions_and_classes_are_no_content(tmp_path, value):
    """torch's reader hands out what it may call, also where nothing is called."""
    for content in (dict(state_dict=value), dict(state_dict=dict(w=value)), dict(meta=[{value: 1}])):
        refused(saved(tmp_path / 'w.pth', content), rf"holds the function, class or object '\S+\.{value.__name__[:15]}")


def test_a_history_has_the_methods_of_its_class(tmp_path):
    """Attributes of an object stand before them."""
    history = read_checkpoint(saved(tmp_path / 'w.pth', dict(history=history_of())))['history']
    assert type(history) is HistoryBuffer and history.mean() == 1


def test_a_legacy_file_leaves_no_values_unset(tmp_path):
    """It names the storages whose values follow, and may leave one out."""
    path = tmp_path / 'w.pth'
    torch.save(dict(w=torch.full((7,), 42.0)), path, _use_new_zipfile_serialization=False)
    content = path.read_bytes()
    path.write_bytes(content[: content.rindex(b'\x80\x02]')] + b'\x80\x02].')
    assert not read_checkpoint(path)['w'].any()
    torch.save(dict(w=Calls(torch._utils._rebuild_tensor, torch.zeros(7).storage(), 0, (4000,), (1,))), path)
    refused(path, 'not resizable')


def test_what_a_file_sets_on_dicts_and_tensors_is_taken_off(tmp_path):
    """An attribute would stand in the place of a method, as `get` of a state dict or `clone` of a tensor."""
    weights, parameter, path = OrderedDict(w=torch.ones(3)), torch.nn.Parameter(torch.ones(2)), tmp_path / 'w.pth'
    weights.get = parameter.clone = torch.Size
    weights._metadata = OrderedDict({'': dict(version=1)})
    weights['parameter'] = parameter
    hooks, state = OrderedDict({0: torch.Size}), dict(grad=torch.ones(2))
    weights['hooked'] = Calls(torch._utils._rebuild_parameter_with_state, parameter.data, True, hooks, state)
    found = read_checkpoint(saved(path, dict(state_dict=weights)))['state_dict']
    assert found.get('w') is found['w'] and [*found] == ['w', 'parameter', 'hooked']
    assert found._metadata == {'': dict(version=1)} and torch.equal(found['parameter'].clone(), torch.ones(2))
    assert found['hooked'].grad is None and found['hooked']._backward_hooks is None and found['hooked'].requires_grad
    weights._metadata = [1, 2]
    found = load_from_file(str(saved(path, dict(state_dict=weights))))['state_dict']
    assert found._metadata.keys() == {'', 'backbone', 'module.backbone'}


@pytest.mark.parametrize('name', ['w\x1b]0;title\x07', 'w' * 400])
def test_names_of_tensors_can_be_printed(tmp_path, name):
    refused(saved(tmp_path / 'w.pth', {name: torch.ones(2)}), 'it names a tensor')


def test_what_a_refused_file_says_is_printed_as_python_writes_it(tmp_path):
    path = tmp_path / 'w.pth'
    with zipfile.ZipFile(path, 'w') as archive:
        archive.writestr('w/version', '3\n')
        archive.writestr('w/data.pkl', b'\x80\x02cos\x1b]0;x\x07\nsystem\n.')
    refused(path, r'it asks for os\\x1b\]0;x\\x07\.system')
    with pytest.raises(CheckpointError, match=r"has format '\\x1b") as caught:
        Checkpoint.open(saved(path, dict(w=torch.ones(1), meta=dict(beit_mm_format='\x1b'))))
    assert str(caught.value).isprintable()


def test_a_pipe_is_no_checkpoint(tmp_path):
    os.mkfifo(tmp_path / 'w.pth')
    with pytest.raises(CheckpointError, match='is no file'):
        read_checkpoint(tmp_path / 'w.pth')


# --- what true files hold -------------------------------------------------------------------------


def test_values_that_checkpoints_hold_beside_tensors(tmp_path):
    content = dict(
        kinds=[torch.float16, torch.device('cpu'), torch.strided, torch.Size([1, 2]), 1j, {1, 2}, 2**70],
        milestones=Counter([3, 3]),
        path=Path('a/b'),
        config=ConfigDict(a=dict(b=ConfigDict(c=2))),
        args=argparse.Namespace(a=1),
        number=np.float32(2),
    )
    found = read_checkpoint(saved(tmp_path / 'w.pth', content))
    assert found == content | dict(args=dict(a=1), path=PurePath('a/b'))
    assert type(found['milestones']) is Counter and {type(found['args']), type(found['config']['a']['b'])} == {dict}
    deep = dict(list=[argparse.Namespace(a=argparse.Namespace(b=np.ones(2)))])
    inner = read_checkpoint(saved(tmp_path / 'w.pth', deep))['list'][0]['a']
    assert type(inner) is dict and type(inner['b']) is np.ndarray
    assert type(read_checkpoint(saved(tmp_path / 'w.pth', argparse.Namespace(a=1)))) is dict


def test_numbers_of_numpy_are_read_and_written_again(tmp_path):
    numbers = [np.dtype(code).type(1) for code in '?bhilBHILefd'] + [np.str_('text')]
    arrays = [np.arange(6, dtype=code).reshape(2, 3) for code in 'bhilqBHILQefd']
    arrays += [np.array(['a', 'bcd']), np.array(3.5), np.asfortranarray(np.arange(6.0).reshape(2, 3))]
    path, content = tmp_path / 'w.pth', dict(numbers=numbers, arrays=arrays)
    for _ in range(2):
        content = read_checkpoint(saved(path, content))
        for found, value in zip(content['numbers'], numbers, strict=True):
            assert type(found) is type(value) and found == value
        for found, value in zip(content['arrays'], arrays, strict=True):
            assert found.dtype == value.dtype and np.array_equal(found, value)
    assert all(type(array) is np.ndarray for array in torch.load(path, weights_only=False)['arrays'])


def test_shared_weights_long_logs_and_values_that_hold_themselves_are_read(tmp_path):
    """Also small expanded buffers, and the names of 22,000 classes."""
    shared, circle = torch.rand(1000, 1000), []
    circle.append(circle)
    names = [f'class {number}' for number in range(22_000)]
    content = dict(
        state_dict=dict(a=shared, b=shared, c=shared.t(), mask=torch.ones(1).expand(512, 512)),
        ema=dict(a=shared, b=shared),
        meta=dict(dataset_meta=dict(classes=names), losses=[0.5] * 300_000),
        circle=circle,
    )
    found = read_checkpoint(saved(tmp_path / 'w.pth', content))
    assert found['meta'] == content['meta'] and torch.equal(found['state_dict']['c'], shared.t())
    assert found['circle'][0] is found['circle']


def test_what_others_allowed_is_theirs_again(tmp_path):
    before = torch.serialization.get_safe_globals()
    torch.serialization.add_safe_globals([np.ndarray, RECONSTRUCT, np.dtype])
    try:
        allowed = set(torch.serialization.get_safe_globals())
        assert read_checkpoint(saved(tmp_path / 'w.pth', dict(a=np.ones(3))))['a'].sum() == 3
        assert set(torch.serialization.get_safe_globals()) == allowed
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(before)


# --- what a file says of itself -------------------------------------------------------------------


def plain_file(path, meta=None, **changes):
    """A BEiT that knows no positions, with other tensors and a meta."""
    return saved(path, dict(state_dict=weights_of(abs_pos_embed=False) | changes, meta=meta))


@pytest.mark.parametrize(
    'said',
    [
        dict(preprocessing=dict(mean='0.5', std=[float('nan')], size=[224])),
        dict(preprocessing=dict(mean=[1e300], std=[None], size=[-1, 5])),
        dict(preprocessing=dict(mean=[[1], 2], size=[float('inf')] * 2), architecture=dict(num_heads='x')),
        dict(preprocessing=[1], architecture=dict(num_heads=10**9, out_indices=['a', []])),
        dict(dataset_meta=7, config_dict=[1]),
    ],
)
def test_what_describes_no_image_is_passed_over(tmp_path, said):
    content = dict(state_dict=weights_of(), meta=said)
    path = saved(tmp_path / 'w.pth', content)
    described = describe_source(content, path)
    assert set(described['preprocessing']) <= {'mean', 'std'} and set(described['architecture']) <= {'num_heads'}
    if described['architecture']:
        with pytest.raises(CheckpointError, match='heads 1000000000, the model has 2'):
            load_checkpoint(BEiTBackbone(ARCH), str(path))
    else:
        load_checkpoint(BEiTBackbone(ARCH), str(path))
    convert_checkpoint(path, tmp_path / 'x.pth')


def test_a_mean_of_other_channels_than_the_weights_is_refused(tmp_path):
    content = dict(state_dict=BEiTBackbone(ARCH).state_dict(), meta=dict(preprocessing=dict(mean=[1] * 4, std=[1])))
    with pytest.raises(CheckpointError, match='w.pth has a mean and std of 4 channels, its patch embedding has 3$'):
        Checkpoint.open(saved(tmp_path / 'w.pth', content))
    content['meta']['preprocessing'].update(mean=[1] * 3)  # one number is for all channels
    assert Checkpoint.open(saved(tmp_path / 'w.pth', content)).preprocessing['std'] == [1]


@pytest.mark.parametrize('levels', [dict(mean=[1, 2]), dict(std=[1, 0, 1]), dict(std=[-1.0]), dict(std=[1] * 4)])
def test_levels_that_fit_no_image_are_passed_over(tmp_path, levels):
    path = plain_file(tmp_path / 'w.pth', dict(preprocessing=levels, architecture=dict(num_heads=2)))
    extractor = FeatureExtractor(path, 'cpu')
    found = [extractor.mean.flatten().tolist(), extractor.std.flatten().tolist()]
    assert found == [pytest.approx(values) for values in IMAGENET.values()]


def test_a_name_is_no_number_of_blocks(tmp_path):
    path = plain_file(tmp_path / 'w.pth', **{f'backbone.blocks.{10**5}.norm1.weight': torch.ones(8)})
    tracemalloc.start()
    for reader in (
        lambda path: Checkpoint.open(path).backbone_arguments(),
        lambda path: convert_checkpoint(path, tmp_path / 'x.pth'),
    ):
        with pytest.raises(CheckpointError, match='lacks backbone.blocks.1.attn.qkv.weight'):
            reader(str(path))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10 << 20  # bytes


def test_a_file_of_a_short_name_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({'cls_token': torch.ones(1, 1, 8), 'blocks.0.attn.qkv.weight': torch.ones(24, 8)}, 'a')
    with pytest.raises(CheckpointError, match='^a lacks '):
        Checkpoint.open('a').backbone_arguments()


@pytest.mark.parametrize(
    ('num_heads', 'said'), [(-2, 'has -2 attention heads'), (3, 'has 3 attention heads'), ([2], 'TypeError')]
)
def test_heads_that_no_tensor_bears_out_are_refused(tmp_path, num_heads, said):
    path = plain_file(tmp_path / 'w.pth', dict(architecture=dict(num_heads=num_heads)))
    with pytest.raises(CheckpointError, match=said):
        FeatureExtractor(path, 'cpu')


def test_a_size_is_that_of_the_positions(tmp_path):
    said = dict(preprocessing=dict(size=[16_000] * 2), architecture=dict(num_heads=2))
    path = saved(tmp_path / 'w.pth', dict(state_dict=weights_of(img_size=32), meta=said))
    assert FeatureExtractor(path, 'cpu').backbone.grid == (2, 2)


ODD = ['text', {1: 2}, torch.tensor(1), torch.zeros(0)]
PLACES = """
    state_dict meta meta/preprocessing meta/dataset_meta meta/config_dict meta/preprocessing/size
    meta/architecture/num_heads meta/dataset_meta/classes state_dict/backbone.patch_embed.proj.weight
    state_dict/backbone.blocks.0.mlp.fc1.bias state_dict/5
""".split()
OPENERS = {
    **READERS,
    'transformers': lambda path: convert_checkpoint(path, path.with_suffix(''), 'hf'),
    'features': lambda path: FeatureExtractor(path, 'cpu'),
    'classifier': lambda path: ClassificationInferencer(path, 'cpu'),
}


@pytest.mark.filterwarnings('ignore')
@pytest.mark.parametrize('place', PLACES)
def test_odd_content_is_one_line(tmp_path, place):
    """Or of no use to the reader, which then does without."""
    weights = weights_of(img_size=32) | {'head.fc.weight': torch.ones(3, 8), 'head.fc.bias': torch.ones(3)}
    meta = dict(preprocessing=dict(IMAGENET, size=[32, 32]), architecture=dict(num_heads=2))
    content = dict(state_dict=weights, meta=dict(meta, dataset_meta=dict(classes=['a', 'b', 'c'])))
    *outer, last = (int(key) if key.isdigit() else key for key in place.split('/'))
    for value in ODD:
        inner = odd = dict(content)
        for key in outer:
            inner[key] = dict(inner[key])
            inner = inner[key]
        inner[last] = value
        path = saved(tmp_path / 'w.pth', odd)
        for opener in OPENERS.values():
            try:
                opener(path)
            except ValueError as error:
                assert isinstance(error, CheckpointError) or 'give another' in str(error)
                assert '\n' not in str(error) and len(str(error)) < 700


@pytest.mark.parametrize(('name', 'value'), [('blocks.0.mlp.fc1.weight', float('nan')), ('cls_token', float('inf'))])
def test_weights_that_are_no_numbers_are_no_weights(tmp_path, name, value):
    weights = BEiTBackbone(ARCH).state_dict()
    weights[name].view(-1)[-1] = value
    write_checkpoint(tmp_path / 'w.safetensors', weights)
    backbone = BEiTBackbone(ARCH)
    before = {name: tensor.clone() for name, tensor in backbone.state_dict().items()}
    with pytest.raises(CheckpointError, match=f'1 of .* tensors hold NaN or infinity: {name}. Nothing was loaded'):
        load_checkpoint(backbone, str(tmp_path / 'w.safetensors'))
    assert all(torch.equal(before[name], tensor) for name, tensor in backbone.state_dict().items())
    weights[name].fill_(3e38)  # large is not infinite, though the sum is
    write_checkpoint(tmp_path / 'w.safetensors', weights)
    load_checkpoint(backbone, str(tmp_path / 'w.safetensors'))

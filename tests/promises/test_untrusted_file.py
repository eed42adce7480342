"""No reader runs what a file holds: files that want to run code are refused, and say what they asked for."""

import io
import os
import pickle

import pytest
import torch
from mmengine.runner import load_checkpoint

from beit_mm.checkpoint.convert import convert_checkpoint
from beit_mm.checkpoint.io import CheckpointError, UnsafeCheckpointError, read_checkpoint
from beit_mm.models import BEiTBackbone

ARCH = dict(embed_dims=8, num_layers=1, num_heads=2)
READERS = {
    'read_checkpoint': read_checkpoint,
    # load_from, --resume, init_cfg, mim
    'mmengine': lambda path: load_checkpoint(BEiTBackbone(ARCH), str(path)),
    'convert_checkpoint': lambda path: convert_checkpoint(path, path.with_suffix('.pth')),
}


class Calls:
    """Pickles as a call of `function`."""

    def __init__(self, function, *args):
        self.call = function, args

    def __reduce__(self):
        return self.call


def system(command):
    return {'x': Calls(os.system, command)}


def evaluated(command):
    return Calls(eval, f'__import__("os").system({command!r})')


def nested(command):
    """A second pickle inside the first, opened by torch itself."""
    buffer = io.BytesIO()
    torch.save(Calls(os.system, command), buffer)
    return Calls(torch.storage._load_from_bytes, buffer.getvalue())


def foreign_encoder(command):
    """OpenAI's encoder.pkl with one foreign object between its weights."""
    dall_e = pytest.importorskip('dall_e')
    encoder = dall_e.Encoder(n_hid=8, vocab_size=16)
    encoder.blocks.input.hook = Calls(os.system, command)
    return encoder


def write(path, content, container):
    if container == 'pickle':
        path.write_bytes(pickle.dumps(content))
    else:
        torch.save(content, path, _use_new_zipfile_serialization=container == 'zip')


SYSTEM = f'{os.system.__module__}.system'
FILES = [
    (attack, container, asked_for)
    for attack, asked_for in (
        (system, SYSTEM),
        (evaluated, 'builtins.eval'),
        (nested, 'torch.storage._load_from_bytes'),
        (foreign_encoder, SYSTEM),
    )
    for container in ('zip', 'legacy', 'pickle')
    # which is how tensors are pickled without a container: refused before the object is met
    if (attack, container) != (foreign_encoder, 'pickle')
]


@pytest.mark.filterwarnings('ignore')
@pytest.mark.parametrize(('attack', 'container', 'asked_for'), FILES)
def test_code_is_refused_and_not_run(tmp_path, attack, container, asked_for):
    victim = tmp_path / 'made_by_the_file'
    path = tmp_path / 'weights.pkl'
    write(path, attack(f'touch {victim}'), container)
    for reader in READERS.values():
        with pytest.raises(CheckpointError) as caught:
            reader(path)
        assert str(path) in str(caught.value) and len(str(caught.value)) < 600
        # torch's reader stops at the container of a bare pickle and of a whole module in a legacy file
        if container == 'zip' or container == 'legacy' and attack is not foreign_encoder:
            assert type(caught.value) is UnsafeCheckpointError and f'it asks for {asked_for}.' in str(caught.value)
        assert not victim.exists()
    # Otherwise the above would prove nothing: the same files run where nobody refuses them.
    if container == 'pickle':
        pickle.loads(path.read_bytes())
    else:
        torch.load(path, weights_only=False)
    assert victim.exists()

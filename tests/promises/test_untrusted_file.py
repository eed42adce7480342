"""No reader runs what a file holds: files that want to run code are refused, and say what they asked for."""
import io
import os
import pickle

import pytest
import torch
from mmengine.runner import load_checkpoint

from beit_mm.checkpoint.convert import convert_checkpoint
from beit_mm.checkpoint.errors import UnsafeCheckpointError
from beit_mm.checkpoint.reader import read_checkpoint
from beit_mm.models import BEiTBackbone

READERS = {
    'read_checkpoint': read_checkpoint,
    'mmengine': lambda path: load_checkpoint(BEiTBackbone('tiny'), str(path)),  # load_from, --resume, init_cfg, mim
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
    if container == 'plain':
        path.write_bytes(pickle.dumps(content))
    else:
        torch.save(content, path, _use_new_zipfile_serialization=container == 'zip')


SYSTEM = f'{os.system.__module__}.system'
FILES = [(attack, container, asked_for)
         for attack, asked_for in ((system, SYSTEM), (evaluated, 'builtins.eval'),
                                   (nested, 'torch.storage._load_from_bytes'), (foreign_encoder, SYSTEM))
         for container in ('zip', 'legacy', 'plain')
         # which is how tensors are pickled without a container: refused before the object is met
         if (attack, container) != (foreign_encoder, 'plain')]


@pytest.mark.filterwarnings('ignore:Couldn.t retrieve source code')  # torch stores that of modules in legacy files
@pytest.mark.parametrize('reader', READERS)
@pytest.mark.parametrize(('attack', 'container', 'asked_for'), FILES)
def test_code_is_refused_and_not_run(tmp_path, attack, container, asked_for, reader):
    victim = tmp_path / 'made_by_the_file'
    path = tmp_path / 'weights.pkl'
    write(path, attack(f'touch {victim}'), container)
    with pytest.raises(UnsafeCheckpointError) as caught:
        READERS[reader](path)
    assert str(path) in str(caught.value) and f'it asks for {asked_for}.' in str(caught.value)
    assert not victim.exists()


@pytest.mark.filterwarnings('ignore')
@pytest.mark.parametrize(('attack', 'container'), [file[:2] for file in FILES])
def test_the_same_files_run_where_nobody_refuses_them(tmp_path, attack, container):
    """Otherwise the test above would prove nothing."""
    victim = tmp_path / 'made_by_the_file'
    path = tmp_path / 'weights.pkl'
    write(path, attack(f'touch {victim}'), container)
    if container == 'plain':
        pickle.loads(path.read_bytes())
    else:
        torch.load(path, weights_only=False)
    assert victim.exists()

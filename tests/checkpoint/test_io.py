"""Files that hold weights are read in any form; what is not a checkpoint is named; writing is all or nothing."""

import hashlib
import os
from functools import partial

import numpy as np
import pytest
import torch
from helpers import file_size_limit
from mmengine.logging import HistoryBuffer, MessageHub
from safetensors.torch import save_file
from torch import nn

from beit_mm.checkpoint.find import name_of_url
from beit_mm.checkpoint.read import CheckpointError, read_checkpoint, write_checkpoint

BASE = torch.arange(12.0)
WEIGHTS = {
    'w': torch.rand(3, 5),
    'scalar': torch.tensor(2.5),
    'empty': torch.empty(0, 3),
    'half': torch.rand(3).bfloat16(),
    'flags': torch.tensor([True, False]),
    'count': torch.tensor([2**40]),
    'bytes': torch.arange(7, dtype=torch.uint8),
    'shared': BASE,
    'again': BASE,
    'part': BASE[4:].view(2, 4),
    'transposed': BASE.view(3, 4).t(),
    'parameter': nn.Parameter(torch.rand(2, dtype=torch.float64)),
}
META = {'epoch': 3, 'preprocessing': {'mean': [127.5], 'size': [224, 224]}, 'name': 'Öl "x"', 'none': None}


def assert_same(found, expected=WEIGHTS):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor)


@pytest.mark.parametrize('zipped', [True, False])
def test_a_run_as_torch_and_mmengine_save_it(tmp_path, zipped):
    """State dict with `_metadata`, optimizer, schedule, log history, NumPy numbers, a random state."""
    module = nn.BatchNorm1d(2)
    optimizer = torch.optim.AdamW(module.parameters())
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 5])
    module(torch.ones(2, 2)).sum().backward()
    optimizer.step()
    hub = MessageHub(f'test_io_{zipped}')
    hub.update_scalar('train/loss', np.float64(0.5))
    hub.update_info('best', np.float32(0.25))
    hub.update_info('palette', np.arange(6, dtype=np.uint8).reshape(2, 3))
    run = {
        'state_dict': module.state_dict(),
        'optimizer': optimizer.state_dict(),
        'schedule': schedule.state_dict(),
        'rng': torch.get_rng_state(),
        'message_hub': hub.state_dict(),
    }
    torch.save(run, tmp_path / 'run.pth', _use_new_zipfile_serialization=zipped)
    found = read_checkpoint(tmp_path / 'run.pth')
    assert_same(found['state_dict'], run['state_dict'])
    assert found['state_dict']._metadata == run['state_dict']._metadata
    assert_same(found['optimizer']['state'][0], run['optimizer']['state'][0])
    assert found['schedule']['milestones'] == {3: 1, 5: 1} and torch.equal(found['rng'], run['rng'])
    history = found['message_hub']['log_scalars']['train/loss']
    assert type(history) is HistoryBuffer and history.mean() == 0.5
    info = found['message_hub']['runtime_info']
    assert info['best'] == np.float32(0.25) and (info['palette'] == hub.get_info('palette')).all()


def test_safetensors_under_any_name(tmp_path):
    weights = {name: torch.rand(3) for name in 'ab'}
    # The first byte is the low byte of the header's length, and 0x80 for some: that is how pickles begin.
    for metadata in (None, *(dict(note='x' * padding) for padding in range(0, 256, 8))):
        save_file(weights, tmp_path / 'w.pth', metadata)
        assert_same(read_checkpoint(tmp_path / 'w.pth'), weights)


def test_a_file_of_another_hash_is_not_read(tmp_path):
    torch.save(WEIGHTS, tmp_path / 'w.pth')
    digest = hashlib.sha256((tmp_path / 'w.pth').read_bytes()).hexdigest()
    read_checkpoint(tmp_path / 'w.pth', sha256=digest.upper())
    with pytest.raises(CheckpointError, match=f'has SHA-256 {digest}, expected 00ff'):
        read_checkpoint(tmp_path / 'w.pth', sha256='00ff')


FORMS = dict(zip=torch.save, legacy=partial(torch.save, _use_new_zipfile_serialization=False), safetensors=save_file)


@pytest.mark.parametrize('form', FORMS)
def test_tensors_do_not_hang_on_their_file_and_one_cut_short_is_said_to_be(tmp_path, form):
    path, weights = tmp_path / 'w.pth', dict(w=torch.rand(5000))
    FORMS[form](weights, path)
    whole = path.read_bytes()
    found = read_checkpoint(path)
    with path.open('r+b') as file:  # written again while they are in use
        file.write(bytes(len(whole)))
    assert_same(found, weights)
    found['w'].zero_()
    for part in (0.1, 0.5, 0.99):
        path.write_bytes(whole[: int(part * len(whole))])
        with pytest.raises(CheckpointError, match='cut short'):
            read_checkpoint(path)


@pytest.mark.parametrize(
    ('content', 'said'),
    [(b'', 'is empty'), (b'\n<!DOCTYPE html><html><body>404</body></html>', 'begins with .<!DOCTYPE html>')],
)
def test_what_is_no_checkpoint_is_named(tmp_path, content, said):
    path = tmp_path / 'encoder.pkl'
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=f'{path}.*{said}'):
        read_checkpoint(path)
    torch.save([torch.ones(2)], path)
    with pytest.raises(CheckpointError, match='holds a list'):
        read_checkpoint(path)


class Method:
    """Pickles as log histories name the methods that they call."""

    def __reduce__(self):
        return getattr, (HistoryBuffer, 'max')


def test_a_file_gets_no_attribute(tmp_path):
    torch.save(dict(m=Method()), tmp_path / 'w.pth')
    assert read_checkpoint(tmp_path / 'w.pth') == dict(m=None)


def test_modules_without_end_are_refused(tmp_path):
    module = root = nn.Sequential()
    for _ in range(12):  # 12 levels of ten references to one module each
        module._modules.update(dict.fromkeys('0123456789', inner := nn.Sequential()))
        module = inner
    torch.save(root, tmp_path / 'm.pkl')
    with pytest.raises(CheckpointError, match='m.pkl'):
        read_checkpoint(tmp_path / 'm.pkl')


@pytest.mark.parametrize('suffix', ['.pth', '.safetensors'])
def test_what_is_written_can_be_read_and_equal_content_gives_equal_files(tmp_path, suffix):
    path = tmp_path / 'new' / 'folder' / f'w{suffix}'
    write_checkpoint(path, dict(state_dict=WEIGHTS, meta=META))
    found = read_checkpoint(path)
    assert_same(found['state_dict'])
    assert found['meta'] == META and os.listdir(path.parent) == [path.name]
    (path.parent / 'other').touch()
    assert path.stat().st_mode == (path.parent / 'other').stat().st_mode
    # whatever they are called: published files have their hash in their name
    write_checkpoint(path.with_name(f'again{suffix}'), dict(state_dict=WEIGHTS, meta=META))
    assert path.read_bytes() == (before := path.with_name(f'again{suffix}').read_bytes())
    with file_size_limit(4 << 20), pytest.raises(OSError, match='File too large'):  # as on a full disk
        write_checkpoint(path, dict(w=torch.rand(2 << 20), v=torch.rand(3)))
    assert path.read_bytes() == before and len(os.listdir(path.parent)) == 3


def test_names_of_urls():
    assert name_of_url('https://site.org/a/beit_base.pth?raw=1#x') == 'beit_base.pth'
    for name in ('pretrained.pth', 'epoch_300.pth', 'checkpoint-1599.pth', 'best.pt', 'model.safetensors'):
        one, other = (name_of_url(f'https://{site}.org/{name}?download=true') for site in 'ab')
        assert one != other and one.endswith(f'-{name}')
    for name in ('encoder.pkl', 'vqkd_encoder_base_decoder_3x768x12_clip-d5036aa7.pth', 'modelled.pth'):
        assert name_of_url(f'https://a.org/{name}') == name

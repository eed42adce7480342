"""Tensors are the file's own memory: nothing is copied, nothing written back, nothing outside of it reached."""
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from beit_mm.checkpoint.errors import CheckpointError
from beit_mm.checkpoint.reader import read_checkpoint

FORMS = ['zip', 'legacy', 'safetensors']


def save_as(form, weights, path):
    if form == 'safetensors':
        save_file(weights, path)
    else:
        torch.save(weights, path, _use_new_zipfile_serialization=form == 'zip')


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor)


def maps_of(path):
    """Address ranges at which this process has the file mapped."""
    lines = [line.split() for line in Path('/proc/self/maps').read_text().splitlines() if line.endswith(str(path))]
    return [range(*(int(end, 16) for end in line[0].split('-'))) for line in lines]


@pytest.mark.skipif(not Path('/proc/self/maps').exists(), reason='only Linux lists what is mapped')
@pytest.mark.parametrize('form', FORMS)
def test_tensors_lie_in_the_mapped_file(tmp_path, form):
    """Their memory is the file's, and is given back with the last of them."""
    path = tmp_path / 'w.pth'
    save_as(form, {'w': torch.arange(200, dtype=torch.uint8), 'v': torch.ones(3, 4, dtype=torch.int8)}, path)
    found = read_checkpoint(path)
    maps = maps_of(path)
    assert maps and all(any(tensor.data_ptr() in map_ for map_ in maps) for tensor in found.values())
    del found
    assert not maps_of(path)


@pytest.mark.parametrize('form', FORMS)
def test_tensors_are_writable_and_the_file_stays(tmp_path, form):
    path = tmp_path / 'w.pth'
    save_as(form, {'w': torch.rand(5000)}, path)
    before = path.read_bytes()
    found = read_checkpoint(path)['w']
    found.zero_()
    assert path.read_bytes() == before
    path.unlink()  # may go while it is in use
    assert found.sum() == 0


@pytest.mark.parametrize('zipped', [True, False])
def test_shared_numbers_stay_shared(tmp_path, zipped):
    whole = torch.arange(12.0)
    weights = {'whole': whole, 'again': whole, 'part': whole[4:].view(2, 4), 'empty': torch.empty(0, 3)}
    torch.save(weights, tmp_path / 'w.pth', _use_new_zipfile_serialization=zipped)
    found = read_checkpoint(tmp_path / 'w.pth')
    assert_same(found, weights)
    found['whole'][5] = -1
    assert found['again'][5] == -1 and found['part'][0, 1] == -1


@pytest.mark.parametrize('shift', range(8))
@pytest.mark.parametrize('zipped', [True, False])
def test_numbers_at_any_place(tmp_path, zipped, shift):
    """Numbers of eight bytes at all distances from multiples of eight are read right, and lie at multiples."""
    weights = {'x' * (1 + shift): torch.rand(3, 5, dtype=torch.float64), 'flag': torch.tensor([True, False]),
               'small': torch.arange(3, dtype=torch.int16)}
    path = tmp_path / 'w.pth'
    torch.save(weights, path, _use_new_zipfile_serialization=zipped)
    if zipped:  # by other writers than torch, without its padding
        with zipfile.ZipFile(path) as archive, zipfile.ZipFile(tmp_path / 'v.pth', 'w') as other:
            for name in archive.namelist():
                other.writestr(name, archive.read(name))
        path = tmp_path / 'v.pth'
    found = read_checkpoint(path)
    assert_same(found, weights)
    assert all(tensor.data_ptr() % tensor.element_size() == 0 for tensor in found.values())


def test_zip_that_contradicts_itself(tmp_path):
    path = tmp_path / 'w.pth'
    torch.save({'w': torch.rand(1000)}, path)
    whole = path.read_bytes()
    data = zipfile.ZipFile(path).getinfo('w/data/0').header_offset
    bad_signature = whole[:data] + b'XX' + whole[data + 2:]
    long_name = whole[:data + 26] + b'\xff\xff' + whole[data + 28:]  # moves the numbers beyond the end
    first, directory = whole[:whole.index(b'PK\x01\x02')], whole[whole.index(b'PK\x01\x02'):]
    odd_size = first + directory.replace((4000).to_bytes(4, 'little'), (3999).to_bytes(4, 'little'))
    for content, said in ((bad_signature, 'nothing begins where'), (long_name, 'cut short'),
                          (odd_size, '3999 bytes are no numbers')):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=said):
            read_checkpoint(path)

"""Small files made to fill the memory or the stack are refused, or read at their own size."""
import pickle
import tracemalloc
import zipfile

import pytest
import torch
from torch import nn

from beit_mm.checkpoint.errors import CheckpointError
from beit_mm.checkpoint.inert_pickle import MAX_TUPLES
from beit_mm.checkpoint.reader import read_checkpoint

NAME = b'X\x01\x00\x00\x00x'


def write(path, code, zipped=True):
    """A pickle written by hand, as torch.save would store it in a zip file, or by itself."""
    code = b'\x80\x02' + code + b'.'
    if zipped:
        with zipfile.ZipFile(path, 'w') as archive:
            archive.writestr('archive/data.pkl', code)
    else:
        path.write_bytes(code)


def ten_references_each(levels):
    """A list of ten references to a list of ten references to ..., each stored once."""
    references = (b'(' + b'h%c' % (level - 1) * 10 + b'lq%c' % level for level in range(1, levels))
    return b'(' + b'N' * 10 + b'lq\x00' + b'0'.join([b'', *references])


def refusal(path):
    """What is said, which must cost less than 16 MB."""
    tracemalloc.start()
    with pytest.raises(CheckpointError, match=str(path)) as caught:
        read_checkpoint(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16 << 20 and len(str(caught.value)) < 1000
    return str(caught.value)


def test_compressed_file_is_not_inflated(tmp_path):
    path = tmp_path / 'w.pth'
    with zipfile.ZipFile(path, 'w', zipfile.ZIP_DEFLATED) as archive:
        archive.writestr('w/data.pkl', pickle.dumps({'x': '0' * 10**8}, 2))
        archive.writestr('w/version', '3\n')
    assert 'is compressed' in refusal(path)


def test_entries_that_claim_more_than_the_file(tmp_path):
    path = tmp_path / 'w.pth'
    torch.save({'x': torch.zeros(1000)}, path)
    content, start, directory = path.read_bytes().partition(b'PK\x01\x02')
    sizes = [size.to_bytes(4, 'little') * 2 for size in (4000, 10**9)]  # stored and original
    path.write_bytes(content + start + directory.replace(*sizes))
    assert 'its entries claim 10000' in refusal(path)


@pytest.mark.parametrize('zipped', [True, False])
@pytest.mark.parametrize(('code', 'said'), [
    (b'}r' + (64 * 10**6).to_bytes(4, 'little'), 'object number 64000000'),  # the memo is an array
    (b'}p64000000\n', 'object number 64000000'),
    (b'X\xff\xff\xff\xffabc', 'cut short'),                                  # a string of 4 GB
    (b'\x96' + (2**40).to_bytes(8, 'little') + b'abc', 'cut short'),         # a bytearray of 1 TB
])
def test_numbers_that_reserve_memory(tmp_path, code, said, zipped):
    path = tmp_path / 'w.pth'
    write(path, code, zipped)
    assert said in refusal(path)


def test_shared_containers_stay_shared(tmp_path):
    path = tmp_path / 'w.pth'
    write(path, b'}' + NAME + ten_references_each(40) + b's')
    found, levels = read_checkpoint(path)['x'], 1
    while found[0] is not None:
        assert len(found) == 10 and all(part is found[0] for part in found)
        found, levels = found[0], levels + 1
    assert levels == 40


def test_shared_containers_are_not_printed(tmp_path):
    path = tmp_path / 'w.pth'
    for program in (b')R', b'Q', b'cbuiltins\ngetattr\nh\x0bh\x0b\x86R'):
        write(path, ten_references_each(12) + program)
        refusal(path)


@pytest.mark.parametrize('code', [
    b'}' + NAME + b']' * 5000 + b'a' * 4999 + b's',
    b'}' + NAME + b']q\x00h\x00as',
], ids=['deep', 'circle'])
def test_deep_containers(tmp_path, code):
    path = tmp_path / 'w.pth'
    write(path, code)
    assert 'more than 100 deep' in refusal(path)


@pytest.mark.parametrize('zipped', [True, False])
@pytest.mark.parametrize('code', [
    b'}' + b')' + b'\x85' * 300_000 + b'Ns',                 # a key of a dict
    b'}(' + b')' + b'\x85q\x00h\x00' * 10**5 + b'Nu',      # the same with a break after each
    b'c__builtin__\nset\n(' + b')' + b'\x85' * 300_000 + b'l\x85R',
], ids=['key', 'memo', 'set'])
def test_deep_tuples_are_never_hashed(tmp_path, code, zipped):
    """CPython would overflow the stack, and the process end."""
    path = tmp_path / 'w.pth'
    write(path, code, zipped)
    assert 'nested deeper than the stack' in refusal(path)


def test_as_many_tuples_as_are_read_can_be_hashed(tmp_path):
    path = tmp_path / 'w.pth'
    write(path, b'}' + b')' + b'\x85' * MAX_TUPLES + b'Ns')
    assert list(read_checkpoint(path).values()) == [None]


@pytest.mark.parametrize('levels', [1, 12])
def test_modules_without_end(tmp_path, levels):
    """One that holds itself, and 12 levels of ten references to one module each."""
    module = root = nn.Module()
    for _ in range(levels):
        for name in range(10):
            module._modules[str(name)] = inner = root if levels == 1 else nn.Module()
        module._modules.update(dict.fromkeys(module._modules, inner))
        module = inner
    path = tmp_path / 'm.pkl'
    torch.save(root, path)
    assert 'without end' in refusal(path)

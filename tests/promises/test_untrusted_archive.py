"""Archives of datasets write nothing outside of their target, and no more than a few times their own size."""

import gzip
import importlib
import io
import os
import struct
import sys
import tarfile
import zipfile
import zlib
from pathlib import Path

import numpy as np
import pytest
from helpers import ROOT, refused, with_peak_memory
from scipy.io import savemat

GIB = 1 << 30
LINKS = {
    'symbolic': (tarfile.SYMTYPE, '../../../mine'),
    'hard': (tarfile.LNKTYPE, '../../../mine'),
    'pipe': (tarfile.FIFOTYPE, ''),
    'device': (tarfile.CHRTYPE, ''),
}


@pytest.fixture(autouse=True)
def small_limits(monkeypatch):
    """A megabyte may always be unpacked, instead of a gigabyte."""
    monkeypatch.syspath_prepend(ROOT / 'tools/datasets')
    archives = importlib.import_module('_archives')
    monkeypatch.setattr(archives, 'MIN_UNPACKED', 1 << 20)
    monkeypatch.setattr(archives, 'MAX_MEMORY', 300 << 20)
    yield
    sys.modules.pop('_archives', None)


def tar_of(*members: tuple[tarfile.TarInfo, bytes], mode: str = 'w') -> bytes:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode=mode) as archive:
        for info, data in members:
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return content.getvalue()


def sparse(name: str, size: int) -> bytes:
    """A tar archive with one member of GNU's sparse form: a hole of `size` bytes."""
    info = tarfile.TarInfo(name)
    info.type = tarfile.GNUTYPE_SPARSE
    block = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    block[386:410] = b'%011o\0%011o\0' % (size, 0)  # one piece of no bytes, at the end
    block[483:495] = b'%011o\0' % size
    block[148:156] = b'        '
    block[148:156] = b'%06o\0 ' % sum(block)
    return bytes(block) + b'\0' * 10_240


def written(folder: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in folder.rglob('*') if path.is_file())


def refused_images(said: str, folder: Path, inner: bytes, name: str = 'whole.tar') -> None:
    """An archive of ImageNet-22k is refused, in which the archive of a class is `inner`."""
    whole = tar_of((tarfile.TarInfo('n00000001.tar'), inner))
    (folder / name).write_bytes(gzip.compress(whole) if name.endswith('gz') else whole)
    refused(said, 'prepare_imagenet22k', folder / name, folder / 'target')


@pytest.mark.parametrize('kind', LINKS)
def test_links_pipes_and_devices_lead_nowhere(tmp_path, kind):
    (tmp_path / 'mine').mkdir()
    link, through = tarfile.TarInfo('n00000001_0.JPEG'), tarfile.TarInfo('n00000001_0.JPEG/x')
    link.type, link.linkname = LINKS[kind]
    refused_images('whole.tar', tmp_path, tar_of((link, b''), (through, b'theirs')))
    assert not os.listdir(tmp_path / 'mine') and not (tmp_path / 'target/n00000001').exists()


def test_a_sparse_member_takes_no_disk(tmp_path):
    content = sparse('n00000001_0.JPEG', 3 * GIB)
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        assert archive.getmembers()[0].size == 3 * GIB
    refused_images('unpacks to more than 8 times its size', tmp_path, content)
    assert written(tmp_path / 'target') < 1 << 20


def test_compressed_images_do_not_fill_the_disk(tmp_path):
    inner = tar_of(*((tarfile.TarInfo(f'n00000001_{i}.JPEG'), b'\0' * (1 << 20)) for i in range(20)))
    refused_images('unpacks to more than', tmp_path, inner, 'whole.tar.gz')
    with zipfile.ZipFile(tmp_path / 'ADEChallengeData2016.zip', 'w', zipfile.ZIP_DEFLATED) as archive:
        for number in range(20):
            archive.writestr(f'ADEChallengeData2016/images/training/{number}.jpg', b'\0' * (1 << 20))
    refused('unpacks to more than', 'prepare_ade20k', tmp_path / 'ADEChallengeData2016.zip', tmp_path / 'ade')
    assert written(tmp_path / 'target') < 4 << 20 and written(tmp_path / 'ade') < 4 << 20


def devkit(folder: Path, meta: bytes) -> Path:
    (folder / 'downloads').mkdir()
    data = 'ILSVRC2012_devkit_t12/data/'
    for name in ('img_train.tar', 'img_val.tar'):
        (folder / f'downloads/ILSVRC2012_{name}').touch()
    (folder / 'downloads/ILSVRC2012_devkit_t12.tar.gz').write_bytes(
        tar_of(
            (tarfile.TarInfo(f'{data}meta.mat'), meta),
            (tarfile.TarInfo(f'{data}ILSVRC2012_validation_ground_truth.txt'), b'1\n'),
            mode='w:gz',
        )
    )
    return folder / 'downloads'


def matlab(synsets: object) -> bytes:
    content = io.BytesIO()
    savemat(content, dict(synsets=synsets))
    return content.getvalue()


def compressed(size: int) -> bytes:
    """MATLAB's compressed element that unpacks to a column of zeros of `size` bytes."""
    pack = struct.pack
    head = pack('<IIII', 6, 8, 6, 0) + pack('<IIii', 5, 8, size // 8, 1) + pack('<II8s', 1, 7, b'synsets')
    packer = zlib.compressobj(9)
    body = packer.compress(pack('<II', 14, len(head) + 8 + size) + head + pack('<II', 9, size))
    for _ in range(size >> 20):
        body += packer.compress(b'\0' * (1 << 20))
    body += packer.flush()
    return matlab(np.zeros(1))[:128] + pack('<II', 15, len(body)) + body


def claims(rows: int) -> bytes:
    """A cell array that says it has so many rows."""
    content = bytearray(matlab(np.array([[1, 'x']], dtype=object)))
    place = content.index(struct.pack('<IIii', 5, 8, 1, 2))
    content[place + 8 : place + 12] = struct.pack('<i', rows)
    return bytes(content)


@pytest.mark.parametrize(
    'meta', [lambda: compressed(GIB), lambda: claims(2**31 - 1), lambda: b'\x93NUMPY', lambda: b'\0' * 200]
)
def test_a_hostile_table_of_classes_takes_no_memory(tmp_path, meta):
    arguments = devkit(tmp_path, meta()), tmp_path / 'target'
    _, added = with_peak_memory(lambda: refused('devkit_t12.tar.gz', 'prepare_imagenet', *arguments))
    assert added < 400 and not (tmp_path / 'target').exists()


def table(name: str) -> np.ndarray:
    return np.array([(1, name), (2, 'n00000001')], dtype=[('ILSVRC2012_ID', 'O'), ('WNID', 'O')])[:, None]


@pytest.mark.parametrize('name', ['/x', '../../x', 'n0000001', 'n00000001/../../x', '\x1b[2J', 'n00000001\n'])
def test_a_name_of_a_class_is_no_path(tmp_path, name):
    refused('names the class', 'prepare_imagenet', devkit(tmp_path, matlab(table(name))), tmp_path / 'deep/target')
    assert not (tmp_path / 'deep').exists() and not (tmp_path / 'x').exists()

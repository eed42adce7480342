"""The preparation scripts on small archives of the official form: right folders, going on after an interruption,
nothing outside of the target, and damage named in one line."""

import hashlib
import io
import pickle
import random
import tarfile
from pathlib import Path

import numpy as np
import pytest
from helpers import refused, run_tool, tree
from labelled import CLASSES, make_images
from PIL import Image
from scipy.io import savemat
from torchvision.datasets import CIFAR100, imagenet

SYNSETS = ['n00000003', 'n00000001', 'n00000002']  # of the identifiers 1, 2, 3
LINK = tarfile.TarInfo('n00000001_0.JPEG')
LINK.type, LINK.linkname = tarfile.SYMTYPE, '../../../mine'


def tar(members: dict[str, bytes | tarfile.TarInfo], mode: str = 'w') -> bytes:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode=mode) as archive:
        for name, data in members.items():
            if isinstance(data, bytes):
                info = tarfile.TarInfo(name)
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))
            else:
                archive.addfile(data)
    return content.getvalue()


def classes_tar(mode: str = 'w', folder: str = '') -> bytes:
    images = {name: {f'{name}_{i}.JPEG': f'{name} {i}'.encode() * 300 for i in range(3)} for name in SYNSETS}
    return tar({f'{folder}{name}.tar': tar(of_class) for name, of_class in images.items()}, mode)


@pytest.fixture
def downloads(tmp_path, monkeypatch) -> Path:
    """The three archives of ImageNet-1K, with three classes and four images to validate on."""
    fields = [(name, 'O') for name in ('ILSVRC2012_ID', 'WNID', 'words', 'gloss', 'num_children')]
    rows = [(number, name, 'a, b', '', 0) for number, name in enumerate(SYNSETS, start=1)]
    savemat(meta := io.BytesIO(), dict(synsets=np.array([*rows, (4, 'n9', 'c', '', 3)], dtype=fields)[:, None]))
    data = 'ILSVRC2012_devkit_t12/data/'
    truth = {f'{data}meta.mat': meta.getvalue(), f'{data}ILSVRC2012_validation_ground_truth.txt': b'3\n1\n2\n3\n'}
    val = {f'ILSVRC2012_val_{i:08}.JPEG': f'val {i}'.encode() for i in (4, 1, 2, 3)}
    for kind, content in dict(train=classes_tar(), val=tar(val), devkit=tar(truth, 'w:gz')).items():
        name = imagenet.ARCHIVE_META[kind][0]
        (tmp_path / name).write_bytes(content)
        monkeypatch.setitem(imagenet.ARCHIVE_META, kind, (name, hashlib.md5(content).hexdigest()))
    return tmp_path


def test_imagenet_goes_on_where_it_was(downloads):
    target = downloads / 'imagenet'
    for path in ('train/n00000003/mine.JPEG', 'train/.n00000001.part/n00000001_0.JPEG', 'val.part/x', '.val.part/x'):
        (target / path).parent.mkdir(parents=True)
        (target / path).write_text('mine')
    refused('train holds 7 images; expected 1,281,167', 'prepare_imagenet', downloads, target)
    train = {f'{name}/{name}_{i}.JPEG': f'{name} {i}'.encode() * 300 for name in SYNSETS[1:] for i in range(3)}
    assert tree(target / 'train') == train | {'n00000003/mine.JPEG': b'mine'}
    classes = dict(enumerate(('n00000002', 'n00000003', 'n00000001', 'n00000002'), start=1))
    val = {f'{name}/ILSVRC2012_val_{i:08}.JPEG': f'val {i}'.encode() for i, name in classes.items()}
    assert tree(target / 'val') == val


@pytest.mark.parametrize('kind', ['train', 'val', 'devkit'])
def test_damage_is_one_line(downloads, kind):
    path = downloads / imagenet.ARCHIVE_META[kind][0]
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    words = 'prepare_imagenet', downloads, downloads / 'out'
    refused(str(path), *words)
    path.unlink()
    refused(f'no {path.name} in', *words)


@pytest.mark.parametrize('form', ['tar.gz', 'folder'])
def test_imagenet22k(tmp_path, form):
    source = tmp_path / f'winter21_whole.{form}'
    if form == 'folder':
        with tarfile.open(fileobj=io.BytesIO(classes_tar())) as archive:
            archive.extractall(source, filter='data')
    else:
        source.write_bytes(classes_tar('w:gz', 'winter21_whole/'))
    few = 'holds 3 classes; expected 21,841 (fall 2011) or 19,167 (winter 2021); if 3 is right, train with '
    refused(few + '--cfg-options model.data_pre', 'prepare_imagenet', source, tmp_path / 'out')
    assert len(tree(tmp_path / 'out')) == 9 and (tmp_path / 'out/n00000002/n00000002_2.JPEG').exists()


@pytest.mark.parametrize(
    ('content', 'message'),
    [
        (tar({'n00000001.tar': tar({'../../evil.JPEG': b''})}), 'outside the destination'),
        (tar({'n00000001.tar': tar({'': LINK})}), 'outside the destination'),
        (tar({'../n00000001.tar/../../x': b''}), "holds 'x'; expected n########.tar"),
        (tar({}), 'holds no archives; expected n########.tar'),
    ],
)
def test_nothing_is_written_outside_of_the_target(tmp_path, content, message):
    (tmp_path / 'whole.tar').write_bytes(content)
    refused(message, 'prepare_imagenet', tmp_path / 'whole.tar', tmp_path / 'deep/target')
    assert [path.name for path in tmp_path.rglob('*') if path.is_file() or path.is_symlink()] == ['whole.tar']


def test_a_damaged_header_is_not_the_end_of_the_archive(tmp_path):
    (tmp_path / 'whole.tar').write_bytes(classes_tar().replace(b'n00000002.tar', b'n00000009.tar'))
    refused('damaged or incomplete', 'prepare_imagenet', tmp_path / 'whole.tar', tmp_path / 'target')


def test_cifar100(tmp_path, monkeypatch):
    pixels = np.random.default_rng(0).integers(0, 256, (4, 3072), dtype=np.uint8)
    parts = {name: dict(data=pixels[:n], fine_labels=[0, 1, 0, 1][:n]) for name, n in dict(train=4, test=2).items()}
    parts['meta'] = dict(fine_label_names=['apple', 'bee'])
    pickles = {name: pickle.dumps(part) for name, part in parts.items()}
    path = tmp_path / 'cifar-100-python.tar.gz'
    path.write_bytes(tar({f'cifar-100-python/{name}': content for name, content in pickles.items()}, 'w:gz'))
    refused('expected MD5 eb9058c3', 'prepare_cifar100', path, tmp_path / 'cifar100')
    train, test, meta, whole = (hashlib.md5(each).hexdigest() for each in (*pickles.values(), path.read_bytes()))
    known = dict(tgz_md5=whole, train_list=[['train', train]], test_list=[['test', test]])
    for name, value in dict(known, meta=dict(CIFAR100.meta, md5=meta)).items():
        monkeypatch.setattr(CIFAR100, name, value)
    for _ in range(2):  # the second time it is there already
        run_tool('datasets/prepare_cifar100.py', path, tmp_path / 'cifar100')
    names = 'train/apple/00000 train/apple/00002 train/bee/00001 train/bee/00003 val/apple/00000 val/bee/00001'.split()
    assert sorted(tree(tmp_path / 'cifar100')) == [f'{name}.png' for name in names]
    image = np.asarray(Image.open(tmp_path / 'cifar100/train/bee/00003.png'))
    assert np.array_equal(image.transpose(2, 0, 1).ravel(), pixels[3])


def test_a_list_holds_what_the_rule_says(tmp_path):
    make_images(tmp_path, per_class=6)
    run_tool('datasets/sample_labels.py', tmp_path / 'train', 4, tmp_path / 'lists/labels.txt', '--seed', 3)
    generator, expected = random.Random(3), []
    for name in CLASSES:
        images = [f'{name}/{index}.png' for index in range(6)]
        generator.shuffle(images)
        expected += images[:4]
    assert (tmp_path / 'lists/labels.txt').read_text().splitlines() == expected
    refused('per_class is 0', 'sample_labels', tmp_path / 'train', 0, tmp_path / 'x.txt')

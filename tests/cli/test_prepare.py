"""The preparation scripts on small archives of the official form: right folders, going on after an interruption,
nothing outside of the target, and damage named in one line."""

import hashlib
import io
import pickle
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
from helpers import refused, run_tool, tree
from PIL import Image
from scipy.io import savemat
from torchvision.datasets import CIFAR100

SYNSETS = ['n00000003', 'n00000001', 'n00000002']  # of the identifiers 1, 2, 3
LINK = tarfile.TarInfo('n00000001_0.JPEG')
LINK.type, LINK.linkname = tarfile.SYMTYPE, '/etc/passwd'


def tar(members: dict[str, bytes], mode: str = 'w', link: tarfile.TarInfo | None = None) -> bytes:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode=mode) as archive:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
        if link:
            archive.addfile(link)
    return content.getvalue()


def classes_tar(mode: str = 'w', folder: str = '') -> bytes:
    images = {name: {f'{name}_{i}.JPEG': f'{name} {i}'.encode() * 300 for i in range(3)} for name in SYNSETS}
    return tar({f'{folder}{name}.tar': tar(of_class) for name, of_class in images.items()}, mode)


def imagenet(folder: Path, synsets: list[str] = SYNSETS) -> Path:
    folder.mkdir()
    dtype = [('ILSVRC2012_ID', 'O'), ('WNID', 'O')]
    savemat(meta := io.BytesIO(), dict(synsets=np.array(list(enumerate(synsets, start=1)), dtype=dtype)[:, None]))
    data = 'ILSVRC2012_devkit_t12/data/'
    truth = {f'{data}meta.mat': meta.getvalue(), f'{data}ILSVRC2012_validation_ground_truth.txt': b'3\n1\n2\n3\n'}
    val = {f'ILSVRC2012_val_{i:08}.JPEG': f'val {i}'.encode() for i in (4, 1, 2, 3)}
    archives = {'img_train.tar': classes_tar(), 'img_val.tar': tar(val), 'devkit_t12.tar.gz': tar(truth, 'w:gz')}
    for name, content in archives.items():
        (folder / f'ILSVRC2012_{name}').write_bytes(content)
    return folder


def test_imagenet_goes_on_where_it_was(tmp_path):
    target = tmp_path / 'imagenet'
    (target / 'train/n00000003').mkdir(parents=True)
    (target / 'train/n00000003/mine.JPEG').write_text('finished')
    (target / 'train/.n00000001.part').mkdir()
    (target / 'train/.n00000001.part/n00000001_0.JPEG').write_text('cut sho')
    refused('train holds 7 images, expected 1,281,167', 'prepare_imagenet', imagenet(tmp_path / 'downloads'), target)
    train = {f'{name}/{name}_{i}.JPEG': f'{name} {i}'.encode() * 300 for name in SYNSETS[1:] for i in range(3)}
    assert tree(target / 'train') == dict(train, **{'n00000003/mine.JPEG': b'finished'})
    assert tree(target / 'val') == {
        f'{name}/ILSVRC2012_val_{i:08}.JPEG': f'val {i}'.encode()
        for i, name in enumerate(('n00000002', 'n00000003', 'n00000001', 'n00000002'), start=1)
    }


@pytest.mark.parametrize('name', ['/x', '../../x', 'n0000001'])
def test_a_class_name_is_no_path(tmp_path, name):
    downloads = imagenet(tmp_path / 'downloads', [name] * 3)
    refused(f'names the class {name!r}', 'prepare_imagenet', downloads, tmp_path / 'deep/target')
    assert not (tmp_path / 'deep').exists()


@pytest.mark.parametrize('name', ['img_train.tar', 'img_val.tar', 'devkit_t12.tar.gz'])
@pytest.mark.parametrize(
    'damage',
    [lambda content: content[: min(1700, len(content) // 2)], lambda _: b'<html>sign in</html>' * 90, lambda _: b''],
    ids=['cut', 'HTML', 'empty'],
)
def test_damage_is_one_line(tmp_path, name, damage):
    path = imagenet(tmp_path / 'downloads') / f'ILSVRC2012_{name}'
    path.write_bytes(damage(path.read_bytes()))
    refused(f'{path}: damaged or incomplete (', 'prepare_imagenet', path.parent, tmp_path / 'imagenet')
    path.unlink()
    refused(f'no {path.name} in', 'prepare_imagenet', path.parent, tmp_path / 'imagenet')


@pytest.mark.parametrize('form', ['tar', 'tar.gz', 'folder'])
def test_imagenet22k(tmp_path, form):
    source = tmp_path / f'winter21_whole.{form}'
    if form == 'folder':
        with tarfile.open(fileobj=io.BytesIO(classes_tar())) as archive:
            archive.extractall(source, filter='data')
    else:
        source.write_bytes(classes_tar('w:gz' if form == 'tar.gz' else 'w', 'winter21_whole/'))
    few = 'holds 3 classes, expected 21,841 (fall 2011) or 19,167 (winter 2021); if it is meant, train with '
    few += '--cfg-options model.data_preprocessor.num_classes=3 model.head.num_classes=3'
    refused(few, 'prepare_imagenet22k', source, tmp_path / 'out')
    assert len(tree(tmp_path / 'out')) == 9 and (tmp_path / 'out/n00000002/n00000002_2.JPEG').exists()


@pytest.mark.parametrize(
    ('outer', 'message'),
    [
        ({'n00000001.tar': tar({'../../evil.JPEG': b''})}, 'outside the destination'),
        ({'n00000001.tar': tar({}, link=LINK)}, 'which is no file'),
        ({'other.tar': b''}, "holds 'other', expected n########.tar"),
        ({}, 'holds no archive of a class'),
    ],
)
def test_nothing_is_written_outside_of_the_target(tmp_path, outer, message):
    (tmp_path / 'whole.tar').write_bytes(tar(outer))
    refused(message, 'prepare_imagenet22k', tmp_path / 'whole.tar', tmp_path / 'deep/target')
    assert [path.name for path in tmp_path.rglob('*') if path.is_file()] == ['whole.tar']


def test_a_damaged_header_is_not_the_end_of_the_archive(tmp_path):
    content = bytearray(classes_tar())
    content[content.index(b'n00000002.tar')] ^= 1
    (tmp_path / 'whole.tar').write_bytes(content)
    refused('damaged or incomplete', 'prepare_imagenet22k', tmp_path / 'whole.tar', tmp_path / 'target')


def test_cifar100(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    parts = dict(meta=dict(fine_label_names=['apple', 'bee']))
    for split, count in (('train', 4), ('test', 2)):
        data = rng.integers(0, 256, (count, 3072), dtype=np.uint8)
        parts[split] = dict(data=data, fine_labels=[i % 2 for i in range(count)])
    pickles = {name: pickle.dumps(part) for name, part in parts.items()}
    md5 = {name: hashlib.md5(content).hexdigest() for name, content in pickles.items()}
    path = tmp_path / 'cifar-100-python.tar.gz'
    path.write_bytes(tar({f'cifar-100-python/{name}': content for name, content in pickles.items()}, 'w:gz'))
    refused('another file (MD5 eb9058c3', 'prepare_cifar100', path, tmp_path / 'cifar100')
    assert not (tmp_path / 'cifar100').exists()
    for name, value in dict(
        tgz_md5=hashlib.md5(path.read_bytes()).hexdigest(),
        train_list=[['train', md5['train']]],
        test_list=[['test', md5['test']]],
        meta=dict(CIFAR100.meta, md5=md5['meta']),
    ).items():
        monkeypatch.setattr(CIFAR100, name, value)
    for _ in range(2):  # the second time it is there already
        run_tool('datasets/prepare_cifar100.py', path, tmp_path / 'cifar100')
    names = 'train/apple/00000 train/apple/00002 train/bee/00001 train/bee/00003 val/apple/00000 val/bee/00001'.split()
    assert sorted(tree(tmp_path / 'cifar100')) == [f'{name}.png' for name in names]
    pixels = np.asarray(Image.open(tmp_path / 'cifar100/train/bee/00003.png'))
    assert np.array_equal(pixels.transpose(2, 0, 1).ravel(), parts['train']['data'][3])


ADE20K = {
    'images/training/ADE_train_00000001.jpg': b'image 1',
    'images/validation/ADE_val_00000001.jpg': b'image 2',
    'annotations/training/ADE_train_00000001.png': b'labels 1',
    'annotations/validation/ADE_val_00000001.png': b'labels 2',
    'objectInfo150.txt': b'Idx\tName\n1\twall\n',
}


def test_ade20k(tmp_path):
    source, target = tmp_path / 'ADEChallengeData2016.zip', tmp_path / 'deep/ade20k'
    top = 'ADEChallengeData2016/'
    others = {f'{top}images/': b'', f'{top}sceneCategories.txt': b'', f'{top}images/training/../../../../evil.jpg': b''}
    with zipfile.ZipFile(source, 'w', zipfile.ZIP_DEFLATED) as archive:
        for name, content in {**others, **{top + name: content for name, content in ADE20K.items()}}.items():
            archive.writestr(name, content)
    for name, content in (('training/ADE_train_00000001.jpg', b'IMAGE 1'), ('validation/ADE_val_00000001.jpg', b'ima')):
        (target / 'images' / name).parent.mkdir(parents=True)
        (target / 'images' / name).write_bytes(content)  # finished, and cut
    refused('expected 20,210 of each in training', 'prepare_ade20k', source, target)
    assert tree(target) == dict(ADE20K, **{'images/training/ADE_train_00000001.jpg': b'IMAGE 1'})
    assert not [*tmp_path.rglob('evil*')]
    source.write_bytes(b'<html>not found</html>')
    refused('ADEChallengeData2016.zip: damaged or incomplete', 'prepare_ade20k', source, target)
    with zipfile.ZipFile(source, 'w') as archive:
        archive.writestr('readme.txt', 'text')
    refused('is it another archive?', 'prepare_ade20k', source, target)
    refused('No such file', 'prepare_ade20k', tmp_path / 'missing.zip', target)

"""The preparation scripts on small archives of the official form: right folders, going on, nothing outside, and damage
named in one line."""
import hashlib
import importlib.util
import io
import os
import pickle
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
from helpers import ROOT
from mmengine.config import Config
from PIL import Image
from scipy.io import savemat

from beit_mm.datasets.archives import ArchiveError, unpack_classes, unpack_files

SYNSETS = ['n00000003', 'n00000001', 'n00000002']  # of the identifiers 1, 2, 3


def tar(members: dict[str, bytes], mode: str = 'w') -> bytes:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode=mode) as archive:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return content.getvalue()


def classes_tar(mode: str = 'w', folder: str = '') -> bytes:
    return tar({f'{folder}{name}.tar': tar({f'{name}_{i}.JPEG': f'{name} {i}'.encode() * 300 for i in range(3)})
                for name in SYNSETS}, mode)


def tree(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob('*') if path.is_file()}


def run(tool: str, *arguments: object) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, str(ROOT / 'tools' / tool), *map(str, arguments)], capture_output=True,
                          text=True, timeout=240, env=dict(os.environ, PYTHONPATH=str(ROOT), OMP_NUM_THREADS='1'))


def call(tool: str, *arguments: object) -> subprocess.CompletedProcess:
    """As `run`, without the seconds that a process of its own takes to begin."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as end:
        patch.setattr(sys, 'argv', [tool, *map(str, arguments)])
        module(tool.removesuffix('.py')).main()
    return subprocess.CompletedProcess(tool, 1, '', f'{end.value.code}\n')


def module(name: str):
    spec = importlib.util.spec_from_file_location(name, ROOT / f'tools/{name}.py')
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


@pytest.fixture
def downloads(tmp_path) -> Path:
    folder = tmp_path / 'downloads'
    folder.mkdir()
    (folder / 'ILSVRC2012_img_train.tar').write_bytes(classes_tar())
    (folder / 'ILSVRC2012_img_val.tar').write_bytes(
        tar({f'ILSVRC2012_val_{i:08}.JPEG': f'val {i}'.encode() for i in (4, 1, 2, 3)}))
    dtype = [('ILSVRC2012_ID', 'O'), ('WNID', 'O')]
    synsets = np.array([(i, name) for i, name in enumerate(SYNSETS, start=1)], dtype=dtype)[:, None]
    savemat(tmp_path / 'meta.mat', dict(synsets=synsets))
    data = 'ILSVRC2012_devkit_t12/data/'
    (folder / 'ILSVRC2012_devkit_t12.tar.gz').write_bytes(tar({
        f'{data}meta.mat': (tmp_path / 'meta.mat').read_bytes(),
        f'{data}ILSVRC2012_validation_ground_truth.txt': b'3\n1\n2\n3\n'}, 'w:gz'))
    return folder


def test_imagenet(downloads, tmp_path):
    done = run('prepare_imagenet.py', downloads, tmp_path / 'imagenet')
    assert 'holds 9 images, expected 1,281,167' in done.stderr.strip().splitlines()[-1] and done.returncode == 1
    assert tree(tmp_path / 'imagenet/val') == {
        f'{name}/ILSVRC2012_val_{i:08}.JPEG': f'val {i}'.encode()
        for i, name in enumerate(('n00000002', 'n00000003', 'n00000001', 'n00000002'), start=1)}
    train = tree(tmp_path / 'imagenet/train')
    assert train == {f'{name}/{name}_{i}.JPEG': f'{name} {i}'.encode() * 300 for name in SYNSETS for i in range(3)}
    (downloads / 'ILSVRC2012_img_val.tar').unlink()
    done = run('prepare_imagenet.py', downloads, tmp_path / 'imagenet')
    assert done.returncode == 1 and 'no ILSVRC2012_img_val.tar in' in done.stderr


def test_finished_classes_stay_and_an_interrupted_one_is_redone(downloads, tmp_path):
    target = tmp_path / 'train'
    (target / 'n00000003').mkdir(parents=True)
    (target / 'n00000003/mine').write_text('finished')
    (target / '.n00000001.part').mkdir()
    (target / '.n00000001.part/n00000001_0.JPEG').write_text('cut sho')
    unpack_classes(downloads / 'ILSVRC2012_img_train.tar', target, 3)
    found = tree(target)
    assert found.pop('n00000003/mine') == b'finished'
    assert found == {f'{name}/{name}_{i}.JPEG': f'{name} {i}'.encode() * 300 for name in SYNSETS[1:] for i in range(3)}


def test_a_cut_archive_ends_with_an_error_and_leaves_no_half_class(downloads, tmp_path):
    path = downloads / 'ILSVRC2012_img_train.tar'
    path.write_bytes(path.read_bytes()[:22000])  # within the second class
    with pytest.raises(ArchiveError, match='img_train.tar: damaged or incomplete'):
        unpack_classes(path, tmp_path / 'train', 3)
    assert [f.name for f in (tmp_path / 'train').iterdir() if not f.name.startswith('.')] == [SYNSETS[0]]


HTML = b'<!DOCTYPE html>\n<html><body>Please sign in</body></html>\n' * 40
DEVKIT = 'ILSVRC2012_devkit_t12.tar.gz'


def refuse(done: subprocess.CompletedProcess, *words: str) -> None:
    """The script ended with one line of an error, which begins on a line of its own and has these words."""
    assert done.returncode == 1 and done.stderr.count('\n') == 1, done.stderr
    assert not done.stdout or done.stdout.endswith('\n')
    assert done.stderr.startswith('error: ')
    for word in words:
        assert word in done.stderr


def meta_damaged(devkit: bytes) -> bytes:
    with tarfile.open(fileobj=io.BytesIO(devkit)) as archive:
        content = {member.name: archive.extractfile(member).read() for member in archive}
    name = next(name for name in content if name.endswith('meta.mat'))
    content[name] = content[name][:140]
    return tar(content, 'w:gz')


@pytest.mark.parametrize('damage', [
    lambda devkit: devkit[:len(devkit) // 2],
    lambda devkit: devkit[:-60] + bytes(40) + devkit[-20:],
    lambda devkit: b'',
    lambda devkit: HTML,
    meta_damaged,
], ids=['cut', 'bytes changed', 'empty', 'HTML', 'meta.mat cut'])
def test_a_damaged_devkit_is_one_line(downloads, tmp_path, damage):
    path = downloads / DEVKIT
    path.write_bytes(damage(path.read_bytes()))
    done = call('prepare_imagenet.py', downloads, tmp_path / 'imagenet')
    refuse(done, f'error: {path}: damaged or incomplete (', '); download it again')
    assert not (tmp_path / 'imagenet').exists()


@pytest.mark.parametrize('name', ['ILSVRC2012_img_train.tar', 'ILSVRC2012_img_val.tar'])
@pytest.mark.parametrize('damage', [lambda content: content[:1700], lambda content: HTML], ids=['cut', 'HTML'])
def test_a_damaged_archive_of_images_is_one_line(downloads, tmp_path, name, damage):
    (downloads / name).write_bytes(damage((downloads / name).read_bytes()))
    done = call('prepare_imagenet.py', downloads, tmp_path / 'imagenet')
    refuse(done, f'error: {downloads / name}: damaged or incomplete (', '); download it again')


def test_a_header_damaged_in_the_middle_is_not_the_end_of_the_archive(downloads, tmp_path):
    path = downloads / 'ILSVRC2012_img_train.tar'
    content = bytearray(path.read_bytes())
    content[content.index(b'n00000002.tar')] ^= 1
    path.write_bytes(content)
    refuse(call('prepare_imagenet.py', downloads, tmp_path / 'imagenet'), f'error: {path}: damaged or incomplete')
    path.write_bytes(content[:content.index(b'00000002.tar') + 100])  # cut within a header
    refuse(call('prepare_imagenet.py', downloads, tmp_path / 'imagenet'), f'error: {path}: damaged or incomplete')


@pytest.mark.parametrize(('share', 'start'), [(0.3, call), (0.6, run), (0.95, call)])
def test_a_cut_archive_of_imagenet22k_is_one_line(tmp_path, share, start):
    rng = np.random.default_rng(0)  # images do not shrink, so that a cut falls into one
    content = tar({f'winter21_whole/{name}.tar': tar({f'{name}_1.JPEG': rng.bytes(30000)}) for name in SYNSETS}, 'w:gz')
    path = tmp_path / 'winter21_whole.tar.gz'
    path.write_bytes(content[:int(share * len(content))])
    refuse(start('prepare_imagenet22k.py', path, tmp_path / 'out'), f'error: {path}: damaged or incomplete (')


def test_a_source_without_class_archives_is_named(tmp_path):
    (tmp_path / 'source/n00000001').mkdir(parents=True)
    done = call('prepare_imagenet22k.py', tmp_path / 'source', tmp_path / 'out')
    refuse(done, f'error: {tmp_path / "source"} holds no archive of a class, expected n########.tar for each')
    assert not (tmp_path / 'out').exists()
    path = tmp_path / 'source/n00000001.tar'
    path.write_bytes(tar({'n00000001_1.JPEG': b'image' * 1000})[:3000])
    refuse(call('prepare_imagenet22k.py', tmp_path / 'source', tmp_path / 'out'), f'error: {path}: damaged')
    refuse(call('prepare_imagenet22k.py', tmp_path / 'gone.tar', tmp_path / 'out'), 'No such file', 'gone.tar')


def test_the_options_for_the_release_of_fewer_classes(tmp_path):
    for number in range(19_167):
        (tmp_path / f'out/n{number:08}').mkdir(parents=True)
    (tmp_path / 'winter21_whole.tar').write_bytes(classes_tar())  # of classes that are there already
    done = run('prepare_imagenet22k.py', tmp_path / 'winter21_whole.tar', tmp_path / 'out')
    assert done.returncode == 0, done.stderr
    last = done.stdout.splitlines()[-1]
    assert 'have 21,841 classes; train them with --cfg-options ' in last
    for name in ('intermediate_in22k_90e', 'intermediate_large_in22k_90e'):
        cfg = Config.fromfile(ROOT / f'configs/beit_plus/{name}.py')
        assert set(numbers_of_classes(cfg.model)) == {21_841}
        cfg.merge_from_dict({key: int(value) for key, value in (
            option.split('=') for option in last.partition('--cfg-options ')[2].split())})
        assert set(numbers_of_classes(cfg.model)) == {19_167}


def numbers_of_classes(config: dict) -> list[int]:
    found = [config['num_classes']] if 'num_classes' in config else []
    return found + [number for value in config.values() if isinstance(value, dict)
                    for number in numbers_of_classes(value)]


@pytest.mark.parametrize('form', ['tar', 'tar.gz', 'folder'])
def test_imagenet22k(tmp_path, form):
    source = tmp_path / f'winter21_whole.{form}'
    if form == 'folder':
        source.mkdir()
        with tarfile.open(fileobj=io.BytesIO(classes_tar())) as archive:
            for member in archive:
                (source / member.name).write_bytes(archive.extractfile(member).read())
    else:
        source.write_bytes(classes_tar('w:gz' if form == 'tar.gz' else 'w', 'winter21_whole/'))
    done = run('prepare_imagenet22k.py', source, tmp_path / 'out')
    refuse(done, 'holds 3 classes, expected 21,841 (fall 2011) or 19,167', 'model.head.num_classes=3')
    assert len(tree(tmp_path / 'out')) == 9 and (tmp_path / 'out/n00000002/n00000002_2.JPEG').exists()


def test_paths_that_lead_out_and_links_are_refused(tmp_path):
    target = tmp_path / 'deep/target'
    for name in ('../../evil.JPEG', '/tmp/evil_of_test.JPEG'):
        path = tmp_path / 'outer.tar'
        path.write_bytes(tar({'n00000001.tar': tar({name: b'evil'})}))
        with pytest.raises(ArchiveError, match='no plain file inside'):
            unpack_classes(path, target, 1)
        path.write_bytes(tar({name: b'evil'}))
        with pytest.raises(ArchiveError, match='no plain file inside'):
            unpack_files(path, target, {'evil.JPEG': 'a'})
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode='w') as archive:
        link = tarfile.TarInfo('evil.JPEG')
        link.type, link.linkname = tarfile.SYMTYPE, '/etc/passwd'
        archive.addfile(link)
    (tmp_path / 'outer.tar').write_bytes(tar({'n00000001.tar': content.getvalue()}))
    with pytest.raises(ArchiveError, match='evil.JPEG'):
        unpack_classes(tmp_path / 'outer.tar', target, 1)
    (tmp_path / 'outer.tar').write_bytes(tar({'other.tar': b''}))
    with pytest.raises(ArchiveError, match="holds 'other', expected n########.tar"):
        unpack_classes(tmp_path / 'outer.tar', target, 1)
    assert not [path for path in tmp_path.rglob('*evil*')] and not Path('/tmp/evil_of_test.JPEG').exists()


def cifar(folder: Path, meta: object = None) -> tuple[Path, str]:
    """A small archive of CIFAR-100's form and its MD5; returns the images, too."""
    rng = np.random.default_rng(0)
    parts = {'meta': meta or {b'fine_label_names': [b'apple', b'bee']}}
    for split, count in (('train', 4), ('test', 2)):
        parts[split] = {b'data': rng.integers(0, 256, (count, 3072), dtype=np.uint8),
                        b'fine_labels': [i % 2 for i in range(count)],
                        b'filenames': [f'{split}_{i}.png'.encode() for i in range(count)]}
    path = folder / 'cifar-100-python.tar.gz'
    path.write_bytes(tar({f'cifar-100-python/{name}': pickle.dumps(part, protocol=3) for name, part in parts.items()},
                         'w:gz'))
    return path, hashlib.md5(path.read_bytes()).hexdigest()


def test_cifar100(tmp_path):
    tool = module('prepare_cifar100')
    path, md5 = cifar(tmp_path)
    for _ in range(2):  # the second time it is there already
        tool.unpack(path, tmp_path / 'cifar100', md5)
    assert sorted(tree(tmp_path / 'cifar100')) == [
        'train/apple/train_0.png', 'train/apple/train_2.png', 'train/bee/train_1.png', 'train/bee/train_3.png',
        'val/apple/test_0.png', 'val/bee/test_1.png']
    data = np.random.default_rng(0).integers(0, 256, (4, 3072), dtype=np.uint8)
    pixels = np.asarray(Image.open(tmp_path / 'cifar100/train/bee/train_3.png'))
    for channel in range(3):
        assert np.array_equal(pixels[..., channel].ravel(), data[3, 1024 * channel:1024 * (channel + 1)])
    done = run('prepare_cifar100.py', path, tmp_path / 'other')
    assert done.returncode == 1 and f'has MD5 {md5}, expected eb9058c3' in done.stderr.strip().splitlines()[-1]


class Program:

    def __reduce__(self):
        return os.system, ('touch program_was_run', )


def test_cifar100_runs_no_program(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path, md5 = cifar(tmp_path, meta=Program())
    with pytest.raises(pickle.UnpicklingError, match='asks for .*system; nothing of it was run'):
        module('prepare_cifar100').unpack(path, tmp_path / 'cifar100', md5)
    assert not (tmp_path / 'program_was_run').exists()


ADE20K = {'images/training/ADE_train_00000001.jpg': b'image 1', 'images/validation/ADE_val_00000001.jpg': b'image 2',
          'annotations/training/ADE_train_00000001.png': b'labels 1',
          'annotations/validation/ADE_val_00000001.png': b'labels 2', 'objectInfo150.txt': b'Idx\tName\n1\twall\n'}


def ade20k_zip(folder: Path, files: dict[str, bytes]) -> Path:
    path = folder / 'ADEChallengeData2016.zip'
    with zipfile.ZipFile(path, 'w', zipfile.ZIP_DEFLATED) as file:
        for name, content in files.items():
            file.writestr(name, content)
    return path


@pytest.fixture
def ade20k(tmp_path) -> Path:
    top = 'ADEChallengeData2016/'
    others = {top: b'', f'{top}images/': b'', f'{top}sceneCategories.txt': b'ADE_train_00000001 street'}
    return ade20k_zip(tmp_path, {**others, **{top + name: content for name, content in ADE20K.items()}})


def test_ade20k(ade20k, tmp_path):
    done = run('prepare_ade20k.py', ade20k, tmp_path / 'ade20k')
    assert tree(tmp_path / 'ade20k') == ADE20K
    assert done.returncode == 1 and 'expected 20,210 of each in training' in done.stderr.strip().splitlines()[-1]
    assert 'training: 1 images, 1 annotations' in done.stdout


def test_ade20k_finished_files_stay_and_damaged_ones_are_written_again(ade20k, tmp_path):
    target = tmp_path / 'ade20k'
    (target / 'images/training').mkdir(parents=True)
    (target / 'images/validation').mkdir(parents=True)
    (target / 'images/training/ADE_train_00000001.jpg').write_bytes(b'IMAGE 1')  # of the right size
    (target / 'images/validation/ADE_val_00000001.jpg').write_bytes(b'pho')
    module('prepare_ade20k').unpack(ade20k, target)
    assert tree(target) == dict(ADE20K, **{'images/training/ADE_train_00000001.jpg': b'IMAGE 1'})


@pytest.mark.parametrize('name', ['../images/training/evil.jpg', '/images/training/evil.jpg',
                                  'a/../../images/training/evil.jpg', 'images/training/..\\evil.jpg'])
def test_ade20k_paths_that_lead_out_are_refused(tmp_path, name):
    path = ade20k_zip(tmp_path, {**ADE20K, name: b'evil'})
    with pytest.raises(ArchiveError, match='no plain file inside of it; nothing was written'):
        module('prepare_ade20k').unpack(path, tmp_path / 'deep/target')
    assert not [*tmp_path.rglob('*evil*')] and not (tmp_path / 'deep').exists()


def test_ade20k_other_and_damaged_archives(ade20k, tmp_path):
    done = run('prepare_ade20k.py', ade20k_zip(tmp_path, {'readme.txt': b'text'}), tmp_path / 'out')
    assert done.returncode == 1 and 'is it another archive?' in done.stderr and 'Traceback' not in done.stderr
    ade20k.write_bytes(b'<html>not found</html>')
    done = run('prepare_ade20k.py', ade20k, tmp_path / 'out')
    assert done.returncode == 1 and 'ADEChallengeData2016.zip: File is not a zip file' in done.stderr
    done = run('prepare_ade20k.py', tmp_path / 'missing.zip', tmp_path / 'out')
    assert done.returncode == 1 and 'missing.zip' in done.stderr.strip().splitlines()[-1]

"""Tar shards give the samples that the folder gives, and what is wrong with them ends in one line."""

import gzip
import io
import os
import pickle
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import refused, run_tool, tree
from labelled import make_images
from mmengine.dataset import default_collate
from PIL import Image

from beit_mm.datasets import SeededSampler, UnreadableImageError
from beit_mm.datasets.image_folder import INDEX
from beit_mm.datasets.reading import read_image
from beit_mm.registry import DATASETS

LOAD = [dict(type='beit_mm.LoadImage')]
TWO_VIEWS = [
    *LOAD,
    dict(type='beit_mm.TwoViewRandomResizedCrop', size=32, second_size=16),
    dict(type='beit_mm.BlockwiseMask', grid=(4, 4), num_masked=6, min_block=2),
    dict(type='beit_mm.PackViews'),
]


@pytest.fixture(scope='module')
def made(tmp_path_factory) -> Path:
    """A folder of 18 images in 3 classes, some with odd names, and its shards, of which no test changes any."""
    root = tmp_path_factory.mktemp('made')
    folder = make_images(root / 'data') / 'train'
    (folder / 'red/deep').mkdir()
    (folder / 'red/0.png').rename(folder / 'red/deep' / ('long' * 30 + '.png'))  # a name beyond tar's 100 bytes
    (folder / 'blue/3.png').rename(folder / os.fsdecode(b'blue/\xff\xe9.png'))
    run_tool('datasets/make_shards.py', folder, root / 'shards', '--shard-size', '20KB')
    return root


@pytest.fixture
def root(made, tmp_path) -> Path:
    """A copy to change."""
    return shutil.copytree(made, tmp_path / 'copy')


def build(folder, kind='ImageFolder', pipeline=LOAD, **kwargs):
    return DATASETS.build(dict(type=f'beit_mm.{kind}', data_root=str(folder), pipeline=pipeline, **kwargs))


def make_tar(path: Path, members: dict[str, bytes], kind: bytes = tarfile.REGTYPE) -> Path:
    """An archive as Python's tarfile writes it."""
    path.parent.mkdir(exist_ok=True)
    with tarfile.open(path, 'w') as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size, info.type, info.linkname = len(content), kind, '/etc/passwd'
            archive.addfile(info, io.BytesIO(content))
    return path


def labels_of(made: Path, kind: str, **settings) -> list[int | None]:
    """The labels in the shards, after a check that they hold the samples of the folder."""
    files, members = (build(made / folder, kind, **settings) for folder in ('data/train', 'shards'))
    assert files.metainfo.get('classes') == members.metainfo.get('classes') and len(files) == len(members)
    for file, member in zip(files, members, strict=True):
        assert np.array_equal(file['img'], member['img']) and file.get('gt_label') == member.get('gt_label')
        shard, name = member['img_path'].removeprefix(f'{made}/shards/').split('/', 1)
        assert name == os.path.relpath(file['img_path'], made / 'data/train') and shard.startswith('shard-00000')
    return [member.get('gt_label') for member in members]


@pytest.mark.parametrize('kind', ['ImageFolder', 'UnlabeledImages'])
def test_samples_order_lists_and_classes_are_the_folders(made, tmp_path, kind):
    assert len(labels_of(made, kind)) == 18
    (tmp_path / 'list').write_text('red/1.png\nblue/2.png 0\n')
    assert len(labels_of(made, kind, ann_file=str(tmp_path / 'list'))) == 2
    if kind == 'ImageFolder':
        for classes in (('red', 'blue'), ('green', 'red', 'blue')):
            expected = [label for label in range(len(classes)) for _ in range(6)]
            assert labels_of(made, kind, classes=classes) == expected


def test_images_beside_the_class_folders_have_no_class(tmp_path):
    folder = make_images(tmp_path / 'data') / 'train'
    shutil.copy(folder / 'red/0.png', folder / 'stray.png')
    run_tool('datasets/make_shards.py', folder, tmp_path / 'shards')
    shards = build(tmp_path / 'shards', classes=('red', 'blue'))
    assert [sample['gt_label'] for sample in shards] == 6 * [0] + 6 * [1]


def test_the_archives_are_ordinary_ones(made):
    found = {}
    for path in sorted((made / 'shards').glob('*.tar')):
        with tarfile.open(path) as archive:
            assert path.stat().st_size < 32_000
            found |= {member.name: archive.extractfile(member).read() for member in archive}
    assert list(found) == sorted(found, key=os.fsencode) and len(list((made / 'shards').iterdir())) == 6
    assert found == tree(made / 'data/train')


def batches(folder: Path, workers: int = 0, skip: int = 0) -> list[bytes]:
    """What is drawn in the second epoch, from a sample on, as a run that goes on does it."""
    dataset = build(folder, 'UnlabeledImages', TWO_VIEWS)
    dataset[0]  # the main process has an archive open when its workers are forked
    dataset = pickle.loads(pickle.dumps(dataset))  # as a spawned worker gets it
    sampler = SeededSampler(dataset, seed=5)
    sampler.set_epoch(1)
    sampler.skip(skip)
    loader = torch.utils.data.DataLoader(dataset, 4, sampler=sampler, num_workers=workers, collate_fn=default_collate)
    return [b''.join(batch['inputs'][key].numpy().tobytes() for key in ('images', 'mask')) for batch in loader]


def test_workers_and_a_resumed_run_draw_what_the_folder_would_give(made):
    whole = batches(made / 'data/train')
    assert len(set(whole)) == 5 and batches(made / 'shards', workers=2) == whole
    assert batches(made / 'shards', skip=8) == whole[2:]


def test_cls_files_of_webdataset_number_the_classes(tmp_path):
    for shard, numbers in enumerate([(2, 0), (1,)]):
        members = {'./.hidden.png': b'', '0.json': b'{}', '__MACOSX/9.png': b'', '@eaDir/0.png/8.png': b''}
        for index, number in enumerate(numbers):
            Image.new('RGB', (9, 7), (number, 0, 0)).save(file := io.BytesIO(), 'PNG')
            members |= {f'{index}.cls': b'%d\n' % number, f'{index}.png': file.getvalue()}
        make_tar(tmp_path / f'web/train-{shard}.tar', members)
    web = tmp_path / 'web'
    run_tool('datasets/make_shards.py', '--index-only', web)
    dataset = build(web)
    assert [(sample['gt_label'], sample['img'][0, 0, 0]) for sample in dataset] == [(0, 0), (1, 1), (2, 2)]
    assert dataset.CLASSES == ('0', '1', '2') and build(web, classes=['x', 'y', 'z']).CLASSES[2] == 'z'
    assert len(build(web, 'UnlabeledImages')) == 3
    with pytest.raises(ValueError, match='train-0.tar/0.png has class 2 .* from 0 to 1'):
        build(web, classes=['x', 'y'])


def negative(content: bytes) -> bytes:
    """The second member claims to be -1536 bytes long, so that its successor would be the first."""
    info = tarfile.TarInfo('b.png')
    info.size = -1536
    return content[:1024] + bytes(info.tobuf(tarfile.GNU_FORMAT)) + content[1024:]


CHANGES = [lambda content: content[:900], lambda content: content[:1800], gzip.compress, negative]


@pytest.mark.parametrize('change', [*CHANGES, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, b'S'])
def test_an_archive_without_plain_whole_images_is_refused(tmp_path, change):
    members, message = {'a.png': b'1' * 500, 'b.png': b'2' * 500}, 'web.tar is not a complete tar archive ('
    if isinstance(change, bytes):
        make_tar(tmp_path / 'web/web.tar', {'a/b.png': b''}, change)
        message = 'is a link, a sparse file or a device'
    else:
        path = make_tar(tmp_path / 'web/web.tar', members)
        path.write_bytes(change(path.read_bytes()))
    refused(message, 'make_shards', '--index-only', tmp_path / 'web')
    assert not (tmp_path / 'web' / INDEX).exists()


def test_missing_and_cut_archives_stop_a_run_before_it_begins(root):
    path = root / 'shards/shard-000001.tar'
    path.write_bytes(path.read_bytes()[:-10])
    for kind in ('ImageFolder', 'UnlabeledImages'):
        with pytest.raises(ValueError, match='^.*shard-000001.tar .*copy it.*$'):
            build(root / 'shards', kind)
        path.unlink(missing_ok=True)


@pytest.mark.parametrize('kind', ['ImageFolder', 'UnlabeledImages'])
def test_a_list_of_images_that_the_archives_lack_is_named(made, tmp_path, kind):
    (tmp_path / 'list').write_text('red/1.png\nred/9.png\n')
    with pytest.raises(ValueError, match='^.*/list lists red/9.png.*/shards.*blue/0.png.*$'):
        build(made / 'shards', kind, ann_file=str(tmp_path / 'list'))


def test_what_breaks_later_is_an_unreadable_image_like_any_other(root):
    dataset = build(root / 'shards', 'UnlabeledImages', TWO_VIEWS, on_error='skip')
    path = dataset.get_data_info(17)['img_path']
    with open(path.archive, 'r+b') as file:
        file.seek(path.offset)
        file.write(b'broken')
    assert dataset[17]['inputs']['unreadable'] == path
    os.truncate(path.archive, path.offset + 50)
    with pytest.raises(UnreadableImageError, match='shard-00000.*/red/deep/longlong.*: cannot be read as an image'):
        read_image(path)


class Trap:
    """Leaves a mark when it is unpickled."""

    def __reduce__(self):
        return os.mkdir, ('ran',)


@pytest.mark.parametrize('damage', ['cut', 'pickle', 'objects'])
def test_an_index_that_cannot_be_read_is_named_and_executes_nothing(root, damage, monkeypatch):
    monkeypatch.chdir(root)
    path = root / 'shards' / INDEX
    content, arrays = path.read_bytes(), dict(np.load(path))
    if damage == 'objects':
        np.savez(path, **dict(arrays, length=np.array([Trap()] * 18, object)))
    else:
        path.write_bytes(dict(cut=content[:300], pickle=pickle.dumps(Trap()))[damage])
    with pytest.raises(ValueError, match='^.* is not an index .*: .* --index-only .*$'):
        build(root / 'shards')
    assert not (root / 'ran').exists()
    run_tool('datasets/make_shards.py', '--index-only', root / 'shards')
    assert path.read_bytes() == content  # what the headers tell is what was written


def test_a_size_is_refused_where_no_archive_is_written(tmp_path, capsys):
    with pytest.raises(SystemExit):
        run_tool('datasets/make_shards.py', '--index-only', tmp_path, '--shard-size', '1MB')
    assert '--shard-size has no effect' in capsys.readouterr().err


def test_an_interrupted_writer_goes_on(root, capsys):
    shards, whole = root / 'shards', tree(root / 'shards')
    for name in (INDEX, *(f'shard-00000{number}.tar' for number in (2, 3, 4))):
        (shards / name).unlink()
    (shards / 'shard-000002.tar.0123abcd.part').write_bytes(b'half')
    first = (shards / 'shard-000000.tar').stat()
    run_tool('datasets/make_shards.py', root / 'data/train', shards, '--shard-size', '20KB')
    assert '2 archives of an earlier run' in capsys.readouterr().out  # another size would not apply to them
    assert tree(shards) == whole and (shards / 'shard-000000.tar').stat().st_mtime_ns == first.st_mtime_ns


def test_a_writer_leaves_what_is_not_its_own(root):
    (root / 'data/train/red/1.png').unlink()
    before = tree(root)
    refused('shard-000000.tar does not hold the images of', 'make_shards', root / 'data/val/red', root / 'shards')
    refused('inside it; choose a folder elsewhere', 'make_shards', root / 'data', root / 'data/train')
    (root / 'data/train/red/1.png').symlink_to('nowhere')
    refused('red/1.png: cannot be read as an image (No such file', 'make_shards', root / 'data/train', root / 'new')
    assert tree(root) == before

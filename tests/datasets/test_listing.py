"""Compact lists of files: what BaseDataset promises holds, and what is remembered is what a search would find."""

import copy
import os
import pickle

import numpy as np
import pytest
from labelled import CLASSES, make_images
from mmengine.dataset import ClassBalancedDataset, ConcatDataset

from beit_mm.datasets import listing
from beit_mm.datasets.listing import Paths, Samples, list_images, list_subfolders
from beit_mm.registry import DATASETS


@pytest.fixture
def folder(tmp_path):
    return make_images(tmp_path / 'data', per_class=3) / 'train'


def build(folder, **kwargs):
    return DATASETS.build(dict(type='beit_mm.ImageFolder', data_root=str(folder), **kwargs))


def described(dataset):
    infos = [dataset.get_data_info(index) for index in range(len(dataset))]
    return [('/'.join(info['img_path'].split('/')[-2:]), info['gt_label']) for info in infos]


WHOLE = [(f'{name}/{index}.png', label) for label, name in enumerate(CLASSES) for index in range(3)]


def test_paths_are_a_sequence_of_strings():
    strings = ['a', 'b/é 😀.jpg', os.fsdecode(b'\xff.png'), 'd']
    paths = Paths.of(strings)
    assert list(paths) == strings and len(paths) == 4 and paths[-1] == 'd' and list(paths[1:3]) == strings[1:3]
    assert list(pickle.loads(pickle.dumps(paths))) == list(copy.deepcopy(paths)) == strings
    assert not Paths.of([]) and list(Paths.of([])[:2]) == []
    with pytest.raises(IndexError):
        paths[4]


def test_what_base_dataset_promises_holds(folder):
    dataset = build(folder)
    assert isinstance(dataset.data_list, Samples) and described(dataset) == WHOLE
    assert dataset.get_data_info(-1)['sample_idx'] == 8 and type(dataset.get_data_info(0)['gt_label']) is int
    assert described(build(folder, indices=4)) == WHOLE[:4] == described(dataset.get_subset(4))
    assert described(build(folder, indices=[5, 1])) == [WHOLE[5], WHOLE[1]] == described(dataset.get_subset([5, 1]))
    assert described(dataset.get_subset(-2)) == WHOLE[-2:] and len(dataset) == 9
    assert described(build(folder, serialize_data=False)) == described(build(folder, lazy_init=True)) == WHOLE
    assert described(pickle.loads(pickle.dumps(dataset))) == WHOLE  # a worker that is spawned
    dataset.get_subset_(3)
    assert described(dataset) == WHOLE[:3]
    two = ConcatDataset([build(folder), build(folder)])
    assert len(two) == 18 and two.get_data_info(17)['gt_label'] == 2
    assert len(ClassBalancedDataset(build(folder), oversample_thr=0.9)) > 9


def test_a_subclass_may_filter_or_list_dicts(folder):
    base = DATASETS.get('beit_mm.ImageFolder')

    class Filtered(base):
        def filter_data(self):
            return [info for info in self.data_list if info['gt_label'] != 1]

    class Longer(base):
        def load_data_list(self):
            return [dict(info, more=1) for info in super().load_data_list()]

    assert described(Filtered(str(folder))) == [entry for entry in WHOLE if entry[1] != 1]
    longer = Longer(str(folder))
    assert longer.get_data_info(8)['more'] == 1 and longer.serialize_data


def test_lists_with_odd_bytes_are_read(folder):
    name = os.fsdecode(b'\xe9\xff.png')
    (folder / 'red/0.png').rename(folder / 'red' / name)
    (folder / 'list.txt').write_bytes(b'\xef\xbb\xbfblue/1.png\r\nred/\xe9\xff.png 2\n')  # as Windows writes it
    dataset = build(folder, ann_file='list.txt')
    assert described(dataset) == [('blue/1.png', 0), (f'red/{name}', 2)]
    assert os.path.isfile(dataset.get_data_info(1)['img_path'])
    (folder / 'list.txt').write_text('blue/1.png', encoding='utf-16')
    with pytest.raises(ValueError, match='list.txt, line 1 holds a NUL byte; expected text in UTF-8'):
        build(folder, ann_file='list.txt')


# --- the cache ------------------------------------------------------------------------------------


@pytest.fixture
def cache(folder, tmp_path, monkeypatch):
    """Everything is remembered; the folders have not changed for a while."""
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
    monkeypatch.setattr(listing, 'MIN_REMEMBERED', 1)
    settle(folder)
    return tmp_path / 'cache/beit_mm'


def settle(folder, when=1e9):
    """Sets the time of the last change of all folders."""
    for path in (folder, *folder.rglob('*/')):
        os.utime(path, (when, when))


def searches(monkeypatch):
    """The folders that are searched from now on."""
    found, search = [], listing.search
    monkeypatch.setattr(listing, 'search', lambda root, *rest: found.append(root) or search(root, *rest))
    return found


def test_a_long_list_is_remembered_until_a_folder_changes(folder, cache, monkeypatch):
    searched = searches(monkeypatch)
    first = build(folder)
    assert len(searched) == 3 and len(list(cache.iterdir())) == 1
    assert described(build(folder)) == described(first) == WHOLE and len(searched) == 3
    (folder / 'blue/0.png').rename(folder / 'blue/9.png')
    assert described(build(folder))[2] == ('blue/9.png', 0) and len(searched) == 6
    build(folder)
    assert len(searched) == 9  # the last change is too fresh to be told from a next one by its time
    settle(folder, when=1e9 + 1)
    (folder / 'green/1.png').write_bytes(b'')  # the file, not the folder
    build(folder)
    build(folder)
    assert len(searched) == 12
    assert list(list_images(str(folder))) == [name for name, _ in described(build(folder))]


def test_a_link_that_leads_elsewhere_now_is_noticed(folder, cache, tmp_path):
    for place in ('one', 'two'):
        (tmp_path / place).mkdir()
        (tmp_path / place / f'{place}.png').touch()
        os.utime(tmp_path / place, (1e9, 1e9))
    (tmp_path / 'current').symlink_to('one')
    (folder / 'blue/more').symlink_to(tmp_path / 'current')
    settle(folder)
    assert 'blue/more/one.png' in list_images(str(folder))
    (tmp_path / 'current').unlink()
    (tmp_path / 'current').symlink_to('two')
    assert 'blue/more/two.png' in list_images(str(folder))


@pytest.mark.parametrize('damage', [b'', b'PK\x03\x04 no archive', 'cut', 'pickle', 'shorter'])
def test_a_damaged_list_is_made_again(folder, cache, damage, tmp_path):
    expected = list_subfolders(str(folder), CLASSES)
    (file,) = cache.iterdir()
    if damage == 'pickle':
        arrays = dict(np.load(file)) | dict(paths=np.array([Trap(str(tmp_path / 'ran'))], object))
        np.savez(file, **arrays)
    elif damage == 'shorter':
        arrays = dict(np.load(file))
        np.savez(file, **dict(arrays, paths=arrays['paths'][:-10]))
    else:
        file.write_bytes(file.read_bytes()[:-100] if damage == 'cut' else damage)
    paths, counts = list_subfolders(str(folder), CLASSES)
    assert (list(paths), counts) == (list(expected[0]), expected[1])
    assert not (tmp_path / 'ran').exists()


class Trap:
    """Leaves a mark when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_without_a_place_to_remember_it_lists_again(folder, cache, monkeypatch):
    cache.parent.mkdir(exist_ok=True)
    cache.write_text('a file where the folder should be')
    searched = searches(monkeypatch)
    assert described(build(folder)) == described(build(folder)) == WHOLE and len(searched) == 6


def test_short_lists_are_not_remembered(folder, cache, monkeypatch):
    monkeypatch.setattr(listing, 'MIN_REMEMBERED', 10)
    build(folder)
    assert not cache.exists()

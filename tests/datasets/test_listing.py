"""Compact lists of files: what BaseDataset promises holds, and what is remembered is what a search would find."""

import copy
import os
import pickle

import pytest
from labelled import CLASSES, make_images
from mmengine.dataset import ClassBalancedDataset, ConcatDataset

from beit_mm.datasets import image_folder
from beit_mm.datasets.image_folder import Paths, Samples
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


def test_heic_images_are_counted_where_nothing_reads_them(tmp_path, monkeypatch):
    for name in ('a.jpg', 'b.HEIC', 'c.heif', 'd/e.heic', 'd/f.png', 'heic'):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    said = []
    monkeypatch.setattr(image_folder, 'print_log', lambda message, **options: said.append(message))
    monkeypatch.setattr(image_folder, 'HeifImageFile', None)
    assert list(image_folder.list_images(str(tmp_path), ('.jpg', '.png'))) == ['a.jpg', 'd/f.png']
    assert said == [f'{tmp_path}: 3 HEIC images are left out; to have them read, pip install pillow-heif']
    assert not len(image_folder.list_images(str(tmp_path), image_folder.BAND_EXTENSIONS)) and len(said) == 1


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

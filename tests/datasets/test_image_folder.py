"""Folders and lists of images: what is found, the right labels, samples that depend on their key only, mistakes."""

import os
import pickle
import re
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from labelled import CLASSES, make_images
from mmengine.dataset import ConcatDataset
from mmpretrain.datasets import CustomDataset
from torch.utils.data import DataLoader, Subset
from torchvision.datasets import ImageFolder as TorchvisionFolder

from beit_mm.datasets import image_folder
from beit_mm.datasets.image_folder import Samples
from beit_mm.datasets.samplers import SampleKey, SeededSampler
from beit_mm.registry import DATASETS

PIPELINE = [
    dict(type='beit_mm.LoadImage'),
    dict(type='beit_mm.TwoViewRandomResizedCrop', size=32, second_size=16),
    dict(type='beit_mm.TwoViewColorJitter'),
    dict(type='beit_mm.BlockwiseMask', grid=(14, 14), num_masked=75),
    dict(type='beit_mm.PackViews'),
]
WHOLE = [(f'{name}/{index}.png', label) for label, name in enumerate(CLASSES) for index in range(3)]


@pytest.fixture
def folder(tmp_path) -> Path:
    """Three class folders of three images."""
    return make_images(tmp_path / 'data', per_class=3) / 'train'


def build(folder, kind='ImageFolder', **settings):
    return DATASETS.build(dict(type=f'beit_mm.{kind}', data_root=str(folder), **settings))


unlabeled = partial(build, kind='UnlabeledImages')


def found(dataset):
    """Paths below the class folders' folder, and labels."""
    infos = [dataset.get_data_info(index) for index in range(len(dataset))]
    root = dataset.data_prefix['img_path']
    return [(os.path.relpath(info['img_path'], root), info.get('gt_label')) for info in infos]


def test_classes_and_order_are_those_of_mmpretrain_and_torchvision(folder):
    (folder / 'Zebra/deep').mkdir(parents=True)  # capitals sort first
    (folder / 'red/0.png').rename(folder / 'Zebra/deep/0.png')
    (folder / 'notes.txt').write_text('no class')
    ours, mmpretrain, torchvision = build(folder), CustomDataset(data_root=str(folder)), TorchvisionFolder(folder)
    assert list(ours.CLASSES) == list(mmpretrain.CLASSES) == torchvision.classes == ['Zebra', *CLASSES]
    theirs = [(os.path.relpath(path, folder), label) for path, label in torchvision.samples]
    assert sorted(found(ours)) == sorted(theirs)
    assert [ours.get_data_info(i)['img_path'] for i in range(9)] == [info['img_path'] for info in mmpretrain]


@pytest.mark.parametrize('litter', ['#recycle', '__MACOSX', '.hidden'])
def test_folders_that_systems_create_are_no_classes(folder, litter):
    (folder / litter / 'red').mkdir(parents=True)
    shutil.copy(folder / 'red/0.png', folder / litter / 'red')
    dataset = build(folder)
    assert dataset.CLASSES == tuple(CLASSES) and found(dataset) == WHOLE


def test_a_folder_is_searched_at_any_depth_in_sorted_order_and_heic_counted(folder, monkeypatch, warnings):
    monkeypatch.setattr(image_folder.reading, 'HeifImageFile', None)
    monkeypatch.setattr(image_folder, 'EXTENSIONS', ('.png', '.jpg', '.webp'))
    odd = 'b.PNG', 'c 1/my image.jpg', 'deep/er/a.webp', '.hidden/a.png', 'red/._0.png', 'red/0.txt'
    for name in (*odd, 'b.HEIC', 'deep/e.heic', 'heic'):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    colours = [name for name, _ in WHOLE]
    expected = ['b.PNG', *colours[:3], 'c 1/my image.jpg', 'deep/er/a.webp', *colours[3:]]
    assert found(unlabeled(folder)) == [(name, None) for name in expected]
    assert re.search(f'^{folder}/: 2 HEIC .* pip install pillow-heif$', warnings()[0])
    image_folder.list_images(str(folder / 'deep'))
    assert ': 1 HEIC image is left out' in warnings()[1]
    assert not len(image_folder.list_images(str(folder), image_folder.BAND_EXTENSIONS)) and len(warnings()) == 2


def test_each_class_folder_is_searched_by_itself(folder):
    """Links to images of another class, or of a folder that is not a class, take them from nobody."""
    (folder / 'blue/more').symlink_to('../red')
    (folder / 'copy').symlink_to('green')
    dataset = build(folder, classes=['blue', 'red', 'copy'])
    names = [name for name, _ in found(dataset)]
    assert names == [
        *(f'blue/{i}.png' for i in range(3)),
        *(f'{name}/{i}.png' for name in ('blue/more', 'red', 'copy') for i in range(3)),
    ]


def test_given_classes_are_matched_by_name(folder):
    (folder / 'names.txt').write_text('red\nblue\n\n')
    for classes in (['red', 'blue'], str(folder / 'names.txt')):
        assert build(folder, metainfo=dict(classes=classes)).CLASSES == ('red', 'blue')
        assert (dataset := build(folder, classes=classes)).CLASSES == ('red', 'blue')
        assert found(dataset) == [*((name, 0) for name, _ in WHOLE[6:]), *((name, 1) for name, _ in WHOLE[:3])]


def test_lists_with_and_without_labels_of_any_names(folder):
    odd = os.fsdecode(b'red/\xe9\xff.png')
    (folder / 'red/0.png').rename(folder / odd)
    (folder / 'list.txt').write_bytes(b'\xef\xbb\xbfblue/1.png\r\nred/\xe9\xff.png 2\n\n')  # as Windows writes it
    assert found(build(folder, ann_file='list.txt')) == [('blue/1.png', 0), (odd, 2)]
    (folder / 'list.txt').write_text('my image.png 7\n../blue/1.png 0\n')  # in no class folders, as ImageNet's
    paths = [path for path, _ in found(unlabeled(folder, data_prefix='red', ann_file='list.txt'))]
    assert paths == ['my image.png', '../blue/1.png']
    names = [str(number) for number in range(8)]
    assert [label for _, label in found(build(folder, ann_file='list.txt', classes=names))] == [7, 0]


def test_what_base_dataset_promises_holds(folder):
    dataset = build(folder)
    assert isinstance(dataset.data_list, Samples) and dataset.get_data_info(-1)['sample_idx'] == 8
    for whole in (dataset, build(folder, lazy_init=True), pickle.loads(pickle.dumps(dataset))):  # in a spawned worker
        assert found(whole) == WHOLE
    for indices, expected in ((4, WHOLE[:4]), ([5, 1], [WHOLE[5], WHOLE[1]]), (-2, WHOLE[-2:])):
        assert found(build(folder, indices=indices)) == found(dataset.get_subset(indices)) == expected
    assert ConcatDataset([dataset, dataset]).get_data_info(17)['gt_label'] == 2


def test_a_loop_without_a_runner_is_told_that_views_repeat(folder, warnings):
    dataset = unlabeled(folder, pipeline=PIPELINE)
    sampler, epochs = SeededSampler(dataset, shuffle=False), []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        epochs.append(next(iter(DataLoader(dataset, 2, sampler=sampler)))['inputs']['images'])
    assert not epochs[0].equal(epochs[1])
    by_number, by_key = (dataset[key]['inputs']['images'] for key in (1, SampleKey(0, 0, 1)))
    assert by_number.equal(by_key)
    next(iter(DataLoader(unlabeled(folder, pipeline=PIPELINE, test_mode=True), 2)))
    next(iter(DataLoader(unlabeled(folder, pipeline=PIPELINE), 2, sampler=[SampleKey(0, 1, 2)])))
    assert not warnings()
    next(iter(DataLoader(Subset(unlabeled(folder, pipeline=PIPELINE), range(4)), 2, shuffle=True)))
    assert 'SeededSampler' in warnings()[0]


def test_unreadable_images_by_policy(folder):
    broken = [folder / name for name in ('blue/1.png', 'blue/2.png', 'green/0.png', 'red/2.png')]
    for path in broken:
        path.write_bytes(b'broken')
    dataset, colours = unlabeled(folder, pipeline=PIPELINE, on_error='skip'), set()
    for epoch in range(8):
        for index, path in zip((1, 2, 3, 8), broken, strict=True):  # the substitute may be broken too
            first, again = (dataset[SampleKey(0, epoch, index)]['inputs'] for _ in range(2))
            assert first.pop('unreadable') == again.pop('unreadable') == str(path)
            assert all(torch.equal(first[key], again[key]) for key in first)
        colours.add(first['images'].float().mean((0, 1)).argmax().item())
    assert len(colours) > 1  # not one image shown ever more often


LIST = dict(ann_file='list.txt')


@pytest.mark.parametrize(
    ('kind', 'settings', 'text', 'message'),
    [
        ('ImageFolder', LIST, 'red/0.png 2\nred/1.png 3', "line 2: 'red/1.png' has label 3; .* 0 to 2"),
        ('ImageFolder', LIST, 'red/0.png 0', "has label 0, which is class 'blue'; expected 2"),
        ('ImageFolder', LIST, '0.png', "line 1: '0.png' .* 0 to 2"),
        ('ImageFolder', dict(data_prefix='red'), '', "no class folders in '.*red"),
        ('ImageFolder', dict(data_prefix='red', classes=['pink']), '', 'no folder .*pink'),
        ('ImageFolder', {}, '', 'no images in .*/empty'),
        ('UnlabeledImages', dict(LIST, data_prefix='nowhere'), 'red/1.png\n', 'nowhere'),
        ('UnlabeledImages', dict(filter_cfg=dict(min_size=9)), '', 'filter_cfg has no effect.*ann_file'),
        ('UnlabeledImages', dict(data_prefix='empty'), '', 'no images in .*/empty/?.* .jpg .jpeg .* .png .*.tiff'),
    ],
)
def test_what_is_missing_empty_or_wrong_is_named(folder, kind, settings, text, message):
    if not text:
        (folder / 'empty').mkdir()
    (folder / 'list.txt').write_text(text)
    with pytest.raises((ValueError, FileNotFoundError), match=f'^.*{message}.*$'):
        build(folder, kind, **settings)

"""Datasets of other libraries, and those around datasets, under our sampler."""

import json
import pickle

import pytest
import torch
from labelled import make_images
from mmengine.dataset import ClassBalancedDataset, ConcatDataset, RepeatDataset
from torch.utils.data import DataLoader, Subset

from beit_mm.datasets import SeededSampler
from beit_mm.registry import DATASETS

CROP = dict(type='mmpretrain.RandomResizedCrop', scale=16, backend='pillow')
TORCHS = [
    dict(type='mmpretrain.NumpyToPIL'),
    dict(type='mmpretrain.torchvision/RandomRotation', degrees=30),  # draws by torch
    dict(type='mmpretrain.PILToNumpy'),
]
PIPELINE = [CROP, *TORCHS, dict(type='mmpretrain.PackInputs')]


def ours(folder, kind='ImageFolder', **settings):
    pipeline = [dict(type='beit_mm.LoadImage'), *PIPELINE]
    return DATASETS.build(dict(type=f'beit_mm.{kind}', data_root=str(folder), pipeline=pipeline, **settings))


def multi_label(folder):
    listed = [dict(img_path='blue/1.png', gt_label=[0, 2])] * 4
    path = folder.parent / 'multi.json'
    path.write_text(json.dumps(dict(metainfo=dict(classes=['a', 'b', 'c']), data_list=listed)))
    pipeline = [dict(type='mmcv.LoadImageFromFile'), *PIPELINE]
    settings = dict(ann_file=str(path), data_prefix=str(folder), pipeline=pipeline)
    return DATASETS.build(dict(type='mmpretrain.MultiLabelDataset', **settings))


KINDS = {
    'ours': ours,
    'repeated': lambda folder: RepeatDataset(ours(folder, indices=[0, 1]), 2),
    'concatenated': lambda folder: ConcatDataset([ours(folder, indices=[0, 1]), ours(folder, indices=[1, 0])]),
    'balanced': lambda folder: ClassBalancedDataset(ours(folder, indices=[0, 1, 2, 3]), 0.9),
    'subset': lambda folder: Subset(ours(folder), [5, 5, 5, 2]),
    'multi-label': multi_label,
}


@pytest.mark.parametrize('kind', KINDS)
def test_any_dataset_draws_by_its_key_with_any_number_of_workers(tmp_path, kind):
    dataset = KINDS[kind](make_images(tmp_path / 'data', per_class=3) / 'train')

    def drawn(num_workers=0, epoch=1, skipped=0, dataset=dataset):
        sampler = SeededSampler(dataset, shuffle=False, seed=3)
        sampler.set_epoch(epoch)
        sampler.skip(skipped)
        own = dict(collate_fn=list, generator=torch.Generator())  # from which the loader draws
        loader = DataLoader(dataset, 2, sampler=sampler, num_workers=num_workers, **own)
        return [sample['inputs'] for batch in loader for sample in batch]

    state = torch.get_rng_state()
    whole = drawn()
    assert torch.equal(state, torch.get_rng_state())  # is the model's
    sent = pickle.loads(pickle.dumps(dataset))  # to a spawned worker
    for same in (drawn(2), drawn(dataset=sent), [*whole[:2], *drawn(skipped=2)]):
        assert len(same) == len(dataset) and all(map(torch.equal, whole, same))
    others = [*drawn(epoch=2), *whole]
    assert not any(torch.equal(one, other) for row, one in enumerate(others) for other in others[:row])

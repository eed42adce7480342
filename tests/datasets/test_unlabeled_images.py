"""The dataset: finding images, broken ones, and samples that depend on their key only."""

import os

import numpy as np
import pytest
import torch
from mmengine.dataset import default_collate
from PIL import Image

from beit_mm.datasets import SeededSampler, UnreadableImageError
from beit_mm.datasets.samplers import SampleKey
from beit_mm.registry import DATASETS

PIPELINE = [
    dict(type='beit_mm.LoadImage'),
    dict(type='beit_mm.TwoViewRandomResizedCrop', size=32, second_size=16),
    dict(type='beit_mm.TwoViewColorJitter'),
    dict(type='beit_mm.BlockwiseMask', grid=(14, 14), num_masked=75),
    dict(type='beit_mm.PackViews'),
]


def build(folder, **kwargs):
    return DATASETS.build(dict(type='beit_mm.UnlabeledImages', data_root=str(folder), **kwargs))


def names(dataset, folder):
    return [os.path.relpath(dataset.get_data_info(i)['img_path'], folder) for i in range(len(dataset))]


@pytest.fixture
def images(tmp_path):
    rng = np.random.default_rng(0)
    for name in ('b/2.PNG', 'b/1.jpg', 'a/deep/x.jpeg', 'top.png', 'c 1/my image.jpg', 'b/3.webp'):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        pixels = rng.integers(0, 256, (40, 50, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / name)
    (tmp_path / 'b' / 'notes.txt').write_text('no image')
    (tmp_path / 'b' / '._1.jpg').write_text('left by another system')
    return tmp_path


def test_folder_is_searched_in_sorted_order(images):
    (images / 'a' / 'up').symlink_to(images)  # a circle
    found = names(build(images), images)
    assert found == ['a/deep/x.jpeg', 'b/1.jpg', 'b/2.PNG', 'b/3.webp', 'c 1/my image.jpg', 'top.png']


def test_prefix_indices_and_lists(images):
    assert names(build(images, data_prefix='b'), images) == ['b/1.jpg', 'b/2.PNG', 'b/3.webp']
    assert names(build(images, indices=2), images) == ['a/deep/x.jpeg', 'b/1.jpg']
    (images / 'list.txt').write_text('2.PNG 7\n1.jpg 3\n\n../c 1/my image.jpg 12\n3.webp\n')
    dataset = build(images, ann_file='list.txt', data_prefix=dict(img_path='b'))
    assert names(dataset, images) == ['b/2.PNG', 'b/1.jpg', 'c 1/my image.jpg', 'b/3.webp']


def test_missing_and_empty_folders_are_named(images):
    (images / 'empty').mkdir()
    for wrong in (dict(data_prefix='gone'), dict(data_prefix='empty'), dict(ann_file='gone.txt')):
        with pytest.raises(FileNotFoundError, match=next(iter(wrong.values()))) as error:
            build(images, **wrong)
        assert '\n' not in str(error.value)
    with pytest.raises(ValueError, match='ignore'):
        build(images, on_error='ignore')


def test_empty_folder_says_which_files_it_looked_for(images):
    (images / 'empty').mkdir()
    (images / 'empty' / 'notes.txt').write_text('no image')
    with pytest.raises(FileNotFoundError, match=f"no images in '{images}/empty/?'.* .jpg .jpeg .* .png .*.tiff"):
        build(images, data_prefix='empty')


def test_a_sample_is_what_the_contract_says(images):
    batch = default_collate([build(images, pipeline=PIPELINE)[i] for i in range(4)])['inputs']
    assert batch.pop('unreadable') == [''] * 4
    shapes = {key: (value.dtype, tuple(value.shape)) for key, value in batch.items()}
    assert shapes == dict(
        images=(torch.uint8, (4, 32, 32, 3)),
        tokenizer_images=(torch.uint8, (4, 16, 16, 3)),
        mask=(torch.bool, (4, 14, 14)),
        positions=(torch.int64, (4, 75)),
    )


def samples(dataset, sampler, workers):
    loader = torch.utils.data.DataLoader(
        dataset, batch_size=2, sampler=sampler, num_workers=workers, collate_fn=default_collate
    )
    batches = [{key: value for key, value in batch['inputs'].items() if key != 'unreadable'} for batch in loader]
    return {key: torch.cat([batch[key] for batch in batches]) for key in batches[0]}


def test_workers_and_ranks_change_nothing(images, monkeypatch):
    dataset = build(images, pipeline=PIPELINE)
    sampler = SeededSampler(dataset, seed=5)
    sampler.set_epoch(1)
    alone, workers = samples(dataset, sampler, 0), samples(dataset, sampler, 2)
    parts = []
    for rank in range(2):
        monkeypatch.setattr('mmengine.dataset.sampler.get_dist_info', lambda rank=rank: (rank, 2))
        part = SeededSampler(dataset, seed=5)
        part.set_epoch(1)
        parts.append(samples(dataset, part, 0))
    for key, value in alone.items():
        assert torch.equal(value, workers[key])
        for rank in range(2):
            assert torch.equal(value[rank::2], parts[rank][key])
    sampler.set_epoch(2)
    assert not torch.equal(samples(dataset, sampler, 0)['mask'].float().sum(0), alone['mask'].float().sum(0))


def test_sampler_yields_keys(images):
    sampler = SeededSampler(build(images), shuffle=False, seed=9)
    assert list(sampler) == [SampleKey(9, 0, i) for i in range(6)]
    assert len(sampler) == 6


def test_plain_index_is_the_first_epoch_of_seed_zero(images):
    dataset = build(images, pipeline=PIPELINE)
    assert torch.equal(dataset[3]['inputs']['images'], dataset[SampleKey(0, 0, 3)]['inputs']['images'])


def test_unreadable_images_by_policy(images):
    (images / 'b' / '1.jpg').write_bytes(b'broken')
    with pytest.raises(UnreadableImageError, match='1.jpg'):
        build(images, pipeline=PIPELINE)[1]
    with pytest.raises(UnreadableImageError, match='1.jpg'):
        build(images, pipeline=PIPELINE, on_error='skip', test_mode=True)[1]
    dataset = build(images, pipeline=PIPELINE, on_error='skip')
    first, again = dataset[1]['inputs'], dataset[1]['inputs']
    assert first.pop('unreadable') == again.pop('unreadable') == str(images / 'b/1.jpg')
    assert all(torch.equal(first[key], again[key]) for key in first)
    substitutes = {dataset[SampleKey(0, epoch, 1)]['inputs']['images'].float().mean().item() for epoch in range(8)}
    assert len(substitutes) > 1  # not one image shown ever more often


def test_skip_gives_up_when_everything_is_broken(images):
    for path in images.rglob('*.*'):
        if path.is_file():
            path.write_bytes(b'broken')
    with pytest.raises(UnreadableImageError, match='substitutes'):
        build(images, pipeline=PIPELINE, on_error='skip')[0]

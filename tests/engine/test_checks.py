"""Model, data sets, labels and checkpoint that disagree are stopped before the first step."""

import shutil
from types import SimpleNamespace

import pytest
import torch
from helpers import make_runner, train
from labelled import classifier_config, make_images
from mmengine.structures import PixelData
from mmseg.structures import SegDataSample
from narrow_segmentors import SEGMENTOR, narrow_segmentor

from beit_mm.engine.checks import FitCheckHook, check_labels, check_widths


@pytest.fixture
def cfg(tmp_path):
    cfg = classifier_config(make_images(tmp_path / 'images', per_class=2), tmp_path / 'work')
    cfg.train_cfg.max_epochs = 1
    cfg.default_hooks.checkpoint.interval = 1
    return cfg


def refused(cfg, message, loop='train'):
    runner = make_runner(cfg)
    with pytest.raises(ValueError, match=message):
        getattr(runner, loop)()


def test_number_of_classes(cfg):
    cfg.model.head.num_classes = cfg.model.data_preprocessor.num_classes = 4
    refused(
        cfg,
        r'images/train has 3 classes \(blue to red\), the model is built for 4; set '
        r'model.data_preprocessor.num_classes=3 model.head.num_classes=3, or give the right folder',
    )
    refused(cfg, 'images/val has 3 classes', loop='test')


def test_a_narrower_architecture_alone_names_what_must_follow(cfg, tmp_path):
    cfg.model.backbone.arch = dict(embed_dims=16, num_layers=2, num_heads=2)
    for loop in ('train', 'test'):
        refused(cfg, r'16 wide.* set model\.head\.in_channels=16$', loop=loop)
    backbone = narrow_segmentor().backbone
    fitting = dict(neck=dict(SEGMENTOR['neck'], embed_dim=32), decode_head=SEGMENTOR['decode_head'])
    for model in (SEGMENTOR, dict(neck=dict(type='FPN'), decode_head=dict(in_channels=99))):
        check_widths(model, backbone)
    with pytest.raises(ValueError, match=r'neck\.embed_dim=32 model\.decode_head\.in_channels=\[32,32,32,32\]'):
        check_widths(dict(neck=dict(fitting['neck'], embed_dim=64), decode_head=dict(in_channels=[64] * 4)), backbone)


@pytest.mark.parametrize('wrapped', [False, True])
def test_a_sampler_whose_numbers_would_repeat_every_view(cfg, wrapped):
    loader = cfg.train_dataloader
    if wrapped:
        loader.dataset = dict(type='ConcatDataset', datasets=[loader.dataset, loader.dataset])
    else:
        loader.sampler = dict(type='DefaultSampler', shuffle=True)
    refused(
        cfg, "ImageFolder has new views in each epoch only with sampler.type='beit_mm.SeededSampler', and no dataset"
    )


def test_a_class_that_one_split_lacks(cfg, tmp_path):
    shutil.rmtree(tmp_path / 'images/val/green')
    refused(
        cfg,
        "images/val has 2 classes, .*images/train has 3, and class 1 is 'red' in the first, 'green' in the "
        'second; give the datasets one list',
    )
    cfg.train_dataloader.dataset.classes = cfg.val_dataloader.dataset.classes = ['blue', 'green', 'red']
    train(cfg)  # an explicit list may have classes of which there is nothing to test


def test_classes_of_the_checkpoint(cfg, tmp_path):
    train(cfg)
    path = tmp_path / 'work/epoch_1.pth'
    assert torch.load(path, weights_only=True)['meta']['dataset_meta']['classes'] == ('blue', 'green', 'red')
    cfg.load_from = str(path)
    cfg.test_dataloader.dataset.classes = ['red', 'green', 'blue']
    refused(cfg, "the checkpoint has 3, and class 0 is 'red' in the first, 'blue' in the second", loop='test')
    cfg.test_dataloader.dataset.classes = None
    for split in (tmp_path / 'images').iterdir():  # other names of the same classes are no contradiction
        for name in ('blue', 'green', 'red'):
            (split / name).rename(split / f'n0_{name}')
    make_runner(cfg).test()


def sample(labels: list[int]) -> SegDataSample:
    made = SegDataSample(metainfo=dict(seg_map_path='data/x.png'))
    made.gt_sem_seg = PixelData(data=torch.tensor(labels)[None, None])
    return made


def test_a_label_without_a_class_is_named_with_its_file():
    check_labels([sample([0, 1, 2, 255]), sample([2, 2, 2, 2])], 3, 255)
    check_labels([sample([0, 1, 254])], 3, 254)
    with pytest.raises(ValueError, match=r'^data/x.png gives label 3, the heads have num_classes=3; set '):
        check_labels([sample([0, 1]), sample([0, 3, 5, 255])], 3, 255)
    with pytest.raises(ValueError, match='every pixel of the first batch is ignored'):
        check_labels([sample([255, 255])], 3, 255)


def test_the_hook_looks_once_a_run():
    hook, head = FitCheckHook(), SimpleNamespace(num_classes=3, ignore_index=255)
    runner, wrong = SimpleNamespace(model=SimpleNamespace(decode_head=head)), dict(data_samples=[sample([7])])
    with pytest.raises(ValueError, match='gives label 7'):
        hook.before_train_iter(runner, 0, wrong)
    hook.before_train_iter(runner, 1, wrong)


def test_the_hook_checks_the_groups_of_the_optimizer(cfg):
    cfg.optim_wrapper.update(
        constructor='LearningRateDecayOptimWrapperConstructor',
        paramwise_cfg=dict(layer_decay_rate=0.65, custom_keys={'.bias': dict(decay_mult=0.0)}),
    )
    cfg.optim_wrapper.optimizer.weight_decay = 0.05
    refused(cfg, 'weight of blocks.0.norm1 .* not to its bias')

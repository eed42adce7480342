"""Model, data sets, labels and checkpoint that disagree are stopped before the first step."""

import shutil
from types import SimpleNamespace

import pytest
import torch
from helpers import make_runner, model_on_meta, train, with_options
from labelled import classifier_config, make_images, save_backbone
from mmengine.structures import PixelData
from mmseg.structures import SegDataSample
from narrow_segmentors import SEGMENTOR, narrow_segmentor

from beit_mm.engine.checks import FitCheckHook, check_class_weights, check_labels, check_widths
from beit_mm.errors import UserError
from beit_mm.registry import MODELS


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


def test_one_weight_for_each_class(cfg):
    cfg.model.head.loss = dict(type='CrossEntropyLoss', class_weight=[1.0, 2.0])
    refused(cfg, r'class_weight of CrossEntropyLoss in model.head has 2 numbers; expected 3')
    cfg.model.head.loss = dict(type='LabelSmoothLoss', label_smooth_val=0.1, class_weight=[1.0, 2.0])
    refused(cfg, 'class_weight .* in model.head has 2 numbers; expected 3')
    cfg.model.head.loss.class_weight = [1.0, 2.0, 3.0]
    train(cfg)
    option = 'model.decode_head.loss_decode.class_weight=[1,2]'
    with pytest.raises(UserError, match=r'in model.decode_head.* has 2 numbers; expected 11'):
        check_class_weights(model_on_meta(with_options('demo/camvid_upernet.py', [option])))


def test_a_metric_that_would_never_stop_a_run(cfg):
    cfg.custom_hooks = [*cfg.get('custom_hooks', []), dict(type='EarlyStoppingHook', monitor='accuracy/top5')]
    refused(cfg, 'EarlyStoppingHook monitors accuracy/top5.*accuracy/top1')
    cfg.val_cfg = cfg.val_dataloader = cfg.val_evaluator = None
    said = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr('beit_mm.errors.log', lambda message, _: said.append(message))
        train(cfg)
    assert any('EarlyStoppingHook' in message for message in said)


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
        assert len(train(cfg).train_dataloader.dataset) == 12
    loader.sampler = dict(type='DefaultSampler', shuffle=True)
    refused(cfg, "ImageFolder has new views in each epoch only with sampler.type='beit_mm.SeededSampler'")


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


def test_a_label_without_a_class_is_named_with_its_file(monkeypatch):
    said = []
    monkeypatch.setattr('beit_mm.engine.checks.warn', said.append)
    check_labels([sample([0, 1, 2, 255]), sample([2, 2, 2, 2])], 3, 255)
    check_labels([sample([0, 1, 254])], 3, 254)
    with pytest.raises(UserError, match='ignore_index.* 0.*reduce_zero_label'):  # the loss would leave class 0 out
        check_labels([sample([0, 1])], 3, 0)
    with pytest.raises(UserError, match=r'data/x.png .*label 3.*num_classes'):
        check_labels([sample([0, 1]), sample([0, 3, 5, 255])], 3, 255)
    assert not said
    check_labels([sample([255, 255])], 3, 255)
    assert len(said) == 1 and '100%' in said[0] and 'label 255' in said[0]


def test_the_hook_looks_once_a_run():
    hook, head = FitCheckHook(), SimpleNamespace(num_classes=3, ignore_index=255)
    runner, wrong = SimpleNamespace(model=SimpleNamespace(decode_head=head)), dict(data_samples=[sample([7])])
    with pytest.raises(ValueError, match='label 7'):
        hook.before_train_iter(runner, 0, wrong)
    hook.before_train_iter(runner, 1, wrong)


def test_the_hook_checks_the_groups_of_the_optimizer(cfg):
    cfg.optim_wrapper.update(
        constructor='LearningRateDecayOptimWrapperConstructor',
        paramwise_cfg=dict(layer_decay_rate=0.65, custom_keys={'.bias': dict(decay_mult=0.0)}),
    )
    cfg.optim_wrapper.optimizer.weight_decay = 0.05
    refused(cfg, 'weight of blocks.0.norm1 .* not to its bias')


@pytest.mark.parametrize(('size', 'number'), [(32, 0), ((31, 25), 0), (64, 1)])  # of patches of 8 pixels
def test_images_of_another_size_than_the_backbones(cfg, size, number, monkeypatch):
    said = []
    monkeypatch.setattr('beit_mm.engine.checks.warn', said.append)
    cfg.model.backbone.img_size = size
    train(cfg)
    assert len(said) == number
    assert all(word in text for text in said for word in ('(32, 32)', '(64, 64)', 'model.backbone.img_size'))


COSINE = dict(type='CosineAnnealingLR', by_epoch=False, end=4, eta_min=1e-5)
RISING = [  # at a rate of 1e-6, scaled or not
    (dict(COSINE), 1, 'param_scheduler.0 .*CosineAnnealingLR.*1e-06.*1e-05.*eta_min_ratio'),
    (dict(COSINE, eta_min=None, eta_min_ratio=1.5), 1, 'param_scheduler.0 .*1e-06.*1.5e-06.*eta_min_ratio'),
    (dict(type='PolyLR', by_epoch=False, end=5, eta_min=2e-6), 1, 'PolyLR.*1e-06.*2e-06.*eta_min'),
    (dict(COSINE, eta_min=1e-9), 2, 'auto_scale_lr .*1e-09 .*param_scheduler.0 .*eta_min_ratio'),
    (dict(type='OneCycleLR', eta_max=1e-6, total_steps=4, by_epoch=False), 2, 'auto_scale_lr .*1e-06 .*OneCycleLR'),
]


@pytest.mark.parametrize(('scheduler', 'ratio', 'message'), RISING)
def test_a_schedule_that_rises_or_is_not_scaled(cfg, scheduler, ratio, message):
    cfg.optim_wrapper.optimizer.lr = 1e-6
    cfg.train_cfg = dict(type='beit_mm.IterLoop', max_iters=4, val_interval=4)
    cfg.param_scheduler = [scheduler]
    cfg.auto_scale_lr = dict(enable=True, base_batch_size=4 * ratio)
    refused(cfg, message)


def test_a_layer_below_whose_rate_would_rise_while_that_of_the_head_falls(cfg):
    constructor = 'beit_mm.BEiTOptimWrapperConstructor'
    cfg.optim_wrapper.update(constructor=constructor, paramwise_cfg=dict(layer_decay_rate=0.1))
    cfg.param_scheduler = [dict(type='CosineAnnealingLR', end=1, eta_min=1e-5)]
    refused(cfg, 'param_scheduler.0 .*1e-07.*1e-05')  # 1e-3 of the head, four layers above


@pytest.mark.parametrize('base_batch_size', [4, 256])
def test_a_scaled_rate_ends_at_its_share_and_is_logged_as_the_last_layers(cfg, base_batch_size):
    cfg.train_cfg = dict(type='beit_mm.IterLoop', max_iters=4, val_interval=4)
    cfg.param_scheduler = [dict(COSINE, eta_min=None, eta_min_ratio=1e-5 / 1e-3, T_max=3)]
    cfg.auto_scale_lr = dict(enable=True, base_batch_size=base_batch_size)
    layers = dict(constructor='beit_mm.BEiTOptimWrapperConstructor', paramwise_cfg=dict(layer_decay_rate=0.5))
    cfg.optim_wrapper.update(layers)
    cfg.default_hooks.runtime_info = dict(type='beit_mm.RuntimeInfoHook')
    scalars = train(cfg).message_hub.log_scalars
    rates = scalars['train/lr'].data[0]
    assert (rates[0], rates[-1]) == pytest.approx((1e-3 * 4 / base_batch_size, 1e-5 * 4 / base_batch_size))
    assert 'train/base_lr' not in scalars  # which mmengine does not scale


@pytest.mark.parametrize('both', [False, True])
def test_weights_that_others_take_the_place_of_are_named(cfg, tmp_path, both, monkeypatch):
    cfg.model.backbone.init_cfg = dict(type='Pretrained', checkpoint=save_backbone(tmp_path / 'first.pth'))
    if both:
        torch.save(dict(state_dict=MODELS.build(cfg.model).state_dict()), tmp_path / 'second.pth')
        cfg.load_from = str(tmp_path / 'second.pth')
    said = []
    monkeypatch.setattr('beit_mm.engine.checks.warn', said.append)
    train(cfg)
    assert [('first.pth' in text, 'second.pth' in text) for text in said if 'init_cfg' in text] == [(True, True)] * both

"""Model, data sets, labels and checkpoint that disagree are stopped before the first step."""

import shutil
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from helpers import make_runner, narrow_dino_model, narrow_model, train
from label_maps import make_label_maps
from labelled import classifier_config, make_images
from mmengine.logging import MessageHub
from mmengine.optim import OptimWrapper, OptimWrapperDict
from mmengine.structures import PixelData
from mmpretrain.evaluation import Accuracy, MultiLabelMetric
from mmseg.evaluation import IoUMetric
from mmseg.models import FCNHead
from mmseg.structures import SegDataSample
from torch import nn

from beit_mm.datasets.segmentation_folder import SegmentationFolder
from beit_mm.engine.checks import FitCheckHook, check_label_files, check_labels, check_out_type, check_size, check_topk
from beit_mm.engine.resuming import follow_config
from beit_mm.errors import UserError
from beit_mm.models import BEiTBackbone
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
        'images/train has 3 classes, .* built for 4; .*model.data_preprocessor.num_classes=3 model.head.num_classes=3',
    )
    refused(cfg, 'images/val has 3 classes', loop='test')


@pytest.mark.parametrize('loop', ['train', 'test'])
def test_all_tokens_do_not_fit_a_head_of_one_vector_an_image(cfg, loop):
    """The default of a backbone, as of a config that was copied from a pretraining."""
    cfg.model.backbone.out_type = 'raw'
    refused(cfg, "out_type.*'avg_featmap'", loop)


@pytest.mark.parametrize(('out_type', 'joins'), [('raw', False), ('featmap', False), ('raw', True)])
def test_all_tokens_do_not_fit_a_decode_head_unless_it_joins_the_backbone(out_type, joins):
    model = nn.Module()
    model.backbone = BEiTBackbone(narrow_model()['backbone']['arch'], 32, 16, out_type=out_type)
    model.decode_head, model.queries_join_backbone = FCNHead(in_channels=8, channels=8, num_classes=2), joins
    expected = pytest.raises(UserError, match="out_type.*'featmap'") if (out_type, joins) == ('raw', False) else None
    with expected or nullcontext():
        check_out_type(model)


@pytest.mark.parametrize('missing', ['erase_box', 'ClassificationDataPreprocessor', None])
def test_boxes_that_nothing_would_erase(cfg, missing):
    *steps, pack = cfg.train_dataloader.dataset.pipeline
    keys = ('img_path',) if missing == 'erase_box' else ('img_path', 'erase_box')
    cfg.train_dataloader.dataset.pipeline = [*steps, dict(type='beit_mm.RandomErasing'), dict(pack, meta_keys=keys)]
    if missing != 'ClassificationDataPreprocessor':
        cfg.model.data_preprocessor.type = 'beit_mm.ClassificationDataPreprocessor'
    if missing:
        refused(cfg, f'RandomErasing would have no effect.*{missing}')
    else:
        train(cfg)


@pytest.mark.parametrize('loop', ['train', 'test'])
def test_an_accuracy_among_more_classes_than_there_are_is_refused_before_a_step(cfg, loop):
    cfg.val_evaluator = cfg.test_evaluator = dict(type='Accuracy', topk=(1, 5))
    refused(cfg, 'best 5 of 3 classes.*val_evaluator.topk=1', loop)


def test_a_metric_of_several_labels_without_a_top_k():
    evaluator = SimpleNamespace(metrics=[MultiLabelMetric(thr=0.5)])
    check_topk(evaluator, SimpleNamespace(metainfo=dict(classes=('a', 'b'))))


def test_what_follows_validations_is_named_where_there_are_none(cfg, monkeypatch):
    cfg.custom_hooks = [*cfg.get('custom_hooks', []), dict(type='EarlyStoppingHook', monitor='accuracy/top1')]
    cfg.default_hooks.checkpoint.save_best = 'accuracy/top1'
    cfg.val_cfg = cfg.val_dataloader = cfg.val_evaluator = None
    said = []
    monkeypatch.setattr('beit_mm.engine.checks.warn', said.append)
    train(cfg)
    assert [text.split()[1] for text in said] == ['CheckpointHook', 'EarlyStoppingHook']


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        (dict(format_only=True), 'output_dir'),
        (dict(output_dir='labels'), 'output_dir .*a/1.png and b/1.jpg'),
        (dict(output_dir='labels', iou_metrics='mDice'), None),
    ],
    ids=str,
)
def test_label_maps_that_would_be_lost(options, message, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # where the metric makes its folder
    images = ['a/1.png', 'a/2.png', 'b/1.jpg' if message else 'a/1.png']  # the last: a dataset that repeats an image
    methods = dict(__len__=lambda _: len(images), get_data_info=lambda _, index: dict(img_path=images[index]))
    dataset = type('Dataset', (), methods)()
    evaluator = SimpleNamespace(metrics=[Accuracy(), IoUMetric(**options)])
    with pytest.raises(UserError, match=message) if message else nullcontext():
        check_label_files(evaluator, dataset)


def test_predictions_that_have_no_label_maps_to_be_compared_with(tmp_path):
    make_label_maps(tmp_path)
    folders, evaluator = dict(img_path='images'), SimpleNamespace(metrics=[IoUMetric()])
    for maps in (None, 'annotations'):
        dataset = SegmentationFolder(str(tmp_path), 'classes.txt', True, dict(folders, seg_map_path=maps))
        with nullcontext() if maps else pytest.raises(UserError, match='images has no label maps.*format_only'):
            check_label_files(evaluator, dataset)


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
    refused(cfg, "class 1 of .*images/val is 'red', of .*images/train 'green'; .*classes=")
    cfg.train_dataloader.dataset.classes = cfg.val_dataloader.dataset.classes = ['blue', 'green', 'red']
    train(cfg)  # an explicit list may have classes of which there is nothing to test


def test_classes_of_the_checkpoint(cfg, tmp_path):
    train(cfg)
    path = tmp_path / 'work/epoch_1.pth'
    assert torch.load(path, weights_only=True)['meta']['dataset_meta']['classes'] == ('blue', 'green', 'red')
    cfg.load_from = str(path)
    cfg.test_dataloader.dataset.classes = ['red', 'green', 'blue']
    refused(cfg, "class 0 of .* is 'red', of the checkpoint 'blue'", loop='test')
    cfg.test_dataloader.dataset.classes = None
    for split in (tmp_path / 'images').iterdir():  # other names of the same classes are no contradiction
        for name in ('blue', 'green', 'red'):
            (split / name).rename(split / f'n0_{name}')
    make_runner(cfg).test()


def sample(labels: list[int]) -> SegDataSample:
    made = SegDataSample(metainfo=dict(seg_map_path='data/x.png'))
    made.gt_sem_seg = PixelData(data=torch.tensor(labels)[None, None])
    return made


@pytest.mark.parametrize(('height', 'number'), [(32, 0), (25, 0), (48, 1)])  # 25 is padded to whole patches
def test_images_of_another_size_than_the_backbone_is_built_for_are_warned_of(height, number, warnings):
    check_size(MODELS.build(narrow_model()), dict(images=torch.zeros(2, height, 32, 3)))
    assert ['(48, 32) pixels' in text for text in warnings()] == [True] * number


def test_a_label_without_a_class_is_named_with_its_file(warnings):
    check_labels([sample([0, 1, 2, 255]), sample([2, 2, 2, 2])], 3, 255)
    check_labels([sample([0, 1, 254])], 3, 254)
    check_labels([sample([0, 1])], 3, None)
    with pytest.raises(UserError, match='has label 255'):
        check_labels([sample([0, 255])], 3, None)
    with pytest.raises(UserError, match=r'data/x.png .*label 3.*num_classes'):
        check_labels([sample([0, 1]), sample([0, 3, 5, 255])], 3, 255)
    assert not warnings()
    check_labels([sample([255, 255])], 3, 255)
    (text,) = warnings()
    assert '100%' in text and 'label 255' in text


class Head(nn.Module):
    num_classes = 3

    def __init__(self, ignore_index: int = 255):
        super().__init__()
        self.ignore_index = ignore_index


def test_the_hook_looks_once_a_run():
    hook, runner, wrong = FitCheckHook(), SimpleNamespace(model=Head()), dict(data_samples=[sample([7])])
    with pytest.raises(ValueError, match='label 7'):
        hook.before_train_iter(runner, 0, wrong)
    hook.before_train_iter(runner, 1, wrong)


def test_labels_are_compared_with_all_heads():
    runner, batch = SimpleNamespace(model=nn.ModuleList([Head(), Head(254)])), dict(data_samples=[sample([0, 255])])
    with pytest.raises(UserError, match='label 255'):
        FitCheckHook().before_train_iter(runner, 0, batch)


def test_the_hook_checks_the_groups_of_the_optimizer(cfg):
    decay = dict(num_layers=3, decay_rate=0.9, decay_type='layer_wise')
    cfg.optim_wrapper.update(constructor='mmseg.LearningRateDecayOptimizerConstructor', paramwise_cfg=decay)
    cfg.optim_wrapper.optimizer.weight_decay = 0.05
    refused(cfg, 'gives all blocks')
    recipe = dict(layer_decay_rate=0.65, custom_keys={'.ln': dict(decay_mult=0.0), '.bias': dict(decay_mult=0.0)})
    cfg.optim_wrapper.update(constructor='LearningRateDecayOptimWrapperConstructor', paramwise_cfg=recipe)
    refused(cfg, 'weight of blocks.0.norm1 .* not to its bias; .*norm_decay_mult')
    cfg.optim_wrapper.paramwise_cfg.norm_decay_mult = 0.0
    make_runner(cfg).train()


@pytest.mark.parametrize(('size', 'number'), [(32, 0), ((31, 25), 0), (64, 1)])  # of patches of 8 pixels
def test_images_of_another_size_than_the_backbones(cfg, size, number, monkeypatch):
    said = []
    monkeypatch.setattr('beit_mm.engine.checks.warn', said.append)
    cfg.model.backbone.img_size = size
    train(cfg)
    assert len(said) == number
    assert all(word in text for text in said for word in ('(32, 32)', '(64, 64)', 'model.backbone.img_size'))


COSINE = dict(type='CosineAnnealingLR', by_epoch=False, end=4)


@pytest.mark.parametrize(
    ('scheduler', 'message'),
    [
        (dict(COSINE, eta_min=1e-9), 'auto_scale_lr .*1e-09 .*param_scheduler.0 .*eta_min_ratio'),
        (dict(type='OneCycleLR', eta_max=1e-6, total_steps=4, by_epoch=False), 'auto_scale_lr .*1e-06 .*OneCycleLR'),
    ],
)
def test_a_schedule_that_would_not_be_scaled(cfg, scheduler, message):
    cfg.train_cfg = dict(type='beit_mm.IterLoop', max_iters=4, val_interval=4)
    cfg.param_scheduler = [scheduler]
    cfg.auto_scale_lr = dict(enable=True, base_batch_size=8)
    refused(cfg, message)


def test_a_layer_below_whose_rate_would_rise_while_that_of_the_head_falls(cfg):
    constructor = 'beit_mm.BEiTOptimWrapperConstructor'
    cfg.optim_wrapper.update(constructor=constructor, paramwise_cfg=dict(layer_decay_rate=0.1))
    cfg.param_scheduler = [dict(type='CosineAnnealingLR', end=1, eta_min=1e-5)]
    refused(cfg, 'param_scheduler.0 .*1e-07.*1e-05')  # 1e-3 of the head, four layers above


@pytest.mark.parametrize('base_batch_size', [4, 256])
def test_a_scaled_rate_ends_at_its_share_and_is_logged_as_the_last_layers(cfg, base_batch_size):
    cfg.train_cfg = dict(type='beit_mm.IterLoop', max_iters=4, val_interval=4)
    cfg.param_scheduler = [dict(COSINE, eta_min_ratio=1e-5 / 1e-3, T_max=3)]
    cfg.auto_scale_lr = dict(enable=True, base_batch_size=base_batch_size)
    layers = dict(constructor='beit_mm.BEiTOptimWrapperConstructor', paramwise_cfg=dict(layer_decay_rate=0.5))
    cfg.optim_wrapper.update(layers)
    cfg.default_hooks.runtime_info = dict(type='beit_mm.RuntimeInfoHook')
    scalars = train(cfg).message_hub.log_scalars
    rates = scalars['train/lr'].data[0]
    assert (rates[0], rates[-1]) == pytest.approx((1e-3 * 4 / base_batch_size, 1e-5 * 4 / base_batch_size))
    assert 'train/base_lr' not in scalars  # which mmengine does not scale


def test_a_run_of_other_shapes_is_not_resumed(cfg, tmp_path):
    train(cfg)
    path = tmp_path / 'work/epoch_1.pth'
    content = torch.load(path, weights_only=True)
    content['state_dict']['head.fc.weight'] = torch.zeros(5, 7)
    torch.save(content, path)
    cfg.load_from, cfg.resume, cfg.train_cfg.max_epochs = str(path), True, 2
    refused(cfg, "epoch_1.pth: shapes differ from this model's: head.fc.weight; resume")


def test_a_changed_config_of_several_optimizers_is_warned_of(warnings):
    rates = {name: OptimWrapper(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.2)) for name in 'ab'}
    loader = torch.utils.data.DataLoader(range(8), batch_size=4)
    runner = SimpleNamespace(optim_wrapper=OptimWrapperDict(**rates), cfg={}, train_dataloader=loader)
    checkpoint = dict(meta=dict(iter=2, config_dict=dict(optim_wrapper=dict(a=dict(lr=0.1)))), state_dict={})
    follow_config(runner, 'iter_2.pth', checkpoint, dict(optim_wrapper=dict(a=dict(lr=0.2))))
    assert any('settings and schedules come from the checkpoint' in text for text in warnings())


def test_positions_of_a_teacher_are_resized():
    def model_of(size: int) -> nn.Module:
        model = narrow_dino_model()
        return MODELS.build(dict(model, backbone=dict(model['backbone'], img_size=size)))

    small, large = model_of(32), model_of(48)
    runner = SimpleNamespace(
        model=large, cfg=dict(resume=True, load_from='a.pth'), message_hub=MessageHub('a'), optim_wrapper=None
    )
    FitCheckHook().after_load_checkpoint(runner, dict(state_dict=small.state_dict()))
    large.load_state_dict(small.state_dict(), strict=False)
    assert large.teacher['backbone'].pos_embed.shape == (1, 37, 32)

"""Every segmentation config holds the numbers of the paper's appendix table, or of the released configs."""

import copy
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from helpers import build_on_meta, check_all, count_parameters, list_configs, load_config
from mmengine.registry import PARAM_SCHEDULERS

from beit_mm.engine.optim import BEiTOptimWrapperConstructor
from beit_mm.registry import MODELS

LEAVES = list_configs('setr', 'upernet')


class Recipe(NamedTuple):
    """The paper's table of ADE20K settings, or one released config."""

    parameters: int
    start: str  # config whose last checkpoint it starts from, or a public file
    rate: float
    layer_decay: float = 0.65
    drop_path: float = 0.1
    layer_scale: float | None = None
    table: bool = False  # a relative position bias in every block instead of a position embedding
    blocks: tuple[int, ...] = (3, 5, 7, 11)
    size: int = 512
    stride: int = 341
    batches: int = 160_000  # of the schedule; an update takes `accumulated` of them
    accumulated: int = 1
    width: int = 768


# Backbone without last norm, with 32 x 32 + 1 instead of 197 positions; heads as mmseg builds the released configs.
VIT_512 = 85_789_440 - 2 * 768 + (1025 - 197) * 768
SETR = Recipe(VIT_512 + 3_581_078 + 4 * 1_810_070, 'beit/pretrain_800e.py', 1e-3, blocks=(4, 7, 9, 11))
PYRAMID = 7_081_728 + 67_963_542 + 1_808_534
UPERNET = Recipe(VIT_512 + PYRAMID, 'beit/pretrain_300e.py', 7e-4)
PT = UPERNET._replace(parameters=163_080_812, start='beit_plus/pretrain_in22k_150e.py', layer_scale=0.1, table=True)
BASE_640 = PT._replace(
    parameters=163_407_980,
    start='beit_plus/intermediate_in22k_90e.py',
    rate=3e-5,
    layer_decay=0.9,
    size=640,
    stride=426,
)
LARGE_640 = BASE_640._replace(
    parameters=441_271_084,
    start='beit_plus/intermediate_large_in22k_90e.py',
    rate=2e-5,
    layer_decay=0.95,
    drop_path=0.2,
    layer_scale=1e-6,
    blocks=(7, 11, 15, 23),
    batches=320_000,
    accumulated=2,
    width=1024,
)
V2_BASE = PT._replace(start='beit_v2/pretrain_1600e.py', rate=5e-5, layer_decay=0.75, drop_path=0.15)
V2_LARGE = LARGE_640._replace(
    parameters=440_398_636,
    start='beit_v2/pretrain_large_1600e.py',
    rate=4e-5,
    layer_decay=0.9,
    size=512,
    stride=341,
    batches=160_000,
    accumulated=1,
)
RECIPES = {
    'beit/setr_pup_512_ade20k_160k.py': SETR,
    # one head less; the others have a second convolution of 256 channels with its norm
    'beit/setr_pup_512_three_aux_ade20k_160k.py': SETR._replace(
        parameters=SETR.parameters - 1_810_070 + 3 * (256 * 256 * 9 + 2 * 256)
    ),
    'beit/setr_pup_512_ade20k_160k_after_in1k.py': SETR._replace(start='beit/finetune_in1k_100e.py'),
    'beit/setr_pup_512_ade20k_160k_supervised.py': SETR._replace(
        start='https://dl.fbaipublicfiles.com/deit/deit_base_patch16_224-b5f2ef4d.pth'
    ),
    'beit/setr_pup_512_ade20k_160k_released_dino.py': SETR._replace(
        start='https://dl.fbaipublicfiles.com/dino/dino_vitbase16_pretrain/dino_vitbase16_pretrain.pth'
    ),
    **{
        f'ablation/setr_pup_{row}_512_ade20k_160k.py': SETR._replace(start=f'ablation/pretrain_{row}_300e.py')
        for row in ('random_mask', 'pixels', 'pixels_random_mask', 'recover_all', 'no_mask_recover_all')
    },
    'ablation/setr_pup_baseline_512_ade20k_160k.py': SETR._replace(start='beit/pretrain_300e.py'),
    'beit_dino/setr_pup_beit_dino_512_ade20k_160k.py': SETR._replace(start='beit_dino/pretrain_beit_dino_300e.py'),
    'beit_dino/setr_pup_dino_512_ade20k_160k.py': SETR._replace(start='beit_dino/pretrain_dino_400e.py'),
    'beit/upernet_512_ade20k_160k.py': UPERNET,
    'ablation/upernet_layer_scale_512_ade20k_160k.py': UPERNET._replace(
        parameters=UPERNET.parameters + 12 * 2 * 768, start='ablation/pretrain_layer_scale_300e.py', layer_scale=0.1
    ),
    'ablation/upernet_layer_scale_rel_pos_512_ade20k_160k.py': PT._replace(start='beit_plus/pretrain_300e.py'),
    'beit_plus/upernet_512_ade20k_160k.py': PT,
    'beit_plus/upernet_512_ade20k_160k_after_in22k.py': BASE_640._replace(
        parameters=PT.parameters, size=512, stride=341
    ),
    'beit_plus/upernet_640_ade20k_160k.py': BASE_640,
    'beit_plus/upernet_large_512_ade20k_160k.py': LARGE_640._replace(
        parameters=440_398_636, size=512, stride=341, batches=160_000, accumulated=1
    ),
    'beit_plus/upernet_large_640_ade20k_160k.py': LARGE_640,
    'beit_v2/upernet_512_ade20k_160k.py': V2_BASE,
    'beit_v2/upernet_512_ade20k_160k_after_in22k.py': V2_BASE._replace(
        start='beit_v2/intermediate_in22k_90e.py', layer_decay=0.85
    ),
    'beit_v2/upernet_large_512_ade20k_160k.py': V2_LARGE,
    'beit_v2/upernet_large_512_ade20k_160k_after_in22k.py': V2_LARGE._replace(
        start='beit_v2/intermediate_large_in22k_90e.py', rate=3e-5
    ),
}
SINGLE_SCALE = {  # rows that the paper tests so, without a file of their own for all scales
    *(leaf for leaf in RECIPES if leaf.startswith(('ablation/setr_pup', 'beit_v2/', 'beit_dino/'))),
    *(
        f'beit/setr_pup_512_{row}.py'
        for row in ('three_aux_ade20k_160k', 'ade20k_160k_supervised', 'ade20k_160k_released_dino')
    ),
}
MULTI_SCALE = [leaf for leaf in LEAVES if leaf.endswith('_ms.py')]
STATISTICS = ([123.675, 116.28, 103.53], [58.395, 57.12, 57.375])  # ImageNet's, under every pretraining


def steps_of(pipeline: list[dict]) -> dict[str, dict]:
    return {step['type'].removeprefix('beit_mm.'): step for step in pipeline}


def test_no_row_is_left_out():
    assert sorted([*RECIPES, *MULTI_SCALE]) == LEAVES
    plain = {leaf.removesuffix('_ms.py') + '.py' for leaf in MULTI_SCALE}
    assert plain == set(RECIPES) - SINGLE_SCALE


def test_models_are_the_published_ones():

    def check(leaf: str) -> None:
        recipe, cfg = RECIPES[leaf], load_config(leaf)
        model, backbone, head = cfg.model, cfg.model.backbone, cfg.model.decode_head
        assert count_parameters(leaf) == recipe.parameters
        assert (backbone.drop_path_rate, backbone.get('layer_scale_init')) == (recipe.drop_path, recipe.layer_scale)
        assert (backbone.get('abs_pos_embed', True), backbone.get('rel_pos_bias')) == (
            (False, 'per_layer') if recipe.table else (True, None)
        )
        assert (backbone.out_type, tuple(backbone.out_indices), backbone.img_size) == (
            'featmap',
            recipe.blocks,
            recipe.size,
        )
        preprocessor = model.data_preprocessor
        assert (preprocessor.mean, preprocessor.std) == STATISTICS and not preprocessor.get('bgr_to_rgb')
        assert (tuple(preprocessor.size), preprocessor.pad_val, preprocessor.seg_pad_val) == (
            (recipe.size,) * 2,
            0,
            255,
        )
        assert (model.test_cfg.mode, tuple(model.test_cfg.crop_size), tuple(model.test_cfg.stride)) == (
            'slide',
            (recipe.size,) * 2,
            (recipe.stride,) * 2,
        )
        heads = [head, *(model.auxiliary_head if isinstance(model.auxiliary_head, list) else [model.auxiliary_head])]
        assert [h.loss_decode.loss_weight for h in heads] == [1.0] + [0.4] * (len(heads) - 1)
        assert all((h.num_classes, h.align_corners, h.norm_cfg.type) == (150, False, 'beit_mm.SyncBN') for h in heads)
        if 'setr_pup' in leaf:
            three = 'three_aux' in leaf
            assert backbone.interpolate_mode == 'bilinear'
            assert [(h.type.removeprefix('beit_mm.Efficient'), h.in_index, h.num_convs, h.up_scale) for h in heads] == [
                ('SETRUPHead', 3, 4, 2),
                *(('SETRUPHead', i, 2 if three else 1, 4) for i in range(3 if three else 4)),
            ]
            assert all(
                (h.channels, h.dropout_ratio, h.kernel_size, h.norm_layer.eps) == (256, 0, 3, 1e-6) for h in heads
            )
        else:
            auxiliary = heads[1]
            assert backbone.get('interpolate_mode', 'bicubic') == 'bicubic' and len(heads) == 2
            assert model.neck == dict(
                type='Feature2Pyramid',
                embed_dim=recipe.width,
                rescales=[4, 2, 1, 0.5],
                norm_cfg=dict(type='beit_mm.SyncBN'),
            )
            assert (head.type, head.channels, tuple(head.pool_scales), head.dropout_ratio, head.in_channels) == (
                'beit_mm.EfficientUPerHead',
                recipe.width,
                (1, 2, 3, 6),
                0.1,
                [recipe.width] * 4,
            )
            assert (
                auxiliary.type,
                auxiliary.in_index,
                auxiliary.channels,
                auxiliary.num_convs,
                auxiliary.concat_input,
                auxiliary.dropout_ratio,
                auxiliary.in_channels,
            ) == ('FCNHead', 2, 256, 1, False, 0.1, recipe.width)

    check_all(RECIPES, check)


def test_optimizers_are_the_published_ones():

    def check(leaf: str) -> None:
        recipe, cfg = RECIPES[leaf], load_config(leaf)
        wrapper, optimizer = cfg.optim_wrapper, cfg.optim_wrapper.optimizer
        assert (optimizer.type, optimizer.lr, tuple(optimizer.betas), optimizer.eps, optimizer.weight_decay) == (
            'AdamW',
            recipe.rate,
            (0.9, 0.999),
            1e-8,
            0.05,
        )
        assert (wrapper.type, wrapper.dtype, wrapper.constructor) == (
            'beit_mm.AutocastOptimWrapper',
            'bfloat16',
            'beit_mm.BEiTOptimWrapperConstructor',
        )
        assert wrapper.paramwise_cfg == dict(layer_decay_rate=recipe.layer_decay) and 'clip_grad' not in wrapper
        assert cfg.auto_scale_lr.base_batch_size == 16
        assert wrapper.get('accumulative_counts', 1) == recipe.accumulated
        assert 8 * cfg.train_dataloader.batch_size * recipe.accumulated == 16
        assert cfg.train_cfg.max_iters == recipe.batches
        assert cfg.train_cfg.val_interval == recipe.batches // 10
        assert not cfg.default_hooks.checkpoint.by_epoch and not cfg.log_processor.by_epoch

    check_all(RECIPES, check)


@pytest.mark.parametrize(
    'leaf',
    [
        'beit/setr_pup_512_ade20k_160k.py',
        'beit_plus/upernet_640_ade20k_160k.py',
        'beit_plus/upernet_large_640_ade20k_160k.py',
    ],
)
def test_every_layer_learns_at_its_rate_and_positions_do_not_decay(leaf):
    """The released formula for every parameter, necks and heads at the full rate; no decay for vectors,
    `cls_token` and `pos_embed` (which the released segmentation decays by mistake)."""
    recipe, cfg = RECIPES[leaf], load_config(leaf)
    model = build_on_meta(leaf)
    wrapper = dict(cfg.optim_wrapper, optimizer=dict(cfg.optim_wrapper.optimizer, fused=False))
    assert wrapper.pop('constructor') == 'beit_mm.BEiTOptimWrapperConstructor'
    groups = BEiTOptimWrapperConstructor(wrapper, wrapper.pop('paramwise_cfg'))(model).optimizer.param_groups
    depth, seen = model.backbone.num_layers, {}
    for group in groups:
        for name, parameter in zip(group['names'], group['params'], strict=True):
            seen[name] = True
            if name.startswith('backbone.blocks.'):
                layer = int(name.split('.')[2]) + 1
            else:
                layer = 0 if name.startswith('backbone.') else depth + 1
            assert group['lr'] == pytest.approx(recipe.rate * recipe.layer_decay ** (depth + 1 - layer)), name
            exempt = parameter.dim() <= 1 or name in ('backbone.cls_token', 'backbone.pos_embed')
            assert group['weight_decay'] == (0 if exempt else 0.05), name
    assert seen.keys() == dict(model.named_parameters()).keys()


def test_schedules_end_where_training_ends():
    """mmengine's last factor stands one step before `end`; warm-up and run count batches."""

    def check(leaf: str) -> None:
        recipe, cfg = RECIPES[leaf], load_config(leaf)
        assert cfg.param_scheduler == [
            dict(type='LinearLR', start_factor=1e-6, by_epoch=False, begin=0, end=1500 * recipe.accumulated + 1),
            dict(type='PolyLR', power=1.0, eta_min=0, by_epoch=False, begin=0, end=recipe.batches + 1),
        ]

    check_all(RECIPES, check)


def test_learning_rate_follows_the_released_formula():
    """mmcv's poly schedule of power 1 times its warm-up, from the first batch to the last; a hundred times shorter."""
    cfg = load_config('beit/setr_pup_512_ade20k_160k.py')
    peak, total, warmup = 1e-3, 1600, 15
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=peak)
    schedulers = []
    for scheduler in cfg.param_scheduler:
        scheduler = dict(scheduler, end=scheduler.end // 100 + 1)
        schedulers.append(PARAM_SCHEDULERS.get(scheduler.pop('type'))(optimizer=optimizer, **scheduler))
    for step in range(total):
        factor = 1 - (1 - step / warmup) * (1 - 1e-6) if step < warmup else 1
        expected = peak * (1 - step / total) * factor
        assert optimizer.param_groups[0]['lr'] == pytest.approx(expected, rel=1e-4), step
        optimizer.step()
        for scheduler in schedulers:
            scheduler.step()
    assert optimizer.param_groups[0]['lr'] < 1e-7 * peak  # where the next batch would be


def test_data_are_the_published_ones():

    def check(leaf: str) -> None:
        recipe, cfg = RECIPES[leaf], load_config(leaf)
        size = recipe.size
        train = steps_of(cfg.train_dataloader.dataset.pipeline)
        assert list(train) == [
            'LoadImage',
            'LoadAnnotation',
            'RandomResize',
            'RandomCrop',
            'RandomFlip',
            'PhotoMetricDistortion',
            'PackSegInputs',
        ]
        assert train['RandomResize'] == dict(
            type='RandomResize', scale=(4 * size, size), ratio_range=(0.5, 2.0), keep_ratio=True
        )
        assert train['RandomCrop'] == dict(type='RandomCrop', crop_size=(size, size), cat_max_ratio=0.75)
        assert train['RandomFlip'].prob == 0.5 and 'unreadable' in train['PackSegInputs'].meta_keys
        assert cfg.train_dataloader.drop_last
        for loader, split in ((cfg.train_dataloader, 'training'), (cfg.val_dataloader, 'validation')):
            dataset = loader.dataset
            assert dataset.data_prefix == dict(img_path=f'images/{split}', seg_map_path=f'annotations/{split}')
            assert (dataset.data_root, dataset.classes, dataset.reduce_zero_label) == (
                'data/ade20k',
                'mmseg.ADE20KDataset',
                True,
            )
        test = steps_of(cfg.test_dataloader.dataset.pipeline)
        assert test['LoadImageFromFile'] == dict(type='LoadImageFromFile', _scope_='beit_mm')  # LoadImage
        assert list(test) == ['LoadImageFromFile', 'Resize', 'LoadAnnotation', 'PackSegInputs']
        assert test['Resize'] == dict(type='Resize', scale=(4 * size, size), keep_ratio=True)
        assert cfg.test_dataloader == cfg.val_dataloader and cfg.test_evaluator == cfg.val_evaluator
        assert cfg.val_evaluator == dict(type='IoUMetric', iou_metrics=['mIoU'])
        assert list(steps_of(cfg.tta_pipeline)) == ['LoadImage', 'LoadAnnotation', 'MultiScaleViews']
        assert cfg.tta_pipeline[-1] == dict(type='beit_mm.MultiScaleViews', short_side=size, crop_size=(size, size))

    check_all(RECIPES, check)


def test_multi_scale_is_what_tta_makes_of_its_config():

    def check(leaf: str) -> None:
        single, cfg = load_config(leaf.removesuffix('_ms.py') + '.py'), load_config(leaf)
        assert cfg.model == dict(single.tta_model, module=single.model)
        dataloader = copy.deepcopy(cfg.test_dataloader)
        assert dataloader.dataset.pipeline == single.tta_pipeline
        dataloader.dataset.pipeline = single.test_dataloader.dataset.pipeline
        assert dataloader == single.test_dataloader and cfg.test_evaluator == single.test_evaluator

    check_all(MULTI_SCALE, check)


def test_multi_scale_twice_is_refused():
    cfg = load_config(MULTI_SCALE[0])
    build_on_meta(MULTI_SCALE[0])
    with pytest.raises(ValueError, match='leave --tta out'):  # what mmseg's test.py makes of --tta
        MODELS.build(dict(cfg.tta_model, module=cfg.model.to_dict()))


def test_each_starts_from_the_last_checkpoint_of_its_row():

    def check(leaf: str) -> None:
        start = RECIPES[leaf].start
        if start.startswith('https://'):
            assert load_config(leaf).model.backbone.init_cfg.checkpoint == start
            return
        folder = load_config(start).get('work_dir', f'work_dirs/{Path(start).stem}')
        checkpoint = f'{folder}/epoch_{load_config(start).train_cfg.max_epochs}.pth'
        assert load_config(leaf).model.backbone.init_cfg.checkpoint == checkpoint

    check_all(RECIPES, check)

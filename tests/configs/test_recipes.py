"""Every config holds the numbers of tests/facts.py, its recipe and its model are those of the papers."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from facts import FINETUNING, PRETRAINING, SEGMENTATION, read, start_of
from helpers import build_on_meta, check_all, count_parameters, header_of, list_configs, load_config
from mmengine.registry import PARAM_SCHEDULERS

from beit_mm.models.lora import with_lora
from beit_mm.registry import TRANSFORMS

IMAGENET = dict(mean=(123.675, 116.28, 103.53), std=(58.395, 57.12, 57.375))
HALF = dict(mean=(127.5,) * 3, std=(127.5,) * 3)
GROUPS = 'beit_mm.BEiTOptimWrapperConstructor'
SWEEP = pytest.approx(3.5e-3, abs=1.5e-3)
KINDS = dict(
    pretraining=read(PRETRAINING, lr=1.5e-3, wd=0.05, batch=2048, decay=None, batches=None),
    finetuning=read(FINETUNING, clip=None, beta=0.999, batches=None),
    segmentation=read(SEGMENTATION, wd=0.05, batch=16, clip=None, beta=0.999, ep=None, warm=1500),
)


def differences(published: object, found: object, where: str = '') -> Iterator[str]:
    """Where a config has another value; keys may be dotted, and None stands for what the config leaves out."""
    if isinstance(published, dict):
        for key, value in published.items():
            inner = found
            for part in key.split('.'):
                inner = inner.get(part) if isinstance(inner, dict) else None
            yield from differences(value, inner, f'{where}.{key}')
    elif isinstance(published, list | tuple) and isinstance(found, list | tuple) and len(published) == len(found):
        for index, pair in enumerate(zip(published, found, strict=True)):
            yield from differences(*pair, f'{where}.{index}')
    elif published != found:
        yield f'{where} is {found!r}, published: {published!r}'


def check(published: dict, name: str) -> None:
    assert not [*differences(published, load_config(name).to_dict())]


def adamw(rate: object, decay: float, beta: float = 0.999) -> dict:
    return dict(type='AdamW', lr=rate, betas=(0.9, beta), eps=1e-8, weight_decay=decay)


def ours(kind: str, **options: object) -> dict:
    return dict(type=f'beit_mm.{kind}', **options)


LOAD, PACK = ours('LoadImage'), dict(type='PackInputs')


def common(row) -> dict:
    """What all three kinds have in their rows."""
    rate = SWEEP if row.lr == 'sweep' else row.lr
    return {
        'model.backbone': dict(drop_path_rate=row.drop, layer_scale_init=row.scale),
        'optim_wrapper': dict(dtype='bfloat16', constructor=GROUPS),
        'optim_wrapper.clip_grad': row.clip and dict(max_norm=row.clip),
        'optim_wrapper.paramwise_cfg.layer_decay_rate': row.decay,
        'optim_wrapper.optimizer': adamw(rate, row.wd, row.beta),
        'auto_scale_lr.base_batch_size': row.batch,
        'train_cfg': dict(max_epochs=row.ep, max_iters=row.batches),
        'train_dataloader.drop_last': True,
    }


def cosine(peak: float, low: float, warmup: int, total: int, start: float = 0) -> np.ndarray:
    """The released law: a line to the peak at the last step of the warm-up, then half a cosine."""
    fall = np.arange(total - warmup) / (total - warmup)
    return np.r_[np.linspace(start, peak, warmup), low + (peak - low) / 2 * (1 + np.cos(np.pi * fall))]


def check_rates(name: str, expected: np.ndarray, scale: float = 1) -> None:
    """mmengine's schedulers give `scale` times these, in epochs of two steps, or with a step for each hundred."""
    cfg, schedulers, found = load_config(name), [], []
    optimizer = torch.optim.SGD([torch.zeros(1)], cfg.optim_wrapper.optimizer.lr * scale)
    for part in (dict(part) for part in cfg.param_scheduler if part.type.endswith('LR')):
        if not part.get('convert_to_iter_based'):
            part.update({key: part[key] // 100 + part[key] % 100 for key in ('begin', 'end')})
        schedulers.append(PARAM_SCHEDULERS.build(part, default_args=dict(optimizer=optimizer, epoch_length=2)))
    assert not any(scheduler.by_epoch for scheduler in schedulers)
    for _ in expected:
        found.append(optimizer.param_groups[0]['lr'])
        for scheduler in schedulers:
            scheduler.step()
    np.testing.assert_allclose(found, expected * scale, rtol=2e-3, atol=1e-9)


def pretraining(name: str, row) -> dict:
    is_v2, is_22k = name.startswith('beit_v2/'), 'in22k' in name
    mask_type = dict(blocks='BlockwiseMask', random='RandomMask').get(row.mask)
    mask = [ours(mask_type, num_masked=75, grid=(14, 14), variant='exact' if is_v2 else None)] if mask_type else []
    sizes = dict(size=224, second_size=row.second)
    crop = ours('TwoViewRandomResizedCrop', scale=(0.2, 1.0) if is_v2 else None, **sizes)
    jitter = ours('TwoViewColorJitter', brightness=0.4, contrast=0.4, saturation=0.4)
    check_rates(name, cosine(1.5e-3, 1e-5, *((100, 10398) if is_22k else (2 * row.warm, 2 * row.ep))))
    return {
        'model.early_layers': row.early,
        'model.recover': 'all' if 'recover_all' in name else None,
        'model.data_preprocessor': HALF if is_22k else IMAGENET,
        'model.backbone': dict(rel_pos_bias=row.bias),
        'model.backbone.abs_pos_embed': False if row.bias else None,
        'train_dataloader.dataset.data_root': f'data/imagenet{"22k" * is_22k}/train',
        'train_dataloader.dataset.pipeline': [LOAD, crop, jitter, *mask, ours('PackViews')],
        'val_dataloader.dataset.pipeline': [LOAD, ours('TwoViewCenterCrop', **sizes), *mask, ours('PackViews')],
    }


def finetuning(name: str, row) -> dict:
    statistics = HALF if name.startswith('beit_plus/') else IMAGENET
    is_cifar, is_22k, size = 'cifar100' in name, 'in22k_90e' in name, row.px
    folder, classes = ('cifar100', 100) if is_cifar else ('imagenet22k', 21841) if is_22k else ('imagenet', 1000)
    fill = dict(pad_val=[round(mean) for mean in statistics['mean']], interpolation='bicubic')
    strength = dict(num_policies=2, magnitude_level=9, magnitude_std=0.5, total_level=10)
    augment = ours('RandAugment', policies='timm_increasing', hparams=fill, **strength)
    erasing = [] if is_cifar else [ours('RandomErasing', prob=0.25)]
    crop = ours('RandomResizedCrop', size=size, scale=None, prob=None)  # 8 to 100 %, flipped or not
    # the whole image from 384 pixels on, else a crop ratio of 0.875
    edge = dict(type='ResizeEdge', scale=256 if size == 224 else size, backend='pillow', interpolation='bicubic')
    val = [LOAD, edge, dict(type='CenterCrop', crop_size=size), PACK]
    mix = dict(augments=[dict(type='Mixup', alpha=0.8), dict(type='CutMix', alpha=1.0)])
    repeated = ours('RepeatedAugmentationSampler', num_repeats=3)
    std = pytest.approx(0.02 if 'scratch' in name else 0.02 * 0.001)
    peak = load_config(name).optim_wrapper.optimizer.lr
    start = 1e-6 if peak == row.min else 0  # DeiT's warm-up
    check_rates(name, cosine(peak, row.min, 2 * row.warm, 2 * row.ep, start), row.decay)
    return {
        'model.data_preprocessor': dict(num_classes=classes, **statistics),
        'model.train_cfg': mix if row.mix else None,
        'model.backbone': dict(out_type='avg_featmap', img_size=None if size == 224 else size),
        'model.head': dict(num_classes=classes, init_cfg=dict(type='Normal', layer='Linear', std=std)),
        'model.head.loss': dict(type='LabelSmoothLoss', label_smooth_val=0.1, mode='original'),
        'train_dataloader.sampler': repeated if row.rep == 3 else ours('SeededSampler', shuffle=True),
        'train_dataloader.dataset.data_root': f'data/{folder}/train',
        'train_dataloader.dataset.pipeline': [LOAD, crop, augment, *erasing, PACK],
        'val_dataloader.dataset.data_root': None if is_22k else f'data/{folder}/val',  # which has none
        'val_dataloader.dataset.pipeline': None if is_22k else val,
    }


def segmentation(name: str, row) -> dict:
    size, width, is_setr, three = row.size, 1024 if 'large' in name else 768, 'setr_pup' in name, 'three_aux' in name
    norm = dict(norm_cfg=dict(type='beit_mm.SyncBN'))
    setr = dict(channels=256, dropout_ratio=0, kernel_size=3, norm_layer=dict(type='LN', eps=1e-6))
    above = dict(type='beit_mm.EfficientUPerHead', pool_scales=(1, 2, 3, 6), in_channels=[width] * 4, channels=width)
    beside = dict(type='beit_mm.FCNHead', in_index=2, in_channels=width, channels=256, num_convs=1, concat_input=False)
    if is_setr:
        above = dict(type='beit_mm.EfficientSETRUPHead', in_index=3, num_convs=4, up_scale=2, **setr)
        beside = dict(type='beit_mm.SETRUPHead', num_convs=2 if three else 1, up_scale=4, **setr)
    else:
        above['dropout_ratio'] = beside['dropout_ratio'] = 0.1
    neck = dict(type='Feature2Pyramid', embed_dim=width, rescales=[4, 2, 1, 0.5], **norm)
    common = dict(num_classes=150, align_corners=False, **norm)
    beside |= {'loss_decode.loss_weight': 0.4, **common}
    resize, window = dict(scale=(4 * size, size), keep_ratio=True), (size, size)
    flip, colours = dict(type='RandomFlip', prob=0.5), dict(type='PhotoMetricDistortion')
    some = [dict(type='RandomResize', ratio_range=(0.5, 2.0), **resize)]
    some += [dict(type='RandomCrop', crop_size=window, cat_max_ratio=0.75), flip, colours]
    by_its_name = dict(type='LoadImageFromFile', _scope_='beit_mm')  # LoadImage, as mmseg looks for it
    step = np.arange(row.batches // 100)
    check_rates(name, row.lr * (1 - step / len(step)) * np.clip(step / (15 * row.acc), 1e-6, 1))
    labels, pack = ours('LoadAnnotation'), dict(type='PackSegInputs')
    ade20k = dict(data_root='data/ade20k', classes='mmseg.ADE20KDataset', reduce_zero_label=True)
    train, val = (
        ade20k | dict(data_prefix=dict(img_path=f'images/{split}', seg_map_path=f'annotations/{split}'))
        for split in ('training', 'validation')
    )
    return {
        'model.data_preprocessor': dict(size=window, pad_val=0, seg_pad_val=255, bgr_to_rgb=None, **IMAGENET),
        'model.backbone': dict(out_type='featmap', img_size=size, out_indices=row.blocks),
        'model.backbone.rel_pos_bias': 'per_layer' if row.bias else None,
        'model.backbone.abs_pos_embed': False if row.bias else None,
        'model.backbone.interpolate_mode': 'bilinear' if is_setr else None,
        'model.neck': None if is_setr else neck,
        'model.decode_head': {'loss_decode.loss_weight': 1.0, **above, **common},
        'model.auxiliary_head': [dict(beside, in_index=i) for i in range(3 if three else 4)] if is_setr else beside,
        'model.test_cfg': dict(mode='slide', crop_size=window, stride=(size * 2 // 3,) * 2),
        'optim_wrapper.accumulative_counts': None if row.acc == 1 else row.acc,
        'train_cfg.val_interval': row.batches // 10,
        'train_dataloader.dataset': train,
        'val_dataloader.dataset': val,
        'train_dataloader.dataset.pipeline': [LOAD, labels, *some, pack],
        'val_dataloader.dataset.pipeline': [by_its_name, dict(type='Resize', **resize), labels, pack],
        'val_evaluator': ours('IoUMetric', iou_metrics=['mIoU']),
        'tta_pipeline': [LOAD, labels, ours('MultiScaleViews', short_side=size, crop_size=window)],
    }


@pytest.mark.parametrize('kind', KINDS)
def test_recipes_and_models_are_the_published_ones(kind):
    def check_one(name: str) -> None:
        cfg, row = load_config(name), KINDS[kind][name]
        check(common(row), name)
        check(globals()[kind](name, row), name)
        assert cfg.test_dataloader == cfg.val_dataloader and cfg.test_evaluator == cfg.val_evaluator
        assert count_parameters(name) == row.parameters

    check_all(KINDS[kind], check_one)


def test_each_starts_from_the_last_checkpoint_of_its_predecessor():
    def check_one(name: str) -> None:
        cfg, last = load_config(name), None
        if start := start_of(name):
            before = load_config(start)
            folder = before.get('work_dir', f'work_dirs/{Path(start).stem}')
            last = f'{folder}/epoch_{before.train_cfg.max_epochs}.pth'
        backbone = cfg.model.backbone.get('module', cfg.model.backbone)
        found = (cfg.load_from, (backbone.get('init_cfg') or {}).get('checkpoint'))
        assert found == ((last, None) if '_384_in1k_10e' in name else (None, last))  # goes on with the same head
        assert bool(last) == ('scratch' not in name)

    probes = [*PROBES, *ATTENTIVE]
    check_all([*KINDS['finetuning'], *KINDS['segmentation'], *probes, *ADAPTED, *MASKS, LINEAR], check_one)


def test_headers_name_what_their_sources_have_otherwise():
    """The recipe of dBOT's own past; the warm-up of the released command and of the paper."""
    dbot = '0.75;2.4e-3;0.9 and 0.95;40 epochs;path 0.2;sine;crops from 0.2;class token'
    for name, facts in (('beit/pretrain_features_ema_300e.py', dbot), ('beit_plus/pretrain_in22k_150e.py', '69,320')):
        differs = ' '.join(header_of(name).split()).partition('Differs: ')[2]
        assert [fact for fact in facts.split(';') if fact not in differs] == []


PROBES = {  # block from 1; parameters: embeddings, blocks, no last norm, and the classifier
    'beit/linear_probe_in1k_50e.py': (9, 85_789_440 - 2 * 768 + 769 * 1000),
    'beit/linear_probe_large_in1k_50e.py': (14, 303_277_056 - 2 * 1024 + 1025 * 1000),
}
LINEAR, DECODER = (f'beit_plus/{head}_512_ade20k_39k_after_in22k.py' for head in ('linear', 'masks_decoder'))
MASKS = ('beit_plus/masks_512', 'beit_plus/masks_640', 'beit_plus/masks_large_640')
MASKS = [
    DECODER,
    *(f'{name}_ade20k_39k_after_in22k.py' for name in (*MASKS, 'beit_v2/masks_512', 'beit_v2/masks_large_512')),
]
FROZEN = [f'dinov2/masks_frozen_{large}512_ade20k_39k.py' for large in ('', 'large_')]
PLAIN = [*FROZEN, *(f'dinov2/masks_{large}512_ade20k_39k.py' for large in ('', 'large_'))]
ATTENTIVE = {  # their pretraining, and parameters of the backbone without its last norm
    'beit/attentive_probe_in1k_90e.py': ('beit/pretrain_800e.py', 85_789_440 - 2 * 768),
    'beit_v2/attentive_probe_in1k_90e.py': ('beit_v2/pretrain_1600e.py', 85_665_360 - 2 * 768),
}
ADAPTED = {  # what they change, and how many parameters learn
    'beit_v2/finetune_lora_in1k_30e.py': ('beit_v2/finetune_in1k_100e.py', 2_359_296 + 769_000),
    'beit_v2/finetune_frozen_in1k_30e.py': ('beit_v2/finetune_in1k_100e.py', 2 * 768 + 769_000),
    'beit_v2/upernet_lora_512_ade20k_160k.py': ('beit_v2/upernet_512_ade20k_160k.py', 2_359_296 + 76_853_804),
    'beit_v2/upernet_frozen_512_ade20k_160k.py': ('beit_v2/upernet_512_ade20k_160k.py', 76_853_804),
}
BEIT, BOTH = 'beit/pretrain_300e.py', 'beit_dino/pretrain_beit_dino_300e.py'
DINO, DALLE, DVAE = 'beit_dino/pretrain_dino_400e.py', 'dvae/dalle_8k_in1k.py', 'dvae/discrete_vae_8k_in1k.py'
VQKD = 'beit_v2/vqkd_base_in1k.py'


def test_every_config_has_one_row():
    named = [*PROBES, *MASKS, *PLAIN, LINEAR, *ATTENTIVE, *ADAPTED, BOTH, DINO, DALLE, DVAE, VQKD]
    for rows in KINDS.values():
        named += rows
    assert sorted(named) == list_configs()


@pytest.mark.parametrize('name', PROBES)
def test_a_linear_probe_is_the_published_one(name):
    block, parameters = PROBES[name]
    crop = dict(type='RandomResizedCrop', scale=224)
    published = {
        'model': dict(layers=block - 1, feature='mean', data_preprocessor=IMAGENET),
        'optim_wrapper.optimizer': adamw(4e-3, 1e-4),
        'param_scheduler': [dict(type='CosineAnnealingLR', eta_min=0, begin=0, end=50)],
        'train_cfg.max_epochs': 50,
        'auto_scale_lr.base_batch_size': 1024,
        'train_dataloader.dataset.pipeline': [LOAD, crop, dict(type='RandomFlip'), PACK],
        'val_dataloader.dataset.pipeline': [LOAD, dict(type='ResizeEdge', scale=256), dict(crop_size=224), {}],
    }
    check(published, name)
    assert sum(p.numel() for p in build_on_meta(name).parameters()) == parameters


def test_images_under_mask_heads_are_resized_as_by_eomts_scale_jitter():
    """torchvision's, which EoMT uses: min(512 / height, 512 / width), times 0.5 to 2."""
    steps = load_config('beit_plus/masks_512_ade20k_39k_after_in22k.py').train_pipeline
    step = TRANSFORMS.build(next(step for step in steps if step.type == 'RandomResize'))
    for height, width in ((512, 683), (400, 300), (100, 1000)):
        image = np.zeros((height, width, 3), np.uint8)
        factors = [step(dict(img=image))['img'].shape[0] / height / min(512 / height, 512 / width) for _ in range(300)]
        assert min(factors) == pytest.approx(0.5, abs=0.04) and max(factors) == pytest.approx(2, abs=0.04)
        assert np.mean(factors) == pytest.approx(1.25, abs=0.1)


def test_mask_heads_are_trained_as_eomt():
    """Its ADE20K recipe with DINOv2-L: 31 epochs of 1,263 steps are 39,153; masks end at sixths of 39,120.

    A frozen encoder is below PMT's decoder, with its rate.
    """

    def check_one(name: str) -> None:
        size, large = (640 if '640' in name else 512), 'large' in name
        # EoMT's ScaleJitter fits the long side to the crop times 0.5 to 2
        resize = dict(scale=(4 * size, size) if name == LINEAR else (size, size), ratio_range=(0.5, 2.0))
        published = {
            'optim_wrapper.optimizer': dict(adamw(2e-4 if name in FROZEN else 1e-4, 0.05), betas=None, eps=None),
            'optim_wrapper.clip_grad': None if name == LINEAR else dict(max_norm=0.01),
            'optim_wrapper.paramwise_cfg': dict(layer_decay_rate=0.8),
            'train_cfg.max_iters': 39_120,
            'param_scheduler': [dict(type='LinearLR', end=1501), dict(type='PolyLR', power=0.9, eta_min=0, end=39_121)],
            'auto_scale_lr.base_batch_size': 16,
            'train_dataloader.dataset.pipeline': [{}, {}, resize, dict(crop_size=(size,) * 2), {}, {}, {}],
            'val_dataloader.dataset.pipeline': [{}, dict(scale=(4 * size, size)), {}, {}],
            'model.test_cfg.crop_size': (size, size),
            'model.backbone': dict(img_size=size, rel_pos_bias='per_layer', abs_pos_embed=False),
        }
        if name in PLAIN:  # its patches of 14 pixels are resampled to 16, as there
            letter, registers = 'l' if large else 'b', dict(patch_size=None, num_registers=4, drop_path_rate=0)
            start = f'dinov2_vit{letter}14_reg4_pretrain'
            published['model.backbone'] = dict(
                registers, img_size=size, rel_pos_bias=None, init_cfg=dict(checkpoint=start)
            )
        if name in FROZEN:
            depth = 24 if large else 12
            published['model.backbone'] |= dict(
                frozen_stages=depth, out_indices=tuple(depth * quarter // 4 - 1 for quarter in range(1, 5))
            )
        if name != LINEAR:
            blocks = 6 if name in FROZEN else 4 if large or name == DECODER else 3
            where = 'decoder' if name in (DECODER, *FROZEN) else 'backbone'
            masks = dict(num_queries=100, num_blocks=blocks, where=where, in_channels=1024 if large else 768)
            published['model.decode_head'] = masks
        check(published, name)

    check_all([*MASKS, *PLAIN, LINEAR], check_one)


@pytest.mark.parametrize('name', ATTENTIVE)
def test_an_attentive_probe_is_efficient_probings(name):
    """The settings of its README and main_linprobe.py, and the trained parameters of its log of BEiT v2."""
    start, of_backbone = ATTENTIVE[name]
    crop = dict(type='beit_mm.RandomResizedCrop', size=224, clips=True)  # which also flips
    edge = dict(type='ResizeEdge', scale=256, interpolation='bicubic')
    published = {
        'model': dict(layers=-1, num_queries=32, data_preprocessor=IMAGENET),
        'optim_wrapper.optimizer': dict(type='beit_mm.LARS', lr=0.1 * 4096 / 256, momentum=0.9),
        'optim_wrapper.dtype': 'bfloat16',
        'train_cfg.max_epochs': 90,
        'auto_scale_lr.base_batch_size': 4096,
        'train_dataloader.dataset.pipeline': [LOAD, crop, PACK],
        'val_dataloader.dataset.pipeline': [LOAD, edge, dict(crop_size=224), {}],
    }
    check(published, name)
    check_rates(name, cosine(1.6, 0, 20, 180, start=1.6e-9))
    shape = ('arch', 'abs_pos_embed', 'rel_pos_bias', 'layer_scale_init')
    ours, theirs = (load_config(config).model.backbone for config in (name, start))
    assert [ours.get(key) for key in shape] == [theirs.get(key) for key in shape]
    learned = count_parameters(name)
    assert learned == 1_383_400 and sum(p.numel() for p in build_on_meta(name).parameters()) == of_backbone + learned


@pytest.mark.parametrize('name', ADAPTED)
def test_lora_and_frozen_backbones_are_those_of_full_fine_tuning(name):
    before, learned = ADAPTED[name]
    cfg, full = load_config(name), load_config(before)
    backbone = cfg.model.backbone.to_dict()
    if 'lora' in name:
        assert backbone == with_lora(backbone['module'], 16)
        backbone = backbone['module']
        assert cfg.train_dataloader == full.train_dataloader
        assert cfg.model.get('train_cfg') == full.model.get('train_cfg')
    else:
        assert backbone.pop('frozen_stages') == 12
    changed = {'drop_path_rate': None}
    assert backbone | changed == full.model.backbone.to_dict() | changed
    for key in ('head', 'neck', 'decode_head', 'auxiliary_head', 'data_preprocessor'):
        assert cfg.model.get(key) == full.model.get(key), key
    assert (cfg.val_dataloader, cfg.auto_scale_lr) == (full.val_dataloader, full.auto_scale_lr)
    assert cfg.optim_wrapper.paramwise_cfg.layer_decay_rate == 1 and count_parameters(name) == learned
    if 'finetune' in name:
        check_rates(name, cosine(1e-3, 1e-6, 10, 60))
    else:
        assert (cfg.train_cfg, cfg.param_scheduler) == (full.train_cfg, full.param_scheduler)


def test_dino_is_that_of_its_released_vit_and_beit_stays_beit():
    """Alone: lr 7.5e-4 for 256 images, 10 epochs of warm-up, half a cosine to 2e-6; weight decay from 0.04 to 0.4."""
    crops = ours('MultiCrop', size=224, scale=(0.25, 1.0), local_size=96, local_scale=(0.05, 0.25), num_local=10)
    hook = dict(momentum=0.996, temperature=(0.04, 0.07), warmup_epochs=50, freeze_last_layer=3)
    beit = load_config(BEIT).to_dict()
    load, box, jitter, mask, pack = beit['train_dataloader']['dataset']['pipeline']
    decay = dict(type='CosineAnnealingWeightDecay', eta_min=0.4, begin=0, end=400, convert_to_iter_based=True)
    check_rates(DINO, cosine(3e-3, 2e-6, 20, 800))
    alone = {
        'model': dict(head=None, target_generator=None),
        'optim_wrapper.optimizer': adamw(7.5e-4 * 1024 / 256, 0.04),
        'param_scheduler': [{}, decay, {}],
        'train_cfg.max_epochs': 400,
        'auto_scale_lr.base_batch_size': 1024,
    }
    both = {key: beit[key] for key in ('optim_wrapper', 'param_scheduler', 'train_cfg', 'auto_scale_lr')}
    both |= dict(model=dict(dino_weight=1.0, dino_on_masked=False), val_dataloader=beit['val_dataloader'])
    views = [load, dict(box, scale=(0.25, 1.0)), jitter, mask, crops, pack]
    for name, published, pipeline in ((BOTH, both, views), (DINO, alone, [load, crops, pack])):
        head = ours('DINOHead', embed_dims=768, num_prototypes=65536)
        check(published | {'model.dino_head': head, 'model.backbone.drop_path_rate': 0.1}, name)
        check({'train_dataloader.dataset.pipeline': pipeline, 'train_dataloader.batch_size': 64}, name)
        assert not [*differences(hook, load_config(name).custom_hooks[-1])]
    projection = 769 * 2048 + 2049 * 2048 + 2049 * 256 + 256 * 65536
    keys_bias = 12 * 768  # which timm's ViT-B/16 of 85,798,656 parameters has, and which changes no attention
    assert count_parameters(DINO) == 85_798_656 - keys_bias + projection
    assert count_parameters(BOTH) == count_parameters(BEIT) + projection


def test_vqkd_is_trained_as_the_released_one():
    """The command of beit2/TOKENIZER.md, with a rate of 5e-5 for 128 images."""
    crop = ours('TwoViewRandomResizedCrop', size=224, second_size=None, scale=(0.08, 1.0))
    warmup, cosine = (
        dict(type='LinearLR', begin=0, end=10),
        dict(type='CosineAnnealingLR', begin=10, end=100, eta_min_ratio=1e-5 / 2e-4),
    )
    published = {
        'model': dict(arch='base', vocab_size=8192, code_dims=32, decoder_layers=3, decay=0.99, kmeans_init=True),
        'optim_wrapper.optimizer': adamw(5e-5 * 512 / 128, 1e-4, 0.99),
        'param_scheduler': [warmup, cosine],
        'train_cfg.max_epochs': 100,
        'auto_scale_lr.base_batch_size': 512,
        'train_dataloader.dataset.pipeline': [LOAD, crop, ours('PackViews')],
    }
    check(published, VQKD)


def test_tokenizers_are_the_published_ones():
    """DALL-E paper, appendix A; the released code's class, which is then used as it was trained."""
    published = {
        'model': dict(vocab_size=8192, kl_weight=6.6, kl_steps=5000, loss='laplace'),
        'model.temperature': (1, 1 / 16),
        'model.temperature_steps': 150_000,
        'optim_wrapper.optimizer': adamw(1e-4, 1e-4),
        'param_scheduler': [dict(type='CosineAnnealingLR', begin=None, end=1_200_000, eta_min_ratio=1.25e-6 / 1e-4)],
        'train_cfg.max_iters': 3_000_000,
        'auto_scale_lr.base_batch_size': 512,
        'default_hooks.ema': dict(type='EMAHook', momentum=0.001),
    }
    check(published, DALLE)
    assert (count_parameters(DALLE), count_parameters(DVAE)) == (53_786_240 + 43_829_766, 20_081_411)
    shape = ('type', 'arch', 'hidden', 'vocab_size', 'embed_dims', 'num_levels', 'bottleneck_blocks')
    used = load_config('ablation/pretrain_own_dvae_300e.py').model.target_generator
    assert [used[key] for key in shape] == [load_config(DVAE).model[key] for key in shape]

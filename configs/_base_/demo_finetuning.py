"""A small classifier of 64-pixel images in 8 x 8 patches. The leaf gives data_root, num_classes and the weights."""
_base_ = './default_runtime.py'

model = dict(
    type='ImageClassifier',
    data_preprocessor=dict(
        type='beit_mm.ClassificationDataPreprocessor',
        mean=[123.675, 116.28, 103.53],
        std=[58.395, 57.12, 57.375]),
    backbone=dict(
        type='beit_mm.BEiTBackbone',
        arch=dict(embed_dims=128, num_layers=6, num_heads=4),
        img_size=64,
        patch_size=8,
        out_type='avg_featmap',
        drop_path_rate=0.1),
    head=dict(
        type='LinearClsHead',
        in_channels=128,
        loss=dict(type='LabelSmoothLoss', label_smooth_val=0.1, mode='original'),
        init_cfg=dict(type='Normal', layer='Linear', std=2e-5)),
    train_cfg=dict(augments=[dict(type='Mixup', alpha=0.8), dict(type='CutMix', alpha=1.0)]))

train_pipeline = [
    dict(type='beit_mm.LoadImage', cache_bytes=2**30),
    dict(type='beit_mm.RandomResizedCrop', size=64, scale=(0.3, 1.0)),  # with flip
    dict(
        type='beit_mm.RandAugment',
        policies='timm_increasing',
        num_policies=2,
        total_level=10,
        magnitude_level=9,
        magnitude_std=0.5,
        hparams=dict(pad_val=[124, 116, 104], interpolation='bicubic')),
    dict(type='beit_mm.RandomErasing', prob=0.25),
    dict(type='PackInputs', meta_keys=('img_path', 'erase_box', 'unreadable')),
]
test_pipeline = [
    dict(type='beit_mm.LoadImage'),
    dict(type='ResizeEdge', scale=72, edge='short', backend='pillow', interpolation='bicubic'),
    dict(type='CenterCrop', crop_size=64),
    dict(type='PackInputs'),
]
train_dataloader = dict(
    batch_size=64,
    num_workers=1,
    persistent_workers=True,
    drop_last=True,
    sampler=dict(type='beit_mm.SeededSampler', shuffle=True),
    collate_fn=dict(type='default_collate'),
    dataset=dict(
        type='beit_mm.ImageFolder', data_prefix='train', on_error='skip', pipeline=train_pipeline))
val_dataloader = dict(
    batch_size=64,
    num_workers=1,
    persistent_workers=True,
    sampler=dict(type='beit_mm.SeededSampler', shuffle=False, seed=0),
    collate_fn=dict(type='default_collate'),
    dataset=dict(
        type='beit_mm.ImageFolder', data_prefix='val', test_mode=True, pipeline=test_pipeline))
test_dataloader = val_dataloader
val_evaluator = dict(type='Accuracy', topk=1)
test_evaluator = val_evaluator

optim_wrapper = dict(
    type='beit_mm.AutocastOptimWrapper',
    dtype='bfloat16',
    constructor='beit_mm.BEiTOptimWrapperConstructor',
    paramwise_cfg=dict(layer_decay_rate=0.8),
    optimizer=dict(
        type='AdamW', lr=2e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.05, fused=True))
train_cfg = dict(type='beit_mm.EpochLoop', max_epochs=20, val_interval=5)
val_cfg = dict()
test_cfg = dict()
param_scheduler = [
    dict(type='LinearLR', start_factor=1e-9, begin=0, end=5, convert_to_iter_based=True),
    dict(
        type='CosineAnnealingLR',
        eta_min_ratio=5e-4,
        begin=5,
        end=20,
        T_max=15,
        convert_to_iter_based=True),
]
auto_scale_lr = dict(base_batch_size=64)
default_hooks = dict(checkpoint=dict(interval=2, max_keep_ckpts=2))

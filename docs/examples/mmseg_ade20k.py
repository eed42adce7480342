"""ADE20K: mmseg's all but backbone, layer decay, and the batch norm, which is SyncBN that runs on a CPU too.

mim train mmsegmentation docs/examples/mmseg_ade20k.py --gpus 1
"""

default_scope = 'mmseg'
size = (512, 512)  # height, width
norm_cfg = dict(type='beit_mm.SyncBN')
model = dict(
    type='EncoderDecoder',
    data_preprocessor=dict(
        type='SegDataPreProcessor', mean=[127.5] * 3, std=[127.5] * 3, bgr_to_rgb=True, size=size, seg_pad_val=255
    ),
    backbone=dict(
        type='beit_mm.BEiTBackbone',
        arch='base',
        img_size=512,
        out_type='featmap',
        out_indices=(3, 5, 7, 11),
        drop_path_rate=0.1,
        abs_pos_embed=False,
        rel_pos_bias='per_layer',
        layer_scale_init=0.1,
        init_cfg=dict(type='Pretrained', checkpoint='beit_base_patch16_224_pt22k_ft22k'),
    ),
    neck=dict(type='Feature2Pyramid', embed_dim=768, rescales=[4, 2, 1, 0.5], norm_cfg=norm_cfg),
    decode_head=dict(
        type='UPerHead',
        in_channels=[768] * 4,
        in_index=[0, 1, 2, 3],
        channels=768,
        num_classes=150,
        norm_cfg=norm_cfg,
        align_corners=False,
    ),
    train_cfg=dict(),
    test_cfg=dict(mode='slide', crop_size=size, stride=(341, 341)),
)

train_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='LoadAnnotations'),
    dict(type='RandomResize', scale=(2048, 512), ratio_range=(0.5, 2.0), keep_ratio=True),
    dict(type='RandomCrop', crop_size=size, cat_max_ratio=0.75),
    dict(type='RandomFlip', prob=0.5),
    dict(type='PhotoMetricDistortion'),
    dict(type='PackSegInputs'),
]
val_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='Resize', scale=(2048, 512), keep_ratio=True),
    dict(type='LoadAnnotations'),
    dict(type='PackSegInputs'),
]
train_dataloader = dict(
    batch_size=2,
    num_workers=2,
    persistent_workers=True,
    sampler=dict(type='InfiniteSampler', shuffle=True),
    dataset=dict(
        type='ADE20KDataset',
        data_root='data/ade20k',
        pipeline=train_pipeline,
        data_prefix=dict(img_path='images/training', seg_map_path='annotations/training'),
    ),
)
val_dataloader = dict(
    batch_size=1,
    num_workers=2,
    persistent_workers=True,
    sampler=dict(type='DefaultSampler', shuffle=False),
    dataset=dict(
        type='ADE20KDataset',
        data_root='data/ade20k',
        pipeline=val_pipeline,
        data_prefix=dict(img_path='images/validation', seg_map_path='annotations/validation'),
    ),
)
val_evaluator = dict(type='IoUMetric', iou_metrics=['mIoU'])

optim_wrapper = dict(
    constructor='beit_mm.BEiTOptimWrapperConstructor',
    paramwise_cfg=dict(layer_decay_rate=0.85),
    optimizer=dict(type='AdamW', lr=3e-5, weight_decay=0.05),
)
param_scheduler = [
    dict(type='LinearLR', start_factor=1e-6, by_epoch=False, begin=0, end=1500),
    dict(type='PolyLR', power=1.0, by_epoch=False, begin=1500, end=160000),
]
train_cfg = dict(type='IterBasedTrainLoop', max_iters=160000, val_interval=16000)
val_cfg = dict(type='ValLoop')
default_hooks = dict(checkpoint=dict(type='CheckpointHook', by_epoch=False, interval=16000))
log_processor = dict(by_epoch=False)
custom_hooks = [dict(type='beit_mm.FitCheckHook')]

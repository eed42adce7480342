"""Classes of images in folders, images/{train,val}/CLASS/*.jpg: mmpretrain's all but backbone and layer decay.

mim train mmpretrain docs/examples/mmpretrain_folder.py --gpus 1
"""

default_scope = 'mmpretrain'
num_classes = 10
data_preprocessor = dict(mean=[127.5] * 3, std=[127.5] * 3, to_rgb=True, num_classes=num_classes)
model = dict(
    type='ImageClassifier',
    backbone=dict(
        type='beit_mm.BEiTBackbone',
        arch='base',
        img_size=224,
        out_type='avg_featmap',
        drop_path_rate=0.1,
        abs_pos_embed=False,
        rel_pos_bias='per_layer',
        layer_scale_init=0.1,  # as the released files are
        init_cfg=dict(type='Pretrained', checkpoint='beit_base_patch16_224_pt22k'),
    ),
    head=dict(type='LinearClsHead', num_classes=num_classes, in_channels=768),
)

train_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='RandomResizedCrop', scale=224, backend='pillow', interpolation='bicubic'),
    dict(type='RandomFlip', prob=0.5),
    dict(type='PackInputs'),
]
val_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='ResizeEdge', scale=256, edge='short', backend='pillow', interpolation='bicubic'),
    dict(type='CenterCrop', crop_size=224),
    dict(type='PackInputs'),
]
train_dataloader = dict(
    batch_size=32,
    num_workers=2,
    persistent_workers=True,
    sampler=dict(type='DefaultSampler', shuffle=True),
    dataset=dict(type='CustomDataset', data_root='images/train', pipeline=train_pipeline),
)
val_dataloader = dict(
    batch_size=32,
    num_workers=2,
    persistent_workers=True,
    sampler=dict(type='DefaultSampler', shuffle=False),
    dataset=dict(type='CustomDataset', data_root='images/val', pipeline=val_pipeline),
)
val_evaluator = dict(type='Accuracy', topk=(1,))

optim_wrapper = dict(
    constructor='beit_mm.BEiTOptimWrapperConstructor',
    paramwise_cfg=dict(layer_decay_rate=0.65),
    optimizer=dict(type='AdamW', lr=5e-4, weight_decay=0.05),
)
param_scheduler = [
    dict(type='LinearLR', start_factor=1e-6, begin=0, end=5, convert_to_iter_based=True),
    dict(type='CosineAnnealingLR', begin=5, end=50, convert_to_iter_based=True),
]
train_cfg = dict(by_epoch=True, max_epochs=50, val_interval=5)
val_cfg = dict()
custom_hooks = [dict(type='beit_mm.FitCheckHook')]  # stops at the first step where parts do not fit

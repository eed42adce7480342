"""A small BEiT fine-tuned on any folder of images with one folder a class, in minutes on two CPU cores.

After:   configs/demo/pretrain.py
Command: python tools/train.py configs/demo/finetune_folder.py
         From random weights, for comparison (with one rate for all layers, as none has learned anything):
         python tools/train.py configs/demo/finetune_folder.py --work-dir work_dirs/finetune_folder_scratch \
             --cfg-options model.backbone.init_cfg=None optim_wrapper.paramwise_cfg.layer_decay_rate=1.0
Data:    data/demo/train/<class>/*.jpg and data/demo/val/<class>/*.jpg; the number of classes is found out.
         Other folders: --cfg-options data_root=images; without images/val there is no validation. Other names of the
         two: train_dataloader.dataset.data_prefix=... val_dataloader.dataset.data_prefix=...
         Fewer images: train_dataloader.dataset.ann_file=list.txt (one path a line, relative to data/demo/train)
Batch:   1 process x 64 images, lr 2e-3
Differs: from ../beit/finetune_in1k_100e.py in size (64-pixel images in 8 x 8 patches), in crops of at least 30 % of an
         image, in layer decay, and in having no repeated augmentation
"""
_base_ = '../_base_/default_runtime.py'

runner_type = 'beit_mm.FolderRunner'  # data_root and the number of classes go where they belong
data_root = 'data/demo'

model = dict(
    type='ImageClassifier',
    data_preprocessor=dict(
        type='beit_mm.ClassificationDataPreprocessor',
        num_classes=2,
        mean=[123.675, 116.28, 103.53],
        std=[58.395, 57.12, 57.375]),
    backbone=dict(
        type='beit_mm.BEiTBackbone',
        arch=dict(embed_dims=128, num_layers=6, num_heads=4),
        img_size=64,
        patch_size=8,
        out_type='avg_featmap',
        drop_path_rate=0.1,
        init_cfg=dict(type='Pretrained', checkpoint='work_dirs/pretrain/iter_3000.pth')),
    head=dict(
        type='LinearClsHead',
        num_classes=2,
        in_channels=128,
        loss=dict(type='LabelSmoothLoss', label_smooth_val=0.1, mode='original'),
        init_cfg=dict(type='Normal', layer='Linear', std=2e-5)),
    train_cfg=dict(augments=[dict(type='Mixup', alpha=0.8), dict(type='CutMix', alpha=1.0)]))

train_pipeline = [
    dict(type='beit_mm.LoadImage'),
    dict(
        type='RandomResizedCrop',
        scale=64,
        crop_ratio_range=(0.3, 1.0),
        backend='pillow',
        interpolation='bicubic'),
    dict(type='RandomFlip', prob=0.5, direction='horizontal'),
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

"""A small BEiT fine-tuned on images with one folder a class, in minutes on two CPU cores.

After:   the packaged weights; of a pretraining of your own: --cfg-options model.backbone.init_cfg.checkpoint=FILE
Command: python tools/train.py configs/demo/finetune_folder.py
         The packaged classifier:
         python tools/train.py configs/demo/finetune_folder.py --work-dir work_dirs/caltech101_finetune --cfg-options \
             data_root=data/caltech101 model.head.num_classes=97 model.data_preprocessor.num_classes=97
         From random weights, for comparison (docs/results.md), with one rate for all layers:
         python tools/train.py configs/demo/finetune_folder.py --work-dir work_dirs/finetune_folder_scratch \
             --cfg-options model.backbone.init_cfg=None optim_wrapper.optimizer.lr=1e-3 \
             optim_wrapper.paramwise_cfg.layer_decay_rate=1.0
Data:    data/demo/train/<class>/*.jpg and data/demo/val/<class>/*.jpg of 10 classes. Other folders and numbers:
         python -m beit_mm finetune writes a config of its own; or --cfg-options data_root=images
         model.head.num_classes=7 model.data_preprocessor.num_classes=7, and without images/val --no-validate
         Fewer images: train_dataloader.dataset.ann_file=list.txt (one path a line, relative to data/demo/train)
Batch:   1 process x 64 images, lr 4e-3
Differs: from ../beit/finetune_in1k_100e.py in size (96-pixel images in 8 x 8 patches), in crops of at least 30 % of an
         image, in rate and layer decay, and in lighter augmentation, with which a short run learns more: no
         RandAugment, Mixup, CutMix or repeated augmentation
"""
_base_ = '../_base_/default_runtime.py'

data_root = 'data/demo'

model = dict(
    type='ImageClassifier',
    data_preprocessor=dict(
        type='beit_mm.ClassificationDataPreprocessor',
        mean=[123.675, 116.28, 103.53],
        std=[58.395, 57.12, 57.375],
        num_classes=10),
    backbone=dict(
        type='beit_mm.BEiTBackbone',
        arch=dict(embed_dims=128, num_layers=5, num_heads=4),
        img_size=96,
        patch_size=8,
        out_type='avg_featmap',
        drop_path_rate=0.1,
        init_cfg=dict(type='Pretrained', checkpoint='demo')),
    head=dict(
        type='LinearClsHead',
        in_channels=128,
        num_classes=10,
        loss=dict(type='LabelSmoothLoss', label_smooth_val=0.1, mode='original'),
        init_cfg=dict(type='Normal', layer='Linear', std=2e-5)))

train_pipeline = [
    dict(type='beit_mm.LoadImage', cache_bytes=2**30),
    dict(type='beit_mm.RandomResizedCrop', size=96, scale=(0.3, 1.0)),  # with flip
    dict(type='beit_mm.RandomErasing', prob=0.25),
    dict(type='PackInputs', meta_keys=('img_path', 'erase_box', 'unreadable')),
]
test_pipeline = [
    dict(type='beit_mm.LoadImage'),
    dict(type='ResizeEdge', scale=108, edge='short', backend='pillow', interpolation='bicubic'),
    dict(type='CenterCrop', crop_size=96),
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
        type='beit_mm.ImageFolder', data_root=data_root, data_prefix='train', on_error='skip', pipeline=train_pipeline))
val_dataloader = dict(
    batch_size=64,
    num_workers=1,
    persistent_workers=True,
    sampler=dict(type='beit_mm.SeededSampler', shuffle=False, seed=0),
    collate_fn=dict(type='default_collate'),
    dataset=dict(
        type='beit_mm.ImageFolder', data_root=data_root, data_prefix='val', test_mode=True, pipeline=test_pipeline))
test_dataloader = val_dataloader
val_evaluator = dict(type='Accuracy', topk=1)
test_evaluator = val_evaluator

optim_wrapper = dict(
    type='beit_mm.AutocastOptimWrapper',
    dtype='bfloat16',
    constructor='beit_mm.BEiTOptimWrapperConstructor',
    paramwise_cfg=dict(layer_decay_rate=0.8),
    optimizer=dict(
        type='AdamW', lr=4e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.05, fused=True))
train_cfg = dict(type='beit_mm.EpochLoop', max_epochs=24, val_interval=6)
val_cfg = dict()
test_cfg = dict()
param_scheduler = [
    dict(type='LinearLR', start_factor=1e-9, begin=0, end=4, convert_to_iter_based=True),
    dict(
        type='CosineAnnealingLR',
        eta_min_ratio=5e-4,
        begin=4,
        end=24,
        T_max=20,
        convert_to_iter_based=True),
]
auto_scale_lr = dict(base_batch_size=64)
default_hooks = dict(checkpoint=dict(interval=2, max_keep_ckpts=2))

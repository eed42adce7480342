"""Linear probes of a small pretrained BEiT on images with one folder a class: all blocks in one run.

After:   the packaged weights, or a pretraining of your own: --cfg-options model.backbone.init_cfg.checkpoint=FILE
Command: python tools/train.py configs/demo/linear_probe_folder.py
         Random features, for comparison:
         python tools/train.py configs/demo/linear_probe_folder.py --work-dir work_dirs/linear_probe_folder_random \
             --cfg-options model.backbone.init_cfg=None
Data:    as finetune_folder.py. Other numbers of classes: --cfg-options model.num_classes=7
Batch:   1 process x 64 images, lr 4e-3
Differs: from ../beit/linear_probe_in1k_50e.py in size (96-pixel images in 8 x 8 patches), in crops of at least 30 % of
         an image, in 20 epochs, and in probing every block
"""
_base_ = './finetune_folder.py'

data_root = 'data/demo'

model = dict(
    _delete_=True,
    type='beit_mm.LinearProbe',
    data_preprocessor=dict(
        type='ClsDataPreprocessor',
        mean=[123.675, 116.28, 103.53],
        std=[58.395, 57.12, 57.375]),
    backbone=dict(
        type='beit_mm.BEiTBackbone',
        arch=dict(embed_dims=128, num_layers=5, num_heads=4),
        img_size=96,
        patch_size=8,
        init_cfg=dict(type='Pretrained', checkpoint='demo')),
    feature='mean',
    num_classes=10)

train_pipeline = [
    dict(type='beit_mm.LoadImage'),
    dict(
        type='RandomResizedCrop',
        scale=96,
        crop_ratio_range=(0.3, 1.0),
        backend='pillow',
        interpolation='bilinear'),
    dict(type='RandomFlip', prob=0.5, direction='horizontal'),
    dict(type='PackInputs', meta_keys=('img_path', 'unreadable')),
]
train_dataloader = dict(dataset=dict(data_root=data_root, pipeline=train_pipeline))
val_dataloader = dict(dataset=dict(data_root=data_root))
test_dataloader = val_dataloader
val_evaluator = dict(_delete_=True, type='beit_mm.LayerAccuracy')
test_evaluator = val_evaluator

optim_wrapper = dict(
    _delete_=True,
    type='beit_mm.AutocastOptimWrapper',
    dtype='bfloat16',
    optimizer=dict(
        type='AdamW', lr=4e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=1e-4, fused=True))
param_scheduler = [dict(type='CosineAnnealingLR', eta_min=0, begin=0, end=20, T_max=20)]
train_cfg = dict(max_epochs=20, val_interval=5)

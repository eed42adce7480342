"""Linear probes of a small pretrained BEiT on images with one folder a class: all blocks in one run.

After:   the packaged weights, or your own pretraining: --cfg-options model.backbone.init_cfg.checkpoint=FILE
Command: python tools/train.py configs/demo/linear_probe_folder.py
         Random features, for comparison:
         python tools/train.py configs/demo/linear_probe_folder.py --work-dir work_dirs/linear_probe_folder_random \
             --cfg-options model.backbone.init_cfg=None
Data:    as finetune_folder.py. Other numbers of classes: --cfg-options model.num_classes=7
Batch:   1 process x 64 images, lr 4e-3
Differs: from ../beit/linear_probe_in1k_50e.py in size (96-pixel images in 8 x 8 patches), in crops of at least 30 % of
         an image, in 20 epochs, and in probing every block
"""
_base_ = [
    '../_base_/models/linear_probe_base.py',
    '../_base_/datasets/demo_folder.py',
    '../_base_/schedules/linear_probe_adamw_bs1024_50e.py',
]

model = dict(
    backbone=dict(
        arch=dict(_delete_=True, embed_dims=128, num_layers=5, num_heads=4),
        img_size=96,
        patch_size=8,
        init_cfg=dict(type='Pretrained', checkpoint='demo')),
    num_classes=10)

train_pipeline = [
    dict(type='beit_mm.LoadImage'),
    dict(
        type='RandomResizedCrop', scale=96, crop_ratio_range=(0.3, 1.0), backend='pillow', interpolation='bilinear'),
    dict(type='RandomFlip', prob=0.5, direction='horizontal'),
    dict(type='PackInputs', meta_keys=('img_path', 'unreadable')),
]
train_dataloader = dict(dataset=dict(pipeline=train_pipeline))
val_evaluator = dict(_delete_=True, type='beit_mm.LayerAccuracy')
test_evaluator = val_evaluator

auto_scale_lr = dict(base_batch_size=64)
train_cfg = dict(max_epochs=20)
param_scheduler = [dict(type='CosineAnnealingLR', eta_min=0, begin=0, end=20, T_max=20)]
default_hooks = dict(checkpoint=dict(interval=2, max_keep_ckpts=2))

"""A small BEiT fine-tuned on images with one folder a class, in minutes on two CPU cores.

After:   the packaged weights, or your own pretraining: --cfg-options model.backbone.init_cfg.checkpoint=FILE
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
         image, in rate and layer decay, and in lighter augmentation, because a short run learns more without
         RandAugment, Mixup, CutMix and repeated augmentation
"""
_base_ = [
    '../_base_/models/finetune_base.py',
    '../_base_/datasets/demo_folder.py',
    '../_base_/schedules/finetune_adamw_bs1024_100e.py',
]

model = dict(
    data_preprocessor=dict(num_classes=10),
    backbone=dict(
        arch=dict(_delete_=True, embed_dims=128, num_layers=5, num_heads=4),
        img_size=96,
        patch_size=8,
        init_cfg=dict(type='Pretrained', checkpoint='demo')),
    head=dict(num_classes=10, in_channels=128),
    train_cfg=None)  # no mixup, no cutmix

optim_wrapper = dict(paramwise_cfg=dict(layer_decay_rate=0.8))
auto_scale_lr = dict(base_batch_size=64)
train_cfg = dict(max_epochs=24, val_interval=6)
param_scheduler = [
    dict(type='LinearLR', start_factor=1e-9, begin=0, end=4, convert_to_iter_based=True),
    dict(type='CosineAnnealingLR', eta_min_ratio=5e-4, begin=4, end=24, T_max=20, convert_to_iter_based=True),
]
default_hooks = dict(checkpoint=dict(interval=2, max_keep_ckpts=2))

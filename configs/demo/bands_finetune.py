"""The model of bands_pretrain.py fine-tuned on 240 labelled images with six bands, of eight classes.

After:   configs/demo/bands_pretrain.py
Command: python tools/train.py configs/demo/bands_finetune.py
         From random weights, for comparison (with one rate for all layers, because none is pretrained):
         python tools/train.py configs/demo/bands_finetune.py --work-dir work_dirs/bands_scratch \
             --cfg-options model.backbone.init_cfg=None optim_wrapper.paramwise_cfg.layer_decay_rate=1.0
Data:    data/bands/{train,val}/<class>/*.tif; of the former those in data/bands/meta/few_labels.txt. All of them:
         --cfg-options train_dataloader.dataset.ann_file=''
Batch:   1 process x 32 images, lr 2e-3
Expect:  docs/records/2026-11-22-bands.md
Differs: from finetune_folder.py in reading six bands, so that OpenCV resizes instead of Pillow; in size (48 pixels, 4
         blocks, width 96), in crops of at least 60 % of an image, and in batch and length
"""
_base_ = [
    '../_base_/models/finetune_base.py',
    '../_base_/datasets/demo_bands.py',
    '../_base_/schedules/finetune_adamw_bs1024_100e.py',
]

model = dict(
    data_preprocessor=dict(num_classes=8, mean=_base_.mean, std=_base_.std),
    backbone=dict(
        arch=dict(_delete_=True, embed_dims=96, num_layers=4, num_heads=4),
        in_channels=6,
        img_size=48,
        patch_size=8,
        init_cfg=dict(type='Pretrained', checkpoint='work_dirs/bands_pretrain/iter_2000.pth')),
    head=dict(num_classes=8, in_channels=96),
    train_cfg=None)  # no mixup, no cutmix

train_pipeline = [
    dict(type='beit_mm.LoadBands', low=_base_.low, high=_base_.high),
    dict(
        type='RandomResizedCrop',
        scale=48,
        crop_ratio_range=(0.6, 1.0),
        backend='cv2',  # Pillow takes no six channels
        interpolation='bilinear'),
    dict(type='RandomFlip', prob=0.5, direction='horizontal'),
    dict(type='beit_mm.RandomErasing', prob=0.25),
    dict(type='PackInputs', meta_keys=('img_path', 'erase_box', 'unreadable')),
]
test_pipeline = [
    dict(type='beit_mm.LoadBands', low=_base_.low, high=_base_.high),
    dict(type='ResizeEdge', scale=48, edge='short', backend='cv2', interpolation='bilinear'),
    dict(type='CenterCrop', crop_size=48),
    dict(type='PackInputs'),
]
train_dataloader = dict(
    batch_size=32,
    dataset=dict(type='beit_mm.ImageFolder', ann_file='meta/few_labels.txt', pipeline=train_pipeline))
val_dataloader = dict(dataset=dict(type='beit_mm.ImageFolder', pipeline=test_pipeline))
test_dataloader = val_dataloader
val_evaluator = dict(type='Accuracy', topk=1)
test_evaluator = val_evaluator

optim_wrapper = dict(paramwise_cfg=dict(layer_decay_rate=0.8), optimizer=dict(lr=2e-3))
auto_scale_lr = dict(base_batch_size=32)
train_cfg = dict(max_epochs=60, val_interval=20)
param_scheduler = [
    dict(type='LinearLR', start_factor=1e-9, begin=0, end=10, convert_to_iter_based=True),
    dict(
        type='CosineAnnealingLR', eta_min_ratio=5e-4, begin=10, end=60, T_max=50, convert_to_iter_based=True),
]
default_hooks = dict(checkpoint=dict(interval=20, max_keep_ckpts=2))

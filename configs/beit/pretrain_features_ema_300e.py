"""BEiT-Base on the features of its own moving average, 300 epochs on ImageNet-1K.

Result:  none published
Model:   ViT-Base, absolute position embedding, 86,380,800 parameters; 224 x 224 pixels, 75 of 196 patches masked
Command: tools/dist_train.sh configs/beit/pretrain_features_ema_300e.py 16
Test:    tools/dist_test.sh configs/beit/pretrain_features_ema_300e.py \
           work_dirs/pretrain_features_ema_300e/epoch_300.pth 16
Batch:   16 GPUs x 128 = 2048 images, lr 1.5e-3
Steps:   300 epochs x 625 = 187,500 updates, 6,250 of them warm-up
Data:    ImageNet-1K, 1,281,167 images
Cost:    135 GFLOP an image forward and backward; 115 GPU hours of an A100 at 40 %

Follows: dBOT (arXiv 2209.03917) with its own past as teacher, in stages: 84.5 ImageNet-1K top-1, 49.5 ADE20K mIoU. Not
         run here
Differs: from dBOT in a teacher that moves at each step, by DINO's schedule, in having no decoder, in 300 epochs, and in
         the recipe, which is that of pretrain_300e.py. dBOT's own: 0.75 of the patches masked at random, lr 2.4e-3 for
         4096 images, betas 0.9 and 0.95, 40 epochs of warm-up, drop path 0.2, fixed sine positions, crops from 0.2 of
         the image without colour jitter, the class token in the loss. From pretrain_300e.py in the targets, in the head
         and in having one view
Options: Features of an earlier block: --cfg-options model.target_generator.layers=8
"""
_base_ = [
    '../_base_/models/mim_base.py',
    '../_base_/datasets/mim_in1k.py',
    '../_base_/schedules/mim_adamw_bs2048_300e.py',
]

model = dict(
    head=dict(_delete_=True, type='beit_mm.FeatureRegressionHead', embed_dims=768, target_dims=768),
    target_generator=dict(_delete_=True, type='beit_mm.FeatureTargets', teacher='ema'))
custom_hooks = [*_base_.custom_hooks, dict(type='beit_mm.TeacherMomentumHook', momentum=0.996)]

train_pipeline = [
    dict(type='beit_mm.LoadImage'),
    dict(type='beit_mm.TwoViewRandomResizedCrop', size=224, second_size=None),
    dict(type='beit_mm.TwoViewColorJitter', brightness=0.4, contrast=0.4, saturation=0.4),
    dict(type='beit_mm.BlockwiseMask', grid=(14, 14), num_masked=75),
    dict(type='beit_mm.PackViews'),
]
val_pipeline = [
    dict(type='beit_mm.LoadImage'),
    dict(type='beit_mm.TwoViewCenterCrop', size=224, second_size=None),
    dict(type='beit_mm.BlockwiseMask', grid=(14, 14), num_masked=75),
    dict(type='beit_mm.PackViews'),
]
train_dataloader = dict(dataset=dict(pipeline=train_pipeline))
val_dataloader = dict(dataset=dict(pipeline=val_pipeline))
test_dataloader = val_dataloader
val_evaluator = dict(type='beit_mm.FeatureMetric')
test_evaluator = val_evaluator

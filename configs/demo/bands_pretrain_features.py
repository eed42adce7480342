"""bands_pretrain.py on features of its own moving average instead of visual tokens: all six bands, one stage.

Command: python tools/train.py configs/demo/bands_pretrain_features.py
Data:    as bands_dvae.py
Batch:   1 process x 32 images, lr 2e-3
Steps:   2,000, 40 times through 1,600 images
Expect:  not run here to its end
Teacher: of three of the bands as red, green and blue:
         --cfg-options model.target_generator.teacher=dinov2_vits14_pretrain
         model.target_generator.channels=[2,1,0] model.head.target_dims=384
Differs: from bands_pretrain.py in the targets, in the head and in having one view, which is not drawn
"""
_base_ = [
    '../_base_/models/demo_mim.py',
    '../_base_/datasets/demo_bands.py',
    '../_base_/schedules/demo_mim_7k.py',
]

model = dict(
    data_preprocessor=dict(mean=_base_.mean, std=_base_.std),
    backbone=dict(
        arch=dict(embed_dims=96, num_layers=4, num_heads=4), in_channels=6, img_size=48),
    head=dict(_delete_=True, type='beit_mm.FeatureRegressionHead', embed_dims=96, target_dims=96),
    target_generator=dict(_delete_=True, type='beit_mm.FeatureTargets', teacher='ema'))
custom_hooks = [*_base_.custom_hooks, dict(type='beit_mm.TeacherMomentumHook', momentum=0.996)]

train_pipeline = [
    dict(type='beit_mm.LoadBands', low=_base_.low, high=_base_.high),
    dict(type='beit_mm.TwoViewRandomResizedCrop', size=48, second_size=None, scale=(0.4, 1.0)),
    dict(type='beit_mm.BlockwiseMask', grid=(6, 6), num_masked=14, min_block=4),
    dict(type='beit_mm.PackViews'),
]
val_pipeline = [
    dict(type='beit_mm.LoadBands', low=_base_.low, high=_base_.high),
    dict(type='beit_mm.TwoViewCenterCrop', size=48, second_size=None),
    dict(type='beit_mm.BlockwiseMask', grid=(6, 6), num_masked=14, min_block=4),
    dict(type='beit_mm.PackViews'),
]
train_dataloader = dict(batch_size=32, dataset=dict(type='beit_mm.UnlabeledImages', pipeline=train_pipeline))
val_dataloader = dict(dataset=dict(type='beit_mm.UnlabeledImages', pipeline=val_pipeline))
test_dataloader = val_dataloader
val_evaluator = dict(type='beit_mm.FeatureMetric')
test_evaluator = val_evaluator

optim_wrapper = dict(optimizer=dict(betas=(0.9, 0.999)))
param_scheduler = [
    dict(type='LinearLR', start_factor=1e-9, by_epoch=False, begin=0, end=100),
    dict(type='CosineAnnealingLR', by_epoch=False, begin=100, end=2000, T_max=1900, eta_min_ratio=5e-3),
]
train_cfg = dict(max_iters=2000, val_interval=500)
auto_scale_lr = dict(base_batch_size=32)

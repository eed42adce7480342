"""A small BEiT pretrained on images with six bands: 48-pixel images in 8 x 8 patches.

After:   configs/demo/bands_dvae.py
Command: python tools/train.py configs/demo/bands_pretrain.py
Data:    as bands_dvae.py
Batch:   1 process x 32 images, lr 2e-3
Steps:   2,000, 40 times through 1,600 images
Expect:  the final classifier's accuracy in docs/records/2026-11-22-bands.md
Differs: from pretrain.py in reading six bands, without colour jitter; in size (4 blocks, width 96, 14 of 36 patches
         masked; tokens of 4 x 4 pixels), batch and length, and in its pictures, which show bands 4 to 6
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
    head=dict(embed_dims=96, vocab_size=512),
    target_generator=dict(
        vocab_size=512, num_levels=2, in_channels=6, checkpoint='work_dirs/bands_dvae/iter_2000.pth'))

train_pipeline = [
    dict(type='beit_mm.LoadBands', low=_base_.low, high=_base_.high),
    dict(type='beit_mm.TwoViewRandomResizedCrop', size=48, second_size=24, scale=(0.4, 1.0)),
    dict(type='beit_mm.BlockwiseMask', grid=(6, 6), num_masked=14, min_block=4),
    dict(type='beit_mm.PackViews'),
]
val_pipeline = [
    dict(type='beit_mm.LoadBands', low=_base_.low, high=_base_.high),
    dict(type='beit_mm.TwoViewCenterCrop', size=48, second_size=24),
    dict(type='beit_mm.BlockwiseMask', grid=(6, 6), num_masked=14, min_block=4),
    dict(type='beit_mm.PackViews'),
]
train_dataloader = dict(batch_size=32, dataset=dict(type='beit_mm.UnlabeledImages', pipeline=train_pipeline))
val_dataloader = dict(dataset=dict(type='beit_mm.UnlabeledImages', pipeline=val_pipeline))
test_dataloader = val_dataloader
val_evaluator = dict(type='beit_mm.MIMMetric')
test_evaluator = val_evaluator
# draws bands 4 to 6, not 1 to 3
custom_hooks = [*_base_.custom_hooks, dict(type='beit_mm.ReconstructionHook', channels=[3, 4, 5])]

optim_wrapper = dict(optimizer=dict(betas=(0.9, 0.999)))
param_scheduler = [
    dict(type='LinearLR', start_factor=1e-9, by_epoch=False, begin=0, end=100),
    dict(type='CosineAnnealingLR', by_epoch=False, begin=100, end=2000, T_max=1900, eta_min_ratio=5e-3),
]
train_cfg = dict(max_iters=2000, val_interval=500)
auto_scale_lr = dict(base_batch_size=32)

"""A small tokenizer of images with six bands: 512 visual tokens of 4 x 4 pixels, on images of half the backbone's size.

Command: python tools/demo/draw_bands.py
         python tools/train.py configs/demo/bands_dvae.py
Data:    data/bands/train and data/bands/val, .tif or .npy files to any depth. Other images: docs/data.md
Batch:   1 process x 16 images, lr 3e-3
Expect:  the final classifier's accuracy in docs/records/2026-11-22-bands.md
Differs: from dvae.py in reading six bands, in 512 tokens of 4 x 4 pixels, in 24-pixel images, rate, length and type,
         and in its pictures, which show bands 4 to 6
"""
_base_ = ['../_base_/datasets/demo_bands.py', '../_base_/default_runtime.py']

model = dict(
    type='beit_mm.DiscreteVAE',
    arch='conv',
    hidden=48,
    vocab_size=512,
    embed_dims=64,
    num_levels=2,
    bottleneck_blocks=2,
    in_channels=6,
    loss='mse',
    # The KL keeps the vocabulary in use.
    temperature=(1.0, 1 / 8),
    temperature_steps=2000,
    kl_weight=0.2,
    kl_steps=500,
    data_preprocessor=dict(type='beit_mm.TwoViewDataPreprocessor', mean=[0] * 6, std=[255] * 6))

train_pipeline = [
    dict(type='beit_mm.LoadBands', low=_base_.low, high=_base_.high),
    dict(type='beit_mm.TwoViewRandomResizedCrop', size=24, second_size=None, scale=(0.4, 1.0)),
    dict(type='beit_mm.PackViews'),
]
val_pipeline = [
    dict(type='beit_mm.LoadBands', low=_base_.low, high=_base_.high),
    dict(type='beit_mm.TwoViewCenterCrop', size=24, second_size=None),
    dict(type='beit_mm.PackViews'),
]
train_dataloader = dict(batch_size=16, dataset=dict(type='beit_mm.UnlabeledImages', pipeline=train_pipeline))
val_dataloader = dict(dataset=dict(type='beit_mm.UnlabeledImages', pipeline=val_pipeline))
test_dataloader = val_dataloader
val_evaluator = dict(type='beit_mm.TokenizerMetric')
test_evaluator = val_evaluator

optim_wrapper = dict(
    type='beit_mm.AutocastOptimWrapper',
    dtype='float32',
    optimizer=dict(type='AdamW', lr=3e-3, betas=(0.9, 0.99), weight_decay=1e-4, fused=True),
    clip_grad=dict(max_norm=1.0))
param_scheduler = [
    dict(type='LinearLR', start_factor=1e-9, by_epoch=False, begin=0, end=50),
    dict(type='CosineAnnealingLR', by_epoch=False, begin=50, end=2000, T_max=1950, eta_min_ratio=0.02),
]
train_cfg = dict(type='beit_mm.IterLoop', max_iters=2000, val_interval=1000)
val_cfg = dict()
test_cfg = dict()
auto_scale_lr = dict(base_batch_size=16)
default_hooks = dict(
    logger=dict(interval=50), checkpoint=dict(by_epoch=False, interval=100, max_keep_ckpts=2))
log_processor = dict(by_epoch=False)
# draws bands 4 to 6, not 1 to 3
custom_hooks = [*_base_.custom_hooks, dict(type='beit_mm.ReconstructionHook', channels=[3, 4, 5])]

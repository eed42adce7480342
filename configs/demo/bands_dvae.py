"""A small tokenizer of images with six bands: 512 visual tokens of 4 x 4 pixels, on images of half the backbone's size.

Command: python tools/demo/draw_bands.py
         python tools/train.py configs/demo/bands_dvae.py
Data:    data/bands/train and data/bands/val, .tif or .npy files to any depth. Other images: docs/data.md
Batch:   1 process x 16 images, lr 3e-3
Expect:  docs/data.md
Differs: from dvae.py in reading six bands, in half as large tokens and half as many, in 24-pixel images, rate, length
         and type, and in its pictures, which show bands 4 to 6
"""
_base_ = ['./dvae.py', '../_base_/datasets/demo_bands.py']
data_root = 'data/bands'

model = dict(
    vocab_size=512,
    num_levels=2,
    in_channels=6,
    temperature_steps=2000,
    kl_steps=500,
    data_preprocessor=dict(mean=[0] * 6, std=[255] * 6))

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
train_dataloader = dict(dataset=dict(data_root=data_root, pipeline=train_pipeline))
val_dataloader = dict(dataset=dict(data_root=data_root, pipeline=val_pipeline))
test_dataloader = val_dataloader
optim_wrapper = dict(dtype='float32', optimizer=dict(lr=3e-3))
param_scheduler = [
    dict(type='LinearLR', start_factor=1e-9, by_epoch=False, begin=0, end=50),
    dict(type='CosineAnnealingLR', by_epoch=False, begin=50, end=2000, T_max=1950, eta_min=6e-5),
]
train_cfg = dict(max_iters=2000)
custom_hooks = [
    *[hook for hook in _base_.custom_hooks if hook['type'] != 'beit_mm.ReconstructionHook'],  # draws bands 1 to 3
    dict(type='beit_mm.ReconstructionHook', channels=[3, 4, 5]),
]

"""The small BEiT on the images of Caltech-101, without their labels: 48-pixel images in 8 x 8 patches.

Command: python tools/train.py configs/demo/dvae.py --work-dir work_dirs/caltech101_dvae \
             --cfg-options data_root=data/caltech101
         python tools/train.py configs/demo/caltech101_pretrain.py
Data:    data/caltech101/{train,val}/<class>/*.jpg; class folders are not looked at
Batch:   1 process x 64 images, lr 2e-3
Steps:   8,000, 126 times through 4,084 images
Time:    an hour on one CPU core without bfloat16, and a third of another for the images
Expect:  mim_loss on held-out images 4.71 after 3,000 steps, 4.35 after 5,000, 4.21 after 8,000 (mim_acc 0.129), where
         token_entropy is 5.89 and position_entropy 5.49. What pretraining is worth: docs/few_labels.md
Differs: from pretrain.py in size (14 of 36 patches masked), batch and length
"""
_base_ = './pretrain.py'

data_root = 'data/caltech101'

model = dict(backbone=dict(img_size=48), target_generator=dict(checkpoint='work_dirs/caltech101_dvae/iter_2000.pth'))

train_pipeline = [
    dict(type='beit_mm.LoadImage', cache_bytes=2**30),
    dict(type='beit_mm.TwoViewRandomResizedCrop', size=48, second_size=24, scale=(0.4, 1.0)),
    dict(type='beit_mm.TwoViewColorJitter', brightness=0.4, contrast=0.4, saturation=0.4),
    dict(type='beit_mm.BlockwiseMask', grid=(6, 6), num_masked=14, min_block=4),
    dict(type='beit_mm.PackViews'),
]
val_pipeline = [
    dict(type='beit_mm.LoadImage'),
    dict(type='beit_mm.TwoViewCenterCrop', size=48, second_size=24),
    dict(type='beit_mm.BlockwiseMask', grid=(6, 6), num_masked=14, min_block=4),
    dict(type='beit_mm.PackViews'),
]
train_dataloader = dict(
    batch_size=64, dataset=dict(data_root=data_root, pipeline=train_pipeline))
val_dataloader = dict(dataset=dict(data_root=data_root, pipeline=val_pipeline))
test_dataloader = val_dataloader

param_scheduler = [
    dict(type='LinearLR', start_factor=1e-9, by_epoch=False, begin=0, end=300),
    dict(type='CosineAnnealingLR', by_epoch=False, begin=300, end=8000, T_max=7700, eta_min=1e-5),
]
train_cfg = dict(max_iters=8000, val_interval=1000)
auto_scale_lr = dict(base_batch_size=64)

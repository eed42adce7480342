"""Ablation "- visual tokens": regression of the pixels of masked patches.

Command: tools/dist_train.sh configs/ablation/pretrain_pixels_300e.py 16
Batch:   16 GPUs x 128 = 2048 images, lr 1.5e-3
Steps:   1281167 // 2048 = 625 an epoch, 187,500 in all
Time:    about two thirds of beit/pretrain_300e.py, there is no tokenizer
Result:  the paper, after fine-tuning: 81.04 top-1 on ImageNet-1K, 41.38 mIoU on ADE20K (SETR-PUP)
         (baseline beit/pretrain_300e.py: 82.86 and 44.65)
Shorter: --cfg-options train_cfg.max_epochs=100 param_scheduler.1.end=100 param_scheduler.1.T_max=90
Differs: the paper states neither the loss nor the normalisation of the pixels and released no code; this is the
         mean squared error on the normalised image
"""
_base_ = '../beit/pretrain_300e.py'

model = dict(
    head=dict(_delete_=True, type='beit_mm.PixelRegressionHead', embed_dims=768, patch_size=16),
    target_generator=None)

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

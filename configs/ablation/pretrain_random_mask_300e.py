"""Ablation "- blockwise masking": 75 patches drawn one by one.

Command: tools/dist_train.sh configs/ablation/pretrain_random_mask_300e.py 16
Batch:   16 GPUs x 128 = 2048 images, lr 1.5e-3
Steps:   1281167 // 2048 = 625 an epoch, 187,500 in all
Time:    as beit/pretrain_300e.py
Result:  the paper, after fine-tuning: 82.77 top-1 on ImageNet-1K, 42.93 mIoU on ADE20K (SETR-PUP)
         (baseline beit/pretrain_300e.py: 82.86 and 44.65)
Shorter: --cfg-options train_cfg.max_epochs=100 param_scheduler.1.end=100 param_scheduler.1.T_max=90
Differs: from the baseline in the mask alone; always exactly 75 patches
"""
_base_ = '../beit/pretrain_300e.py'

train_pipeline = [
    dict(type='beit_mm.LoadImage'),
    dict(type='beit_mm.TwoViewRandomResizedCrop', size=224, second_size=112),
    dict(type='beit_mm.TwoViewColorJitter', brightness=0.4, contrast=0.4, saturation=0.4),
    dict(type='beit_mm.RandomMask', grid=(14, 14), num_masked=75),
    dict(type='beit_mm.PackViews'),
]
val_pipeline = [
    dict(type='beit_mm.LoadImage'),
    dict(type='beit_mm.TwoViewCenterCrop', size=224, second_size=112),
    dict(type='beit_mm.RandomMask', grid=(14, 14), num_masked=75),
    dict(type='beit_mm.PackViews'),
]
train_dataloader = dict(dataset=dict(pipeline=train_pipeline))
val_dataloader = dict(dataset=dict(pipeline=val_pipeline))
test_dataloader = val_dataloader

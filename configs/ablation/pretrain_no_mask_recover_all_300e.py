"""Ablation "- masking + recover 100% of visual tokens": nothing is hidden.

Command: tools/dist_train.sh configs/ablation/pretrain_no_mask_recover_all_300e.py 16
Batch:   16 GPUs x 128 = 2048 images, lr 1.5e-3
Steps:   1281167 // 2048 = 625 an epoch, 187,500 in all
Time:    slightly more than beit/pretrain_300e.py: 196 instead of 75 predictions an image
Result:  the paper, after fine-tuning: 81.67 top-1 on ImageNet-1K, 36.73 mIoU on ADE20K (SETR-PUP)
         (baseline beit/pretrain_300e.py: 82.86 and 44.65)
Shorter: --cfg-options train_cfg.max_epochs=100 param_scheduler.1.end=100 param_scheduler.1.T_max=90
Differs: from the baseline in the mask: there is none, and the backbone has no mask token
"""
_base_ = '../beit/pretrain_300e.py'

model = dict(backbone=dict(masked_input=False), recover='all')

train_pipeline = [
    dict(type='beit_mm.LoadImage'),
    dict(type='beit_mm.TwoViewRandomResizedCrop', size=224, second_size=112),
    dict(type='beit_mm.TwoViewColorJitter', brightness=0.4, contrast=0.4, saturation=0.4),
    dict(type='beit_mm.PackViews'),
]
val_pipeline = [
    dict(type='beit_mm.LoadImage'),
    dict(type='beit_mm.TwoViewCenterCrop', size=224, second_size=112),
    dict(type='beit_mm.PackViews'),
]
train_dataloader = dict(dataset=dict(pipeline=train_pipeline))
val_dataloader = dict(dataset=dict(pipeline=val_pipeline))
test_dataloader = val_dataloader

"""Ablation "- visual tokens - blockwise masking": pixels of 75 patches drawn one by one.

Command: tools/dist_train.sh configs/ablation/pretrain_pixels_random_mask_300e.py 16
Batch:   16 GPUs x 128 = 2048 images, lr 1.5e-3
Steps:   300 epochs x 625 = 187,500, ImageNet-1K with 1,281,167 images; warm-up 6,250
Writes:  work_dirs/pretrain_pixels_random_mask_300e/epoch_300.pth
Model:   ViT-Base, absolute position embedding, 86,380,800 parameters; 224 x 224 pixels, 75 of 196 patches masked
Result:  80.50 ImageNet-1K top-1 at 224 pixels after fine-tuning (paper, ablation table)
         37.09 ADE20K mIoU with SETR-PUP after fine-tuning, single scale (paper, ablation table)

Time:    about two thirds of beit/pretrain_300e.py, there is no tokenizer
Shorter: --cfg-options train_cfg.max_epochs=100 param_scheduler.1.end=100
Differs: as pretrain_pixels_300e.py, with the mask of pretrain_random_mask_300e.py
"""
_base_ = [
    '../_base_/models/mim_base.py',
    '../_base_/datasets/mim_in1k.py',
    '../_base_/schedules/mim_adamw_bs2048_300e.py',
]

model = dict(
    head=dict(_delete_=True, type='beit_mm.PixelRegressionHead', embed_dims=768, patch_size=16),
    target_generator=None)

train_pipeline = [
    dict(type='beit_mm.LoadImage'),
    dict(type='beit_mm.TwoViewRandomResizedCrop', size=224, second_size=None),
    dict(type='beit_mm.TwoViewColorJitter', brightness=0.4, contrast=0.4, saturation=0.4),
    dict(type='beit_mm.RandomMask', grid=(14, 14), num_masked=75),
    dict(type='beit_mm.PackViews'),
]
val_pipeline = [
    dict(type='beit_mm.LoadImage'),
    dict(type='beit_mm.TwoViewCenterCrop', size=224, second_size=None),
    dict(type='beit_mm.RandomMask', grid=(14, 14), num_masked=75),
    dict(type='beit_mm.PackViews'),
]
train_dataloader = dict(dataset=dict(pipeline=train_pipeline))
val_dataloader = dict(dataset=dict(pipeline=val_pipeline))
test_dataloader = val_dataloader

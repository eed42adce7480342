"""Ablation "+ recover 100% of visual tokens": the loss counts every patch, masked or not.

Command: tools/dist_train.sh configs/ablation/pretrain_recover_all_300e.py 16
Batch:   16 GPUs x 128 = 2048 images, lr 1.5e-3
Steps:   300 epochs x 625 = 187,500, ImageNet-1K with 1,281,167 images; warm-up 6,250
Writes:  work_dirs/pretrain_recover_all_300e/epoch_300.pth
Model:   ViT-Base, absolute position embedding, 92,089,856 parameters; 224 x 224 pixels, 75 of 196 patches masked
Result:  82.59 ImageNet-1K top-1 at 224 pixels after fine-tuning (paper, ablation table)
         40.93 ADE20K mIoU with SETR-PUP after fine-tuning, single scale (paper, ablation table)

Time:    slightly more than beit/pretrain_300e.py: 196 instead of 75 predictions an image
Shorter: --cfg-options train_cfg.max_epochs=100 param_scheduler.1.end=100
Differs: from the baseline in the patches that count; mim_acc then includes the visible ones
"""
_base_ = [
    '../_base_/models/mim_base.py',
    '../_base_/datasets/mim_in1k.py',
    '../_base_/schedules/mim_adamw_bs2048_300e.py',
]

model = dict(recover='all')

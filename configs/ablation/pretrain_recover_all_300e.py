"""Ablation "+ recover 100% of visual tokens": the loss counts every patch, masked or not.

Command: tools/dist_train.sh configs/ablation/pretrain_recover_all_300e.py 16
Batch:   16 GPUs x 128 = 2048 images, lr 1.5e-3
Steps:   1281167 // 2048 = 625 an epoch, 187,500 in all
Time:    slightly more than beit/pretrain_300e.py: 196 instead of 75 predictions an image
Result:  the paper, after fine-tuning: 82.59 top-1 on ImageNet-1K, 40.93 mIoU on ADE20K (SETR-PUP)
         (baseline beit/pretrain_300e.py: 82.86 and 44.65)
Shorter: --cfg-options train_cfg.max_epochs=100 param_scheduler.1.end=100 param_scheduler.1.T_max=90
Differs: from the baseline in the patches that count; mim_acc then includes the visible ones
"""
_base_ = '../beit/pretrain_300e.py'

model = dict(recover='all')

"""Ablation "+ recover 100 % of visual tokens" with SETR-PUP on ADE20K at 512 pixels.

Command: tools/dist_train.sh configs/ablation/pretrain_recover_all_300e.py 16
         tools/dist_train.sh configs/ablation/setr_pup_recover_all_512_ade20k_160k.py 8
Batch:   8 GPUs x 2 = 16 images, lr 1e-3
Steps:   160,000, 126.7 times through the 20,210 images
Time:    as beit/setr_pup_512_ade20k_160k.py
Result:  the paper: 40.93 mIoU at a single scale
         (baseline setr_pup_baseline_512_ade20k_160k.py: 44.65)
Shorter: --cfg-options train_cfg.max_iters=80000 param_scheduler.1.end=80001
Differs: from beit/setr_pup_512_ade20k_160k.py in the weights it starts from
"""
_base_ = '../beit/setr_pup_512_ade20k_160k.py'

model = dict(backbone=dict(init_cfg=dict(checkpoint='work_dirs/pretrain_recover_all_300e/epoch_300.pth')))

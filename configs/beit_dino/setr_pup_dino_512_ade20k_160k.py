"""DINO with SETR-PUP on ADE20K at 512 pixels.

Command: tools/dist_train.sh configs/beit_dino/pretrain_dino_400e.py 16
         tools/dist_train.sh configs/beit_dino/setr_pup_dino_512_ade20k_160k.py 8
Batch:   8 GPUs x 2 = 16 images, lr 1e-3
Steps:   160,000, 126.7 times through ADE20K with 20,210 images; warm-up 1,500
Writes:  work_dirs/setr_pup_dino_512_ade20k_160k/iter_160000.pth
Model:   ViT-Base, absolute position embedding, 97,245,166 parameters; 512 x 512 pixels
Test:    tools/dist_test.sh configs/beit_dino/setr_pup_dino_512_ade20k_160k.py CHECKPOINT 8 [--tta]
Result:  44.08 ADE20K mIoU, single scale (paper, table of BEiT and DINO together)
         44.1 ADE20K mIoU, single scale (paper, segmentation table)

Time:    as beit/setr_pup_512_ade20k_160k.py
Options: From the original's weights, as the paper's row: --cfg-options
             model.backbone.init_cfg.checkpoint=dino_vitbase16_pretrain.pth model.backbone.init_cfg.prefix=None
Shorter: --cfg-options train_cfg.max_iters=80000 param_scheduler.1.end=80001
Differs: from beit/setr_pup_512_ade20k_160k.py in the weights it starts from: the teacher's, as DINO itself evaluates
"""
_base_ = '../beit/setr_pup_512_ade20k_160k.py'

model = dict(
    backbone=dict(
        init_cfg=dict(checkpoint='work_dirs/pretrain_dino_400e/epoch_400.pth', prefix='teacher.backbone.')))

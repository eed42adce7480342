"""BEiT-Base with SETR-PUP on ADE20K at 512 pixels after ImageNet-1K: the paper's intermediate fine-tuning.

Command: tools/dist_train.sh configs/beit/pretrain_800e.py 16
         tools/dist_train.sh configs/beit/finetune_in1k_100e.py 8
         tools/dist_train.sh configs/beit/setr_pup_512_ade20k_160k_after_in1k.py 8
Batch:   8 GPUs x 2 = 16 images, lr 1e-3
Steps:   160,000, 126.7 times through ADE20K with 20,210 images; warm-up 1,500
Writes:  work_dirs/setr_pup_512_ade20k_160k_after_in1k/iter_160000.pth
Model:   ViT-Base, absolute position embedding, 97,245,166 parameters; 512 x 512 pixels
Test:    tools/dist_test.sh configs/beit/setr_pup_512_ade20k_160k_after_in1k.py CHECKPOINT 8 [--tta]
Result:  47.7 ADE20K mIoU, single scale (paper, segmentation table)

Time:    as setr_pup_512_ade20k_160k.py
Shorter: --cfg-options train_cfg.max_iters=80000 param_scheduler.1.end=80001
Differs: from setr_pup_512_ade20k_160k.py in the weights it starts from. The paper gives no settings of its own for this
         row.
"""
_base_ = './setr_pup_512_ade20k_160k.py'

model = dict(
    backbone=dict(
        init_cfg=dict(type='Pretrained', checkpoint='work_dirs/finetune_in1k_100e/epoch_100.pth')))

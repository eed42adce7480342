"""DINO ViT-Base with SETR-PUP on ADE20K at 512 pixels: the row "DINO" of the segmentation table.

Command: tools/dist_train.sh configs/beit/setr_pup_512_ade20k_160k_released_dino.py 8
Batch:   8 GPUs x 2 = 16 images, lr 1e-3
Steps:   160,000, 126.7 times through ADE20K with 20,210 images; warm-up 1,500
Writes:  work_dirs/setr_pup_512_ade20k_160k_released_dino/iter_160000.pth
Model:   ViT-Base, absolute position embedding, 97,245,166 parameters; 512 x 512 pixels
Test:    tools/dist_test.sh configs/beit/setr_pup_512_ade20k_160k_released_dino.py CHECKPOINT 8 [--tta]
Result:  44.1 ADE20K mIoU, single scale (paper, segmentation table)
         44.08 ADE20K mIoU, single scale (paper, table of multi-task pretraining with DINO)

Time:    as setr_pup_512_ade20k_160k.py
Shorter: --cfg-options train_cfg.max_iters=80000 param_scheduler.1.end=80001
Differs: from setr_pup_512_ade20k_160k.py in the weights it starts from: DINO's own of ViT-B/16, 400 epochs on
         ImageNet-1K, the paper's comparison. They are fetched at the start; their key biases, which the softmax takes
         away again, are dropped.
"""
_base_ = './setr_pup_512_ade20k_160k.py'

model = dict(
    backbone=dict(
        init_cfg=dict(
            checkpoint='https://dl.fbaipublicfiles.com/dino/dino_vitbase16_pretrain/dino_vitbase16_pretrain.pth')))

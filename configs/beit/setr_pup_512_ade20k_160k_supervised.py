"""A supervised ViT-Base with SETR-PUP on ADE20K at 512 pixels: the row "supervised" of the segmentation table.

Command: tools/dist_train.sh configs/beit/setr_pup_512_ade20k_160k_supervised.py 8
Batch:   8 GPUs x 2 = 16 images, lr 1e-3
Steps:   160,000, 126.7 times through ADE20K with 20,210 images; warm-up 1,500
Writes:  work_dirs/setr_pup_512_ade20k_160k_supervised/iter_160000.pth
Model:   ViT-Base, absolute position embedding, 97,245,166 parameters; 512 x 512 pixels
Test:    tools/dist_test.sh configs/beit/setr_pup_512_ade20k_160k_supervised.py CHECKPOINT 8 [--tta]
Result:  45.3 ADE20K mIoU, single scale (paper, segmentation table)

Time:    as setr_pup_512_ade20k_160k.py
Shorter: --cfg-options train_cfg.max_iters=80000 param_scheduler.1.end=80001
Differs: from setr_pup_512_ade20k_160k.py in the weights it starts from. The paper says "supervised pre-training on
         ImageNet" and not whose weights it took; these are DeiT-B's, trained with ImageNet-1K's labels for 300 epochs
         without distillation, the DeiT-B of its classification table. They are fetched at the start; their key biases,
         which the softmax takes away again, are dropped.
"""
_base_ = './setr_pup_512_ade20k_160k.py'

model = dict(
    backbone=dict(
        init_cfg=dict(
            checkpoint='https://dl.fbaipublicfiles.com/deit/deit_base_patch16_224-b5f2ef4d.pth')))

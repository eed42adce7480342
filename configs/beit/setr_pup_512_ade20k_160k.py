"""BEiT-Base with SETR-PUP on ADE20K at 512 pixels: the paper's segmentation table.

Command: tools/dist_train.sh configs/beit/pretrain_800e.py 16
         tools/dist_train.sh configs/beit/setr_pup_512_ade20k_160k.py 8
         The last alone, from the released weights: --cfg-options
         model.backbone.init_cfg.checkpoint=beit_base_patch16_224_pt1k_800ep.pth
Batch:   8 GPUs x 2 = 16 images, lr 1e-3
Steps:   160,000, 126.7 times through ADE20K with 20,210 images; warm-up 1,500
Writes:  work_dirs/setr_pup_512_ade20k_160k/iter_160000.pth
Model:   ViT-Base, absolute position embedding, 97,245,166 parameters; 512 x 512 pixels
Test:    tools/dist_test.sh configs/beit/setr_pup_512_ade20k_160k.py CHECKPOINT 8 [--tta]
Result:  45.6 ADE20K mIoU, single scale (paper, segmentation table)
         45.58 ADE20K mIoU, single scale (paper, ablation table)

Time:    about a sixtieth of pretrain_800e.py (973 GFLOP an image without the auxiliary heads)
Shorter: --cfg-options train_cfg.max_iters=80000 param_scheduler.1.end=80001
Differs: neither the paper nor its authors published this head's code. Heads, the blocks they read and windows are those
         of SETR's own code, with its four auxiliary heads (setr_pup_three_aux_512_ade20k_160k.py has mmseg's three),
         but mmseg's implementation: no bias before a batch norm, and logits after the last upsampling instead of
         before. Optimizer and schedule are the paper's; the warm-up starts at a millionth of the rate, as in the
         released UperNet code. bfloat16, in tests too (--cfg-options model.test_cfg.precision=float32); the paper does
         not say.
"""
_base_ = [
    '../_base_/models/setr_pup_base.py',
    '../_base_/datasets/ade20k_512.py',
    '../_base_/schedules/segment_adamw_bs16_160k.py',
]

model = dict(
    backbone=dict(init_cfg=dict(type='Pretrained', checkpoint='work_dirs/pretrain_800e/epoch_800.pth')))

"""BEiT-Base with SETR-PUP on ADE20K at 512 pixels: the paper's segmentation table.

Result:  45.6 ADE20K mIoU, single scale (paper, segmentation table)
         45.58 ADE20K mIoU, single scale (paper, ablation table)
         45.3 ADE20K mIoU, single scale, from deit_base_patch16_224-b5f2ef4d.pth (paper, segmentation table)
         44.1 ADE20K mIoU, single scale, from dino_vitbase16_pretrain.pth (paper, segmentation table)
Model:   ViT-Base, absolute position embedding, 97,245,166 parameters; 512 x 512 pixels
Command: tools/dist_train.sh configs/beit/pretrain_800e.py 16
         tools/dist_train.sh configs/beit/setr_pup_512_ade20k_160k.py 8
         The last from other weights:
           --cfg-options model.backbone.init_cfg.checkpoint=beit_base_patch16_224_pt1k_800ep
           --cfg-options model.backbone.init_cfg.checkpoint=https://dl.fbaipublicfiles.com/deit/deit_base_patch16_224-b5f2ef4d.pth
           --cfg-options model.backbone.init_cfg.checkpoint=https://dl.fbaipublicfiles.com/dino/dino_vitbase16_pretrain/dino_vitbase16_pretrain.pth
Test:    tools/dist_test.sh configs/beit/setr_pup_512_ade20k_160k.py \
           work_dirs/setr_pup_512_ade20k_160k/iter_160000.pth 8 [--tta]
Batch:   8 GPUs x 2 = 16 images, lr 1e-3
Steps:   160,000 updates, 1,500 of them warm-up
Data:    ADE20K, 20,210 images, 126.7 times
Cost:    1,031 GFLOP an image forward and backward; 5.9 GPU hours of an A100 at 40 %

Differs: neither the paper nor its authors published the code of this head. The heads, the blocks that they read and the
         windows are those of SETR's own code, with its four auxiliary heads (setr_pup_three_aux_512_ade20k_160k.py has
         mmseg's three). The implementation is mmseg's: no bias before a batch norm, and logits after the last
         upsampling instead of before. Optimizer and schedule are the paper's; the warm-up starts at a millionth of the
         rate, as in the released UperNet code. The precision is bfloat16, in tests too (--cfg-options
         model.test_cfg.precision=float32); the paper does not state it. Nor does it say which supervised weights it
         used; here they are the DeiT-B of its classification table. The key biases of DeiT and DINO are dropped,
         because the softmax cancels them.
"""
_base_ = [
    '../_base_/models/setr_pup_base.py',
    '../_base_/datasets/ade20k_512.py',
    '../_base_/schedules/segment_adamw_bs16_160k.py',
]

model = dict(
    backbone=dict(init_cfg=dict(type='Pretrained', checkpoint='work_dirs/pretrain_800e/epoch_800.pth')))

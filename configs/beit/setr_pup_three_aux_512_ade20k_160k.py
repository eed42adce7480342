"""BEiT-Base with SETR-PUP on ADE20K, with the auxiliary heads of mmseg's SETR configs: three of two convolutions each.

Result:  none published
Model:   ViT-Base, absolute position embedding, 97,206,104 parameters; 512 x 512 pixels
Command: tools/dist_train.sh configs/beit/pretrain_800e.py 16
         tools/dist_train.sh configs/beit/setr_pup_three_aux_512_ade20k_160k.py 8
         The last from the released weights:
           --cfg-options model.backbone.init_cfg.checkpoint=beit_base_patch16_224_pt1k_800ep
Test:    tools/dist_test.sh configs/beit/setr_pup_three_aux_512_ade20k_160k.py \
           work_dirs/setr_pup_three_aux_512_ade20k_160k/iter_160000.pth 8 [--tta]
Batch:   8 GPUs x 2 = 16 images, lr 1e-3
Steps:   160,000 updates, 1,500 of them warm-up
Data:    ADE20K, 20,210 images, 126.7 times
Cost:    1,360 GFLOP an image forward and backward; 7.8 GPU hours of an A100 at 40 %

Differs: from setr_pup_512_ade20k_160k.py, which has the four auxiliary heads of SETR's own code, in the auxiliary
         heads: they read blocks 5, 8 and 10, not the last one, and their logits have the size of the image.
"""
_base_ = [
    '../_base_/models/setr_pup_base.py',
    '../_base_/datasets/ade20k_512.py',
    '../_base_/schedules/segment_adamw_bs16_160k.py',
]

model = dict(
    backbone=dict(init_cfg=dict(type='Pretrained', checkpoint='work_dirs/pretrain_800e/epoch_800.pth')),
    auxiliary_head=[
        dict(head, num_convs=2) for head in _base_.model.auxiliary_head if head['in_index'] < 3])  # noqa: F821

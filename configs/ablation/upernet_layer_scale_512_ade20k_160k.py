"""Architecture variant "ViT + LayerScale" with UperNet on ADE20K at 512 pixels.

Result:  45.43 ADE20K mIoU, single scale (paper, table of architecture variants)
Model:   ViT-Base, absolute position embedding, LayerScale, 163,296,044 parameters; 512 x 512 pixels
Command: tools/dist_train.sh configs/ablation/pretrain_layer_scale_300e.py 16
         tools/dist_train.sh configs/ablation/upernet_layer_scale_512_ade20k_160k.py 8
Test:    tools/dist_test.sh configs/ablation/upernet_layer_scale_512_ade20k_160k.py \
           work_dirs/upernet_layer_scale_512_ade20k_160k/iter_160000.pth 8 [--tta]
Batch:   8 GPUs x 2 = 16 images, lr 7e-4
Steps:   160,000 updates, 1,500 of them warm-up
Data:    ADE20K, 20,210 images, 126.7 times
Cost:    3,641 GFLOP an image forward and backward; 21 GPU hours of an A100 at 40 %

Differs: from beit/upernet_512_ade20k_160k.py in LayerScale and the weights it starts from
"""
_base_ = [
    '../_base_/models/upernet_base.py',
    '../_base_/datasets/ade20k_512.py',
    '../_base_/schedules/segment_adamw_bs16_160k.py',
]

model = dict(
    backbone=dict(
        layer_scale_init=0.1,
        init_cfg=dict(type='Pretrained', checkpoint='work_dirs/pretrain_layer_scale_300e/epoch_300.pth')))
optim_wrapper = dict(optimizer=dict(lr=7e-4))

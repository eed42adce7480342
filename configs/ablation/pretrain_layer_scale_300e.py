"""Architecture variant "ViT + LayerScale".

Result:  83.00 ImageNet-1K top-1 at 224 pixels, by finetune_layer_scale_in1k_100e.py (paper, table of architecture
           variants)
         45.43 ADE20K mIoU, single scale, by upernet_layer_scale_512_ade20k_160k.py (paper, table of architecture
           variants)
Model:   ViT-Base, absolute position embedding, LayerScale, 92,108,288 parameters; 224 x 224 pixels, 75 of 196 patches
           masked
Command: tools/dist_train.sh configs/ablation/pretrain_layer_scale_300e.py 16
Test:    tools/dist_test.sh configs/ablation/pretrain_layer_scale_300e.py \
           work_dirs/pretrain_layer_scale_300e/epoch_300.pth 16
Batch:   16 GPUs x 128 = 2048 images, lr 1.5e-3
Steps:   300 epochs x 625 = 187,500 updates, 6,250 of them warm-up
Data:    ImageNet-1K, 1,281,167 images
Cost:    152 GFLOP an image forward and backward; 130 GPU hours of an A100 at 40 %

Differs: from the baseline in LayerScale, started at 0.1 as in the released code (the paper does not say)
"""
_base_ = [
    '../_base_/models/mim_base.py',
    '../_base_/datasets/mim_in1k.py',
    '../_base_/schedules/mim_adamw_bs2048_300e.py',
]

model = dict(backbone=dict(layer_scale_init=0.1))

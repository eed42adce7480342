"""BEiT-Large, 800 epochs on ImageNet-1K: the large rows of the paper's classification table.

Result:  85.2 ImageNet-1K top-1 at 224 pixels, by finetune_large_in1k_50e.py (paper, classification table)
         73.5 ImageNet-1K top-1 of a linear probe of layer 14, by linear_probe_large_in1k_50e.py (paper, linear probe
           table)
Model:   ViT-Large, absolute position embedding, 311,674,880 parameters; 224 x 224 pixels, 75 of 196 patches masked
Command: tools/dist_train.sh configs/beit/pretrain_large_800e.py 16
Test:    tools/dist_test.sh configs/beit/pretrain_large_800e.py work_dirs/pretrain_large_800e/epoch_800.pth 16
Batch:   16 GPUs x 128 = 2048 images, lr 1.5e-3
Steps:   800 epochs x 625 = 500,000 updates, 6,250 of them warm-up
Data:    ImageNet-1K, 1,281,167 images
Cost:    413 GFLOP an image forward and backward; 942 GPU hours of an A100 at 40 %

Differs: from pretrain_800e.py in the model and in the gradient clip, 1.0 instead of 3.0 (paper, table of pretraining
         hyperparameters). No large checkpoint of this recipe was released.
"""
_base_ = [
    '../_base_/models/mim_base.py',
    '../_base_/datasets/mim_in1k.py',
    '../_base_/schedules/mim_adamw_bs2048_300e.py',
]

model = dict(backbone=dict(arch='large'), head=dict(embed_dims=1024))
optim_wrapper = dict(clip_grad=dict(max_norm=1.0))
train_cfg = dict(max_epochs=800)
param_scheduler = [
    dict(type='LinearLR', start_factor=1e-9, begin=0, end=10, convert_to_iter_based=True),
    dict(type='CosineAnnealingLR', eta_min_ratio=1e-5 / 1.5e-3, begin=10, end=800, convert_to_iter_based=True),
]

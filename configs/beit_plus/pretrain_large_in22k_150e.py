"""BEiT+ Large, 150 epochs on ImageNet-22K: the released checkpoint `beit_large_patch16_224_pt22k`.

Result:  86.0 ImageNet-1K top-1 at 224 pixels, by finetune_large_in1k_50e.py (microsoft/unilm README)
Model:   ViT-Large, shared relative position bias, LayerScale, 311,534,016 parameters; 224 x 224 pixels, 75 of 196
           patches masked
Command: tools/dist_train.sh configs/beit_plus/pretrain_large_in22k_150e.py 16
Test:    tools/dist_test.sh configs/beit_plus/pretrain_large_in22k_150e.py \
           work_dirs/beit_plus_pretrain_large_in22k_150e/epoch_150.pth 16
Batch:   16 GPUs x 128 = 2048 images, lr 1.5e-3
Steps:   150 epochs x 6,932 = 1,039,800 updates, 10,000 of them warm-up
Data:    ImageNet-22K, 14,197,122 images
Cost:    413 GFLOP an image forward and backward; 1,958 GPU hours of an A100 at 40 %

Differs: from pretrain_in22k_150e.py in the model, in LayerScale from 1e-5, and in the gradient clip of 1.0, which the
         paper gives for large models
"""
_base_ = [
    '../_base_/models/mim_base.py',
    '../_base_/datasets/mim_in1k.py',
    '../_base_/schedules/mim_adamw_bs2048_300e.py',
]

work_dir = 'work_dirs/beit_plus_pretrain_large_in22k_150e'
model = dict(
    data_preprocessor=dict(mean=[127.5, 127.5, 127.5], std=[127.5, 127.5, 127.5]),
    backbone=dict(
        arch='large', abs_pos_embed=False, rel_pos_bias='shared', layer_scale_init=1e-5),
    head=dict(embed_dims=1024))
train_dataloader = dict(dataset=dict(data_root='data/imagenet22k/train'))

optim_wrapper = dict(clip_grad=dict(max_norm=1.0))
train_cfg = dict(max_epochs=150, val_interval=5)
param_scheduler = [  # in steps: from 0 to the peak at step 9,999, down to the end of the run
    dict(type='LinearLR', start_factor=1e-9, by_epoch=False, begin=0, end=10000),
    dict(type='CosineAnnealingLR', eta_min_ratio=1e-5 / 1.5e-3, by_epoch=False, begin=10000, end=1039800),
]

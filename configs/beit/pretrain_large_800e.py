"""BEiT-Large, 800 epochs on ImageNet-1K: the large rows of the paper's classification table.

Command: tools/dist_train.sh configs/beit/pretrain_large_800e.py 16
Batch:   16 GPUs x 128 = 2048 images, lr 1.5e-3
Steps:   800 epochs x 625 = 500,000, ImageNet-1K with 1,281,167 images; warm-up 6,250
Writes:  work_dirs/pretrain_large_800e/epoch_800.pth
Model:   ViT-Large, absolute position embedding, 311,674,880 parameters; 224 x 224 pixels, 75 of 196 patches masked
Result:  85.2 ImageNet-1K top-1 at 224 pixels after fine-tuning (paper, classification table)
         86.3 ImageNet-1K top-1 after fine-tuning at 224 and then 384 pixels (paper, classification table)
         73.5 ImageNet-1K top-1 of a linear probe of layer 14 (paper, linear probe table)

Time:    about 2.7 times pretrain_800e.py (425 against 160 GFLOP an image)
Shorter: --cfg-options train_cfg.max_epochs=300 param_scheduler.1.end=300
Differs: from pretrain_800e.py in the model and in the gradient clip, 1.0 instead of 3.0 (paper, table of pretraining
         hyperparameters). Color jitter after the crop and bfloat16, as there. No large checkpoint of this recipe was
         released.
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
    dict(type='CosineAnnealingLR', eta_min=1e-5, begin=10, end=800, convert_to_iter_based=True),
]

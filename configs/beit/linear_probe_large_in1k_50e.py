"""Linear probe of BEiT-Large on ImageNet-1K: the 14th block's mean of patch tokens, 50 epochs.

Result:  73.5 ImageNet-1K top-1 of a linear probe of layer 14 (paper, linear probe table)
Model:   ViT-Large, absolute position embedding, frozen, 304,300,008 parameters, 1,025,000 of them trained; 224 x 224
           pixels
Command: tools/dist_train.sh configs/beit/pretrain_large_800e.py 16
         tools/dist_train.sh configs/beit/linear_probe_large_in1k_50e.py 8
Test:    tools/dist_test.sh configs/beit/linear_probe_large_in1k_50e.py \
           work_dirs/linear_probe_large_in1k_50e/epoch_50.pth 8
Batch:   8 GPUs x 128 = 1024 images, lr 4e-3
Steps:   50 epochs x 1,251 = 62,550 updates
Data:    ImageNet-1K, 1,281,167 images
Cost:    72 GFLOP an image forward and backward; 10 GPU hours of an A100 at 40 %

Differs: from linear_probe_in1k_50e.py in the model and the block
"""
_base_ = [
    '../_base_/models/linear_probe_base.py',
    '../_base_/datasets/finetune_in1k.py',
    '../_base_/schedules/linear_probe_adamw_bs1024_50e.py',
]

model = dict(
    backbone=dict(
        arch='large',
        init_cfg=dict(type='Pretrained', checkpoint='work_dirs/pretrain_large_800e/epoch_800.pth')),
    layers=13)  # from 0

train_pipeline = [
    dict(type='beit_mm.LoadImage'),
    dict(type='RandomResizedCrop', scale=224, backend='pillow', interpolation='bilinear'),
    dict(type='RandomFlip', prob=0.5, direction='horizontal'),
    dict(type='PackInputs', meta_keys=('img_path', 'unreadable')),
]
train_dataloader = dict(dataset=dict(pipeline=train_pipeline))
val_evaluator = dict(_delete_=True, type='beit_mm.LayerAccuracy')
test_evaluator = val_evaluator

"""BEiT-Large, fine-tuned at 224 pixels, fine-tuned further at 384: 10 epochs.

Result:  86.3 ImageNet-1K top-1 at 384 pixels (paper, classification table)
Model:   ViT-Large, absolute position embedding, 304,691,176 parameters; 384 x 384 pixels
Command: tools/dist_train.sh configs/beit/pretrain_large_800e.py 16
         tools/dist_train.sh configs/beit/finetune_large_in1k_50e.py 8
         tools/dist_train.sh configs/beit/finetune_large_384_in1k_10e.py 16
Test:    tools/dist_test.sh configs/beit/finetune_large_384_in1k_10e.py \
           work_dirs/finetune_large_384_in1k_10e/epoch_10.pth 16
Batch:   16 GPUs x 16, an update every 2 batches = 512 images, lr 5e-6
Steps:   10 epochs x 2,502 = 25,020 updates, 12,510 of them warm-up
Data:    ImageNet-1K, 1,281,167 images
Cost:    1,146 GFLOP an image forward and backward; 33 GPU hours of an A100 at 40 %

Differs: from finetune_384_in1k_10e.py, whose unverified settings hold here too, in the model, and in having no repeated
         augmentation, which the paper leaves out for large models
"""
_base_ = [
    '../_base_/models/finetune_base.py',
    '../_base_/datasets/finetune_in1k.py',
    '../_base_/schedules/finetune_adamw_bs1024_100e.py',
]

model = dict(backbone=dict(arch='large', img_size=384), head=dict(in_channels=1024))
load_from = 'work_dirs/finetune_large_in1k_50e/epoch_50.pth'

train_pipeline = [
    dict(type='beit_mm.LoadImage'),
    dict(type='beit_mm.RandomResizedCrop', size=384),
    dict(
        type='beit_mm.RandAugment', policies='timm_increasing', num_policies=2, total_level=10, magnitude_level=9,
        magnitude_std=0.5, hparams=dict(pad_val=[124, 116, 104], interpolation='bicubic')),
    dict(type='beit_mm.RandomErasing', prob=0.25),
    dict(type='PackInputs', meta_keys=('img_path', 'erase_box', 'unreadable')),
]
test_pipeline = [
    dict(type='beit_mm.LoadImage'),
    dict(type='ResizeEdge', scale=384, edge='short', backend='pillow', interpolation='bicubic'),
    dict(type='CenterCrop', crop_size=384),
    dict(type='PackInputs'),
]
train_dataloader = dict(batch_size=16, dataset=dict(pipeline=train_pipeline))
val_dataloader = dict(dataset=dict(pipeline=test_pipeline))
test_dataloader = val_dataloader

optim_wrapper = dict(
    accumulative_counts=2, paramwise_cfg=dict(layer_decay_rate=1.0), optimizer=dict(lr=5e-6, weight_decay=1e-8))
auto_scale_lr = dict(base_batch_size=512)
train_cfg = dict(max_epochs=10, val_interval=1)
param_scheduler = [dict(type='LinearLR', start_factor=0.2, begin=0, end=5, convert_to_iter_based=True)]

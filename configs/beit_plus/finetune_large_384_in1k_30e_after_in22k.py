"""BEiT+ Large fine-tuned on ImageNet-1K at 384 after ImageNet-22K: released `beit_large_patch16_384_pt22k_ft22kto1k`.

Result:  88.4 ImageNet-1K top-1 at 384 pixels (paper, comparison with supervised pretraining)
         88.408 ImageNet-1K top-1 at 384 pixels (microsoft/unilm beit get_started_for_image_classification.md)
         98.602 ImageNet-1K top-5 at 384 pixels (microsoft/unilm beit get_started_for_image_classification.md)
Model:   ViT-Large, relative position bias in every block, LayerScale, 304,998,888 parameters; 384 x 384 pixels
Command: tools/dist_train.sh configs/beit_plus/pretrain_large_in22k_150e.py 16
         tools/dist_train.sh configs/beit_plus/finetune_large_in22k_90e.py 16
         tools/dist_train.sh configs/beit_plus/finetune_large_384_in1k_30e_after_in22k.py 8
         The last from the released weights:
           --cfg-options model.backbone.init_cfg.checkpoint=beit_large_patch16_224_pt22k_ft22k
Test:    tools/dist_test.sh configs/beit_plus/finetune_large_384_in1k_30e_after_in22k.py \
           work_dirs/beit_plus_finetune_large_384_in1k_30e_after_in22k/epoch_30.pth 8
Batch:   8 GPUs x 32, an update every 2 batches = 512 images, lr 2e-5
Steps:   30 epochs x 2,502 = 75,060 updates, 12,510 of them warm-up
Data:    ImageNet-1K, 1,281,167 images
Cost:    1,146 GFLOP an image forward and backward; 98 GPU hours of an A100 at 40 %

Differs: from the released command in bfloat16 instead of float16. From finetune_large_in1k_30e_after_in22k.py only in
         the image size: the model of the intermediate fine-tuning at 224 is fine-tuned at 384 directly, with resized
         bias tables.
Options: Less memory: --cfg-options model.backbone.with_cp=True
"""
_base_ = [
    '../_base_/models/finetune_base.py',
    '../_base_/datasets/finetune_in1k.py',
    '../_base_/schedules/finetune_adamw_bs1024_100e.py',
]

work_dir = 'work_dirs/beit_plus_finetune_large_384_in1k_30e_after_in22k'
model = dict(
    data_preprocessor=dict(mean=[127.5, 127.5, 127.5], std=[127.5, 127.5, 127.5]),
    backbone=dict(
        arch='large',
        img_size=384,
        abs_pos_embed=False,
        rel_pos_bias='per_layer',
        layer_scale_init=1e-5,
        drop_path_rate=0.4,
        init_cfg=dict(type='Pretrained', checkpoint='work_dirs/beit_plus_finetune_large_in22k_90e/epoch_90.pth')),
    head=dict(in_channels=1024),
    train_cfg=None)  # no mixup, no cutmix

train_pipeline = [
    dict(type='beit_mm.LoadImage'),
    dict(type='beit_mm.RandomResizedCrop', size=384),
    dict(
        type='beit_mm.RandAugment', policies='timm_increasing', num_policies=2, total_level=10, magnitude_level=9,
        magnitude_std=0.5, hparams=dict(pad_val=[128, 128, 128], interpolation='bicubic')),  # its own mean
    dict(type='beit_mm.RandomErasing', prob=0.25),
    dict(type='PackInputs', meta_keys=('img_path', 'erase_box', 'unreadable')),
]
test_pipeline = [
    dict(type='beit_mm.LoadImage'),
    dict(type='ResizeEdge', scale=384, edge='short', backend='pillow', interpolation='bicubic'),
    dict(type='CenterCrop', crop_size=384),
    dict(type='PackInputs'),
]
train_dataloader = dict(batch_size=32, dataset=dict(pipeline=train_pipeline))
val_dataloader = dict(dataset=dict(pipeline=test_pipeline))
test_dataloader = val_dataloader

optim_wrapper = dict(
    accumulative_counts=2, paramwise_cfg=dict(layer_decay_rate=0.9), optimizer=dict(lr=2e-5, weight_decay=1e-8))
auto_scale_lr = dict(base_batch_size=512)
train_cfg = dict(max_epochs=30)
param_scheduler = [
    dict(type='LinearLR', start_factor=1e-9, begin=0, end=5, convert_to_iter_based=True),
    dict(type='CosineAnnealingLR', eta_min_ratio=0.05, begin=5, end=30, convert_to_iter_based=True),
]

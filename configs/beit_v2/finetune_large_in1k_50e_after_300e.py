"""BEiT v2 Large fine-tuned on ImageNet-1K after 300 epochs: `beitv2_large_patch16_224_pt1k_300e_ft1k`.

Result:  86.6 ImageNet-1K top-1 at 224 pixels (microsoft/unilm beit2 get_started_for_image_classification.md)
Model:   ViT-Large, relative position bias in every block, LayerScale, 304,430,568 parameters; 224 x 224 pixels
Command: tools/dist_train.sh configs/beit_v2/pretrain_large_300e.py 16
         tools/dist_train.sh configs/beit_v2/finetune_large_in1k_50e_after_300e.py 8
         The last from the released weights:
           --cfg-options model.backbone.init_cfg.checkpoint=beitv2_large_patch16_224_pt1k_300e
Test:    tools/dist_test.sh configs/beit_v2/finetune_large_in1k_50e_after_300e.py \
           work_dirs/beit_v2_finetune_large_in1k_50e_after_300e/epoch_50.pth 8
Batch:   8 GPUs x 64, an update every 2 batches = 1024 images, lr 5e-4
Steps:   50 epochs x 1,251 = 62,550 updates, 6,255 of them warm-up
Data:    ImageNet-1K, 1,281,167 images
Cost:    369 GFLOP an image forward and backward; 53 GPU hours of an A100 at 40 %

Differs: from finetune_large_in1k_50e.py in the rate, as in the released command
"""
_base_ = [
    '../_base_/models/finetune_base.py',
    '../_base_/datasets/finetune_in1k.py',
    '../_base_/schedules/finetune_adamw_bs1024_100e.py',
]

work_dir = 'work_dirs/beit_v2_finetune_large_in1k_50e_after_300e'
model = dict(
    backbone=dict(
        arch='large',
        abs_pos_embed=False,
        rel_pos_bias='per_layer',
        layer_scale_init=1e-5,
        drop_path_rate=0.2,
        init_cfg=dict(type='Pretrained', checkpoint='work_dirs/beit_v2_pretrain_large_300e/epoch_300.pth')),
    head=dict(in_channels=1024))
train_dataloader = dict(batch_size=64)

optim_wrapper = dict(accumulative_counts=2, paramwise_cfg=dict(layer_decay_rate=0.8), optimizer=dict(lr=5e-4))
train_cfg = dict(max_epochs=50)
param_scheduler = [
    dict(type='LinearLR', start_factor=1e-9, begin=0, end=5, convert_to_iter_based=True),
    dict(type='CosineAnnealingLR', eta_min_ratio=2e-3, begin=5, end=50, convert_to_iter_based=True),
]

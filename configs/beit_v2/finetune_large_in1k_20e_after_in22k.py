"""BEiT v2 Large fine-tuned on ImageNet-1K after ImageNet-22K: `beitv2_large_patch16_224_pt1k_ft21kto1k`.

Result:  88.4 ImageNet-1K top-1 at 224 pixels (microsoft/unilm beit2 README)
         98.6 ImageNet-1K top-5 at 224 pixels (microsoft/unilm beit2 README)
         88.370 ImageNet-1K top-1 at 224 pixels (microsoft/unilm beit2 get_started_for_image_classification.md)
         98.578 ImageNet-1K top-5 at 224 pixels (microsoft/unilm beit2 get_started_for_image_classification.md)
Model:   ViT-Large, relative position bias in every block, LayerScale, 304,430,568 parameters; 224 x 224 pixels
Command: tools/dist_train.sh configs/beit_v2/pretrain_large_1600e.py 16
         tools/dist_train.sh configs/beit_v2/finetune_large_in22k_90e.py 32
         tools/dist_train.sh configs/beit_v2/finetune_large_in1k_20e_after_in22k.py 8
         The last from the released weights:
           --cfg-options model.backbone.init_cfg.checkpoint=beitv2_large_patch16_224_pt1k_ft21k
Test:    tools/dist_test.sh configs/beit_v2/finetune_large_in1k_20e_after_in22k.py \
           work_dirs/beit_v2_finetune_large_in1k_20e_after_in22k/epoch_20.pth 8
Batch:   8 GPUs x 64, an update every 2 batches = 1024 images, lr 7e-5
Steps:   20 epochs x 1,251 = 25,020 updates, 6,255 of them warm-up
Data:    ImageNet-1K, 1,281,167 images
Cost:    369 GFLOP an image forward and backward; 21 GPU hours of an A100 at 40 %

Differs: from finetune_in1k_30e_after_in22k.py in the model, rate, layer decay, stochastic depth and length, as in the
         released command
"""
_base_ = [
    '../_base_/models/finetune_base.py',
    '../_base_/datasets/finetune_in1k.py',
    '../_base_/schedules/finetune_adamw_bs1024_100e.py',
]

work_dir = 'work_dirs/beit_v2_finetune_large_in1k_20e_after_in22k'
model = dict(
    backbone=dict(
        arch='large',
        abs_pos_embed=False,
        rel_pos_bias='per_layer',
        layer_scale_init=1e-5,
        drop_path_rate=0.25,
        init_cfg=dict(type='Pretrained', checkpoint='work_dirs/beit_v2_finetune_large_in22k_90e/epoch_90.pth')),
    head=dict(in_channels=1024),
    train_cfg=None)  # no mixup, no cutmix
train_dataloader = dict(batch_size=64)

optim_wrapper = dict(accumulative_counts=2, paramwise_cfg=dict(layer_decay_rate=0.8), optimizer=dict(lr=7e-5))
train_cfg = dict(max_epochs=20)
param_scheduler = [
    dict(type='LinearLR', start_factor=1e-9, begin=0, end=5, convert_to_iter_based=True),
    dict(type='CosineAnnealingLR', eta_min_ratio=1e-6 / 7e-5, begin=5, end=20, convert_to_iter_based=True),
]

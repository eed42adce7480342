"""BEiT v2 Base fine-tuned on ImageNet-1K after ImageNet-22K: released `beitv2_base_patch16_224_pt1k_ft21kto1k`.

Result:  86.5 ImageNet-1K top-1 at 224 pixels (microsoft/unilm beit2 README)
         98.0 ImageNet-1K top-5 at 224 pixels (microsoft/unilm beit2 README)
         86.458 ImageNet-1K top-1 at 224 pixels (microsoft/unilm beit2 get_started_for_image_classification.md)
         97.978 ImageNet-1K top-5 at 224 pixels (microsoft/unilm beit2 get_started_for_image_classification.md)
         86.47 ImageNet-1K top-1 at 224 pixels (mmpretrain metafile, of the converted weights)
         97.99 ImageNet-1K top-5 at 224 pixels (mmpretrain metafile, of the converted weights)
Model:   ViT-Base, relative position bias in every block, LayerScale, 86,530,984 parameters; 224 x 224 pixels
Command: tools/dist_train.sh configs/beit_v2/pretrain_1600e.py 16
         tools/dist_train.sh configs/beit_v2/finetune_in22k_90e.py 32
         tools/dist_train.sh configs/beit_v2/finetune_in1k_30e_after_in22k.py 8
         The last from the released weights:
           --cfg-options model.backbone.init_cfg.checkpoint=beitv2_base_patch16_224_pt1k_ft21k
Test:    tools/dist_test.sh configs/beit_v2/finetune_in1k_30e_after_in22k.py \
           work_dirs/beit_v2_finetune_in1k_30e_after_in22k/epoch_30.pth 8
Batch:   8 GPUs x 128 = 1024 images, lr 5e-5
Steps:   30 epochs x 1,251 = 37,530 updates, 25,020 of them warm-up
Data:    ImageNet-1K, 1,281,167 images
Cost:    105 GFLOP an image forward and backward; 9.0 GPU hours of an A100 at 40 %

Differs: from the released command in bfloat16 instead of float16. The norm after the mean is loaded with the weights;
         the head for 21841 classes is not.
"""
_base_ = [
    '../_base_/models/finetune_base.py',
    '../_base_/datasets/finetune_in1k.py',
    '../_base_/schedules/finetune_adamw_bs1024_100e.py',
]

work_dir = 'work_dirs/beit_v2_finetune_in1k_30e_after_in22k'
model = dict(
    backbone=dict(
        abs_pos_embed=False,
        rel_pos_bias='per_layer',
        layer_scale_init=0.1,
        drop_path_rate=0.1,
        init_cfg=dict(type='Pretrained', checkpoint='work_dirs/beit_v2_finetune_in22k_90e/epoch_90.pth')),
    train_cfg=None)  # no mixup, no cutmix

optim_wrapper = dict(paramwise_cfg=dict(layer_decay_rate=0.75), optimizer=dict(lr=5e-5))
train_cfg = dict(max_epochs=30)
param_scheduler = [
    dict(type='LinearLR', start_factor=1e-9, begin=0, end=20, convert_to_iter_based=True),
    dict(type='CosineAnnealingLR', eta_min_ratio=0.02, begin=20, end=30, convert_to_iter_based=True),
]

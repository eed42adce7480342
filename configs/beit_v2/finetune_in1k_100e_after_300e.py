"""BEiT v2 Base fine-tuned on ImageNet-1K after 300 epochs: released `beitv2_base_patch16_224_pt1k_300e_ft1k`.

Result:  85.0 ImageNet-1K top-1 at 224 pixels (microsoft/unilm beit2 get_started_for_image_classification.md)
         85.0 ImageNet-1K top-1 at 224 pixels (mmpretrain metafile, of its own training)
Model:   ViT-Base, relative position bias in every block, LayerScale, 86,530,984 parameters; 224 x 224 pixels
Command: tools/dist_train.sh configs/beit_v2/pretrain_300e.py 16
         tools/dist_train.sh configs/beit_v2/finetune_in1k_100e_after_300e.py 8
         The last from the released weights:
           --cfg-options model.backbone.init_cfg.checkpoint=beitv2_base_patch16_224_pt1k_300e
Test:    tools/dist_test.sh configs/beit_v2/finetune_in1k_100e_after_300e.py \
           work_dirs/beit_v2_finetune_in1k_100e_after_300e/epoch_100.pth 8
Batch:   8 GPUs x 128 = 1024 images, lr 5e-4
Steps:   100 epochs x 1,251 = 125,100 updates, 25,020 of them warm-up
Data:    ImageNet-1K, 1,281,167 images
Cost:    105 GFLOP an image forward and backward; 30 GPU hours of an A100 at 40 %

Differs: from finetune_in1k_100e.py in layer decay and stochastic depth, as in the released command
"""
_base_ = [
    '../_base_/models/finetune_base.py',
    '../_base_/datasets/finetune_in1k.py',
    '../_base_/schedules/finetune_adamw_bs1024_100e.py',
]

work_dir = 'work_dirs/beit_v2_finetune_in1k_100e_after_300e'
model = dict(
    backbone=dict(
        abs_pos_embed=False,
        rel_pos_bias='per_layer',
        layer_scale_init=0.1,
        drop_path_rate=0.1,
        init_cfg=dict(type='Pretrained', checkpoint='work_dirs/beit_v2_pretrain_300e/epoch_300.pth')))

optim_wrapper = dict(paramwise_cfg=dict(layer_decay_rate=0.65), optimizer=dict(lr=5e-4))
param_scheduler = [
    dict(type='LinearLR', start_factor=1e-9, begin=0, end=20, convert_to_iter_based=True),
    dict(type='CosineAnnealingLR', eta_min_ratio=2e-3, begin=20, end=100, convert_to_iter_based=True),
]

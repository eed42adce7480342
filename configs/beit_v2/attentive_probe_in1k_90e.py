"""Attentive probe of BEiT v2 Base on ImageNet-1K: the patches of the last block, 32 queries, 90 epochs.

Result:  81.4 ImageNet-1K top-1 of an attentive probe at 224 pixels (billpsomas/efficient-probing README, the best
           epoch)
Model:   ViT-Base, shared relative position bias, LayerScale, frozen, 87,047,224 parameters, 1,383,400 of them trained;
           224 x 224 pixels
Command: tools/dist_train.sh configs/beit_v2/pretrain_1600e.py 16
         tools/dist_train.sh configs/beit_v2/attentive_probe_in1k_90e.py 8
         The last from the released weights:
           --cfg-options model.backbone.init_cfg.checkpoint=beitv2_base_patch16_224_pt1k
Test:    tools/dist_test.sh configs/beit_v2/attentive_probe_in1k_90e.py \
           work_dirs/beit_v2_attentive_probe_in1k_90e/epoch_90.pth 8
Batch:   8 GPUs x 512 = 4096 images, lr 1.6e0
Steps:   90 epochs x 312 = 28,080 updates, 3,120 of them warm-up
Data:    ImageNet-1K, 1,281,167 images
Cost:    35 GFLOP an image forward and backward; 9.0 GPU hours of an A100 at 40 %

Differs: from billpsomas/efficient-probing in a classifier that computes in float32 and begins with weights of 0.01, in
         crops that are not Pillow's, and in 8 GPUs of 512 images, as in its README (its log: 16 of 256). The weights
         that it measured, vit_base_patch16_224.beitv2/checkpoint-799.pth, are not published; whether they are those of
         beitv2_base_patch16_224_pt1k is unknown. Not run here.
Options: One query: --cfg-options model.num_queries=1
"""
_base_ = [
    '../_base_/models/attentive_probe_base.py',
    '../_base_/datasets/finetune_in1k.py',
    '../_base_/schedules/attentive_probe_lars_bs4096_90e.py',
]

work_dir = 'work_dirs/beit_v2_attentive_probe_in1k_90e'
model = dict(
    backbone=dict(
        abs_pos_embed=False,
        rel_pos_bias='shared',
        layer_scale_init=0.1,
        init_cfg=dict(type='Pretrained', checkpoint='work_dirs/beit_v2_pretrain_1600e/epoch_1600.pth')))

train_pipeline = [
    dict(type='beit_mm.LoadImage'),
    dict(type='beit_mm.RandomResizedCrop', size=224, clips=True),  # and flips every other image
    dict(type='PackInputs', meta_keys=('img_path', 'unreadable')),
]
train_dataloader = dict(batch_size=512, dataset=dict(pipeline=train_pipeline))
val_evaluator = dict(_delete_=True, type='beit_mm.LayerAccuracy')
test_evaluator = val_evaluator

"""Attentive probe of BEiT-Base on ImageNet-1K: the patches of the last block, 32 queries, 90 epochs.

Result:  none published
Model:   ViT-Base, absolute position embedding, frozen, 87,171,304 parameters, 1,383,400 of them trained; 224 x 224
           pixels
Command: tools/dist_train.sh configs/beit/pretrain_800e.py 16
         tools/dist_train.sh configs/beit/attentive_probe_in1k_90e.py 8
         The last from the released weights:
           --cfg-options model.backbone.init_cfg.checkpoint=beit_base_patch16_224_pt1k_800ep
Test:    tools/dist_test.sh configs/beit/attentive_probe_in1k_90e.py work_dirs/attentive_probe_in1k_90e/epoch_90.pth 8
Batch:   8 GPUs x 512 = 4096 images, lr 1.6e0
Steps:   90 epochs x 312 = 28,080 updates, 3,120 of them warm-up
Data:    ImageNet-1K, 1,281,167 images
Cost:    35 GFLOP an image forward and backward; 9.0 GPU hours of an A100 at 40 %

Differs: the settings are those of billpsomas/efficient-probing, whose benchmark has no row for these weights. Not run
         here. Differences are those of ../beit_v2/attentive_probe_in1k_90e.py.
Options: Another block, from 0: --cfg-options model.layers=8
         One query: --cfg-options model.num_queries=1
"""
_base_ = [
    '../_base_/models/attentive_probe_base.py',
    '../_base_/datasets/finetune_in1k.py',
    '../_base_/schedules/attentive_probe_lars_bs4096_90e.py',
]

work_dir = 'work_dirs/attentive_probe_in1k_90e'
model = dict(
    backbone=dict(init_cfg=dict(type='Pretrained', checkpoint='work_dirs/pretrain_800e/epoch_800.pth')))

train_pipeline = [
    dict(type='beit_mm.LoadImage'),
    dict(type='beit_mm.RandomResizedCrop', size=224, clips=True),  # and flips every other image
    dict(type='PackInputs', meta_keys=('img_path', 'unreadable')),
]
train_dataloader = dict(batch_size=512, dataset=dict(pipeline=train_pipeline))
val_evaluator = dict(_delete_=True, type='beit_mm.LayerAccuracy')
test_evaluator = val_evaluator

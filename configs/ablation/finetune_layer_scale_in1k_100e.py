"""Architecture variant "ViT + LayerScale", fine-tuned on ImageNet-1K.

Result:  83.00 ImageNet-1K top-1 at 224 pixels (paper, table of architecture variants)
Model:   ViT-Base, absolute position embedding, LayerScale, 86,576,872 parameters; 224 x 224 pixels
Command: tools/dist_train.sh configs/ablation/pretrain_layer_scale_300e.py 16
         tools/dist_train.sh configs/ablation/finetune_layer_scale_in1k_100e.py 8
Test:    tools/dist_test.sh configs/ablation/finetune_layer_scale_in1k_100e.py \
           work_dirs/finetune_layer_scale_in1k_100e/epoch_100.pth 8
Batch:   8 GPUs x 128 = 1024 images, lr 4e-3
Steps:   100 epochs x 1,251 = 125,100 updates, 25,020 of them warm-up
Data:    ImageNet-1K, 1,281,167 images
Cost:    105 GFLOP an image forward and backward; 30 GPU hours of an A100 at 40 %

Differs: from beit/finetune_in1k_100e.py in LayerScale and the weights it starts from
"""
_base_ = [
    '../_base_/models/finetune_base.py',
    '../_base_/datasets/finetune_in1k.py',
    '../_base_/schedules/finetune_adamw_bs1024_100e.py',
]

model = dict(
    backbone=dict(
        layer_scale_init=0.1,
        init_cfg=dict(type='Pretrained', checkpoint='work_dirs/pretrain_layer_scale_300e/epoch_300.pth')))
train_dataloader = dict(sampler=dict(_delete_=True, type='beit_mm.RepeatedAugmentationSampler', num_repeats=3))

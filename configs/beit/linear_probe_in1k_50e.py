"""Linear probe of BEiT-Base on ImageNet-1K: the 9th block's mean of patch tokens, 50 epochs.

Result:  56.7 ImageNet-1K top-1 of a linear probe of layer 9 (paper, linear probe table)
Model:   ViT-Base, absolute position embedding, frozen, 86,556,904 parameters, 769,000 of them trained; 224 x 224 pixels
Command: tools/dist_train.sh configs/beit/pretrain_800e.py 16
         tools/dist_train.sh configs/beit/linear_probe_in1k_50e.py 8
         The last from the released weights:
           --cfg-options model.backbone.init_cfg.checkpoint=beit_base_patch16_224_pt1k_800ep
Test:    tools/dist_test.sh configs/beit/linear_probe_in1k_50e.py work_dirs/linear_probe_in1k_50e/epoch_50.pth 8
Batch:   8 GPUs x 128 = 1024 images, lr 4e-3
Steps:   50 epochs x 1,251 = 62,550 updates
Data:    ImageNet-1K, 1,281,167 images
Cost:    26 GFLOP an image forward and backward; 3.8 GPU hours of an A100 at 40 %

Differs: the released code classifies the class token and the mean together, and runs 100 epochs by default. From the
         released code: the output of the block without a norm, a rate that changes once an epoch, no warm-up, and a
         weight decay of 1e-4 on all parameters of the classifier, which computes in float32. The backbone computes in
         bfloat16 (released: float16). The paper does not say which pretraining it probes; the 800 epochs of its main
         table are inferred.
Options: All blocks in one run, with an accuracy for each: --cfg-options model.layers=None
         The class token and the mean, as in the released code: --cfg-options model.feature=cls_mean
"""
_base_ = [
    '../_base_/models/linear_probe_base.py',
    '../_base_/datasets/finetune_in1k.py',
    '../_base_/schedules/linear_probe_adamw_bs1024_50e.py',
]

model = dict(
    backbone=dict(init_cfg=dict(type='Pretrained', checkpoint='work_dirs/pretrain_800e/epoch_800.pth')),
    layers=8)  # from 0

train_pipeline = [
    dict(type='beit_mm.LoadImage'),
    dict(type='RandomResizedCrop', scale=224, backend='pillow', interpolation='bilinear'),
    dict(type='RandomFlip', prob=0.5, direction='horizontal'),
    dict(type='PackInputs', meta_keys=('img_path', 'unreadable')),
]
train_dataloader = dict(dataset=dict(pipeline=train_pipeline))
val_evaluator = dict(_delete_=True, type='beit_mm.LayerAccuracy')
test_evaluator = val_evaluator

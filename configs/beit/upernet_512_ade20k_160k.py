"""Architecture variant "ViT" with UperNet on ADE20K at 512 pixels.

Result:  44.86 ADE20K mIoU, single scale (paper, table of architecture variants)
Model:   ViT-Base, absolute position embedding, 163,277,612 parameters; 512 x 512 pixels
Command: tools/dist_train.sh configs/beit/pretrain_300e.py 16
         tools/dist_train.sh configs/beit/upernet_512_ade20k_160k.py 8
Test:    tools/dist_test.sh configs/beit/upernet_512_ade20k_160k.py \
           work_dirs/upernet_512_ade20k_160k/iter_160000.pth 8 [--tta]
Batch:   8 GPUs x 2 = 16 images, lr 7e-4
Steps:   160,000 updates, 1,500 of them warm-up
Data:    ADE20K, 20,210 images, 126.7 times
Cost:    3,641 GFLOP an image forward and backward; 21 GPU hours of an A100 at 40 %

Differs: the paper gives no settings for this table: size, rate, layer decay and schedule are from the released config
         for weights without intermediate fine-tuning (upernet_beit_base_12_512_slide_160k_ade20k_pt.py). Class token
         and position embedding have no weight decay, as the released code intends but does not do. bfloat16 instead of
         float16, in tests too (--cfg-options model.test_cfg.precision=float32).
Options: From the released 800-epoch weights: --cfg-options
         model.backbone.init_cfg.checkpoint=beit_base_patch16_224_pt1k_800ep
"""
_base_ = [
    '../_base_/models/upernet_base.py',
    '../_base_/datasets/ade20k_512.py',
    '../_base_/schedules/segment_adamw_bs16_160k.py',
]

model = dict(
    backbone=dict(init_cfg=dict(type='Pretrained', checkpoint='work_dirs/pretrain_300e/epoch_300.pth')))
optim_wrapper = dict(optimizer=dict(lr=7e-4))

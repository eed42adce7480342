"""Architecture variant "ViT + LayerScale" with UperNet on ADE20K at 512 pixels.

Command: tools/dist_train.sh configs/ablation/pretrain_layer_scale_300e.py 16
         tools/dist_train.sh configs/ablation/upernet_layer_scale_512_ade20k_160k.py 8
Batch:   8 GPUs x 2 = 16 images, lr 7e-4
Steps:   160,000, 126.7 times through the 20,210 images
Time:    as beit/upernet_512_ade20k_160k.py
Result:  the paper: 45.43 mIoU at a single scale
         (baseline ../beit/upernet_512_ade20k_160k.py: 44.86)
Shorter: --cfg-options train_cfg.max_iters=80000 param_scheduler.1.end=80001
Differs: from beit/upernet_512_ade20k_160k.py in LayerScale and the weights it starts from
"""
_base_ = [
    '../_base_/models/upernet_base.py',
    '../_base_/datasets/ade20k_512.py',
    '../_base_/schedules/segment_adamw_bs16.py',
    '../_base_/segmentation_runtime.py',
]

model = dict(
    backbone=dict(
        layer_scale_init=0.1,
        init_cfg=dict(
            type='Pretrained', checkpoint='work_dirs/pretrain_layer_scale_300e/epoch_300.pth')))
optim_wrapper = dict(optimizer=dict(lr=7e-4))

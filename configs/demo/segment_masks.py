"""A small BEiT under a head that classifies masks, on a folder of images and label maps, in minutes on two CPU cores.

After:   the packaged weights, or your own pretraining: --cfg-options model.backbone.init_cfg.checkpoint=FILE
Command: python tools/train.py configs/demo/segment_masks.py
Data:    as segment_setr_pup.py; other folders and classes: camvid_upernet.py is a pattern
Batch:   1 process x 8 images, lr 2e-3
Differs: from segment_upernet.py in the head, in clipping gradients, and in the schedule's polynomial of degree 0.9
"""
_base_ = [
    '../_base_/models/masks_base.py',
    '../_base_/datasets/demo_segmentation.py',
    '../_base_/schedules/masks_adamw_bs16_39k.py',
]

model = dict(
    data_preprocessor=dict(size=(128, 128)),
    backbone=dict(
        arch=dict(_delete_=True, embed_dims=128, num_layers=5, num_heads=4),
        img_size=128,
        patch_size=8,
        out_indices=(1, 2, 3, 4),
        init_cfg=dict(type='Pretrained', checkpoint='demo')),
    decode_head=dict(
        where='decoder', in_channels=128, in_index=(0, 1, 2, 3), num_classes=13, num_queries=30, num_blocks=2,
        num_points=2048),
    test_cfg=dict(crop_size=(128, 128), stride=(85, 85)))

optim_wrapper = dict(clip_grad=dict(max_norm=0.1), optimizer=dict(lr=2e-3))
auto_scale_lr = dict(base_batch_size=8)
train_cfg = dict(max_iters=300, val_interval=300)
param_scheduler = [
    dict(type='LinearLR', start_factor=1e-6, by_epoch=False, begin=0, end=31),
    dict(type='PolyLR', power=0.9, eta_min=0, by_epoch=False, begin=0, end=301),
]
default_hooks = dict(checkpoint=dict(interval=100, max_keep_ckpts=2))

"""A small BEiT under UperNet on a folder of images and label maps, in minutes on two CPU cores.

After:   the packaged weights, or your own pretraining: --cfg-options model.backbone.init_cfg.checkpoint=FILE
Command: python tools/train.py configs/demo/segment_upernet.py
         From random weights, for comparison:
         python tools/train.py configs/demo/segment_upernet.py --work-dir work_dirs/segment_upernet_scratch \
             --cfg-options model.backbone.init_cfg=None optim_wrapper.paramwise_cfg.layer_decay_rate=1.0
Data:    as segment_setr_pup.py; other folders and classes: camvid_upernet.py is a pattern
Batch:   1 process x 8 images, lr 2e-3
Differs: from ../beit/upernet_512_ade20k_160k.py in size (128-pixel crops of images of 160 in 8 x 8 patches, heads of 64
         channels; a pyramid of x2, 1, /2 and /4, where patches of 16 pixels need x4 to /2), in resizing by 0.75 to 1.5,
         in rate, warm-up and layer decay, and in having no colour distortion, because a short run learns more without
         it
"""
_base_ = [
    '../_base_/models/upernet_base.py',
    '../_base_/datasets/demo_segmentation.py',
    '../_base_/schedules/segment_adamw_bs16_160k.py',
]

model = dict(
    data_preprocessor=dict(size=(128, 128)),
    backbone=dict(
        arch=dict(_delete_=True, embed_dims=128, num_layers=5, num_heads=4),
        img_size=128,
        patch_size=8,
        out_indices=(1, 2, 3, 4),
        init_cfg=dict(type='Pretrained', checkpoint='demo')),
    neck=dict(embed_dim=128, rescales=[2, 1, 0.5, 0.25]),
    decode_head=dict(in_channels=[128, 128, 128, 128], channels=64, num_classes=13),
    auxiliary_head=dict(in_channels=128, channels=64, num_classes=13),
    test_cfg=dict(crop_size=(128, 128), stride=(85, 85)))

optim_wrapper = dict(paramwise_cfg=dict(layer_decay_rate=0.8), optimizer=dict(lr=2e-3))
auto_scale_lr = dict(base_batch_size=8)
train_cfg = dict(max_iters=300, val_interval=300)
# mmengine's schedulers arrive at their last factor one step before `end`
param_scheduler = [
    dict(type='LinearLR', start_factor=1e-6, by_epoch=False, begin=0, end=31),
    dict(type='PolyLR', power=1.0, eta_min=0, by_epoch=False, begin=0, end=301),
]
default_hooks = dict(checkpoint=dict(interval=100, max_keep_ckpts=2))

"""A small BEiT under UperNet on any folder in ADE20K's layout, in ten minutes on two CPU cores.

Command: with a pretraining of configs/demo/pretrain.py,
         python tools/train.py configs/demo/segment_upernet.py --cfg-options
             model.backbone.init_cfg.checkpoint=work_dirs/pretrain/iter_3000.pth
         From random weights: --cfg-options model.backbone.init_cfg=None
             optim_wrapper.paramwise_cfg.layer_decay_rate=1.0
Data:    as segment_setr_pup.py, whose header has the command for CamVid
Batch:   1 process x 8 images, lr 1e-3
Shorter: --cfg-options train_cfg.max_iters=300 param_scheduler.1.end=301
Differs: from ../beit/upernet_512_ade20k_160k.py in size (128-pixel crops of photos of 160 in 8 x 8 patches, heads of
         64 channels; a pyramid of x2, 1, /2 and /4, as patches of 16 pixels take x4 to /2), in resizing by 0.75 to
         1.5, in lr and in layer decay
"""
_base_ = ['../_base_/demo_segmentation.py', '../_base_/segmentation_runtime.py']

norm_cfg = dict(type='beit_mm.SyncBN')
model = dict(
    type='beit_mm.SlidingSegmentor',
    data_preprocessor=dict(
        type='SegDataPreProcessor',
        mean=[123.675, 116.28, 103.53],
        std=[58.395, 57.12, 57.375],
        size=(128, 128),
        pad_val=0,
        seg_pad_val=255),
    backbone=dict(
        type='beit_mm.BEiTBackbone',
        arch=dict(embed_dims=128, num_layers=6, num_heads=4),
        img_size=128,
        patch_size=8,
        out_type='featmap',
        out_indices=(1, 2, 3, 5),
        drop_path_rate=0.1,
        init_cfg=dict(type='Pretrained', checkpoint='work_dirs/pretrain/iter_3000.pth')),
    neck=dict(type='Feature2Pyramid', embed_dim=128, rescales=[2, 1, 0.5, 0.25], norm_cfg=norm_cfg),
    decode_head=dict(
        type='beit_mm.LeanUPerHead',
        in_channels=[128, 128, 128, 128],
        in_index=[0, 1, 2, 3],
        pool_scales=(1, 2, 3, 6),
        channels=64,
        dropout_ratio=0.1,
        num_classes=13,
        norm_cfg=norm_cfg,
        align_corners=False,
        loss_decode=dict(type='CrossEntropyLoss', use_sigmoid=False, loss_weight=1.0)),
    auxiliary_head=dict(
        type='FCNHead',
        in_channels=128,
        in_index=2,
        channels=64,
        num_convs=1,
        concat_input=False,
        dropout_ratio=0.1,
        num_classes=13,
        norm_cfg=norm_cfg,
        align_corners=False,
        loss_decode=dict(type='CrossEntropyLoss', use_sigmoid=False, loss_weight=0.4)),
    test_cfg=dict(mode='slide', crop_size=(128, 128), stride=(85, 85)))
default_hooks = dict(checkpoint=dict(interval=1200, max_keep_ckpts=1))

"""A small BEiT under SETR-PUP on any folder in ADE20K's layout, in ten minutes on two CPU cores.

Command: tools/run_demo.sh (all stages), or, with a pretraining of configs/demo/pretrain.py,
         python tools/train.py configs/demo/segment_setr_pup.py --cfg-options
             model.backbone.init_cfg.checkpoint=work_dirs/pretrain/iter_3000.pth
         From random weights: --cfg-options model.backbone.init_cfg=None
             optim_wrapper.paramwise_cfg.layer_decay_rate=1.0
Data:    data_root=... is one folder; the number of classes is that of the dataset's. The defaults are the photos that
         the demo draws, {train,val} and annotations/{train,val}. Of CamVid, images/{training,validation},
         annotations/{training,validation} and classes.txt, 11 lines after its header:
         python tools/train.py configs/demo/segment_setr_pup.py --work-dir work_dirs/camvid --cfg-options
             data_root=camvid model.backbone.init_cfg.checkpoint=...
             train_dataloader.dataset.classes=classes.txt
             train_dataloader.dataset.data_prefix.img_path=images/training
             train_dataloader.dataset.data_prefix.seg_map_path=annotations/training
             {val,test}_dataloader.dataset.classes=classes.txt
             {val,test}_dataloader.dataset.data_prefix.img_path=images/validation
             {val,test}_dataloader.dataset.data_prefix.seg_map_path=annotations/validation
         (a shell takes the braces apart); then
         python tools/test.py work_dirs/camvid/segment_setr_pup.py work_dirs/camvid/iter_1200.pth [--tta]
Batch:   1 process x 8 images, lr 1e-3
Shorter: --cfg-options train_cfg.max_iters=300 param_scheduler.1.end=301
Differs: from ../beit/setr_pup_512_ade20k_160k.py in size (128-pixel crops of photos of 160 in 8 x 8 patches, heads of
         64 channels; three upsamplings, where patches of 16 pixels take four), in resizing by 0.75 to 1.5 and in layer
         decay
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
        out_indices=(2, 3, 4, 5),
        drop_path_rate=0.1,
        interpolate_mode='bilinear',
        init_cfg=dict(type='Pretrained', checkpoint='work_dirs/pretrain/iter_3000.pth')),
    decode_head=dict(
        type='beit_mm.LeanSETRUPHead',
        in_channels=128,
        in_index=3,
        channels=64,
        num_convs=3,
        up_scale=2,
        kernel_size=3,
        dropout_ratio=0,
        num_classes=13,
        norm_cfg=norm_cfg,
        norm_layer=dict(type='LN', eps=1e-6),
        align_corners=False,
        loss_decode=dict(type='CrossEntropyLoss', use_sigmoid=False, loss_weight=1.0)),
    auxiliary_head=[
        dict(
            type='SETRUPHead',
            in_channels=128,
            in_index=index,
            channels=64,
            num_convs=1,
            up_scale=4,
            kernel_size=3,
            dropout_ratio=0,
            num_classes=13,
            norm_cfg=norm_cfg,
            norm_layer=dict(type='LN', eps=1e-6),
            align_corners=False,
            loss_decode=dict(type='CrossEntropyLoss', use_sigmoid=False, loss_weight=0.4))
        for index in range(4)
    ],
    test_cfg=dict(mode='slide', crop_size=(128, 128), stride=(85, 85)))
default_hooks = dict(checkpoint=dict(interval=1200, max_keep_ckpts=1))

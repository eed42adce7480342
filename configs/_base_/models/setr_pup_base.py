"""ViT-Base at 512 pixels under SETR-PUP: four convolutions, each with an upsampling, and four auxiliary heads."""
norm_cfg = dict(type='beit_mm.SyncBN')
setr_head = dict(
    in_channels=768,
    channels=256,
    kernel_size=3,
    dropout_ratio=0,
    num_classes=150,
    norm_cfg=norm_cfg,
    norm_layer=dict(type='LN', eps=1e-6),
    align_corners=False)
model = dict(
    type='beit_mm.SlidingSegmentor',
    # ImageNet's statistics, as the released code's, whatever those of the pretraining were
    data_preprocessor=dict(
        type='SegDataPreProcessor', mean=[123.675, 116.28, 103.53], std=[58.395, 57.12, 57.375],
        size=(512, 512), pad_val=0, seg_pad_val=255),
    backbone=dict(
        type='beit_mm.BEiTBackbone', arch='base', img_size=512, out_type='featmap', drop_path_rate=0.1,
        out_indices=(4, 7, 9, 11), interpolate_mode='bilinear'),
    decode_head=dict(
        setr_head,
        type='beit_mm.EfficientSETRUPHead',
        in_index=3,
        num_convs=4,
        up_scale=2,
        loss_decode=dict(type='CrossEntropyLoss', use_sigmoid=False, loss_weight=1.0)),
    auxiliary_head=[
        dict(
            setr_head,
            type='beit_mm.SETRUPHead',
            in_index=index,
            num_convs=1,
            up_scale=4,
            loss_decode=dict(type='CrossEntropyLoss', use_sigmoid=False, loss_weight=0.4))
        for index in range(4)
    ],
    # in bfloat16; precision='float32' is the other way
    test_cfg=dict(mode='slide', crop_size=(512, 512), stride=(341, 341)))

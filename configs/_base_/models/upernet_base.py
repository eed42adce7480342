"""ViT-Base at 512 pixels under UperNet: a pyramid of the outputs of four blocks, and an auxiliary head."""
norm_cfg = dict(type='beit_mm.SyncBN')
model = dict(
    type='beit_mm.SlidingSegmentor',
    # ImageNet's statistics, as the released code's, whatever those of the pretraining were
    data_preprocessor=dict(
        type='SegDataPreProcessor', mean=[123.675, 116.28, 103.53], std=[58.395, 57.12, 57.375],
        size=(512, 512), pad_val=0, seg_pad_val=255),
    backbone=dict(
        type='beit_mm.BEiTBackbone', arch='base', img_size=512, out_type='featmap', drop_path_rate=0.1,
        out_indices=(3, 5, 7, 11)),
    neck=dict(type='Feature2Pyramid', embed_dim=768, rescales=[4, 2, 1, 0.5], norm_cfg=norm_cfg),
    decode_head=dict(
        type='beit_mm.EfficientUPerHead',
        in_channels=[768, 768, 768, 768],
        in_index=[0, 1, 2, 3],
        pool_scales=(1, 2, 3, 6),
        channels=768,
        dropout_ratio=0.1,
        num_classes=150,
        norm_cfg=norm_cfg,
        align_corners=False,
        loss_decode=dict(type='CrossEntropyLoss', use_sigmoid=False, loss_weight=1.0)),
    auxiliary_head=dict(
        type='beit_mm.FCNHead',
        in_channels=768,
        in_index=2,
        channels=256,
        num_convs=1,
        concat_input=False,
        dropout_ratio=0.1,
        num_classes=150,
        norm_cfg=norm_cfg,
        align_corners=False,
        loss_decode=dict(type='CrossEntropyLoss', use_sigmoid=False, loss_weight=0.4)),
    # in bfloat16; precision='float32' is the other way
    test_cfg=dict(mode='slide', crop_size=(512, 512), stride=(341, 341)))

"""ViT-Base at 512 pixels whose last three blocks also mix the queries of a head that classifies masks."""
model = dict(
    type='beit_mm.SlidingSegmentor',
    # ImageNet's statistics, as under UperNet
    data_preprocessor=dict(
        type='SegDataPreProcessor', mean=[123.675, 116.28, 103.53], std=[58.395, 57.12, 57.375],
        size=(512, 512), pad_val=0, seg_pad_val=255),
    backbone=dict(
        type='beit_mm.BEiTBackbone', arch='base', img_size=512, out_type='featmap', drop_path_rate=0.1),
    decode_head=dict(
        type='beit_mm.MaskClassificationHead', where='backbone', in_channels=768, num_classes=150,
        num_queries=100, num_blocks=3),
    test_cfg=dict(mode='slide', crop_size=(512, 512), stride=(341, 341)))

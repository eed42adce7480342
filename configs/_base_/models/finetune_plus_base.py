"""The released checkpoints' classifier: a bias table in every block and LayerScale, no position embedding."""
model = dict(
    type='ImageClassifier',
    data_preprocessor=dict(
        type='beit_mm.ClassificationDataPreprocessor',
        num_classes=1000,
        mean=[127.5, 127.5, 127.5],
        std=[127.5, 127.5, 127.5]),
    backbone=dict(
        type='beit_mm.BEiTBackbone',
        arch='base',
        out_type='avg_featmap',
        abs_pos_embed=False,
        rel_pos_bias='per_layer',
        layer_scale_init=0.1,
        drop_path_rate=0.1),
    head=dict(
        type='LinearClsHead',
        num_classes=1000,
        in_channels=768,
        loss=dict(type='LabelSmoothLoss', label_smooth_val=0.1, mode='original'),
        # 0.02 times the released code's init_scale of 0.001
        init_cfg=dict(type='Normal', layer='Linear', std=2e-5)))

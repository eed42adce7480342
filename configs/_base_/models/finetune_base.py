"""The paper's classifier: ViT-Base, the mean of the patch tokens, a new norm, one linear layer."""
model = dict(
    type='ImageClassifier',
    data_preprocessor=dict(
        type='beit_mm.ClassificationDataPreprocessor',
        num_classes=1000,
        to_onehot=True,  # of class numbers mmpretrain's loss would fetch the largest from the device
        mean=[123.675, 116.28, 103.53],
        std=[58.395, 57.12, 57.375]),
    backbone=dict(
        type='beit_mm.BEiTBackbone', arch='base', out_type='avg_featmap', drop_path_rate=0.1),
    head=dict(
        type='LinearClsHead',
        num_classes=1000,
        in_channels=768,
        loss=dict(type='LabelSmoothLoss', label_smooth_val=0.1, mode='original'),
        # 0.02 times the released code's init_scale of 0.001
        init_cfg=dict(type='Normal', layer='Linear', std=2e-5)),
    # One of the two for each batch, with equal chances; the numbers are of their Beta distributions.
    train_cfg=dict(augments=[dict(type='Mixup', alpha=0.8), dict(type='CutMix', alpha=1.0)]))

"""Classifiers on the mean of the patch tokens of ViT-Base's blocks; the leaf names the block."""
model = dict(
    type='beit_mm.LinearProbe',
    data_preprocessor=dict(
        type='beit_mm.ClassificationDataPreprocessor',  # its copies do not wait for the device
        mean=[123.675, 116.28, 103.53], std=[58.395, 57.12, 57.375]),
    backbone=dict(type='beit_mm.BEiTBackbone', arch='base'),
    feature='mean',
    num_classes=1000)

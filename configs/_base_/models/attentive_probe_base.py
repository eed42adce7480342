"""A classifier that reads the patches of ViT-Base's last block by 32 learned queries."""
model = dict(
    type='beit_mm.AttentiveProbe',
    data_preprocessor=dict(
        type='beit_mm.ClassificationDataPreprocessor',  # its copies do not wait for the device
        mean=[123.675, 116.28, 103.53], std=[58.395, 57.12, 57.375]),
    backbone=dict(type='beit_mm.BEiTBackbone', arch='base'),
    layers=-1,
    num_queries=32,
    num_classes=1000)

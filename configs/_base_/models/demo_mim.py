"""A small BEiT for images of 96 pixels in 8 x 8 patches that predicts the 1,024 tokens of the packaged tokenizer."""
model = dict(
    type='beit_mm.BEiTPretrainer',
    data_preprocessor=dict(
        type='beit_mm.TwoViewDataPreprocessor', mean=[123.675, 116.28, 103.53], std=[58.395, 57.12, 57.375]),
    backbone=dict(
        type='beit_mm.BEiTBackbone',
        arch=dict(embed_dims=128, num_layers=5, num_heads=4),
        img_size=96,
        patch_size=8,
        masked_input=True),
    head=dict(type='beit_mm.BEiTMIMHead', embed_dims=128, vocab_size=1024),
    target_generator=dict(
        type='beit_mm.DiscreteVAE',
        arch='conv',
        hidden=48,
        vocab_size=1024,
        embed_dims=64,
        num_levels=3,
        bottleneck_blocks=2,
        checkpoint='demo'))

"""The paper's pretraining model: ViT-Base, absolute position embedding, DALL-E's 8192 visual tokens."""
model = dict(
    type='beit_mm.BEiTPretrainer',
    data_preprocessor=dict(
        type='beit_mm.TwoViewDataPreprocessor',
        mean=[123.675, 116.28, 103.53],
        std=[58.395, 57.12, 57.375]),
    backbone=dict(
        type='beit_mm.BEiTBackbone', arch='base', masked_input=True, drop_path_rate=0.1),
    head=dict(type='beit_mm.BEiTMIMHead', embed_dims=768, vocab_size=8192),
    target_generator=dict(type='beit_mm.DALLETokenizer'))

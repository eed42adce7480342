"""BEiT v2's pretraining model: LayerScale, a shared bias, patch aggregation and VQ-KD's 8192 visual tokens."""
model = dict(
    type='beit_mm.BEiTV2Pretrainer',
    early_layers=9,
    data_preprocessor=dict(
        type='beit_mm.TwoViewDataPreprocessor',
        mean=[123.675, 116.28, 103.53],
        std=[58.395, 57.12, 57.375],
        tokenizer_scale=1),
    backbone=dict(
        type='beit_mm.BEiTBackbone',
        arch='base',
        masked_input=True,
        abs_pos_embed=False,
        rel_pos_bias='shared',
        layer_scale_init=0.1,
        drop_path_rate=0.1),
    head=dict(type='beit_mm.BEiTMIMHead', embed_dims=768, vocab_size=8192),
    target_generator=dict(type='beit_mm.VQKDTokenizer'))

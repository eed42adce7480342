"""BEiT v2's pretraining model: LayerScale, a shared bias, patch aggregation and VQ-KD's 8192 visual tokens."""
_base_ = './mim_base.py'

model = dict(
    type='beit_mm.BEiTV2Pretrainer',
    early_layers=9,
    data_preprocessor=dict(tokenizer_scale=1),
    backbone=dict(abs_pos_embed=False, rel_pos_bias='shared', layer_scale_init=0.1),
    target_generator=dict(type='beit_mm.VQKDTokenizer'))

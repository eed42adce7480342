"""The released checkpoints' classifier: a bias table in every block and LayerScale, no position embedding."""
_base_ = './finetune_base.py'

model = dict(
    data_preprocessor=dict(mean=[127.5, 127.5, 127.5], std=[127.5, 127.5, 127.5]),
    backbone=dict(abs_pos_embed=False, rel_pos_bias='per_layer', layer_scale_init=0.1),
)

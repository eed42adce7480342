"""The released checkpoints' model: shared relative position bias and LayerScale, no position embedding."""
_base_ = './mim_base.py'

model = dict(backbone=dict(abs_pos_embed=False, rel_pos_bias='shared', layer_scale_init=0.1))

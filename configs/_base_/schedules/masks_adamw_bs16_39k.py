"""Mask classification on ADE20K: AdamW for 16 images a step, layer decay 0.8, 39,120 steps, bfloat16, clipping at 0.01.

Lengths are in steps. Types without a prefix are mmseg's.
"""
_base_ = '../default_runtime.py'

default_scope = 'mmseg'
train_cfg = dict(type='beit_mm.IterLoop', max_iters=39120, val_interval=3912)
optim_wrapper = dict(
    type='beit_mm.AutocastOptimWrapper', dtype='bfloat16', clip_grad=dict(max_norm=0.01),
    constructor='beit_mm.BEiTOptimWrapperConstructor', paramwise_cfg=dict(layer_decay_rate=0.8),
    optimizer=dict(type='AdamW', lr=1e-4, weight_decay=0.05, fused=True))
auto_scale_lr = dict(base_batch_size=16)
# mmengine's schedulers arrive at their last factor one step before `end`
param_scheduler = [
    dict(type='LinearLR', start_factor=1e-6, by_epoch=False, begin=0, end=1501),
    dict(type='PolyLR', power=0.9, eta_min=0, by_epoch=False, begin=0, end=39121),
]
val_cfg = dict(type='ValLoop')
test_cfg = dict(type='TestLoop')
visualizer = dict(type='SegLocalVisualizer')
log_processor = dict(by_epoch=False)
default_hooks = dict(
    checkpoint=dict(by_epoch=False, interval=3912), visualization=dict(type='SegVisualizationHook'))

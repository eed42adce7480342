"""Fine-tuning on ADE20K: AdamW for 16 images a step, layer decay 0.65, 160,000 steps, bfloat16, no clipping.

Lengths are in steps. Types without a prefix are mmseg's.
"""
_base_ = '../default_runtime.py'

default_scope = 'mmseg'
optim_wrapper = dict(
    type='beit_mm.AutocastOptimWrapper',
    dtype='bfloat16',
    constructor='beit_mm.BEiTOptimWrapperConstructor',
    paramwise_cfg=dict(layer_decay_rate=0.65),
    optimizer=dict(type='AdamW', lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.05, fused=True))
auto_scale_lr = dict(base_batch_size=16)
train_cfg = dict(type='beit_mm.IterLoop', max_iters=160000, val_interval=16000)
val_cfg = dict(type='ValLoop')
test_cfg = dict(type='TestLoop')
# Both at once, as the released code: peak * (1 - t/160000), times 1e-6 + t/1500 in the first 1500 steps. mmengine's
# schedulers arrive at their last factor one step before `end`.
param_scheduler = [
    dict(type='LinearLR', start_factor=1e-6, by_epoch=False, begin=0, end=1501),
    dict(type='PolyLR', power=1.0, eta_min=0, by_epoch=False, begin=0, end=160001),
]
default_hooks = dict(
    checkpoint=dict(by_epoch=False, interval=4000),
    visualization=dict(type='SegVisualizationHook'))  # draws where `mim test` is given --show-dir
visualizer = dict(type='SegLocalVisualizer')
log_processor = dict(by_epoch=False)

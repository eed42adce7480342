"""Pretraining in an hour of one CPU core: AdamW at 2e-3 for 64 images a step, 300 + 6,700 steps, bfloat16."""
_base_ = '../default_runtime.py'

optim_wrapper = dict(
    type='beit_mm.AutocastOptimWrapper',
    dtype='bfloat16',
    constructor='beit_mm.BEiTOptimWrapperConstructor',
    optimizer=dict(type='AdamW', lr=2e-3, betas=(0.9, 0.98), eps=1e-8, weight_decay=0.05, fused=True),
    clip_grad=dict(max_norm=3.0))
auto_scale_lr = dict(base_batch_size=64)
train_cfg = dict(type='beit_mm.IterLoop', max_iters=7000, val_interval=1000)
val_cfg = dict()
test_cfg = dict()
param_scheduler = [
    dict(type='LinearLR', start_factor=1e-9, by_epoch=False, begin=0, end=300),
    dict(type='CosineAnnealingLR', by_epoch=False, begin=300, end=7000, T_max=6700, eta_min_ratio=5e-3),
]
default_hooks = dict(
    logger=dict(interval=50), checkpoint=dict(by_epoch=False, interval=250, max_keep_ckpts=2))
log_processor = dict(
    by_epoch=False, custom_cfg=[dict(data_src='mim_loss', method_name='mean', window_size=1)])

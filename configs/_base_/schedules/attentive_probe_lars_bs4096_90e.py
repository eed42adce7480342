"""Attentive probes: LARS at 1.6 for 4096 images a step (0.1 for 256), 10 + 80 epochs, no weight decay, bfloat16."""
_base_ = '../default_runtime.py'

optim_wrapper = dict(
    type='beit_mm.AutocastOptimWrapper',
    dtype='bfloat16',
    optimizer=dict(type='beit_mm.LARS', lr=1.6, momentum=0.9))
auto_scale_lr = dict(base_batch_size=4096)
train_cfg = dict(type='beit_mm.EpochLoop', max_epochs=90, val_interval=5)
val_cfg = dict()
test_cfg = dict()
param_scheduler = [
    dict(type='LinearLR', start_factor=1e-9, begin=0, end=10, convert_to_iter_based=True),
    dict(type='CosineAnnealingLR', eta_min_ratio=0.0, begin=10, end=90, convert_to_iter_based=True),
]

"""Linear probes: AdamW at 4e-3 for 1024 images a step, half a cosine over 50 epochs, stepped by epoch, bfloat16."""
_base_ = '../default_runtime.py'

optim_wrapper = dict(
    type='beit_mm.AutocastOptimWrapper',
    dtype='bfloat16',
    optimizer=dict(type='AdamW', lr=4e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=1e-4, fused=True))
auto_scale_lr = dict(base_batch_size=1024)
train_cfg = dict(type='beit_mm.EpochLoop', max_epochs=50, val_interval=5)
val_cfg = dict()
test_cfg = dict()
param_scheduler = [dict(type='CosineAnnealingLR', eta_min=0, begin=0, end=50)]

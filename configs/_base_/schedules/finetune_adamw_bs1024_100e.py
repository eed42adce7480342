"""Fine-tuning: AdamW at 4e-3 for 1024 images a step, decayed by 0.65 a layer, 20 + 80 epochs, bfloat16, no clipping.

To keep and evaluate a moving average of the weights (released code: --model_ema):
--cfg-options default_hooks.ema.type=EMAHook default_hooks.ema.momentum=0.0001
With accumulation set its `interval` to accumulative_counts, because mmengine counts batches.
"""
_base_ = '../default_runtime.py'

optim_wrapper = dict(
    type='beit_mm.AutocastOptimWrapper',
    dtype='bfloat16',
    constructor='beit_mm.BEiTOptimWrapperConstructor',
    paramwise_cfg=dict(layer_decay_rate=0.65),
    optimizer=dict(type='AdamW', lr=4e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.05, fused=True))
auto_scale_lr = dict(base_batch_size=1024)
train_cfg = dict(type='beit_mm.EpochLoop', max_epochs=100, val_interval=5)
val_cfg = dict()
test_cfg = dict()
param_scheduler = [
    # From 0 (mmengine refuses a factor of exactly 0) to the peak at the last step of epoch 20.
    dict(type='LinearLR', start_factor=1e-9, begin=0, end=20, convert_to_iter_based=True),
    # To 1e-6 for the head; a ratio, so that the rates of lower layers end as much lower as they began.
    dict(type='CosineAnnealingLR', eta_min_ratio=2.5e-4, begin=20, end=100, convert_to_iter_based=True),
]

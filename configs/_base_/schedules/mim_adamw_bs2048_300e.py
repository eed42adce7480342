"""Pretraining: AdamW at 1.5e-3 for 2048 images a step, 10 + 290 epochs, bfloat16, gradients clipped at 3.

float16 with a loss scaler instead: --cfg-options optim_wrapper.dtype=float16
"""
_base_ = '../default_runtime.py'

optim_wrapper = dict(
    type='beit_mm.AutocastOptimWrapper',
    dtype='bfloat16',
    constructor='beit_mm.BEiTOptimWrapperConstructor',
    optimizer=dict(type='AdamW', lr=1.5e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.05, fused=True),
    clip_grad=dict(max_norm=3.0))
auto_scale_lr = dict(base_batch_size=2048)
train_cfg = dict(type='beit_mm.EpochLoop', max_epochs=300, val_interval=20)
val_cfg = dict()
test_cfg = dict()
param_scheduler = [
    # From 0 (mmengine refuses a factor of exactly 0) to the peak at the last step of epoch 10.
    dict(type='LinearLR', start_factor=1e-9, begin=0, end=10, convert_to_iter_based=True),
    dict(type='CosineAnnealingLR', eta_min_ratio=1e-5 / 1.5e-3, begin=10, end=300, convert_to_iter_based=True),
]
custom_hooks = [*_base_.custom_hooks, dict(type='beit_mm.ReconstructionHook')]
# mmengine smooths what is called a loss, over validations too.
log_processor = dict(custom_cfg=[dict(data_src='mim_loss', method_name='mean', window_size=1)])

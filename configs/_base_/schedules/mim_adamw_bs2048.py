"""Optimizer of pretraining: AdamW at 1.5e-3 for 2048 images a step, bfloat16, gradients clipped at 3.

float16 with a loss scaler instead: --cfg-options optim_wrapper.dtype=float16
"""
optim_wrapper = dict(
    type='beit_mm.AutocastOptimWrapper',
    dtype='bfloat16',
    constructor='beit_mm.BEiTOptimWrapperConstructor',
    optimizer=dict(
        type='AdamW', lr=1.5e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.05, fused=True),
    clip_grad=dict(max_norm=3.0))
auto_scale_lr = dict(base_batch_size=2048)
val_cfg = dict()
test_cfg = dict()

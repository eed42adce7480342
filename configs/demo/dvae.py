"""A small tokenizer: 1,024 visual tokens of 8 x 8 pixels, learned in minutes on two CPU cores.

Command: python tools/demo/draw_images.py
         python tools/train.py configs/demo/dvae.py
         The packaged one: --work-dir work_dirs/caltech101_dvae --cfg-options data_root=data/caltech101
Data:    data/demo/train and data/demo/val, to any depth. Other folders: --cfg-options data_root=images, and
         without images/val --no-validate
Batch:   1 process x 16 images, lr 2e-3
Steps:   3,000, five minutes of one CPU core with bfloat16
Expect:  on held-out images of Caltech-101 at 96 pixels recon_mae_01 0.062 from tokens, 0.060 from probabilities
Differs: from ../dvae/discrete_vae_8k_in1k.py in size, schedule and learning rate; the temperature ends at 1/8
"""
_base_ = ['../_base_/datasets/demo_images.py', '../_base_/default_runtime.py']

model = dict(
    type='beit_mm.DiscreteVAE',
    arch='conv',
    hidden=48,
    vocab_size=1024,
    embed_dims=64,
    num_levels=3,
    bottleneck_blocks=2,
    loss='mse',
    # The KL keeps the vocabulary in use.
    temperature=(1.0, 1 / 8),
    temperature_steps=3000,
    kl_weight=0.2,
    kl_steps=750,
    data_preprocessor=dict(type='beit_mm.TwoViewDataPreprocessor', mean=[0, 0, 0], std=[255, 255, 255]))

train_pipeline = [
    dict(type='beit_mm.LoadImage', cache_bytes=2**30),
    dict(type='beit_mm.TwoViewRandomResizedCrop', size=64, second_size=None, scale=(0.2, 1.0)),
    dict(type='beit_mm.PackViews'),
]
val_pipeline = [
    dict(type='beit_mm.LoadImage'),
    dict(type='beit_mm.TwoViewCenterCrop', size=96, second_size=None),
    dict(type='beit_mm.PackViews'),
]
train_dataloader = dict(batch_size=16, dataset=dict(pipeline=train_pipeline))
val_dataloader = dict(dataset=dict(pipeline=val_pipeline))
test_dataloader = val_dataloader
val_evaluator = dict(type='beit_mm.TokenizerMetric')
test_evaluator = val_evaluator

optim_wrapper = dict(
    type='beit_mm.AutocastOptimWrapper',
    dtype='bfloat16',
    optimizer=dict(type='AdamW', lr=2e-3, betas=(0.9, 0.99), weight_decay=1e-4, fused=True),
    clip_grad=dict(max_norm=1.0))
param_scheduler = [
    dict(type='LinearLR', start_factor=1e-9, by_epoch=False, begin=0, end=50),
    dict(type='CosineAnnealingLR', by_epoch=False, begin=50, end=3000, T_max=2950, eta_min_ratio=0.02),
]
train_cfg = dict(type='beit_mm.IterLoop', max_iters=3000, val_interval=1000)
val_cfg = dict()
test_cfg = dict()
auto_scale_lr = dict(base_batch_size=16)
default_hooks = dict(
    logger=dict(interval=50), checkpoint=dict(by_epoch=False, interval=100, max_keep_ckpts=2))
log_processor = dict(by_epoch=False)
custom_hooks = [*_base_.custom_hooks, dict(type='beit_mm.ReconstructionHook')]

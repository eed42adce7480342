"""BEiT v2's tokenizer at demo size: 512 visual tokens of 8 x 8 pixels from the packaged BEiT's features.

Command: python tools/train.py configs/demo/vqkd.py
Data:    as dvae.py
Batch:   1 process x 32 images, lr 1e-3
Steps:   1,000, ten minutes of one CPU core with bfloat16
Expect:  on 1,020 held-out images of Caltech-101, seeds 0 to 2: codes_used 512, perplexity 424, 419, 415,
         feature_distance 0.031, 0.032, 0.032 (data_root=data/caltech101, 24 November 2026)
Differs: from ../beit_v2/vqkd_base_in1k.py in size, teacher, schedule and learning rate, and in restarting codes that
         stand for fewer than one patch in ten steps; weights start as in a pretraining
"""
_base_ = ['../_base_/datasets/demo_images.py', '../_base_/default_runtime.py']

model = dict(
    type='beit_mm.VQKD',
    arch=dict(embed_dims=128, num_layers=3, num_heads=4),
    img_size=96,
    patch_size=8,
    vocab_size=512,
    code_dims=16,
    decoder_layers=1,
    restart_below=0.1,
    init_bound=0.02,
    teacher=dict(type='beit_mm.BEiTTeacher', checkpoint='demo', layer=2),
    teacher_dims=128,
    pixel_decoder=dict(hidden=48, width=64, bottleneck_blocks=2),
    data_preprocessor=dict(type='beit_mm.TwoViewDataPreprocessor', mean=[0, 0, 0], std=[255, 255, 255]))

train_pipeline = [
    dict(type='beit_mm.LoadImage', cache_bytes=2**30),
    dict(type='beit_mm.TwoViewRandomResizedCrop', size=96, second_size=None, scale=(0.2, 1.0)),
    dict(type='beit_mm.PackViews'),
]
val_pipeline = [
    dict(type='beit_mm.LoadImage'),
    dict(type='beit_mm.TwoViewCenterCrop', size=96, second_size=None),
    dict(type='beit_mm.PackViews'),
]
train_dataloader = dict(batch_size=32, dataset=dict(pipeline=train_pipeline))
val_dataloader = dict(dataset=dict(pipeline=val_pipeline))
test_dataloader = val_dataloader
val_evaluator = dict(type='beit_mm.TokenizerMetric')
test_evaluator = val_evaluator

optim_wrapper = dict(
    type='beit_mm.AutocastOptimWrapper',
    dtype='bfloat16',
    constructor='beit_mm.BEiTOptimWrapperConstructor',
    optimizer=dict(type='AdamW', lr=1e-3, betas=(0.9, 0.99), eps=1e-8, weight_decay=1e-4, fused=True))
param_scheduler = [
    dict(type='LinearLR', start_factor=1e-9, by_epoch=False, begin=0, end=50),
    dict(type='CosineAnnealingLR', by_epoch=False, begin=50, end=1000, T_max=950, eta_min_ratio=0.01),
]
train_cfg = dict(type='beit_mm.IterLoop', max_iters=1000, val_interval=500)
val_cfg = dict()
test_cfg = dict()
auto_scale_lr = dict(base_batch_size=32)
default_hooks = dict(
    logger=dict(interval=50), checkpoint=dict(by_epoch=False, interval=500, max_keep_ckpts=2))
log_processor = dict(by_epoch=False)
custom_hooks = [*_base_.custom_hooks, dict(type='beit_mm.ReconstructionHook')]

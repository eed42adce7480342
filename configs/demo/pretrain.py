"""A small BEiT pretrained on the tokens of a small tokenizer: 96-pixel images in 8 x 8 patches.

After:   the packaged tokenizer; one of your own: --cfg-options model.target_generator.checkpoint=FILE
Command: python tools/train.py configs/demo/pretrain.py
         The packaged one: --work-dir work_dirs/caltech101_pretrain --cfg-options data_root=data/caltech101
Data:    as dvae.py
Batch:   1 process x 64 images, lr 2e-3
Steps:   7,000, an hour of one CPU core with bfloat16; fewer: --steps 500
Expect:  on held-out images of Caltech-101 mim_loss 5.09, 4.75, 4.32 after 1,000, 3,000 and 7,000 steps (mim_acc 0.156),
         where token_entropy is 5.78 and position_entropy 5.75. What that is worth: docs/results.md
Differs: from ../beit/pretrain_800e.py in size (58 of 12 x 12 patches masked in blocks of 8 or more; tokens of as many
         pixels as patches, so that the second view is as large as the first), in crops of at least 30 % of an image,
         in beta2, and in having no stochastic depth
"""
_base_ = ['../_base_/datasets/demo_images.py', '../_base_/pretrain_runtime.py']

model = dict(
    type='beit_mm.BEiTPretrainer',
    data_preprocessor=dict(
        type='beit_mm.TwoViewDataPreprocessor',
        mean=[123.675, 116.28, 103.53],
        std=[58.395, 57.12, 57.375]),
    backbone=dict(
        type='beit_mm.BEiTBackbone',
        arch=dict(embed_dims=128, num_layers=5, num_heads=4),
        img_size=96,
        patch_size=8,
        masked_input=True),
    head=dict(type='beit_mm.BEiTMIMHead', embed_dims=128, vocab_size=1024),
    target_generator=dict(
        type='beit_mm.DiscreteVAE',
        arch='conv',
        hidden=48,
        vocab_size=1024,
        embed_dims=64,
        num_levels=3,
        bottleneck_blocks=2,
        checkpoint='demo'))

train_pipeline = [
    dict(type='beit_mm.LoadImage', cache_bytes=2**30),
    dict(type='beit_mm.TwoViewRandomResizedCrop', size=96, second_size=96, scale=(0.3, 1.0)),
    dict(type='beit_mm.TwoViewColorJitter', brightness=0.4, contrast=0.4, saturation=0.4),
    dict(type='beit_mm.BlockwiseMask', grid=(12, 12), num_masked=58, min_block=8),
    dict(type='beit_mm.PackViews'),
]
val_pipeline = [
    dict(type='beit_mm.LoadImage'),
    dict(type='beit_mm.TwoViewCenterCrop', size=96, second_size=96),
    dict(type='beit_mm.BlockwiseMask', grid=(12, 12), num_masked=58, min_block=8),
    dict(type='beit_mm.PackViews'),
]
train_dataloader = dict(batch_size=64, dataset=dict(pipeline=train_pipeline))
val_dataloader = dict(dataset=dict(pipeline=val_pipeline))
test_dataloader = val_dataloader
val_evaluator = dict(type='beit_mm.MIMMetric')
test_evaluator = val_evaluator

optim_wrapper = dict(
    type='beit_mm.AutocastOptimWrapper',
    dtype='bfloat16',
    constructor='beit_mm.BEiTOptimWrapperConstructor',
    optimizer=dict(
        type='AdamW', lr=2e-3, betas=(0.9, 0.98), eps=1e-8, weight_decay=0.05, fused=True),
    clip_grad=dict(max_norm=3.0))
param_scheduler = [
    dict(type='LinearLR', start_factor=1e-9, by_epoch=False, begin=0, end=300),
    dict(type='CosineAnnealingLR', by_epoch=False, begin=300, end=7000, T_max=6700, eta_min=1e-5),
]
train_cfg = dict(type='beit_mm.IterLoop', max_iters=7000, val_interval=1000)
auto_scale_lr = dict(base_batch_size=64)
default_hooks = dict(
    logger=dict(interval=50), checkpoint=dict(by_epoch=False, interval=250, max_keep_ckpts=2))
log_processor = dict(by_epoch=False)

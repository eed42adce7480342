"""Tokenizer table "re-implemented dVAE": the released code's discrete VAE, 8192 visual tokens, trained on ImageNet-1K.

Result:  0.0880 mean absolute error of normalised RGB values on ImageNet-1K, resolution and range not stated (paper,
           tokenizer table)
Model:   discrete VAE of strided convolutions and residual blocks, 20,081,411 parameters; 112 x 112 pixels
Command: tools/dist_train.sh configs/dvae/discrete_vae_8k_in1k.py 8
Test:    tools/dist_test.sh configs/dvae/discrete_vae_8k_in1k.py work_dirs/discrete_vae_8k_in1k/iter_50000.pth 8
Batch:   8 GPUs x 64 = 512 images, lr 1e-3
Steps:   50,000 updates, 1,000 of them warm-up
Data:    ImageNet-1K, 1,281,167 images, 20.0 times

Differs: the paper says only "based on DALLE-pytorch, 8K, ImageNet-1K without labels". The network is the class in the
         authors' code (microsoft/unilm `beit/modeling_discrete_vae.py`). Neither its weights nor its training were
         released, so batch, length and schedules are ours. DALLE-pytorch trains with batch 8, no KL and a learning rate
         that has vanished after 50,000 steps, and most of its vocabulary is never used
Anneal:  temperature 1 to 1/16 over the run, KL weight 0 to 0.5 over its first quarter
Options: DALLE-pytorch's network, two residual blocks at the bottleneck, 16.67 M parameters, a fifth of the arithmetic:
         --cfg-options model.bottleneck_blocks=2
         At 256 pixels: --cfg-options test_dataloader.dataset.pipeline.TwoViewCenterCrop.size=256
"""
_base_ = ['../_base_/datasets/mim_in1k.py', '../_base_/default_runtime.py']

model = dict(
    type='beit_mm.DiscreteVAE',
    arch='conv',
    hidden=256,
    vocab_size=8192,
    embed_dims=512,
    num_levels=3,
    bottleneck_blocks=None,  # one behind every level instead
    loss='mse',
    temperature=(1.0, 1 / 16),
    temperature_steps=50_000,
    kl_weight=0.5,
    kl_steps=12_500,
    data_preprocessor=dict(type='beit_mm.TwoViewDataPreprocessor', mean=[0, 0, 0], std=[255, 255, 255]))

train_pipeline = [
    dict(type='beit_mm.LoadImage'),
    dict(type='beit_mm.TwoViewRandomResizedCrop', size=112, second_size=None, scale=(0.2, 1.0)),
    dict(type='beit_mm.PackViews'),
]
val_pipeline = [
    dict(type='beit_mm.LoadImage'),
    dict(type='beit_mm.TwoViewCenterCrop', size=112, second_size=None),
    dict(type='beit_mm.PackViews'),
]
train_dataloader = dict(batch_size=64, dataset=dict(pipeline=train_pipeline))
val_dataloader = dict(batch_size=64, dataset=dict(pipeline=val_pipeline))
test_dataloader = val_dataloader
val_evaluator = dict(type='beit_mm.TokenizerMetric')
test_evaluator = val_evaluator
val_cfg = dict()
test_cfg = dict()

optim_wrapper = dict(
    type='beit_mm.AutocastOptimWrapper',
    dtype='float32',
    optimizer=dict(type='AdamW', lr=1e-3, betas=(0.9, 0.99), weight_decay=1e-4, fused=True),
    clip_grad=dict(max_norm=1.0))
auto_scale_lr = dict(base_batch_size=512)
param_scheduler = [
    dict(type='LinearLR', start_factor=1e-9, by_epoch=False, begin=0, end=1000),
    dict(
        type='CosineAnnealingLR', by_epoch=False, begin=1000, end=50_000, eta_min_ratio=0.02),
]
train_cfg = dict(type='beit_mm.IterLoop', max_iters=50_000, val_interval=5000)
log_processor = dict(by_epoch=False)
custom_hooks = [*_base_.custom_hooks, dict(type='beit_mm.ReconstructionHook')]
default_hooks = dict(checkpoint=dict(by_epoch=False, interval=5000))

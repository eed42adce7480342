"""DALL-E's tokenizer, trained on ImageNet-1K images: its networks, likelihood and schedules.

Result:  0.0856 mean absolute error of normalised RGB values on ImageNet-1K, resolution and range not stated (paper,
           tokenizer table)
Model:   DALL-E's discrete VAE, 97,616,006 parameters; 256 x 256 pixels
Command: tools/dist_train.sh configs/dvae/dalle_8k_in1k.py 16
Test:    tools/dist_test.sh configs/dvae/dalle_8k_in1k.py work_dirs/dalle_8k_in1k/iter_3000000.pth 16
Batch:   16 GPUs x 32 = 512 images, lr 1e-4
Steps:   3,000,000 updates
Data:    ImageNet-1K, 1,281,167 images, 1198.9 times

Differs: from DALL-E in the images (DALL-E: 250 million from the web), in the crop (a random box of at least 40 % of the
         image, antialiased bicubic) and in float32 (DALL-E: mixed precision)
Anneal:  temperature 1 to 1/16 over the first 150,000 steps, KL weight 0 to 6.6 over the first 5,000,
         lr to 1.25e-6 over the first 1,200,000 (DALL-E paper, appendix A)
Options: DALL-E's own weights: python tools/test.py configs/dvae/dalle_8k_in1k.py --cfg-options
           model.checkpoint=encoder.pkl model.decoder_checkpoint=decoder.pkl
         At 112 pixels: --cfg-options test_dataloader.dataset.pipeline.TwoViewCenterCrop.size=112
"""
_base_ = ['../_base_/datasets/mim_in1k.py', '../_base_/default_runtime.py']

model = dict(
    type='beit_mm.DiscreteVAE',
    arch='dalle',
    hidden=256,
    vocab_size=8192,
    embed_dims=128,
    loss='laplace',
    temperature=(1.0, 1 / 16),
    temperature_steps=150_000,
    kl_weight=6.6,
    kl_steps=5000,
    data_preprocessor=dict(type='beit_mm.TwoViewDataPreprocessor', mean=[0, 0, 0], std=[255, 255, 255]))

train_pipeline = [
    dict(type='beit_mm.LoadImage'),
    dict(
        type='beit_mm.TwoViewRandomResizedCrop',
        size=256,
        second_size=None,
        scale=(0.4, 1.0),
        ratio=(1.0, 1.0)),
    dict(type='beit_mm.PackViews'),
]
val_pipeline = [
    dict(type='beit_mm.LoadImage'),
    dict(type='beit_mm.TwoViewCenterCrop', size=256, second_size=None),
    dict(type='beit_mm.PackViews'),
]
train_dataloader = dict(batch_size=32, dataset=dict(pipeline=train_pipeline))
val_dataloader = dict(batch_size=32, dataset=dict(pipeline=val_pipeline))
test_dataloader = val_dataloader
val_evaluator = dict(type='beit_mm.TokenizerMetric')
test_evaluator = val_evaluator
val_cfg = dict()
test_cfg = dict()

optim_wrapper = dict(
    type='beit_mm.AutocastOptimWrapper',
    dtype='float32',
    optimizer=dict(
        type='AdamW', lr=1e-4, betas=(0.9, 0.999), eps=1e-8, weight_decay=1e-4, fused=True))
auto_scale_lr = dict(base_batch_size=512)
param_scheduler = [
    dict(
        type='CosineAnnealingLR', by_epoch=False, end=1_200_000, eta_min_ratio=0.0125)
]
train_cfg = dict(type='beit_mm.IterLoop', max_iters=3_000_000, val_interval=50_000)
log_processor = dict(by_epoch=False)
custom_hooks = [*_base_.custom_hooks, dict(type='beit_mm.ReconstructionHook')]
# DALL-E averages its weights with a factor of 0.999 a step; the average is what checkpoints hold.
default_hooks = dict(
    checkpoint=dict(by_epoch=False, interval=10_000),
    ema=dict(type='EMAHook', momentum=0.001))

"""pretrain.py on the tokens of vqkd.py instead of the discrete VAE's.

After:   vqkd.py
Command: python tools/train.py configs/demo/pretrain_vqkd.py
Data:    as dvae.py
Batch:   1 process x 64 images, lr 2e-3
Steps:   7,000; fewer: --steps 500
Differs: from pretrain.py in the tokenizer
"""
_base_ = [
    '../_base_/models/demo_mim.py',
    '../_base_/datasets/demo_images.py',
    '../_base_/schedules/demo_mim_7k.py',
]

model = dict(
    head=dict(vocab_size=512),
    target_generator=dict(
        _delete_=True,
        type='beit_mm.VQKDTokenizer',
        checkpoint='work_dirs/vqkd/iter_1000.pth',
        arch=dict(embed_dims=128, num_layers=3, num_heads=4),
        img_size=96,
        patch_size=8,
        vocab_size=512,
        code_dims=16,
        pixel_decoder=dict(hidden=48, width=64, bottleneck_blocks=2)))

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
custom_hooks = [*_base_.custom_hooks, dict(type='beit_mm.ReconstructionHook')]

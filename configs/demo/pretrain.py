"""A small BEiT pretrained on the tokens of a small tokenizer: 96-pixel images in 8 x 8 patches.

After:   the packaged tokenizer, or your own: --cfg-options model.target_generator.checkpoint=FILE
Command: python tools/train.py configs/demo/pretrain.py
         The packaged one: --work-dir work_dirs/caltech101_pretrain --cfg-options data_root=data/caltech101
Data:    as dvae.py
Batch:   1 process x 64 images, lr 2e-3
Steps:   7,000, an hour of one CPU core with bfloat16; fewer: --steps 500
Expect:  on held-out images of Caltech-101 mim_loss 5.09, 4.75, 4.32 after 1,000, 3,000 and 7,000 steps (mim_acc 0.156),
         where token_entropy is 5.78 and position_entropy 5.75. For their meaning see docs/own_images.md
Differs: from ../beit/pretrain_800e.py in size (58 of 12 x 12 patches masked, in blocks of 8 or more; tokens as large as
         patches, so that both views have the same size), in crops of at least 30 % of an image, in beta2, and in having
         no stochastic depth
"""
_base_ = [
    '../_base_/models/demo_mim.py',
    '../_base_/datasets/demo_images.py',
    '../_base_/schedules/demo_mim_7k.py',
]

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

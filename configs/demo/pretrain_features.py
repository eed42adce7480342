"""pretrain.py on the features of the packaged BEiT instead of visual tokens.

Command: python tools/train.py configs/demo/pretrain_features.py
Data:    as dvae.py
Batch:   1 process x 64 images, lr 2e-3
Steps:   7,000; fewer: --steps 500
Expect:  on Caltech-101, 8,000 steps with larger first weights in each MLP: a linear layer 46.0 % (tokens 39.3)
Teacher: another, such as --cfg-options model.target_generator.teacher=dinov2_vits14_pretrain model.head.target_dims=384
         for a second stage with fresh weights, as dBOT's, the result of the first:
         --work-dir work_dirs/pretrain_features_2 --cfg-options
         model.target_generator.teacher=work_dirs/pretrain_features/iter_7000.pth
Differs: from pretrain.py in the targets, in the head and in having one view
"""
_base_ = [
    '../_base_/models/demo_mim.py',
    '../_base_/datasets/demo_images.py',
    '../_base_/schedules/demo_mim_7k.py',
]

model = dict(
    head=dict(_delete_=True, type='beit_mm.FeatureRegressionHead', embed_dims=128, target_dims=128),
    target_generator=dict(_delete_=True, type='beit_mm.FeatureTargets', teacher='demo', layers=-1, normalize=True))

train_pipeline = [
    dict(type='beit_mm.LoadImage', cache_bytes=2**30),
    dict(type='beit_mm.TwoViewRandomResizedCrop', size=96, second_size=None, scale=(0.3, 1.0)),
    dict(type='beit_mm.TwoViewColorJitter', brightness=0.4, contrast=0.4, saturation=0.4),
    dict(type='beit_mm.BlockwiseMask', grid=(12, 12), num_masked=58, min_block=8),
    dict(type='beit_mm.PackViews'),
]
val_pipeline = [
    dict(type='beit_mm.LoadImage'),
    dict(type='beit_mm.TwoViewCenterCrop', size=96, second_size=None),
    dict(type='beit_mm.BlockwiseMask', grid=(12, 12), num_masked=58, min_block=8),
    dict(type='beit_mm.PackViews'),
]
train_dataloader = dict(batch_size=64, dataset=dict(pipeline=train_pipeline))
val_dataloader = dict(dataset=dict(pipeline=val_pipeline))
test_dataloader = val_dataloader
val_evaluator = dict(type='beit_mm.FeatureMetric')
test_evaluator = val_evaluator

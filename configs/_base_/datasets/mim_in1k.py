"""ImageNet-1K without labels, in two views with a blockwise mask, 128 images a GPU.

data/imagenet/train and data/imagenet/val, folders nested to any depth.
"""
train_pipeline = [
    dict(type='beit_mm.LoadImage'),
    dict(type='beit_mm.TwoViewRandomResizedCrop', size=224, second_size=112),
    dict(type='beit_mm.TwoViewColorJitter', brightness=0.4, contrast=0.4, saturation=0.4),
    dict(type='beit_mm.BlockwiseMask', grid=(14, 14), num_masked=75),
    dict(type='beit_mm.PackViews'),
]
val_pipeline = [
    dict(type='beit_mm.LoadImage'),
    dict(type='beit_mm.TwoViewCenterCrop', size=224, second_size=112),
    dict(type='beit_mm.BlockwiseMask', grid=(14, 14), num_masked=75),
    dict(type='beit_mm.PackViews'),
]

train_dataloader = dict(
    batch_size=128, num_workers=8, persistent_workers=True, pin_memory=True, drop_last=True,
    sampler=dict(type='beit_mm.SeededSampler', shuffle=True),
    collate_fn=dict(type='default_collate'),
    dataset=dict(
        type='beit_mm.UnlabeledImages', data_root='data/imagenet/train', on_error='skip', pipeline=train_pipeline))
val_dataloader = dict(
    batch_size=128, num_workers=8, persistent_workers=True, pin_memory=True,
    sampler=dict(type='beit_mm.SeededSampler', shuffle=False, seed=0),
    collate_fn=dict(type='default_collate'),
    dataset=dict(
        type='beit_mm.UnlabeledImages', data_root='data/imagenet/val', test_mode=True, pipeline=val_pipeline))
val_evaluator = dict(type='beit_mm.MIMMetric')
test_dataloader = val_dataloader
test_evaluator = val_evaluator

"""Two views and a blockwise mask of ImageNet-1K images; no label is read, folders may be nested in any depth."""
_base_ = './in1k.py'

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

train_dataloader = dict(dataset=dict(type='beit_mm.UnlabeledImages', pipeline=train_pipeline))
val_dataloader = dict(dataset=dict(type='beit_mm.UnlabeledImages', pipeline=val_pipeline))
val_evaluator = dict(type='beit_mm.MIMMetric')
test_dataloader = val_dataloader
test_evaluator = val_evaluator

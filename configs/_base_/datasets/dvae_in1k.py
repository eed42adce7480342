"""Single views of ImageNet-1K images for training a tokenizer; no label is read.

data/imagenet/train/<class>/*.JPEG and data/imagenet/val/**/*.JPEG, in any depth of folders. The leaf sets
the size of the views and the batch.
"""
train_dataloader = dict(
    num_workers=8,
    persistent_workers=True,
    pin_memory=True,
    drop_last=True,
    sampler=dict(type='beit_mm.SeededSampler', shuffle=True),
    collate_fn=dict(type='default_collate'),
    dataset=dict(type='beit_mm.UnlabeledImages', data_root='data/imagenet/train', on_error='skip'))
val_dataloader = dict(
    num_workers=8,
    persistent_workers=True,
    pin_memory=True,
    sampler=dict(type='beit_mm.SeededSampler', shuffle=False, seed=0),
    collate_fn=dict(type='default_collate'),
    dataset=dict(type='beit_mm.UnlabeledImages', data_root='data/imagenet/val', test_mode=True))
test_dataloader = val_dataloader
val_evaluator = dict(type='beit_mm.TokenizerMetric')
test_evaluator = val_evaluator
val_cfg = dict()
test_cfg = dict()

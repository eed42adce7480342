"""Images in a folder for each class, in data/demo/train and data/demo/val, at 96 pixels, lightly augmented."""
data_root = 'data/demo'

train_pipeline = [
    dict(type='beit_mm.LoadImage', cache_bytes=2**30),
    dict(type='beit_mm.RandomResizedCrop', size=96, scale=(0.3, 1.0)),  # with flip
    dict(type='beit_mm.RandomErasing', prob=0.25),
    dict(type='PackInputs', meta_keys=('img_path', 'erase_box', 'unreadable')),
]
test_pipeline = [
    dict(type='beit_mm.LoadImage'),
    dict(type='ResizeEdge', scale=108, edge='short', backend='pillow', interpolation='bicubic'),
    dict(type='CenterCrop', crop_size=96),
    dict(type='PackInputs'),
]
train_dataloader = dict(
    batch_size=64, num_workers=1, persistent_workers=True, drop_last=True,
    sampler=dict(type='beit_mm.SeededSampler', shuffle=True),
    collate_fn=dict(type='default_collate'),
    dataset=dict(
        type='beit_mm.ImageFolder', data_root=data_root, data_prefix='train', on_error='skip', pipeline=train_pipeline))
val_dataloader = dict(
    batch_size=64, num_workers=1, persistent_workers=True,
    sampler=dict(type='beit_mm.SeededSampler', shuffle=False, seed=0),
    collate_fn=dict(type='default_collate'),
    dataset=dict(
        type='beit_mm.ImageFolder', data_root=data_root, data_prefix='val', test_mode=True, pipeline=test_pipeline))
val_evaluator = dict(type='Accuracy', topk=1)
test_dataloader = val_dataloader
test_evaluator = val_evaluator

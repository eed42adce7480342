"""Images without labels in data/demo/train and data/demo/val. The leaf sets pipelines and batch."""
data_root = 'data/demo'

train_dataloader = dict(
    num_workers=1, persistent_workers=True, drop_last=True,
    sampler=dict(type='beit_mm.SeededSampler', shuffle=True),
    collate_fn=dict(type='default_collate'),
    dataset=dict(type='beit_mm.UnlabeledImages', data_root=data_root, data_prefix='train', on_error='skip'))
val_dataloader = dict(
    batch_size=64, num_workers=1, persistent_workers=True,
    sampler=dict(type='beit_mm.SeededSampler', shuffle=False, seed=0),
    collate_fn=dict(type='default_collate'),
    dataset=dict(type='beit_mm.UnlabeledImages', data_root=data_root, data_prefix='val', test_mode=True))
test_dataloader = val_dataloader

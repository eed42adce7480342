"""ImageNet-1K: data/imagenet/train/<class>/*.JPEG and data/imagenet/val/<class>/*.JPEG, 128 images a GPU.

The files that inherit from this one say what is read of an image, and in which form.
"""
train_dataloader = dict(
    batch_size=128,
    num_workers=8,
    persistent_workers=True,
    pin_memory=True,
    drop_last=True,
    sampler=dict(type='beit_mm.SeededSampler', shuffle=True),
    collate_fn=dict(type='default_collate'),
    dataset=dict(data_root='data/imagenet/train', on_error='skip'),
)
val_dataloader = dict(
    batch_size=128,
    num_workers=8,
    persistent_workers=True,
    pin_memory=True,
    sampler=dict(type='beit_mm.SeededSampler', shuffle=False, seed=0),
    collate_fn=dict(type='default_collate'),
    dataset=dict(data_root='data/imagenet/val', test_mode=True),
)
test_dataloader = val_dataloader

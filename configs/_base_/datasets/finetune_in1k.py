"""ImageNet-1K at 224 pixels with labels, in the sorted order of the folders, 128 images a GPU.

data/imagenet/train/<class>/*.JPEG and data/imagenet/val/<class>/*.JPEG. Rotations and shifts are filled with ImageNet's
mean colour; BEiT+ sets another colour, because its mean differs.
"""
train_pipeline = [
    dict(type='beit_mm.LoadImage'),
    dict(type='beit_mm.RandomResizedCrop', size=224),  # and flips every other image
    dict(
        type='beit_mm.RandAugment', policies='timm_increasing', num_policies=2, total_level=10, magnitude_level=9,
        magnitude_std=0.5, hparams=dict(pad_val=[124, 116, 104], interpolation='bicubic')),
    dict(type='beit_mm.RandomErasing', prob=0.25),
    dict(type='PackInputs', meta_keys=('img_path', 'erase_box', 'unreadable')),
]
test_pipeline = [
    dict(type='beit_mm.LoadImage'),
    dict(type='ResizeEdge', scale=256, edge='short', backend='pillow', interpolation='bicubic'),
    dict(type='CenterCrop', crop_size=224),
    dict(type='PackInputs'),
]

train_dataloader = dict(
    batch_size=128, num_workers=8, persistent_workers=True, pin_memory=True, drop_last=True,
    sampler=dict(type='beit_mm.SeededSampler', shuffle=True),
    collate_fn=dict(type='default_collate'),
    dataset=dict(
        type='beit_mm.ImageFolder', data_root='data/imagenet/train', on_error='skip', pipeline=train_pipeline))
val_dataloader = dict(
    batch_size=128, num_workers=8, persistent_workers=True, pin_memory=True,
    sampler=dict(type='beit_mm.SeededSampler', shuffle=False, seed=0),
    collate_fn=dict(type='default_collate'),
    dataset=dict(
        type='beit_mm.ImageFolder', data_root='data/imagenet/val', test_mode=True, pipeline=test_pipeline))
val_evaluator = dict(type='Accuracy', topk=(1, 5))
test_dataloader = val_dataloader
test_evaluator = val_evaluator

"""A pretraining that logs what its features are worth after each validation: k-NN of images, and of patches."""

_base_ = '../../configs/beit/pretrain_300e.py'

pipeline = [
    dict(type='beit_mm.LoadImage'),
    dict(type='ResizeEdge', scale=256, edge='short', backend='pillow'),
    dict(type='CenterCrop', crop_size=224),
    dict(type='PackInputs'),
]
sampler = dict(type='beit_mm.SeededSampler', shuffle=False)
loader = dict(batch_size=64, num_workers=4, sampler=sampler, collate_fn=dict(type='default_collate'))
images = dict(type='beit_mm.ImageFolder', pipeline=pipeline)
knn = dict(
    type='beit_mm.KNNHook',
    train_dataloader=dict(loader, dataset=dict(images, data_root='data/imagenet/train')),
    val_dataloader=dict(loader, dataset=dict(images, data_root='data/imagenet/val')),
)
folder = dict(data_root='data/camvid', classes='classes.txt', reduce_zero_label=True)
training = dict(img_path='images/training', seg_map_path='annotations/training')
validation = dict(img_path='images/validation', seg_map_path='annotations/validation')
dense_knn = dict(
    type='beit_mm.DenseKNNHook',
    train=dict(folder, data_prefix=training),
    val=dict(folder, data_prefix=validation),
    short_side=160,
    max_images=100,
)
default_hooks = dict(knn=knn, dense_knn=dense_knn)

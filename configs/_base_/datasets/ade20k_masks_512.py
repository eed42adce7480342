"""ADE20K at 512 pixels as EoMT is trained: the long side is 512 times 0.5 to 2 before the crop, which is padded."""
_base_ = './ade20k_512.py'

train_pipeline = [
    dict(type='beit_mm.LoadImage'),
    dict(type='beit_mm.LoadAnnotation'),
    dict(type='RandomResize', scale=(512, 512), ratio_range=(0.5, 2.0), keep_ratio=True),
    dict(type='RandomCrop', crop_size=(512, 512), cat_max_ratio=1.0),
    dict(type='RandomFlip', prob=0.5),
    dict(type='PhotoMetricDistortion'),
    dict(
        type='PackSegInputs',
        meta_keys=('img_path', 'seg_map_path', 'ori_shape', 'img_shape', 'scale_factor', 'flip',
                   'flip_direction', 'reduce_zero_label', 'unreadable')),
]
train_dataloader = dict(dataset=dict(pipeline=train_pipeline))

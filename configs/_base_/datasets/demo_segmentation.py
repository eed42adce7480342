"""Images and label maps in data/demo, in 128-pixel crops: 13 classes, 0 is unlabelled."""
data_root = 'data/demo'

train_pipeline = [
    dict(type='beit_mm.LoadImage', cache_bytes=2**30),
    dict(type='beit_mm.LoadAnnotation'),
    dict(type='RandomResize', scale=(2048, 160), ratio_range=(0.75, 1.5), keep_ratio=True),
    dict(type='RandomCrop', crop_size=(128, 128), cat_max_ratio=0.75),
    dict(type='RandomFlip', prob=0.5),
    dict(
        type='PackSegInputs',
        meta_keys=('img_path', 'seg_map_path', 'ori_shape', 'img_shape', 'scale_factor', 'flip',
                   'flip_direction', 'reduce_zero_label', 'unreadable')),
]
test_pipeline = [
    # beit_mm.LoadImage by the name that mmseg's inferencers look for
    dict(type='LoadImageFromFile', _scope_='beit_mm'),
    dict(type='Resize', scale=(2048, 160), keep_ratio=True),
    # after the resizing: the annotation keeps the image's size
    dict(type='beit_mm.LoadAnnotation'),
    dict(type='PackSegInputs'),
]
tta_pipeline = [
    dict(type='beit_mm.LoadImage'),
    dict(type='beit_mm.LoadAnnotation'),
    dict(type='beit_mm.MultiScaleViews', short_side=160, crop_size=(128, 128)),
]
tta_model = dict(type='beit_mm.MultiScaleTTA')

train_dataloader = dict(
    batch_size=8, num_workers=1, persistent_workers=True, drop_last=True,
    sampler=dict(type='beit_mm.SeededSampler', shuffle=True),
    dataset=dict(
        type='beit_mm.SegmentationFolder',
        data_root=data_root,
        data_prefix=dict(img_path='train', seg_map_path='annotations/train'),
        classes='meta/segmentation_classes.txt',
        reduce_zero_label=True,
        on_error='skip',
        pipeline=train_pipeline))
val_dataloader = dict(
    batch_size=1, num_workers=1, persistent_workers=True,
    sampler=dict(type='beit_mm.SeededSampler', shuffle=False, seed=0),
    dataset=dict(
        type='beit_mm.SegmentationFolder',
        data_root=data_root,
        data_prefix=dict(img_path='val', seg_map_path='annotations/val'),
        classes='meta/segmentation_classes.txt',
        reduce_zero_label=True,
        test_mode=True,
        pipeline=test_pipeline))
val_evaluator = dict(type='beit_mm.IoUMetric', iou_metrics=['mIoU'])
test_dataloader = val_dataloader
test_evaluator = val_evaluator

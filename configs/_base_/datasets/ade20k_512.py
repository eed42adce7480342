"""ADE20K's 150 classes at 512 pixels: data/ade20k/{images,annotations}/{training,validation}.

Unpack the official archive, ADEChallengeData2016.zip. For your own classes in the same layout, write a config of a few
lines on top of any config with this base:

    _base_ = 'configs/beit/upernet_512_ade20k_160k.py'
    data = dict(data_root='data/mine', classes=['sky', 'road'], reduce_zero_label=False)  # True: 0 marks unlabelled
    train_dataloader = dict(dataset=data)
    val_dataloader = dict(dataset=data)
    test_dataloader = val_dataloader
    model = dict(decode_head=dict(num_classes=2), auxiliary_head=dict(num_classes=2))
    # of SETR-PUP: auxiliary_head=[dict(head, num_classes=2) for head in _base_.model.auxiliary_head]

Without `seg_map_path` in `data_prefix` images need no label maps. Then test_evaluator.format_only=True
test_evaluator.output_dir=DIR only writes predictions, numbered as ADE20K's server expects.
"""
train_pipeline = [
    dict(type='beit_mm.LoadImage'),
    dict(type='beit_mm.LoadAnnotation'),
    dict(type='RandomResize', scale=(2048, 512), ratio_range=(0.5, 2.0), keep_ratio=True),
    dict(type='RandomCrop', crop_size=(512, 512), cat_max_ratio=0.75),
    dict(type='RandomFlip', prob=0.5),
    # made for BGR; on RGB it turns the hue the other way round, by a random angle that has both signs
    dict(type='PhotoMetricDistortion'),
    dict(
        type='PackSegInputs',
        meta_keys=('img_path', 'seg_map_path', 'ori_shape', 'img_shape', 'scale_factor', 'flip',
                   'flip_direction', 'reduce_zero_label', 'unreadable')),
]
test_pipeline = [
    # beit_mm.LoadImage by the name that mmseg's inferencers look for
    dict(type='LoadImageFromFile', _scope_='beit_mm'),
    dict(type='Resize', scale=(2048, 512), keep_ratio=True),
    # after the resizing: the annotation keeps the image's size
    dict(type='beit_mm.LoadAnnotation'),
    dict(type='PackSegInputs'),
]
# --tta: ratios 0.5, 0.75, 1, 1.25, 1.5 and 1.75, each with its mirror image, no short side below the window
tta_pipeline = [
    dict(type='beit_mm.LoadImage'),
    dict(type='beit_mm.LoadAnnotation'),
    dict(type='beit_mm.MultiScaleViews', short_side=512, crop_size=(512, 512)),
]
tta_model = dict(type='beit_mm.MultiScaleTTA')

train_dataloader = dict(
    batch_size=2,
    num_workers=4,
    persistent_workers=True,
    pin_memory=True,
    drop_last=True,
    sampler=dict(type='beit_mm.SeededSampler', shuffle=True),
    dataset=dict(
        type='beit_mm.SegmentationFolder',
        data_root='data/ade20k',
        data_prefix=dict(img_path='images/training', seg_map_path='annotations/training'),
        classes='mmseg.ADE20KDataset',
        reduce_zero_label=True,
        on_error='skip',
        pipeline=train_pipeline))
val_dataloader = dict(
    batch_size=1,
    num_workers=4,
    persistent_workers=True,
    sampler=dict(type='beit_mm.SeededSampler', shuffle=False, seed=0),
    dataset=dict(
        type='beit_mm.SegmentationFolder',
        data_root='data/ade20k',
        data_prefix=dict(img_path='images/validation', seg_map_path='annotations/validation'),
        classes='mmseg.ADE20KDataset',
        reduce_zero_label=True,
        test_mode=True,
        pipeline=test_pipeline))
val_evaluator = dict(type='beit_mm.IoUMetric', iou_metrics=['mIoU'])
test_dataloader = val_dataloader
test_evaluator = val_evaluator

"""BEiT+ Large with UperNet on ADE20K at 640 pixels after ImageNet-22K: `beit_large_patch16_640_pt22k_ft22ktoade20k`.

Result:  56.7 ADE20K mIoU, single scale (paper, comparison with supervised pretraining)
         57.0 ADE20K mIoU, all scales with flip (paper, comparison with supervised pretraining)
         56.7 ADE20K mIoU, single scale (microsoft/unilm README)
         57.0 ADE20K mIoU, all scales with flip (microsoft/unilm README)
         56.33 ADE20K mIoU, single scale (mmsegmentation metafile, of its own training)
         56.84 ADE20K mIoU, all scales with flip (mmsegmentation metafile, of its own training)
Model:   ViT-Large, relative position bias in every block, LayerScale, 441,271,084 parameters; 640 x 640 pixels
Command: tools/dist_train.sh configs/beit_plus/pretrain_large_in22k_150e.py 16
         tools/dist_train.sh configs/beit_plus/finetune_large_in22k_90e.py 16
         tools/dist_train.sh configs/beit_plus/upernet_large_640_ade20k_160k_after_in22k.py 8
         The last from the released weights:
           --cfg-options model.backbone.init_cfg.checkpoint=beit_large_patch16_224_pt22k_ft22k
Test:    tools/dist_test.sh configs/beit_plus/upernet_large_640_ade20k_160k_after_in22k.py \
           work_dirs/beit_plus_upernet_large_640_ade20k_160k_after_in22k/iter_320000.pth 8 [--tta]
Batch:   8 GPUs x 1, an update every 2 batches = 16 images, lr 2e-5
Steps:   160,000 updates, as max_iters counts 320,000 batches, 1,500 of them warm-up
Data:    ADE20K, 20,210 images, 126.7 times
Cost:    11,978 GFLOP an image forward and backward; 68 GPU hours of an A100 at 40 %

Differs: from the released upernet_beit_large_24_640_slide_160k_ade20k_pt2ft.py in the same points as
         upernet_640_ade20k_160k_after_in22k.py from its released config. Steps, warm-up and schedule count batches, as
         in the released config: there are 320,000, and the rate falls until the last (mmseg's config ends the schedule
         at half). A single process needs batches of two, because batch norm needs more than one value in a map of one
         pixel.
Options: With room for two images a GPU: --cfg-options train_dataloader.batch_size=2 optim_wrapper.accumulative_counts=1
         train_cfg.max_iters=160000 param_scheduler.LinearLR.end=1501 param_scheduler.PolyLR.end=160001
"""
_base_ = [
    '../_base_/models/upernet_base.py',
    '../_base_/datasets/ade20k_512.py',
    '../_base_/schedules/segment_adamw_bs16_160k.py',
]

work_dir = 'work_dirs/beit_plus_upernet_large_640_ade20k_160k_after_in22k'
model = dict(
    data_preprocessor=dict(size=(640, 640)),
    backbone=dict(
        arch='large',
        img_size=640,
        out_indices=(7, 11, 15, 23),
        abs_pos_embed=False,
        rel_pos_bias='per_layer',
        layer_scale_init=1e-6,
        drop_path_rate=0.2,
        init_cfg=dict(type='Pretrained', checkpoint='work_dirs/beit_plus_finetune_large_in22k_90e/epoch_90.pth')),
    neck=dict(embed_dim=1024),
    decode_head=dict(in_channels=[1024, 1024, 1024, 1024], channels=1024),
    auxiliary_head=dict(in_channels=1024),
    test_cfg=dict(crop_size=(640, 640), stride=(426, 426)))

train_pipeline = [
    dict(type='beit_mm.LoadImage'),
    dict(type='beit_mm.LoadAnnotation'),
    dict(type='RandomResize', scale=(2560, 640), ratio_range=(0.5, 2.0), keep_ratio=True),
    dict(type='RandomCrop', crop_size=(640, 640), cat_max_ratio=0.75),
    dict(type='RandomFlip', prob=0.5),
    dict(type='PhotoMetricDistortion'),
    dict(
        type='PackSegInputs',
        meta_keys=('img_path', 'seg_map_path', 'ori_shape', 'img_shape', 'scale_factor', 'flip',
                   'flip_direction', 'reduce_zero_label', 'unreadable')),
]
test_pipeline = [
    dict(type='LoadImageFromFile', _scope_='beit_mm'),
    dict(type='Resize', scale=(2560, 640), keep_ratio=True),
    dict(type='beit_mm.LoadAnnotation'),
    dict(type='PackSegInputs'),
]
tta_pipeline = [
    dict(type='beit_mm.LoadImage'),
    dict(type='beit_mm.LoadAnnotation'),
    dict(type='beit_mm.MultiScaleViews', short_side=640, crop_size=(640, 640)),
]
train_dataloader = dict(batch_size=1, dataset=dict(pipeline=train_pipeline))
val_dataloader = dict(dataset=dict(pipeline=test_pipeline))
test_dataloader = val_dataloader

optim_wrapper = dict(
    accumulative_counts=2, paramwise_cfg=dict(layer_decay_rate=0.95), optimizer=dict(lr=2e-5))
train_cfg = dict(max_iters=320000, val_interval=32000)
param_scheduler = [
    dict(type='LinearLR', start_factor=1e-6, by_epoch=False, begin=0, end=3001),
    dict(type='PolyLR', power=1.0, eta_min=0, by_epoch=False, begin=0, end=320001),
]

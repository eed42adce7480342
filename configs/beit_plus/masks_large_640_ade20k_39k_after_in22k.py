"""BEiT+ Large whose last blocks classify masks on ADE20K at 640 pixels after ImageNet-22K.

Result:  none published
Model:   ViT-Large, relative position bias in every block, LayerScale, 317,341,335 parameters; 640 x 640 pixels
Command: tools/dist_train.sh configs/beit_plus/pretrain_large_in22k_150e.py 16
         tools/dist_train.sh configs/beit_plus/finetune_large_in22k_90e.py 16
         tools/dist_train.sh configs/beit_plus/masks_large_640_ade20k_39k_after_in22k.py 8
         The last from the released weights:
           --cfg-options model.backbone.init_cfg.checkpoint=beit_large_patch16_224_pt22k_ft22k
Test:    tools/dist_test.sh configs/beit_plus/masks_large_640_ade20k_39k_after_in22k.py \
           work_dirs/beit_plus_masks_large_640_ade20k_39k_after_in22k/iter_39120.pth 8 [--tta]
Batch:   8 GPUs x 2 = 16 images, lr 1e-4
Steps:   39,120 updates, 1,500 of them warm-up
Data:    ADE20K, 20,210 images, 31.0 times
Cost:    4,815 GFLOP an image forward and backward; 6.7 GPU hours of an A100 at 40 %

Differs: as masks_512_ade20k_39k_after_in22k.py does, and in the size of images. Not run here.
"""
_base_ = [
    '../_base_/models/masks_base.py',
    '../_base_/datasets/ade20k_512.py',
    '../_base_/schedules/masks_adamw_bs16_39k.py',
]

work_dir = 'work_dirs/beit_plus_masks_large_640_ade20k_39k_after_in22k'
model = dict(
    data_preprocessor=dict(size=(640, 640)),
    backbone=dict(
        arch='large',
        img_size=640,
        abs_pos_embed=False,
        rel_pos_bias='per_layer',
        layer_scale_init=1e-6,
        drop_path_rate=0.2,
        init_cfg=dict(type='Pretrained', checkpoint='work_dirs/beit_plus_finetune_large_in22k_90e/epoch_90.pth')),
    decode_head=dict(in_channels=1024, num_blocks=4),
    test_cfg=dict(crop_size=(640, 640), stride=(426, 426)))

train_pipeline = [
    dict(type='beit_mm.LoadImage'),
    dict(type='beit_mm.LoadAnnotation'),
    dict(type='RandomResize', scale=(640, 640), ratio_range=(0.5, 2.0), keep_ratio=True),
    dict(type='RandomCrop', crop_size=(640, 640), cat_max_ratio=1.0),
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
train_dataloader = dict(dataset=dict(pipeline=train_pipeline))
val_dataloader = dict(dataset=dict(pipeline=test_pipeline))
test_dataloader = val_dataloader

"""BEiT+ Base with UperNet on ADE20K at 640 pixels after ImageNet-22K: `beit_base_patch16_640_pt22k_ft22ktoade20k`.

Result:  53.6 ADE20K mIoU, single scale (paper, comparison with supervised pretraining)
         54.2 ADE20K mIoU, all scales with flip (paper, comparison with supervised pretraining)
         53.61 ADE20K mIoU, single scale (microsoft/unilm beit semantic_segmentation/README.md)
         54.26 ADE20K mIoU, all scales with flip (microsoft/unilm beit semantic_segmentation/README.md)
         53.08 ADE20K mIoU, single scale (mmsegmentation metafile, of its own training)
         53.84 ADE20K mIoU, all scales with flip (mmsegmentation metafile, of its own training)
Model:   ViT-Base, relative position bias in every block, LayerScale, 163,407,980 parameters; 640 x 640 pixels
Command: tools/dist_train.sh configs/beit_plus/pretrain_in22k_150e.py 16
         tools/dist_train.sh configs/beit_plus/finetune_in22k_90e.py 16
         tools/dist_train.sh configs/beit_plus/upernet_640_ade20k_160k_after_in22k.py 8
         The last from the released weights:
           --cfg-options model.backbone.init_cfg.checkpoint=beit_base_patch16_224_pt22k_ft22k
Test:    tools/dist_test.sh configs/beit_plus/upernet_640_ade20k_160k_after_in22k.py \
           work_dirs/beit_plus_upernet_640_ade20k_160k_after_in22k/iter_160000.pth 8 [--tta]
Batch:   8 GPUs x 2 = 16 images, lr 3e-5
Steps:   160,000 updates, 1,500 of them warm-up
Data:    ADE20K, 20,210 images, 126.7 times
Cost:    5,790 GFLOP an image forward and backward; 33 GPU hours of an A100 at 40 %

Differs: from the released upernet_beit_base_12_640_slide_160k_ade20k_pt2ft.py in having no weight decay on the class
         token, and in bfloat16 instead of float16. Tests run in bfloat16; the released results are of float32
         (--cfg-options model.test_cfg.precision=float32). As in the released config, images are normalised with
         ImageNet's statistics, although the weights come from images normalised with 0.5 (the log warns).
"""
_base_ = [
    '../_base_/models/upernet_base.py',
    '../_base_/datasets/ade20k_512.py',
    '../_base_/schedules/segment_adamw_bs16_160k.py',
]

work_dir = 'work_dirs/beit_plus_upernet_640_ade20k_160k_after_in22k'
model = dict(
    data_preprocessor=dict(size=(640, 640)),
    backbone=dict(
        img_size=640,
        abs_pos_embed=False,
        rel_pos_bias='per_layer',
        layer_scale_init=0.1,
        init_cfg=dict(type='Pretrained', checkpoint='work_dirs/beit_plus_finetune_in22k_90e/epoch_90.pth')),
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
train_dataloader = dict(dataset=dict(pipeline=train_pipeline))
val_dataloader = dict(dataset=dict(pipeline=test_pipeline))
test_dataloader = val_dataloader

optim_wrapper = dict(paramwise_cfg=dict(layer_decay_rate=0.9), optimizer=dict(lr=3e-5))

"""BEiT v2 Base, 300 epochs on ImageNet-1K: the released checkpoint `beitv2_base_patch16_224_pt1k_300e`.

Result:  85.0 ImageNet-1K top-1 at 224 pixels, by finetune_in1k_100e_after_300e.py (microsoft/unilm beit2
           get_started_for_image_classification.md)
Model:   ViT-Base, shared relative position bias, LayerScale, 106,143,056 parameters; 224 x 224 pixels, 75 of 196
           patches masked
Command: tools/dist_train.sh configs/beit_v2/pretrain_300e.py 16
Test:    tools/dist_test.sh configs/beit_v2/pretrain_300e.py work_dirs/beit_v2_pretrain_300e/epoch_300.pth 16
Batch:   16 GPUs x 128 = 2048 images, lr 1.5e-3
Steps:   300 epochs x 625 = 187,500 updates, 6,250 of them warm-up
Data:    ImageNet-1K, 1,281,167 images
Cost:    155 GFLOP an image forward and backward; 132 GPU hours of an A100 at 40 %

Tokens:  VQ-KD's, 8192, of the released vqkd_encoder_base_decoder_3x768x12_clip, which is downloaded on first use
Differs: from pretrain_1600e.py in length, in a second beta of 0.98 and in having no stochastic depth, as in the
         released command; from the released command in the same points as pretrain_1600e.py
Options: On 8 GPUs: --cfg-options train_dataloader.batch_size=256
"""
_base_ = [
    '../_base_/models/mim_v2_base.py',
    '../_base_/datasets/mim_in1k.py',
    '../_base_/schedules/mim_adamw_bs2048_300e.py',
]

work_dir = 'work_dirs/beit_v2_pretrain_300e'
model = dict(backbone=dict(drop_path_rate=0.0))

# one view for both networks, and always 75 patches
train_pipeline = [
    dict(type='beit_mm.LoadImage'),
    dict(type='beit_mm.TwoViewRandomResizedCrop', size=224, second_size=None, scale=(0.2, 1.0)),
    dict(type='beit_mm.TwoViewColorJitter', brightness=0.4, contrast=0.4, saturation=0.4),
    dict(type='beit_mm.BlockwiseMask', grid=(14, 14), num_masked=75, variant='exact'),
    dict(type='beit_mm.PackViews'),
]
val_pipeline = [
    dict(type='beit_mm.LoadImage'),
    dict(type='beit_mm.TwoViewCenterCrop', size=224, second_size=None),
    dict(type='beit_mm.BlockwiseMask', grid=(14, 14), num_masked=75, variant='exact'),
    dict(type='beit_mm.PackViews'),
]
train_dataloader = dict(dataset=dict(pipeline=train_pipeline))
val_dataloader = dict(dataset=dict(pipeline=val_pipeline))
test_dataloader = val_dataloader

optim_wrapper = dict(optimizer=dict(betas=(0.9, 0.98)))

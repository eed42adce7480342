"""BEiT v2 Base, 1600 epochs on ImageNet-1K: the released checkpoint `beitv2_base_patch16_224_pt1k`.

Result:  81.4 ImageNet-1K top-1 of an attentive probe at 224 pixels, by attentive_probe_in1k_90e.py
           (billpsomas/efficient-probing README, the best epoch)
         85.5 ImageNet-1K top-1 at 224 pixels, by finetune_in1k_100e.py (microsoft/unilm beit2 README)
         53.1 ADE20K mIoU, single scale, by upernet_512_ade20k_160k.py (microsoft/unilm beit2 README)
Model:   ViT-Base, shared relative position bias, LayerScale, 106,143,056 parameters; 224 x 224 pixels, 75 of 196
           patches masked
Command: tools/dist_train.sh configs/beit_v2/pretrain_1600e.py 16
Test:    tools/dist_test.sh configs/beit_v2/pretrain_1600e.py work_dirs/beit_v2_pretrain_1600e/epoch_1600.pth 16
Batch:   16 GPUs x 128 = 2048 images, lr 1.5e-3
Steps:   1600 epochs x 625 = 1,000,000 updates, 6,250 of them warm-up
Data:    ImageNet-1K, 1,281,167 images
Cost:    155 GFLOP an image forward and backward; 706 GPU hours of an A100 at 40 %

Tokens:  VQ-KD's, 8192, of the released vqkd_encoder_base_decoder_3x768x12_clip, which is downloaded on first use
Differs: from the released command in bfloat16 instead of float16 (the tokenizer's encoder in float16, its search of the
         codebook in float32), and in colour jitter after the crop instead of before it.
Options: On 8 GPUs: --cfg-options train_dataloader.batch_size=256
"""
_base_ = [
    '../_base_/models/mim_v2_base.py',
    '../_base_/datasets/mim_in1k.py',
    '../_base_/schedules/mim_adamw_bs2048_300e.py',
]

work_dir = 'work_dirs/beit_v2_pretrain_1600e'
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

train_cfg = dict(max_epochs=1600)
param_scheduler = [
    dict(type='LinearLR', start_factor=1e-9, begin=0, end=10, convert_to_iter_based=True),
    dict(type='CosineAnnealingLR', eta_min_ratio=1e-5 / 1.5e-3, begin=10, end=1600, convert_to_iter_based=True),
]

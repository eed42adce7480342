"""DINOv2 Large with registers whose last blocks classify masks, on ADE20K at 512 pixels.

Result:  none published
Model:   ViT-Large, absolute position embedding, LayerScale, 4 registers, 315,997,335 parameters; 512 x 512 pixels
Command: tools/dist_train.sh configs/dinov2/masks_large_512_ade20k_39k.py 8
Test:    tools/dist_test.sh configs/dinov2/masks_large_512_ade20k_39k.py \
           work_dirs/dinov2_masks_large_512_ade20k_39k/iter_39120.pth 8 [--tta]
Batch:   8 GPUs x 2 = 16 images, lr 1e-4
Steps:   39,120 updates, 1,500 of them warm-up
Data:    ADE20K, 20,210 images, 31.0 times
Cost:    2,933 GFLOP an image forward and backward; 4.1 GPU hours of an A100 at 40 %

Differs: as masks_512_ade20k_39k.py does. Not run here.
"""
_base_ = [
    '../_base_/models/masks_base.py',
    '../_base_/datasets/ade20k_masks_512.py',
    '../_base_/schedules/masks_adamw_bs16_39k.py',
]

work_dir = 'work_dirs/dinov2_masks_large_512_ade20k_39k'
model = dict(
    backbone=dict(
        arch='large',
        num_registers=4,
        layer_scale_init=1e-5,
        drop_path_rate=0.0,
        interpolate_mode='bicubic_antialias',
        init_cfg=dict(type='Pretrained', checkpoint='dinov2_vitl14_reg4_pretrain')),
    decode_head=dict(in_channels=1024, num_blocks=4))

"""A decoder of six blocks that classifies masks on a frozen DINOv2 Base, on ADE20K at 512 pixels.

Result:  none published
Model:   ViT-Base, absolute position embedding, LayerScale, 4 registers, frozen, 138,039,703 parameters, 51,594,391 of
           them trained; 512 x 512 pixels
Command: tools/dist_train.sh configs/dinov2/masks_frozen_512_ade20k_39k.py 8
Test:    tools/dist_test.sh configs/dinov2/masks_frozen_512_ade20k_39k.py \
           work_dirs/dinov2_masks_frozen_512_ade20k_39k/iter_39120.pth 8 [--tta]
Batch:   8 GPUs x 2 = 16 images, lr 2e-4
Steps:   39,120 updates, 1,500 of them warm-up
Data:    ADE20K, 20,210 images, 31.0 times
Cost:    1,160 GFLOP an image forward and backward; 1.6 GPU hours of an A100 at 40 %

Differs: from PMT (github.com/tue-mps/pmt), which it follows, in the encoder (there DINOv3), in the norms in front of
         the decoder (the final one and batch norm), in having no rotary positions, and in the schedule, which is that
         of masks_512_ade20k_39k.py (there a cosine of 16 epochs after a warm-up of 6,000 steps). PMT's decoder has MLPs
         as wide as the model (here four times as wide), an MLP for each feature map (here a linear layer), LayerScale,
         and the class token and registers among its tokens. Not run here.
"""
_base_ = [
    '../_base_/models/masks_base.py',
    '../_base_/datasets/ade20k_masks_512.py',
    '../_base_/schedules/masks_adamw_bs16_39k.py',
]

work_dir = 'work_dirs/dinov2_masks_frozen_512_ade20k_39k'
model = dict(
    backbone=dict(
        num_registers=4,
        layer_scale_init=1e-5,
        drop_path_rate=0.0,
        interpolate_mode='bicubic_antialias',
        out_indices=(2, 5, 8, 11),
        frozen_stages=12,
        init_cfg=dict(type='Pretrained', checkpoint='dinov2_vitb14_reg4_pretrain')),
    decode_head=dict(where='decoder', in_index=(0, 1, 2, 3), num_blocks=6))
optim_wrapper = dict(optimizer=dict(lr=2e-4))

"""BEiT+ Base under a decoder of four blocks that classifies masks, on ADE20K at 512 pixels after ImageNet-22K.

Result:  none published
Model:   ViT-Base, relative position bias in every block, LayerScale, 123,647,191 parameters; 512 x 512 pixels
Command: tools/dist_train.sh configs/beit_plus/pretrain_in22k_150e.py 16
         tools/dist_train.sh configs/beit_plus/finetune_in22k_90e.py 16
         tools/dist_train.sh configs/beit_plus/masks_decoder_512_ade20k_39k_after_in22k.py 8
         The last from the released weights:
           --cfg-options model.backbone.init_cfg.checkpoint=beit_base_patch16_224_pt22k_ft22k
Test:    tools/dist_test.sh configs/beit_plus/masks_decoder_512_ade20k_39k_after_in22k.py \
           work_dirs/beit_plus_masks_decoder_512_ade20k_39k_after_in22k/iter_39120.pth 8 [--tta]
Batch:   8 GPUs x 2 = 16 images, lr 1e-4
Steps:   39,120 updates, 1,500 of them warm-up
Data:    ADE20K, 20,210 images, 31.0 times
Cost:    1,304 GFLOP an image forward and backward; 1.8 GPU hours of an A100 at 40 %

Differs: from masks_512_ade20k_39k_after_in22k.py in the head: blocks of its own, as in PMT, on the outputs of four
         blocks. PMT trains it on a frozen encoder (--cfg-options model.backbone.frozen_stages=12). Not run here.
"""
_base_ = [
    '../_base_/models/masks_base.py',
    '../_base_/datasets/ade20k_masks_512.py',
    '../_base_/schedules/masks_adamw_bs16_39k.py',
]

work_dir = 'work_dirs/beit_plus_masks_decoder_512_ade20k_39k_after_in22k'
model = dict(
    backbone=dict(
        out_indices=(2, 5, 8, 11),
        abs_pos_embed=False,
        rel_pos_bias='per_layer',
        layer_scale_init=0.1,
        init_cfg=dict(type='Pretrained', checkpoint='work_dirs/beit_plus_finetune_in22k_90e/epoch_90.pth')),
    decode_head=dict(where='decoder', in_index=(0, 1, 2, 3), num_blocks=4))

"""BEiT+ Base under one linear layer on ADE20K at 512 pixels after ImageNet-22K: any head's baseline.

Result:  none published
Model:   ViT-Base, relative position bias in every block, LayerScale, 86,342,358 parameters; 512 x 512 pixels
Command: tools/dist_train.sh configs/beit_plus/pretrain_in22k_150e.py 16
         tools/dist_train.sh configs/beit_plus/finetune_in22k_90e.py 16
         tools/dist_train.sh configs/beit_plus/linear_512_ade20k_39k_after_in22k.py 8
         The last from the released weights:
           --cfg-options model.backbone.init_cfg.checkpoint=beit_base_patch16_224_pt22k_ft22k
Test:    tools/dist_test.sh configs/beit_plus/linear_512_ade20k_39k_after_in22k.py \
           work_dirs/beit_plus_linear_512_ade20k_39k_after_in22k/iter_39120.pth 8 [--tta]
Batch:   8 GPUs x 2 = 16 images, lr 1e-4
Steps:   39,120 updates, 1,500 of them warm-up
Data:    ADE20K, 20,210 images, 31.0 times
Cost:    643 GFLOP an image forward and backward; 0.9 GPU hours of an A100 at 40 %

Differs: from masks_512_ade20k_39k_after_in22k.py in the head, its loss, and in having no clipping. It costs little more
         than the encoder and ranks encoders as Mask2Former does (arXiv 2404.12172). Not run here.
"""
_base_ = [
    '../_base_/models/masks_base.py',
    '../_base_/datasets/ade20k_512.py',
    '../_base_/schedules/masks_adamw_bs16_39k.py',
]

work_dir = 'work_dirs/beit_plus_linear_512_ade20k_39k_after_in22k'
model = dict(
    backbone=dict(
        abs_pos_embed=False,
        rel_pos_bias='per_layer',
        layer_scale_init=0.1,
        init_cfg=dict(type='Pretrained', checkpoint='work_dirs/beit_plus_finetune_in22k_90e/epoch_90.pth')),
    decode_head=dict(
        _delete_=True, type='beit_mm.FCNHead', in_channels=768, in_index=0, channels=768, num_convs=0,
        concat_input=False, dropout_ratio=0, num_classes=150, loss_decode=dict(type='CrossEntropyLoss')))
optim_wrapper = dict(clip_grad=None)

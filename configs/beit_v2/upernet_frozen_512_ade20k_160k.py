"""UperNet on a frozen BEiT v2 Base on ADE20K at 512 pixels.

Result:  none published
Model:   ViT-Base, relative position bias in every block, LayerScale, frozen, 163,080,812 parameters, 76,853,804 of them
           trained; 512 x 512 pixels
Command: tools/dist_train.sh configs/beit_v2/pretrain_1600e.py 16
         tools/dist_train.sh configs/beit_v2/upernet_frozen_512_ade20k_160k.py 8
         The last from the released weights:
           --cfg-options model.backbone.init_cfg.checkpoint=beitv2_base_patch16_224_pt1k
Test:    tools/dist_test.sh configs/beit_v2/upernet_frozen_512_ade20k_160k.py \
           work_dirs/beit_v2_upernet_frozen_512_ade20k_160k/iter_160000.pth 8 [--tta]
Batch:   8 GPUs x 2 = 16 images, lr 2e-4
Steps:   160,000 updates, 1,500 of them warm-up
Data:    ADE20K, 20,210 images, 126.7 times
Cost:    3,213 GFLOP an image forward and backward; 18 GPU hours of an A100 at 40 %

Differs: no paper has this recipe, and it was not run here. From upernet_512_ade20k_160k.py in a frozen backbone, and in
         rate.
"""
_base_ = [
    '../_base_/models/upernet_base.py',
    '../_base_/datasets/ade20k_512.py',
    '../_base_/schedules/segment_adamw_bs16_160k.py',
]

work_dir = 'work_dirs/beit_v2_upernet_frozen_512_ade20k_160k'
model = dict(
    backbone=dict(
        abs_pos_embed=False,
        rel_pos_bias='per_layer',
        layer_scale_init=0.1,
        drop_path_rate=0.0,
        frozen_stages=12,
        init_cfg=dict(type='Pretrained', checkpoint='work_dirs/beit_v2_pretrain_1600e/epoch_1600.pth')))
optim_wrapper = dict(paramwise_cfg=dict(layer_decay_rate=1.0), optimizer=dict(lr=2e-4))

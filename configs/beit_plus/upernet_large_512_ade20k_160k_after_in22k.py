"""BEiT+ Large with UperNet on ADE20K at 512 pixels after ImageNet-22K: the released large `..._512_..._pt2ft`.

Result:  none published
Model:   ViT-Large, relative position bias in every block, LayerScale, 440,398,636 parameters; 512 x 512 pixels
Command: tools/dist_train.sh configs/beit_plus/pretrain_large_in22k_150e.py 16
         tools/dist_train.sh configs/beit_plus/finetune_large_in22k_90e.py 16
         tools/dist_train.sh configs/beit_plus/upernet_large_512_ade20k_160k_after_in22k.py 8
         The last from the released weights:
           --cfg-options model.backbone.init_cfg.checkpoint=beit_large_patch16_224_pt22k_ft22k
Test:    tools/dist_test.sh configs/beit_plus/upernet_large_512_ade20k_160k_after_in22k.py \
           work_dirs/beit_plus_upernet_large_512_ade20k_160k_after_in22k/iter_160000.pth 8 [--tta]
Batch:   8 GPUs x 2 = 16 images, lr 2e-5
Steps:   160,000 updates, 1,500 of them warm-up
Data:    ADE20K, 20,210 images, 126.7 times
Cost:    7,493 GFLOP an image forward and backward; 43 GPU hours of an A100 at 40 %

Differs: from the released upernet_beit_large_24_512_slide_160k_ade20k_pt2ft.py in the same points as
         upernet_640_ade20k_160k_after_in22k.py from its released config. No result at this size was published.
"""
_base_ = [
    '../_base_/models/upernet_base.py',
    '../_base_/datasets/ade20k_512.py',
    '../_base_/schedules/segment_adamw_bs16_160k.py',
]

work_dir = 'work_dirs/beit_plus_upernet_large_512_ade20k_160k_after_in22k'
model = dict(
    backbone=dict(
        arch='large',
        out_indices=(7, 11, 15, 23),
        abs_pos_embed=False,
        rel_pos_bias='per_layer',
        layer_scale_init=1e-6,
        drop_path_rate=0.2,
        init_cfg=dict(type='Pretrained', checkpoint='work_dirs/beit_plus_finetune_large_in22k_90e/epoch_90.pth')),
    neck=dict(embed_dim=1024),
    decode_head=dict(in_channels=[1024, 1024, 1024, 1024], channels=1024),
    auxiliary_head=dict(in_channels=1024))
optim_wrapper = dict(paramwise_cfg=dict(layer_decay_rate=0.95), optimizer=dict(lr=2e-5))

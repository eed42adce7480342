"""BEiT v2 Base with UperNet on ADE20K at 512 pixels: released `beitv2_base_patch16_224_pt1k_ftade20k`.

Result:  53.1 ADE20K mIoU, single scale (microsoft/unilm beit2 README)
Model:   ViT-Base, relative position bias in every block, LayerScale, 163,080,812 parameters; 512 x 512 pixels
Command: tools/dist_train.sh configs/beit_v2/pretrain_1600e.py 16
         tools/dist_train.sh configs/beit_v2/upernet_512_ade20k_160k.py 8
         The last from the released weights:
           --cfg-options model.backbone.init_cfg.checkpoint=beitv2_base_patch16_224_pt1k
Test:    tools/dist_test.sh configs/beit_v2/upernet_512_ade20k_160k.py \
           work_dirs/beit_v2_upernet_512_ade20k_160k/iter_160000.pth 8 [--tta]
Batch:   8 GPUs x 2 = 16 images, lr 5e-5
Steps:   160,000 updates, 1,500 of them warm-up
Data:    ADE20K, 20,210 images, 126.7 times
Cost:    3,641 GFLOP an image forward and backward; 21 GPU hours of an A100 at 40 %

Differs: from the released upernet_beit_base_12_512_slide_160k_ade20k.py in having no weight decay on the class token,
         and in bfloat16 instead of float16. Tests run in bfloat16 (released: float32; --cfg-options
         model.test_cfg.precision=float32).
"""
_base_ = [
    '../_base_/models/upernet_base.py',
    '../_base_/datasets/ade20k_512.py',
    '../_base_/schedules/segment_adamw_bs16_160k.py',
]

work_dir = 'work_dirs/beit_v2_upernet_512_ade20k_160k'
model = dict(
    backbone=dict(
        abs_pos_embed=False,
        rel_pos_bias='per_layer',
        layer_scale_init=0.1,
        drop_path_rate=0.15,
        init_cfg=dict(type='Pretrained', checkpoint='work_dirs/beit_v2_pretrain_1600e/epoch_1600.pth')))
optim_wrapper = dict(paramwise_cfg=dict(layer_decay_rate=0.75), optimizer=dict(lr=5e-5))

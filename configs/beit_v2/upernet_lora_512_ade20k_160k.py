"""BEiT v2 Base adapted by LoRA of rank 16, with UperNet on ADE20K at 512 pixels.

Result:  none published
Model:   ViT-Base, relative position bias in every block, LayerScale, LoRA of rank 16, 165,440,108 parameters,
           79,213,100 of them trained; 512 x 512 pixels
Command: tools/dist_train.sh configs/beit_v2/pretrain_1600e.py 16
         tools/dist_train.sh configs/beit_v2/upernet_lora_512_ade20k_160k.py 8
         The last from the released weights:
           --cfg-options model.backbone.module.init_cfg.checkpoint=beitv2_base_patch16_224_pt1k
Test:    tools/dist_test.sh configs/beit_v2/upernet_lora_512_ade20k_160k.py \
           work_dirs/beit_v2_upernet_lora_512_ade20k_160k/iter_160000.pth 8 [--tta]
Batch:   8 GPUs x 2 = 16 images, lr 2e-4
Steps:   160,000 updates, 1,500 of them warm-up
Data:    ADE20K, 20,210 images, 126.7 times
Cost:    3,437 GFLOP an image forward and backward; 20 GPU hours of an A100 at 40 %

Differs: no paper has this recipe, and it was not run here. From upernet_512_ade20k_160k.py in LoRA of all linear layers
         of the blocks, without layer decay, and in rate and drop path. The checkpoint has the low-rank matrices, the
         neck and the heads alone; the rest is read from the pretrained file.
"""
_base_ = [
    '../_base_/models/upernet_base.py',
    '../_base_/datasets/ade20k_512.py',
    '../_base_/schedules/segment_adamw_bs16_160k.py',
]

work_dir = 'work_dirs/beit_v2_upernet_lora_512_ade20k_160k'
model = dict(
    backbone=dict(
        _delete_=True,
        type='mmpretrain.LoRAModel',
        module=dict(
            _base_.model.backbone,
            abs_pos_embed=False,
            rel_pos_bias='per_layer',
            layer_scale_init=0.1,
            init_cfg=dict(type='Pretrained', checkpoint='work_dirs/beit_v2_pretrain_1600e/epoch_1600.pth')),
        rank=16,
        alpha=32,
        targets=[dict(type='attn.qkv'), dict(type='attn.proj'), dict(type='mlp.fc1'), dict(type='mlp.fc2')]))
optim_wrapper = dict(paramwise_cfg=dict(layer_decay_rate=1.0), optimizer=dict(lr=2e-4))

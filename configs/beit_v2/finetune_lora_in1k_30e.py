"""BEiT v2 Base adapted to ImageNet-1K by LoRA of rank 16, 30 epochs.

Result:  none published
Model:   ViT-Base, relative position bias in every block, LayerScale, LoRA of rank 16, 88,890,280 parameters, 3,128,296
           of them trained; 224 x 224 pixels
Command: tools/dist_train.sh configs/beit_v2/pretrain_1600e.py 16
         tools/dist_train.sh configs/beit_v2/finetune_lora_in1k_30e.py 8
         The last from the released weights:
           --cfg-options model.backbone.module.init_cfg.checkpoint=beitv2_base_patch16_224_pt1k
Test:    tools/dist_test.sh configs/beit_v2/finetune_lora_in1k_30e.py \
           work_dirs/beit_v2_finetune_lora_in1k_30e/epoch_30.pth 8
Batch:   8 GPUs x 128 = 1024 images, lr 1e-3
Steps:   30 epochs x 1,251 = 37,530 updates, 6,255 of them warm-up
Data:    ImageNet-1K, 1,281,167 images
Cost:    72 GFLOP an image forward and backward; 6.2 GPU hours of an A100 at 40 %

Differs: no paper has this recipe, and it was not run here. From finetune_in1k_100e.py in LoRA of all linear layers of
         the blocks, without layer decay, in rate, drop path and length. The checkpoint has the low-rank matrices and
         the head alone; the rest is read from the pretrained file.
"""
_base_ = [
    '../_base_/models/finetune_base.py',
    '../_base_/datasets/finetune_in1k.py',
    '../_base_/schedules/finetune_adamw_bs1024_100e.py',
]

work_dir = 'work_dirs/beit_v2_finetune_lora_in1k_30e'
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

optim_wrapper = dict(paramwise_cfg=dict(layer_decay_rate=1.0), optimizer=dict(lr=1e-3))
train_cfg = dict(max_epochs=30)
param_scheduler = [
    dict(type='LinearLR', start_factor=1e-9, begin=0, end=5, convert_to_iter_based=True),
    dict(type='CosineAnnealingLR', eta_min_ratio=1e-3, begin=5, end=30, convert_to_iter_based=True),
]

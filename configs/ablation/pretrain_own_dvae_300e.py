"""Tokenizer table "re-implemented dVAE": visual tokens learned on ImageNet-1K instead of DALL-E's.

Result:  82.70 ImageNet-1K top-1 at 224 pixels, by beit/finetune_in1k_100e.py (paper, tokenizer table)
Model:   ViT-Base, absolute position embedding, 92,089,856 parameters; 224 x 224 pixels, 75 of 196 patches masked
Command: tools/dist_train.sh configs/dvae/discrete_vae_8k_in1k.py 8
         tools/dist_train.sh configs/ablation/pretrain_own_dvae_300e.py 16
Then:    tools/dist_train.sh configs/beit/finetune_in1k_100e.py 8 \
           --work-dir work_dirs/finetune_in1k_100e_after_pretrain_own_dvae_300e \
           --cfg-options model.backbone.init_cfg.checkpoint=work_dirs/pretrain_own_dvae_300e/epoch_300.pth
Test:    tools/dist_test.sh configs/ablation/pretrain_own_dvae_300e.py work_dirs/pretrain_own_dvae_300e/epoch_300.pth 16
Batch:   16 GPUs x 128 = 2048 images, lr 1.5e-3
Steps:   300 epochs x 625 = 187,500 updates, 6,250 of them warm-up
Data:    ImageNet-1K, 1,281,167 images
Cost:    116 GFLOP an image forward and backward; 99 GPU hours of an A100 at 40 %

Differs: from the baseline in the tokenizer, which must be trained first, because the paper's own was not released. See
         ../dvae/discrete_vae_8k_in1k.py
"""
_base_ = [
    '../_base_/models/mim_base.py',
    '../_base_/datasets/mim_in1k.py',
    '../_base_/schedules/mim_adamw_bs2048_300e.py',
]

model = dict(
    target_generator=dict(
        _delete_=True,
        type='beit_mm.DiscreteVAE',
        arch='conv',
        hidden=256,
        vocab_size=8192,
        embed_dims=512,
        num_levels=3,
        bottleneck_blocks=None,
        checkpoint='work_dirs/discrete_vae_8k_in1k/iter_50000.pth'))

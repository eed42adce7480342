"""Tokenizer table "re-implemented dVAE": visual tokens learned on ImageNet-1K instead of DALL-E's.

Command: tools/dist_train.sh configs/dvae/discrete_vae_8k_in1k.py 8
         tools/dist_train.sh configs/ablation/pretrain_own_dvae_300e.py 16
Batch:   16 GPUs x 128 = 2048 images, lr 1.5e-3
Steps:   1281167 // 2048 = 625 an epoch, 187,500 in all
Time:    less than beit/pretrain_300e.py, the tokenizer is a small part of DALL-E's
Result:  the paper, after fine-tuning: 82.70 top-1 on ImageNet-1K
         (baseline beit/pretrain_300e.py: 82.86)
Shorter: --cfg-options train_cfg.max_epochs=100 param_scheduler.1.end=100 param_scheduler.1.T_max=90
Differs: from the baseline in the tokenizer, which must be trained first; the paper's own was not released
"""
_base_ = '../beit/pretrain_300e.py'

model = dict(
    target_generator=dict(
        _delete_=True,
        type='beit_mm.DiscreteVAE',
        arch='conv',
        hidden=256,
        vocab_size=8192,
        embed_dims=512,
        num_levels=3,
        bottleneck_blocks=2,
        checkpoint='work_dirs/discrete_vae_8k_in1k/iter_50000.pth'))

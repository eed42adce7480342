"""Architecture variant "ViT + LayerScale".

Command: tools/dist_train.sh configs/ablation/pretrain_layer_scale_300e.py 16
Batch:   16 GPUs x 128 = 2048 images, lr 1.5e-3
Steps:   1281167 // 2048 = 625 an epoch, 187,500 in all
Time:    as beit/pretrain_300e.py
Result:  the paper, after fine-tuning: 83.00 top-1 on ImageNet-1K, 45.43 mIoU on ADE20K (UperNet)
         (baseline beit/pretrain_300e.py: 82.86 and 44.86; with a relative position bias as well,
         beit_plus/pretrain_300e.py: 83.22 and 45.70)
Shorter: --cfg-options train_cfg.max_epochs=100 param_scheduler.1.end=100 param_scheduler.1.T_max=90
Differs: from the baseline in LayerScale, started at 0.1 as in the released code (the paper does not say)
"""
_base_ = '../beit/pretrain_300e.py'

model = dict(backbone=dict(layer_scale_init=0.1))

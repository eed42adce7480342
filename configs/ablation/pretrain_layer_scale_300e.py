"""Architecture variant "ViT + LayerScale".

Command: tools/dist_train.sh configs/ablation/pretrain_layer_scale_300e.py 16
Batch:   16 GPUs x 128 = 2048 images, lr 1.5e-3
Steps:   300 epochs x 625 = 187,500, ImageNet-1K with 1,281,167 images; warm-up 6,250
Writes:  work_dirs/pretrain_layer_scale_300e/epoch_300.pth
Model:   ViT-Base, absolute position embedding, LayerScale, 92,108,288 parameters; 224 x 224 pixels, 75 of 196 patches
           masked
Result:  83.00 ImageNet-1K top-1 at 224 pixels after fine-tuning (paper, table of architecture variants)
         45.43 ADE20K mIoU with UperNet after fine-tuning, single scale (paper, table of architecture variants; crop
           size not stated)

Time:    as beit/pretrain_300e.py
Shorter: --cfg-options train_cfg.max_epochs=100 param_scheduler.1.end=100
Differs: from the baseline in LayerScale, started at 0.1 as in the released code (the paper does not say)
"""
_base_ = [
    '../_base_/models/mim_base.py',
    '../_base_/datasets/mim_in1k.py',
    '../_base_/schedules/mim_adamw_bs2048_300e.py',
]

model = dict(backbone=dict(layer_scale_init=0.1))

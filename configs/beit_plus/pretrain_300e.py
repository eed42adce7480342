"""BEiT+ Base, 300 epochs on ImageNet-1K: LayerScale and a shared relative position bias.

Command: tools/dist_train.sh configs/beit_plus/pretrain_300e.py 16
Batch:   16 GPUs x 128 = 2048 images, lr 1.5e-3
Steps:   300 epochs x 625 = 187,500, ImageNet-1K with 1,281,167 images; warm-up 6,250
Writes:  work_dirs/beit_plus_pretrain_300e/epoch_300.pth
Model:   ViT-Base, shared relative position bias, LayerScale, 91,965,776 parameters; 224 x 224 pixels, 75 of 196 patches
           masked
Result:  83.22 ImageNet-1K top-1 at 224 pixels after fine-tuning (paper, table of architecture variants)
         45.70 ADE20K mIoU with UperNet after fine-tuning, single scale (paper, table of architecture variants; crop
           size not stated)
         6.2994 loss of masked image modeling on the training images, last epoch (the authors' log, microsoft/unilm
           issue 383)
         0.04961 accuracy of masked image modeling on the training images, last epoch (the authors' log, microsoft/unilm
           issue 383)
         83.1 ImageNet-1K top-1 at 224 pixels after fine-tuning (mmpretrain metafile, of its own training)

Time:    as beit/pretrain_300e.py
Options: On 8 GPUs: --cfg-options train_dataloader.batch_size=256
Shorter: --cfg-options train_cfg.max_epochs=100 param_scheduler.1.end=100
Differs: from the paper's main model (beit/) in the architecture; this is what the released code trains by default. The
         released code's README runs 800 epochs of it. From that code in bfloat16 instead of float16, and in colour
         jitter after the crop, not before it.
"""
_base_ = [
    '../_base_/models/mim_base.py',
    '../_base_/datasets/mim_in1k.py',
    '../_base_/schedules/mim_adamw_bs2048_300e.py',
]

work_dir = 'work_dirs/beit_plus_pretrain_300e'
model = dict(backbone=dict(abs_pos_embed=False, rel_pos_bias='shared', layer_scale_init=0.1))

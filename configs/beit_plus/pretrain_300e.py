"""BEiT+ Base, 300 epochs on ImageNet-1K: LayerScale and a shared relative position bias.

Result:  6.2994 loss of masked image modeling on the training images, last epoch (the authors' log, microsoft/unilm
           issue 383)
         0.04961 accuracy of masked image modeling on the training images, last epoch (the authors' log, microsoft/unilm
           issue 383)
         83.22 ImageNet-1K top-1 at 224 pixels, by ablation/finetune_layer_scale_rel_pos_in1k_100e.py (paper, table of
           architecture variants)
         45.70 ADE20K mIoU, single scale, by ablation/upernet_layer_scale_rel_pos_512_ade20k_160k.py (paper, table of
           architecture variants)
Model:   ViT-Base, shared relative position bias, LayerScale, 91,965,776 parameters; 224 x 224 pixels, 75 of 196 patches
           masked
Command: tools/dist_train.sh configs/beit_plus/pretrain_300e.py 16
Test:    tools/dist_test.sh configs/beit_plus/pretrain_300e.py work_dirs/beit_plus_pretrain_300e/epoch_300.pth 16
Batch:   16 GPUs x 128 = 2048 images, lr 1.5e-3
Steps:   300 epochs x 625 = 187,500 updates, 6,250 of them warm-up
Data:    ImageNet-1K, 1,281,167 images
Cost:    152 GFLOP an image forward and backward; 130 GPU hours of an A100 at 40 %

Differs: from the paper's main model (beit/) in the architecture; the released code trains this one by default, and its
         README trains it for 800 epochs. From the released code in bfloat16 instead of float16, and in colour jitter
         after the crop instead of before it.
Options: On 8 GPUs: --cfg-options train_dataloader.batch_size=256
"""
_base_ = [
    '../_base_/models/mim_base.py',
    '../_base_/datasets/mim_in1k.py',
    '../_base_/schedules/mim_adamw_bs2048_300e.py',
]

work_dir = 'work_dirs/beit_plus_pretrain_300e'
model = dict(backbone=dict(abs_pos_embed=False, rel_pos_bias='shared', layer_scale_init=0.1))

"""BEiT-Base, 800 epochs on ImageNet-1K: the pretraining behind the paper's main tables.

Result:  83.2 ImageNet-1K top-1 at 224 pixels, by finetune_in1k_100e.py (paper, classification table)
         45.6 ADE20K mIoU, single scale, by setr_pup_512_ade20k_160k.py (paper, segmentation table)
         56.7 ImageNet-1K top-1 of a linear probe of layer 9, by linear_probe_in1k_50e.py (paper, linear probe table)
         90.1 CIFAR-100 top-1 at 224 pixels, by finetune_cifar100_150e.py (paper, CIFAR-100 table)
Model:   ViT-Base, absolute position embedding, 92,089,856 parameters; 224 x 224 pixels, 75 of 196 patches masked
Command: tools/dist_train.sh configs/beit/pretrain_800e.py 16
Test:    tools/dist_test.sh configs/beit/pretrain_800e.py work_dirs/pretrain_800e/epoch_800.pth 16
Batch:   16 GPUs x 128 = 2048 images, lr 1.5e-3
Steps:   800 epochs x 625 = 500,000 updates, 6,250 of them warm-up
Data:    ImageNet-1K, 1,281,167 images
Cost:    152 GFLOP an image forward and backward; 346 GPU hours of an A100 at 40 %

Differs: the default command of the released code trains the BEiT+ architecture (beit_plus/pretrain_300e.py); this is
         the plain ViT of the paper and of its released checkpoint `beit_base_patch16_224_pt1k_800ep`. bfloat16 instead
         of float16. Colours are jittered after the crop instead of before it, which changes the two views by 0.65 and
         0.83 of 255 levels on average.
Options: On 8 GPUs: --cfg-options train_dataloader.batch_size=256
"""
_base_ = [
    '../_base_/models/mim_base.py',
    '../_base_/datasets/mim_in1k.py',
    '../_base_/schedules/mim_adamw_bs2048_300e.py',
]

train_cfg = dict(max_epochs=800)
param_scheduler = [
    dict(type='LinearLR', start_factor=1e-9, begin=0, end=10, convert_to_iter_based=True),
    dict(type='CosineAnnealingLR', eta_min_ratio=1e-5 / 1.5e-3, begin=10, end=800, convert_to_iter_based=True),
]

"""BEiT-Base fine-tuned on ImageNet-1K, then on CIFAR-100, 150 epochs: the transfer row with intermediate fine-tuning.

Command: tools/dist_train.sh configs/beit/pretrain_800e.py 16
         tools/dist_train.sh configs/beit/finetune_in1k_100e.py 8
         tools/dist_train.sh configs/beit/finetune_cifar100_150e_after_in1k.py 8
Batch:   8 GPUs x 64 = 512 images, lr 4e-3
Steps:   150 epochs x 97 = 14,550, CIFAR-100 with 50,000 images; warm-up 1,940
Writes:  work_dirs/finetune_cifar100_150e_after_in1k/epoch_150.pth
Model:   ViT-Base, absolute position embedding, 85,866,340 parameters; 224 x 224 pixels
Result:  91.8 CIFAR-100 top-1 (paper, CIFAR-100 table)

Time:    as finetune_cifar100_150e.py
Shorter: --cfg-options train_cfg.max_epochs=50 param_scheduler.1.end=50
Differs: from finetune_cifar100_150e.py in where it starts: the norm after the mean comes with the weights, the head of
         1000 classes does not. The paper gives one table of settings for both rows.
"""
_base_ = './finetune_cifar100_150e.py'

model = dict(
    backbone=dict(init_cfg=dict(checkpoint='work_dirs/finetune_in1k_100e/epoch_100.pth')))

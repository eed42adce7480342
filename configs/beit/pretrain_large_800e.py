"""BEiT-Large, 800 epochs on ImageNet-1K: the large rows of the paper's classification table.

Command: tools/dist_train.sh configs/beit/pretrain_large_800e.py 16
Batch:   16 GPUs x 128 = 2048 images, lr 1.5e-3
Steps:   1281167 // 2048 = 625 an epoch, 500,000 in all
Time:    about 2.7 times pretrain_800e.py (425 against 160 GFLOP an image)
Result:  the paper, after fine-tuning: 85.2 top-1 on ImageNet-1K at 224, 86.3 at 384; linear probe of
         layer 14: 73.5
Shorter: 300 epochs: set max_epochs, end and T_max as in pretrain_300e.py
Differs: from pretrain_800e.py in the model and in the gradient clip, 1.0 instead of 3.0 (paper, table of
         pretraining hyperparameters). No large checkpoint of this recipe was released.
"""
_base_ = './pretrain_800e.py'

model = dict(backbone=dict(arch='large'), head=dict(embed_dims=1024))
optim_wrapper = dict(clip_grad=dict(max_norm=1.0))

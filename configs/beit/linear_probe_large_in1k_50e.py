"""Linear probe of BEiT-Large on ImageNet-1K: the 14th block's mean of patch tokens, 50 epochs.

Command: tools/dist_train.sh configs/beit/pretrain_large_800e.py 16
         tools/dist_train.sh configs/beit/linear_probe_large_in1k_50e.py 8
         All blocks in one run, accuracy layer by layer: --cfg-options model.layers=None
Batch:   8 GPUs x 128 = 1024 images, lr 4e-3
Steps:   1281167 // 1024 = 1251 an epoch, 62,550 in all
Time:    about 2.8 times linear_probe_in1k_50e.py
Result:  the paper: 73.5 top-1
Shorter: linear_probe_in1k_50e.py
Differs: from linear_probe_in1k_50e.py in the model and the block
"""
_base_ = './linear_probe_in1k_50e.py'

model = dict(
    backbone=dict(
        arch='large',
        init_cfg=dict(checkpoint='work_dirs/pretrain_large_800e/epoch_800.pth')),
    layers=13)  # from 0

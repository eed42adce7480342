"""BEiT+ Large, 150 epochs on ImageNet-22K: the released checkpoint `beit_large_patch16_224_pt22k`.

Command: tools/dist_train.sh configs/beit_plus/pretrain_large_in22k_150e.py 16
Batch:   16 GPUs x 128 = 2048 images, lr 1.5e-3
Steps:   14197122 // 2048 = 6932 an epoch, 1,039,800 in all, the first 10,000 of them warm-up
Time:    about 2.7 times pretrain_in22k_150e.py (425 against 160 GFLOP an image)
Result:  released, after fine-tuning on ImageNet-1K: 86.0 top-1 at 224; with intermediate fine-tuning on
         ImageNet-22K 87.4 at 224, 88.4 at 384, 88.6 at 512
Shorter: pretrain_in22k_150e.py
Differs: from pretrain_in22k_150e.py in the model, LayerScale from 1e-5, and the gradient clip of 1.0 that the
         paper gives for large models
"""
_base_ = './pretrain_in22k_150e.py'

model = dict(
    backbone=dict(arch='large', layer_scale_init=1e-5), head=dict(embed_dims=1024))
optim_wrapper = dict(clip_grad=dict(max_norm=1.0))

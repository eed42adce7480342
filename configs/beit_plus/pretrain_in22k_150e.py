"""BEiT+ Base, 150 epochs on ImageNet-22K: the released checkpoint `beit_base_patch16_224_pt22k`.

Command: tools/dist_train.sh configs/beit_plus/pretrain_in22k_150e.py 16
Batch:   16 GPUs x 128 = 2048 images, lr 1.5e-3
Steps:   14197122 // 2048 = 6932 an epoch, 1,039,800 in all, the first 10,000 of them warm-up
Time:    about twice beit/pretrain_800e.py
Result:  released, after fine-tuning on ImageNet-1K: 83.7 top-1 at 224; with intermediate fine-tuning on
         ImageNet-22K 85.2 at 224 and 86.8 at 384
Shorter: pretrain_300e.py on ImageNet-1K
Differs: from the released command in bfloat16 instead of float16, and in jitter after the crop. Images are
         normalised with mean and std 0.5 there, so here too. With another batch the schedule below, in steps,
         must change.
"""
_base_ = [
    '../_base_/models/mim_plus_base.py',
    '../_base_/datasets/mim_in1k.py',
    '../_base_/schedules/mim_adamw_bs2048.py',
    '../_base_/default_runtime.py',
]

model = dict(data_preprocessor=dict(mean=[127.5, 127.5, 127.5], std=[127.5, 127.5, 127.5]))
train_dataloader = dict(dataset=dict(data_root='data/imagenet22k/train'))
default_hooks = dict(checkpoint=dict(interval=5))

train_cfg = dict(type='EpochBasedTrainLoop', max_epochs=150, val_interval=5)
param_scheduler = [
    # From 0 (mmengine refuses a factor of exactly 0) to the peak at step 9,999.
    dict(type='LinearLR', start_factor=1e-9, by_epoch=False, begin=0, end=10000),
    dict(
        type='CosineAnnealingLR',
        eta_min=1e-5,
        by_epoch=False,
        begin=10000,
        end=1039800,
        T_max=1029800),
]

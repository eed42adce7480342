"""BEiT+ Base fine-tuned on ImageNet-1K straight after pretraining: released `beit_base_patch16_224_pt22k_ft1k`.

Command: tools/dist_train.sh configs/beit_plus/pretrain_in22k_150e.py 16
         tools/dist_train.sh configs/beit_plus/finetune_pt22k_in1k_100e.py 8
         From the released weights, without the first: --cfg-options
         model.backbone.init_cfg.checkpoint=beit_base_patch16_224_pt22k.pth
Batch:   8 GPUs x 128 = 1024 images, lr 4e-3
Steps:   1281167 // 1024 = 1251 an epoch, 125,100 in all
Time:    as beit/finetune_in1k_100e.py
Result:  released: 83.7 top-1, 96.6 top-5
Shorter: --cfg-options train_cfg.max_epochs=50 param_scheduler.1.end=50 param_scheduler.1.T_max=30
Differs: from the released command in bfloat16 instead of float16. No repeated augmentation, as there; mean and std 0.5,
         as there and in this pretraining.
"""
_base_ = [
    '../_base_/models/finetune_plus_base.py',
    '../_base_/datasets/finetune_plus_in1k.py',
    '../_base_/schedules/finetune_adamw_bs1024.py',
    '../_base_/default_runtime.py',
]

model = dict(
    backbone=dict(
        init_cfg=dict(
            type='Pretrained', checkpoint='work_dirs/pretrain_in22k_150e/epoch_150.pth')),
    train_cfg=dict(augments=[dict(type='Mixup', alpha=0.8), dict(type='CutMix', alpha=1.0)]))

train_cfg = dict(type='EpochBasedTrainLoop', max_epochs=100, val_interval=5)
param_scheduler = [
    # From 0 (mmengine refuses a factor of exactly 0) to the peak at the last step of epoch 20.
    dict(type='LinearLR', start_factor=1e-9, begin=0, end=20, convert_to_iter_based=True),
    # To 1e-6 for the head; a ratio, so that the rates of lower layers end as much lower as they began.
    dict(
        type='CosineAnnealingLR',
        eta_min_ratio=2.5e-4,
        begin=20,
        end=100,
        T_max=80,
        convert_to_iter_based=True),
]

"""BEiT+ Base fine-tuned on ImageNet-1K at 224 after ImageNet-22K: released `beit_base_patch16_224_pt22k_ft22kto1k`.

Command: tools/dist_train.sh configs/beit_plus/intermediate_in22k_90e.py 16
         tools/dist_train.sh configs/beit_plus/finetune_224_in1k.py 8
         From the released weights, without the first: --cfg-options
         model.backbone.init_cfg.checkpoint=beit_base_patch16_224_pt22k_ft22k.pth
Batch:   8 GPUs x 64 = 512 images, lr 2e-5
Steps:   1281167 // 512 = 2502 an epoch, 75,060 in all
Time:    about a third of beit/finetune_in1k_100e.py
Result:  released: 85.2 top-1, 97.6 top-5
Shorter: --cfg-options train_cfg.max_epochs=10 param_scheduler.1.end=10 param_scheduler.1.T_max=5
Differs: from the released command in bfloat16 instead of float16. The norm after the mean comes with the weights; the
         head of 21841 classes does not. No mixup, no cutmix, almost no weight decay, as there.
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
            type='Pretrained', checkpoint='work_dirs/intermediate_in22k_90e/epoch_90.pth')))
train_dataloader = dict(batch_size=64)
optim_wrapper = dict(
    paramwise_cfg=dict(layer_decay_rate=0.85), optimizer=dict(lr=2e-5, weight_decay=1e-8))
auto_scale_lr = dict(base_batch_size=512)

train_cfg = dict(type='EpochBasedTrainLoop', max_epochs=30, val_interval=5)
param_scheduler = [
    # From 0 (mmengine refuses a factor of exactly 0) to the peak at the last step of epoch 5.
    dict(type='LinearLR', start_factor=1e-9, begin=0, end=5, convert_to_iter_based=True),
    # To 1e-6 for the head; a ratio, so that the rates of lower layers end as much lower as they began.
    dict(
        type='CosineAnnealingLR',
        eta_min_ratio=0.05,
        begin=5,
        end=30,
        T_max=25,
        convert_to_iter_based=True),
]

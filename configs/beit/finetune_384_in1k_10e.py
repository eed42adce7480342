"""BEiT-Base, fine-tuned at 224 pixels, fine-tuned further at 384: 10 epochs.

Command: tools/dist_train.sh configs/beit/finetune_in1k_100e.py 8
         tools/dist_train.sh configs/beit/finetune_384_in1k_10e.py 16
Batch:   16 GPUs x 32 = 512 images, lr 5e-6. On 8 GPUs: --cfg-options optim_wrapper.accumulative_counts=2
Steps:   1281167 // 512 = 2502 an epoch, 25,020 in all
Time:    about a third of finetune_in1k_100e.py (333 against 105 GFLOP an image, a tenth of the epochs)
Result:  the paper: 84.6 top-1
Shorter: finetune_in1k_100e.py (83.2 top-1)
Differs: the paper says no more than "10 more epochs" and "the standard higher-resolution setting of DeiT". From DeiT's
         command: lr 5e-6 that stays (its min-lr is the same), weight decay 1e-8, batch 512, and its defaults: 5 epochs
         of warm-up from 1e-6, the augmentation of the 224 run, bicubic position embedding. Not verified for BEiT; that
         the rate is the same for all layers is DeiT's way too. Evaluated on the whole height or width (crop ratio 1) as
         the released BEiT, where DeiT crops 0.875.
"""
_base_ = [
    '../_base_/models/finetune_base.py',
    '../_base_/datasets/finetune_in1k_384.py',
    '../_base_/schedules/finetune_adamw_bs1024.py',
    '../_base_/default_runtime.py',
]

model = dict(backbone=dict(img_size=384))
load_from = 'work_dirs/finetune_in1k_100e/epoch_100.pth'
train_dataloader = dict(
    batch_size=32,
    sampler=dict(_delete_=True, type='beit_mm.RepeatedAugmentationSampler', num_repeats=3))
optim_wrapper = dict(
    paramwise_cfg=dict(layer_decay_rate=1.0), optimizer=dict(lr=5e-6, weight_decay=1e-8))
auto_scale_lr = dict(base_batch_size=512)

train_cfg = dict(type='EpochBasedTrainLoop', max_epochs=10, val_interval=1)
param_scheduler = [
    dict(type='LinearLR', start_factor=0.2, begin=0, end=5, convert_to_iter_based=True),
]

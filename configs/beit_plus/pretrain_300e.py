"""BEiT+ Base, 300 epochs on ImageNet-1K: LayerScale and a shared relative position bias.

Command: tools/dist_train.sh configs/beit_plus/pretrain_300e.py 16
Batch:   16 GPUs x 128 = 2048 images, lr 1.5e-3. On 8 GPUs: --cfg-options train_dataloader.batch_size=256
Steps:   1281167 // 2048 = 625 an epoch, 187,500 in all
Time:    as beit/pretrain_300e.py
Result:  the paper, after fine-tuning (architecture variants): 83.22 top-1 on ImageNet-1K, 45.70 mIoU on
         ADE20K (UperNet). A user's log of the released code ends at loss 6.30, accuracy 0.050.
Shorter: --cfg-options train_cfg.max_epochs=100 param_scheduler.1.end=100 param_scheduler.1.T_max=90
Differs: from the paper's main model (beit/) in the architecture; this is what the released code trains by
         default. The released code's README runs 800 epochs of it.
"""
_base_ = [
    '../_base_/models/mim_plus_base.py',
    '../_base_/datasets/mim_in1k.py',
    '../_base_/schedules/mim_adamw_bs2048.py',
    '../_base_/default_runtime.py',
]

work_dir = 'work_dirs/beit_plus_pretrain_300e'  # not that of beit/pretrain_300e.py
train_cfg = dict(type='EpochBasedTrainLoop', max_epochs=300, val_interval=20)
param_scheduler = [
    # From 0 (mmengine refuses a factor of exactly 0) to the peak at the last step of epoch 10.
    dict(type='LinearLR', start_factor=1e-9, begin=0, end=10, convert_to_iter_based=True),
    dict(
        type='CosineAnnealingLR',
        eta_min=1e-5,
        begin=10,
        end=300,
        T_max=290,
        convert_to_iter_based=True),
]

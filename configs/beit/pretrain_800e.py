"""BEiT-Base, 800 epochs on ImageNet-1K: the pretraining behind the paper's main tables.

Command: tools/dist_train.sh configs/beit/pretrain_800e.py 16
Batch:   16 GPUs x 128 = 2048 images, lr 1.5e-3. On 8 GPUs: --cfg-options train_dataloader.batch_size=256
Steps:   1281167 // 2048 = 625 an epoch, 500,000 in all
Time:    the paper: about five days on 16 V100
Result:  the paper, after fine-tuning: 83.2 top-1 on ImageNet-1K, 45.6 mIoU on ADE20K (SETR-PUP);
         linear probe of layer 9: 56.7
Shorter: pretrain_300e.py (82.86 top-1)
Differs: from the released code's default command, which trains the BEiT+ architecture
         (beit_plus/pretrain_300e.py); this is the plain ViT of the paper and of its released
         checkpoint `beit_base_patch16_224_pt1k_800ep`. bfloat16 instead of float16.
"""
_base_ = [
    '../_base_/models/mim_base.py',
    '../_base_/datasets/mim_in1k.py',
    '../_base_/schedules/mim_adamw_bs2048.py',
    '../_base_/default_runtime.py',
]

train_cfg = dict(type='EpochBasedTrainLoop', max_epochs=800, val_interval=20)
param_scheduler = [
    # From 0 (mmengine refuses a factor of exactly 0) to the peak at the last step of epoch 10.
    dict(type='LinearLR', start_factor=1e-9, begin=0, end=10, convert_to_iter_based=True),
    dict(
        type='CosineAnnealingLR',
        eta_min=1e-5,
        begin=10,
        end=800,
        T_max=790,
        convert_to_iter_based=True),
]

"""BEiT+ Large fine-tuned on ImageNet-22K, 90 epochs: the released checkpoint `beit_large_patch16_224_pt22k_ft22k`.

Command: tools/dist_train.sh configs/beit_plus/pretrain_large_in22k_150e.py 16
         tools/dist_train.sh configs/beit_plus/intermediate_large_in22k_90e.py 16
         From the released weights, without the first: --cfg-options
         model.backbone.init_cfg.checkpoint=beit_large_patch16_224_pt22k.pth
Batch:   16 GPUs x 64 x 2 accumulated = 2048 images, lr 2e-3
Steps:   14197122 // 2048 = 6932 an epoch, 623,880 in all
Time:    about 3.5 times intermediate_in22k_90e.py (370 against 105 GFLOP an image)
Result:  released, after fine-tuning on ImageNet-1K: 87.4 top-1 at 224, 88.4 at 384, 88.6 at 512
Shorter: intermediate_in22k_90e.py
Differs: from intermediate_in22k_90e.py in the model, in layer decay, batch and lr. The clip of 1.0 that the released
         command names is ignored there, and left out here.
"""
_base_ = './intermediate_in22k_90e.py'

model = dict(
    backbone=dict(
        arch='large',
        layer_scale_init=1e-5,
        init_cfg=dict(checkpoint='work_dirs/pretrain_large_in22k_150e/epoch_150.pth')),
    head=dict(in_channels=1024))
train_dataloader = dict(batch_size=64)
optim_wrapper = dict(
    accumulative_counts=2,
    paramwise_cfg=dict(layer_decay_rate=0.75),
    optimizer=dict(lr=2e-3))
auto_scale_lr = dict(base_batch_size=2048)
param_scheduler = [
    # From 0 (mmengine refuses a factor of exactly 0) to the peak at the last step of epoch 5.
    dict(type='LinearLR', start_factor=1e-9, begin=0, end=5, convert_to_iter_based=True),
    # To 1e-6 for the head; a ratio, so that the rates of lower layers end as much lower as they began.
    dict(
        type='CosineAnnealingLR',
        eta_min_ratio=5e-4,
        begin=5,
        end=90,
        T_max=85,
        convert_to_iter_based=True),
]

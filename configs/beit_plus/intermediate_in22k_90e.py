"""BEiT+ Base fine-tuned on ImageNet-22K, 90 epochs: the released checkpoint `beit_base_patch16_224_pt22k_ft22k`.

Command: tools/dist_train.sh configs/beit_plus/pretrain_in22k_150e.py 16
         tools/dist_train.sh configs/beit_plus/intermediate_in22k_90e.py 16
         From the released weights, without the first: --cfg-options
         model.backbone.init_cfg.checkpoint=beit_base_patch16_224_pt22k.pth
Batch:   16 GPUs x 256 = 4096 images, lr 3e-3. On 8 GPUs: --cfg-options optim_wrapper.accumulative_counts=2
Steps:   14197122 // 4096 = 3466 an epoch, 311,940 in all
Time:    about ten times beit/finetune_in1k_100e.py (11 times the images, 90 epochs)
Result:  released, after fine-tuning on ImageNet-1K: 85.2 top-1 at 224, 86.8 at 384
Shorter: finetune_pt22k_in1k_100e.py, which goes to ImageNet-1K directly
Differs: from the released command in having no gradient clip: that names 3.0, but ignores it under deepspeed.
         bfloat16 instead of float16. No accuracy while training, as there: ImageNet-22K has no validation images.
"""
_base_ = [
    '../_base_/models/finetune_plus_base.py',
    '../_base_/datasets/finetune_plus_in1k.py',
    '../_base_/schedules/finetune_adamw_bs1024.py',
    '../_base_/default_runtime.py',
]

model = dict(
    data_preprocessor=dict(num_classes=21841),
    backbone=dict(
        drop_path_rate=0.2,
        init_cfg=dict(
            type='Pretrained', checkpoint='work_dirs/pretrain_in22k_150e/epoch_150.pth')),
    head=dict(num_classes=21841))
train_dataloader = dict(batch_size=256, dataset=dict(data_root='data/imagenet22k/train'))
val_dataloader = None
val_evaluator = None
val_cfg = None
test_dataloader = None
test_evaluator = None
test_cfg = None

optim_wrapper = dict(optimizer=dict(lr=3e-3))
auto_scale_lr = dict(base_batch_size=4096)
default_hooks = dict(checkpoint=dict(interval=5))
train_cfg = dict(type='EpochBasedTrainLoop', max_epochs=90)
param_scheduler = [
    # From 0 (mmengine refuses a factor of exactly 0) to the peak at the last step of epoch 5.
    dict(type='LinearLR', start_factor=1e-9, begin=0, end=5, convert_to_iter_based=True),
    # To 1e-6 for the head; a ratio, so that the rates of lower layers end as much lower as they began.
    dict(
        type='CosineAnnealingLR',
        eta_min_ratio=1e-6 / 3e-3,
        begin=5,
        end=90,
        T_max=85,
        convert_to_iter_based=True),
]

"""BEiT+ Large fine-tuned on ImageNet-1K at 384 after ImageNet-22K: released `beit_large_patch16_384_pt22k_ft22kto1k`.

Command: tools/dist_train.sh configs/beit_plus/intermediate_large_in22k_90e.py 16
         tools/dist_train.sh configs/beit_plus/finetune_large_384_in1k.py 8
         From the released weights, without the first: --cfg-options
         model.backbone.init_cfg.checkpoint=beit_large_patch16_224_pt22k_ft22k.pth
Batch:   8 GPUs x 32 x 2 accumulated = 512 images, lr 2e-5. Less memory: --cfg-options model.backbone.with_cp=True
Steps:   1281167 // 512 = 2502 an epoch, 75,060 in all
Time:    about 3.1 times finetune_large_224_in1k.py (1146 against 370 GFLOP an image)
Result:  the paper: 88.4 top-1; released: 88.408 top-1, 98.602 top-5
Shorter: finetune_large_224_in1k.py
Differs: from the released command in bfloat16 instead of float16. From finetune_large_224_in1k.py in the image size
         alone: the model of the intermediate fine-tuning at 224 goes to 384 directly, its bias tables resampled.
"""
_base_ = './finetune_224_in1k.py'

model = dict(
    backbone=dict(
        arch='large',
        img_size=384,
        layer_scale_init=1e-5,
        drop_path_rate=0.4,
        init_cfg=dict(checkpoint='work_dirs/intermediate_large_in22k_90e/epoch_90.pth')),
    head=dict(in_channels=1024))

train_pipeline = [
    dict(type='beit_mm.LoadImage'),
    dict(type='RandomResizedCrop', scale=384, backend='pillow', interpolation='bicubic'),
    dict(type='RandomFlip', prob=0.5, direction='horizontal'),
    dict(
        type='beit_mm.RandAugment',
        policies='timm_increasing',
        num_policies=2,
        total_level=10,
        magnitude_level=9,
        magnitude_std=0.5,
        hparams=dict(pad_val=[128, 128, 128], interpolation='bicubic')),
    dict(type='beit_mm.RandomErasing', prob=0.25),
    dict(type='PackInputs', meta_keys=('img_path', 'erase_box', 'unreadable')),
]
test_pipeline = [
    dict(type='beit_mm.LoadImage'),
    dict(type='ResizeEdge', scale=384, edge='short', backend='pillow', interpolation='bicubic'),
    dict(type='CenterCrop', crop_size=384),
    dict(type='PackInputs'),
]
train_dataloader = dict(batch_size=32, dataset=dict(pipeline=train_pipeline))
val_dataloader = dict(dataset=dict(pipeline=test_pipeline))
test_dataloader = val_dataloader

optim_wrapper = dict(accumulative_counts=2, paramwise_cfg=dict(layer_decay_rate=0.9))

"""BEiT+ Large fine-tuned on ImageNet-22K, 90 epochs: the released checkpoint `beit_large_patch16_224_pt22k_ft22k`.

Result:  88.4 ImageNet-1K top-1 at 384 pixels, by finetune_large_384_in1k_30e_after_in22k.py (paper, comparison with
           supervised pretraining)
         88.6 ImageNet-1K top-1 at 512 pixels, by finetune_large_512_in1k_30e_after_in22k.py (paper, comparison with
           supervised pretraining)
         56.7 ADE20K mIoU, single scale, by upernet_large_640_ade20k_160k_after_in22k.py (paper, comparison with
           supervised pretraining)
         87.396 ImageNet-1K top-1 at 224 pixels, by finetune_large_in1k_30e_after_in22k.py (microsoft/unilm beit
           get_started_for_image_classification.md)
Model:   ViT-Large, relative position bias in every block, LayerScale, 325,792,593 parameters; 224 x 224 pixels
Command: tools/dist_train.sh configs/beit_plus/pretrain_large_in22k_150e.py 16
         tools/dist_train.sh configs/beit_plus/finetune_large_in22k_90e.py 16
         The last from the released weights:
           --cfg-options model.backbone.init_cfg.checkpoint=beit_large_patch16_224_pt22k
Batch:   16 GPUs x 64, an update every 2 batches = 2048 images, lr 2e-3
Steps:   90 epochs x 6,932 = 623,880 updates, 34,660 of them warm-up
Data:    ImageNet-22K, 14,197,122 images
Cost:    369 GFLOP an image forward and backward; 1,051 GPU hours of an A100 at 40 %

Differs: from finetune_in22k_90e.py in the model, layer decay, batch and lr. The released command names a clip of 1.0,
         but its code ignores that, so there is none here.
"""
_base_ = [
    '../_base_/models/finetune_base.py',
    '../_base_/datasets/finetune_in1k.py',
    '../_base_/schedules/finetune_adamw_bs1024_100e.py',
]

work_dir = 'work_dirs/beit_plus_finetune_large_in22k_90e'
model = dict(
    data_preprocessor=dict(
        num_classes=21841, mean=[127.5, 127.5, 127.5], std=[127.5, 127.5, 127.5]),
    backbone=dict(
        arch='large',
        abs_pos_embed=False,
        rel_pos_bias='per_layer',
        layer_scale_init=1e-5,
        drop_path_rate=0.2,
        init_cfg=dict(type='Pretrained', checkpoint='work_dirs/beit_plus_pretrain_large_in22k_150e/epoch_150.pth')),
    head=dict(num_classes=21841, in_channels=1024),
    train_cfg=None)  # no mixup, no cutmix

train_pipeline = [
    dict(type='beit_mm.LoadImage'),
    dict(type='beit_mm.RandomResizedCrop', size=224),
    dict(
        type='beit_mm.RandAugment', policies='timm_increasing', num_policies=2, total_level=10, magnitude_level=9,
        magnitude_std=0.5, hparams=dict(pad_val=[128, 128, 128], interpolation='bicubic')),  # its own mean
    dict(type='beit_mm.RandomErasing', prob=0.25),
    dict(type='PackInputs', meta_keys=('img_path', 'erase_box', 'unreadable')),
]
train_dataloader = dict(batch_size=64, dataset=dict(data_root='data/imagenet22k/train', pipeline=train_pipeline))
val_dataloader = None
val_evaluator = None
val_cfg = None
test_dataloader = None
test_evaluator = None
test_cfg = None

optim_wrapper = dict(accumulative_counts=2, paramwise_cfg=dict(layer_decay_rate=0.75), optimizer=dict(lr=2e-3))
auto_scale_lr = dict(base_batch_size=2048)
train_cfg = dict(_delete_=True, type='beit_mm.EpochLoop', max_epochs=90)
param_scheduler = [
    dict(type='LinearLR', start_factor=1e-9, begin=0, end=5, convert_to_iter_based=True),
    dict(type='CosineAnnealingLR', eta_min_ratio=5e-4, begin=5, end=90, convert_to_iter_based=True),
]

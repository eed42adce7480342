"""BEiT+ Base fine-tuned on ImageNet-22K, 90 epochs: the released checkpoint `beit_base_patch16_224_pt22k_ft22k`.

Result:  86.8 ImageNet-1K top-1 at 384 pixels, by finetune_384_in1k_30e_after_in22k.py (paper, comparison with
           supervised pretraining)
         53.6 ADE20K mIoU, single scale, by upernet_640_ade20k_160k_after_in22k.py (paper, comparison with supervised
           pretraining)
         85.2 ImageNet-1K top-1 at 224 pixels, by finetune_in1k_30e_after_in22k.py (microsoft/unilm README)
Model:   ViT-Base, relative position bias in every block, LayerScale, 102,557,713 parameters; 224 x 224 pixels
Command: tools/dist_train.sh configs/beit_plus/pretrain_in22k_150e.py 16
         tools/dist_train.sh configs/beit_plus/finetune_in22k_90e.py 16
         The last from the released weights:
           --cfg-options model.backbone.init_cfg.checkpoint=beit_base_patch16_224_pt22k
Batch:   16 GPUs x 256 = 4096 images, lr 3e-3
Steps:   90 epochs x 3,466 = 311,940 updates, 17,330 of them warm-up
Data:    ImageNet-22K, 14,197,122 images
Cost:    105 GFLOP an image forward and backward; 300 GPU hours of an A100 at 40 %

Differs: from the released command in having no gradient clip: the command names 3.0, but its code ignores that under
         deepspeed. bfloat16 instead of float16. No accuracy during training, because ImageNet-22K has no validation
         images.
Options: On 8 GPUs: --cfg-options optim_wrapper.accumulative_counts=2
"""
_base_ = [
    '../_base_/models/finetune_base.py',
    '../_base_/datasets/finetune_in1k.py',
    '../_base_/schedules/finetune_adamw_bs1024_100e.py',
]

work_dir = 'work_dirs/beit_plus_finetune_in22k_90e'
model = dict(
    data_preprocessor=dict(
        num_classes=21841, mean=[127.5, 127.5, 127.5], std=[127.5, 127.5, 127.5]),
    backbone=dict(
        abs_pos_embed=False,
        rel_pos_bias='per_layer',
        layer_scale_init=0.1,
        drop_path_rate=0.2,
        init_cfg=dict(type='Pretrained', checkpoint='work_dirs/beit_plus_pretrain_in22k_150e/epoch_150.pth')),
    head=dict(num_classes=21841),
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
train_dataloader = dict(batch_size=256, dataset=dict(data_root='data/imagenet22k/train', pipeline=train_pipeline))
val_dataloader = None
val_evaluator = None
val_cfg = None
test_dataloader = None
test_evaluator = None
test_cfg = None

optim_wrapper = dict(optimizer=dict(lr=3e-3))
auto_scale_lr = dict(base_batch_size=4096)
train_cfg = dict(_delete_=True, type='beit_mm.EpochLoop', max_epochs=90)
param_scheduler = [
    dict(type='LinearLR', start_factor=1e-9, begin=0, end=5, convert_to_iter_based=True),
    dict(type='CosineAnnealingLR', eta_min_ratio=1e-6 / 3e-3, begin=5, end=90, convert_to_iter_based=True),
]

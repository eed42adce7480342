"""BEiT v2 Large fine-tuned on ImageNet-22K, 90 epochs: released `beitv2_large_patch16_224_pt1k_ft21k`.

Result:  88.4 ImageNet-1K top-1 at 224 pixels, by finetune_large_in1k_20e_after_in22k.py (microsoft/unilm beit2 README)
         57.5 ADE20K mIoU, single scale, by upernet_large_512_ade20k_160k_after_in22k.py (microsoft/unilm beit2 README)
Model:   ViT-Large, relative position bias in every block, LayerScale, 325,792,593 parameters; 224 x 224 pixels
Command: tools/dist_train.sh configs/beit_v2/pretrain_large_1600e.py 16
         tools/dist_train.sh configs/beit_v2/finetune_large_in22k_90e.py 32
         The last from the released weights:
           --cfg-options model.backbone.init_cfg.checkpoint=beitv2_large_patch16_224_pt1k
Batch:   32 GPUs x 128 = 4096 images, lr 6e-4
Steps:   90 epochs x 3,466 = 311,940 updates, 69,320 of them warm-up
Data:    ImageNet-22K, 14,197,122 images
Cost:    369 GFLOP an image forward and backward; 1,051 GPU hours of an A100 at 40 %

Differs: from finetune_in22k_90e.py in the model and stochastic depth, as in the released command
Options: On 16 GPUs: --cfg-options optim_wrapper.accumulative_counts=2
"""
_base_ = [
    '../_base_/models/finetune_base.py',
    '../_base_/datasets/finetune_in1k.py',
    '../_base_/schedules/finetune_adamw_bs1024_100e.py',
]

work_dir = 'work_dirs/beit_v2_finetune_large_in22k_90e'
model = dict(
    data_preprocessor=dict(num_classes=21841),
    backbone=dict(
        arch='large',
        abs_pos_embed=False,
        rel_pos_bias='per_layer',
        layer_scale_init=1e-5,
        drop_path_rate=0.2,
        init_cfg=dict(type='Pretrained', checkpoint='work_dirs/beit_v2_pretrain_large_1600e/epoch_1600.pth')),
    head=dict(num_classes=21841, in_channels=1024))
train_dataloader = dict(dataset=dict(data_root='data/imagenet22k/train'))
val_dataloader = None
val_evaluator = None
val_cfg = None
test_dataloader = None
test_evaluator = None
test_cfg = None

optim_wrapper = dict(paramwise_cfg=dict(layer_decay_rate=0.75), optimizer=dict(lr=6e-4))
auto_scale_lr = dict(base_batch_size=4096)
train_cfg = dict(_delete_=True, type='beit_mm.EpochLoop', max_epochs=90)
param_scheduler = [
    dict(type='LinearLR', start_factor=1e-9, begin=0, end=20, convert_to_iter_based=True),
    dict(type='CosineAnnealingLR', eta_min_ratio=1e-6 / 6e-4, begin=20, end=90, convert_to_iter_based=True),
]

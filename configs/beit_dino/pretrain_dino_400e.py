"""DINO with ViT-Base, 400 epochs on ImageNet-1K: a baseline of the paper.

Result:  82.8 ImageNet-1K top-1 at 224 pixels, by beit/finetune_in1k_100e.py (paper, classification table)
         44.08 ADE20K mIoU, single scale, by beit/setr_pup_512_ade20k_160k.py (paper, table of BEiT and DINO together)
Model:   ViT-Base, absolute position embedding, 217,856,000 parameters; 224 x 224 pixels
Command: tools/dist_train.sh configs/beit_dino/pretrain_dino_400e.py 16
Then:    tools/dist_train.sh configs/beit/finetune_in1k_100e.py 8 \
           --work-dir work_dirs/finetune_in1k_100e_after_pretrain_dino_400e \
           --cfg-options model.backbone.init_cfg.checkpoint=work_dirs/pretrain_dino_400e/epoch_400.pth \
           model.backbone.init_cfg.prefix=teacher.backbone.
         tools/dist_train.sh configs/beit/setr_pup_512_ade20k_160k.py 8 \
           --work-dir work_dirs/setr_pup_512_ade20k_160k_after_pretrain_dino_400e \
           --cfg-options model.backbone.init_cfg.checkpoint=work_dirs/pretrain_dino_400e/epoch_400.pth \
           model.backbone.init_cfg.prefix=teacher.backbone.
Batch:   16 GPUs x 64 = 1024 images, lr 3e-3
Steps:   400 epochs x 1,251 = 500,400 updates, 12,510 of them warm-up
Data:    ImageNet-1K, 1,281,167 images
Cost:    442 GFLOP an image forward and backward; 504 GPU hours of an A100 at 40 %

Differs: from the original (facebookresearch/dino, the arguments of its released ViT-B/16) in clipping all gradients
         together at 3 (original: each tensor at 0.3); in weight decay, which class token and position embedding do not
         have (original: biases and other vectors do not have it); in bfloat16 (the last layer of the head in float32);
         in BEiT's initialisation; in attention without a bias for the keys, which changes no attention; in an exact
         Gaussian blur; and in the position embedding of local crops, resized to 6 x 6 patches by size instead of by the
         scale factor 6.1 / 14. The row in the paper starts from the original's file, dino_vitbase16_pretrain.pth
Options: float32, as the original: --cfg-options optim_wrapper.dtype=float32
Trains:  108,862,464 of the parameters; the others are the teacher's
"""
_base_ = [
    '../_base_/models/mim_base.py',
    '../_base_/datasets/mim_in1k.py',
    '../_base_/default_runtime.py',
]

model = dict(
    type='beit_mm.DINOPretrainer',
    data_preprocessor=dict(type='beit_mm.MultiCropDataPreprocessor'),
    dino_head=dict(type='beit_mm.DINOHead', embed_dims=768, num_prototypes=65536),
    head=None,
    target_generator=None)
custom_hooks = [
    *_base_.custom_hooks,
    dict(type='beit_mm.DINOHook', momentum=0.996, temperature=(0.04, 0.07), warmup_epochs=50, freeze_last_layer=3),
]

train_pipeline = [
    dict(type='beit_mm.LoadImage'),
    dict(
        type='beit_mm.MultiCrop', size=224, scale=(0.25, 1.0), local_size=96, local_scale=(0.05, 0.25), num_local=10),
    dict(type='beit_mm.PackViews'),
]
train_dataloader = dict(batch_size=64, dataset=dict(pipeline=train_pipeline))
val_dataloader = None
val_evaluator = None
val_cfg = None
test_dataloader = None
test_evaluator = None
test_cfg = None

optim_wrapper = dict(
    type='beit_mm.AutocastOptimWrapper',
    dtype='bfloat16',
    constructor='beit_mm.BEiTOptimWrapperConstructor',
    optimizer=dict(  # 7.5e-4 for 256 images
        type='AdamW', lr=3e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.04, fused=True),
    clip_grad=dict(max_norm=3.0))
auto_scale_lr = dict(base_batch_size=1024)
train_cfg = dict(type='beit_mm.EpochLoop', max_epochs=400)
param_scheduler = [
    # From 0 (mmengine refuses a factor of exactly 0) to the peak at the last step of epoch 10.
    dict(type='LinearLR', start_factor=1e-9, begin=0, end=10, convert_to_iter_based=True),
    dict(type='CosineAnnealingWeightDecay', eta_min=0.4, begin=0, end=400, convert_to_iter_based=True),
    dict(type='CosineAnnealingLR', eta_min_ratio=2e-6 / 3e-3, begin=10, end=400, convert_to_iter_based=True),
]

"""BEiT and DINO in one pretraining of ViT-Base, 300 epochs on ImageNet-1K: the paper's multi-task row.

Result:  82.9 ImageNet-1K top-1 at 224 pixels, by beit/finetune_in1k_100e.py (paper, table of BEiT and DINO together)
         46.85 ADE20K mIoU, single scale, by beit/setr_pup_512_ade20k_160k.py (paper, table of BEiT and DINO together)
Model:   ViT-Base, absolute position embedding, 224,156,416 parameters; 224 x 224 pixels, 75 of 196 patches masked
Command: tools/dist_train.sh configs/beit_dino/pretrain_beit_dino_300e.py 32
Then:    tools/dist_train.sh configs/beit/finetune_in1k_100e.py 8 \
           --work-dir work_dirs/finetune_in1k_100e_after_pretrain_beit_dino_300e \
           --cfg-options model.backbone.init_cfg.checkpoint=work_dirs/pretrain_beit_dino_300e/epoch_300.pth \
           model.backbone.init_cfg.prefix=backbone.
         tools/dist_train.sh configs/beit/setr_pup_512_ade20k_160k.py 8 \
           --work-dir work_dirs/setr_pup_512_ade20k_160k_after_pretrain_beit_dino_300e \
           --cfg-options model.backbone.init_cfg.checkpoint=work_dirs/pretrain_beit_dino_300e/epoch_300.pth \
           model.backbone.init_cfg.prefix=backbone.
Test:    tools/dist_test.sh configs/beit_dino/pretrain_beit_dino_300e.py \
           work_dirs/pretrain_beit_dino_300e/epoch_300.pth 32
Batch:   32 GPUs x 64 = 2048 images, lr 1.5e-3
Steps:   300 epochs x 625 = 187,500 updates, 6,250 of them warm-up
Data:    ImageNet-1K, 1,281,167 images
Cost:    594 GFLOP an image forward and backward; 507 GPU hours of an A100 at 40 %

Differs: the paper says only that both tasks are trained together for 300 epochs; no code was released. Here the loss is
         the sum of both. The first global crop is BEiT's image, with BEiT's jitter, mask and second view for the
         tokenizer, without DINO's grayscale and blur. Its boxes cover at least a quarter of the image, because the
         teacher sees this crop too, unmasked. DINO's student also sees it unmasked, in a separate pass. The rest of
         DINO (other crops, head, temperature and momentum) is as in pretrain_dino_400e.py, with its bfloat16 and
         Gaussian blur. Optimizer, rate, weight decay and clipping are BEiT's (beit/pretrain_300e.py)
Options: The student's class token from the masked pass, with a sixth less arithmetic:
             --cfg-options model.dino_on_masked=True
         Another weight of DINO's loss: --cfg-options model.dino_weight=0.5
Trains:  115,162,880 of the parameters; the others are the teacher's
"""
_base_ = [
    '../_base_/models/mim_base.py',
    '../_base_/datasets/mim_in1k.py',
    '../_base_/schedules/mim_adamw_bs2048_300e.py',
]

model = dict(
    type='beit_mm.DINOPretrainer',
    data_preprocessor=dict(type='beit_mm.MultiCropDataPreprocessor'),
    dino_head=dict(type='beit_mm.DINOHead', embed_dims=768, num_prototypes=65536),
    dino_weight=1.0,
    dino_on_masked=False)
custom_hooks = [
    *_base_.custom_hooks,
    dict(type='beit_mm.DINOHook', momentum=0.996, temperature=(0.04, 0.07), warmup_epochs=50, freeze_last_layer=3),
]

train_pipeline = [
    dict(type='beit_mm.LoadImage'),
    dict(type='beit_mm.TwoViewRandomResizedCrop', size=224, second_size=112, scale=(0.25, 1.0)),
    dict(type='beit_mm.TwoViewColorJitter', brightness=0.4, contrast=0.4, saturation=0.4),
    dict(type='beit_mm.BlockwiseMask', grid=(14, 14), num_masked=75),
    dict(
        type='beit_mm.MultiCrop', size=224, scale=(0.25, 1.0), local_size=96, local_scale=(0.05, 0.25), num_local=10),
    dict(type='beit_mm.PackViews'),
]
train_dataloader = dict(batch_size=64, dataset=dict(pipeline=train_pipeline))

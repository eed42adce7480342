"""BEiT+ Base fine-tuned on ImageNet-1K straight after pretraining: released `beit_base_patch16_224_pt22k_ft1k`.

Result:  83.7 ImageNet-1K top-1 at 224 pixels (microsoft/unilm README)
         96.6 ImageNet-1K top-5 at 224 pixels (microsoft/unilm README)
         83.1 ImageNet-1K top-1 at 224 pixels (mmpretrain metafile, of its own training after 300 epochs on ImageNet-1K)
Model:   ViT-Base, relative position bias in every block, LayerScale, 86,530,984 parameters; 224 x 224 pixels
Command: tools/dist_train.sh configs/beit_plus/pretrain_in22k_150e.py 16
         tools/dist_train.sh configs/beit_plus/finetune_in1k_100e.py 8
         The last from the released weights:
           --cfg-options model.backbone.init_cfg.checkpoint=beit_base_patch16_224_pt22k
Test:    tools/dist_test.sh configs/beit_plus/finetune_in1k_100e.py \
           work_dirs/beit_plus_finetune_in1k_100e/epoch_100.pth 8
Batch:   8 GPUs x 128 = 1024 images, lr 4e-3
Steps:   100 epochs x 1,251 = 125,100 updates, 25,020 of them warm-up
Data:    ImageNet-1K, 1,281,167 images
Cost:    105 GFLOP an image forward and backward; 30 GPU hours of an A100 at 40 %

Differs: from the released command in bfloat16 instead of float16, and in random partners for mixup and cutmix
         (released: the batch in reverse).
"""
_base_ = [
    '../_base_/models/finetune_base.py',
    '../_base_/datasets/finetune_in1k.py',
    '../_base_/schedules/finetune_adamw_bs1024_100e.py',
]

work_dir = 'work_dirs/beit_plus_finetune_in1k_100e'
model = dict(
    data_preprocessor=dict(mean=[127.5, 127.5, 127.5], std=[127.5, 127.5, 127.5]),
    backbone=dict(
        abs_pos_embed=False,
        rel_pos_bias='per_layer',
        layer_scale_init=0.1,
        init_cfg=dict(type='Pretrained', checkpoint='work_dirs/beit_plus_pretrain_in22k_150e/epoch_150.pth')))

train_pipeline = [
    dict(type='beit_mm.LoadImage'),
    dict(type='beit_mm.RandomResizedCrop', size=224),
    dict(
        type='beit_mm.RandAugment', policies='timm_increasing', num_policies=2, total_level=10, magnitude_level=9,
        magnitude_std=0.5, hparams=dict(pad_val=[128, 128, 128], interpolation='bicubic')),  # its own mean
    dict(type='beit_mm.RandomErasing', prob=0.25),
    dict(type='PackInputs', meta_keys=('img_path', 'erase_box', 'unreadable')),
]
train_dataloader = dict(dataset=dict(pipeline=train_pipeline))

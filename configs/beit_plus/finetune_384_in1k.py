"""BEiT+ Base fine-tuned on ImageNet-1K at 384 after ImageNet-22K: released `beit_base_patch16_384_pt22k_ft22kto1k`.

Command: tools/dist_train.sh configs/beit_plus/intermediate_in22k_90e.py 16
         tools/dist_train.sh configs/beit_plus/finetune_384_in1k.py 8
         From the released weights, without the first: --cfg-options
         model.backbone.init_cfg.checkpoint=beit_base_patch16_224_pt22k_ft22k.pth
Batch:   8 GPUs x 64 = 512 images, lr 2e-5
Steps:   1281167 // 512 = 2502 an epoch, 75,060 in all
Time:    about 3.2 times finetune_224_in1k.py (333 against 105 GFLOP an image)
Result:  the paper: 86.8 top-1; released: 86.820 top-1, 98.124 top-5
Shorter: finetune_224_in1k.py (85.2 top-1)
Differs: from finetune_224_in1k.py in the image size alone: the model of the intermediate fine-tuning at 224 goes to 384
         directly, its bias tables resampled. Evaluated on the whole height or width (crop ratio 1).
"""
_base_ = './finetune_224_in1k.py'

model = dict(backbone=dict(img_size=384))

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
train_dataloader = dict(dataset=dict(pipeline=train_pipeline))
val_dataloader = dict(dataset=dict(pipeline=test_pipeline))
test_dataloader = val_dataloader

"""BEiT+ Large fine-tuned on ImageNet-1K at 512 after ImageNet-22K: released `beit_large_patch16_512_pt22k_ft22kto1k`.

Command: tools/dist_train.sh configs/beit_plus/pretrain_large_in22k_150e.py 16
         tools/dist_train.sh configs/beit_plus/intermediate_large_in22k_90e.py 16
         tools/dist_train.sh configs/beit_plus/finetune_large_512_in1k.py 8
         The last alone, from the released weights: --cfg-options
         model.backbone.init_cfg.checkpoint=beit_large_patch16_224_pt22k_ft22k.pth
Batch:   8 GPUs x 32 x 2 accumulated = 512 images, lr 2e-5
Steps:   30 epochs x 2,502 = 75,060, ImageNet-1K with 1,281,167 images; warm-up 12,510
Writes:  work_dirs/finetune_large_512_in1k/epoch_30.pth
Model:   ViT-Large, relative position bias in every block, LayerScale, 305,674,728 parameters; 512 x 512 pixels
Result:  88.6 ImageNet-1K top-1 at 512 pixels (paper, comparison with supervised pretraining)
         88.600 ImageNet-1K top-1 at 512 pixels (microsoft/unilm beit get_started_for_image_classification.md)
         98.658 ImageNet-1K top-5 at 512 pixels (microsoft/unilm beit get_started_for_image_classification.md)

Time:    about 5.9 times finetune_large_224_in1k.py (2172 against 370 GFLOP an image)
Options: Less memory: --cfg-options model.backbone.with_cp=True
Shorter: finetune_large_384_in1k.py
Differs: from the released command in bfloat16 instead of float16. From finetune_large_224_in1k.py in the image size
         alone: the model of the intermediate fine-tuning at 224 goes to 512 directly, its bias tables resampled.
"""
_base_ = './finetune_224_in1k.py'

model = dict(
    backbone=dict(
        arch='large',
        img_size=512,
        layer_scale_init=1e-5,
        drop_path_rate=0.4,
        init_cfg=dict(checkpoint='work_dirs/intermediate_large_in22k_90e/epoch_90.pth'),
    ),
    head=dict(in_channels=1024),
)
optim_wrapper = dict(accumulative_counts=2, paramwise_cfg=dict(layer_decay_rate=0.9))

train_pipeline = _base_.train_pipeline
train_pipeline[1].size = 512  # RandomResizedCrop
test_pipeline = _base_.test_pipeline
test_pipeline[1].scale = 512  # ResizeEdge: the whole height or width
test_pipeline[2].crop_size = 512  # CenterCrop
train_dataloader = dict(batch_size=32, dataset=dict(pipeline=train_pipeline))
val_dataloader = dict(dataset=dict(pipeline=test_pipeline))
test_dataloader = val_dataloader

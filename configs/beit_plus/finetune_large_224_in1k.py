"""BEiT+ Large fine-tuned on ImageNet-1K at 224 after ImageNet-22K: released `beit_large_patch16_224_pt22k_ft22kto1k`.

Command: tools/dist_train.sh configs/beit_plus/pretrain_large_in22k_150e.py 16
         tools/dist_train.sh configs/beit_plus/intermediate_large_in22k_90e.py 16
         tools/dist_train.sh configs/beit_plus/finetune_large_224_in1k.py 8
         The last alone, from the released weights: --cfg-options
         model.backbone.init_cfg.checkpoint=beit_large_patch16_224_pt22k_ft22k.pth
Batch:   8 GPUs x 32 x 2 accumulated = 512 images, lr 2e-5
Steps:   30 epochs x 2,502 = 75,060, ImageNet-1K with 1,281,167 images; warm-up 12,510
Writes:  work_dirs/finetune_large_224_in1k/epoch_30.pth
Model:   ViT-Large, relative position bias in every block, LayerScale, 304,430,568 parameters; 224 x 224 pixels
Result:  87.396 ImageNet-1K top-1 at 224 pixels (microsoft/unilm beit get_started_for_image_classification.md)
         98.282 ImageNet-1K top-5 at 224 pixels (microsoft/unilm beit get_started_for_image_classification.md)

Time:    about 3.5 times finetune_224_in1k.py (370 against 105 GFLOP an image)
Shorter: finetune_224_in1k.py
Differs: from finetune_224_in1k.py in the model, in layer decay and stochastic depth
"""
_base_ = './finetune_224_in1k.py'

model = dict(
    backbone=dict(
        arch='large',
        layer_scale_init=1e-5,
        drop_path_rate=0.4,
        init_cfg=dict(checkpoint='work_dirs/intermediate_large_in22k_90e/epoch_90.pth')),
    head=dict(in_channels=1024))
train_dataloader = dict(batch_size=32)
optim_wrapper = dict(accumulative_counts=2, paramwise_cfg=dict(layer_decay_rate=0.9))

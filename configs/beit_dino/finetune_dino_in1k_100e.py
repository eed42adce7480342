"""DINO, fine-tuned on ImageNet-1K at 224 pixels, 100 epochs.

Command: tools/dist_train.sh configs/beit_dino/pretrain_dino_400e.py 16
         tools/dist_train.sh configs/beit_dino/finetune_dino_in1k_100e.py 8
Batch:   8 GPUs x 128 = 1024 images, lr 4e-3
Steps:   100 epochs x 1,251 = 125,100, ImageNet-1K with 1,281,167 images; warm-up 25,020
Writes:  work_dirs/finetune_dino_in1k_100e/epoch_100.pth
Model:   ViT-Base, absolute position embedding, 86,558,440 parameters; 224 x 224 pixels
Result:  82.8 ImageNet-1K top-1 at 224 pixels (paper, classification table and table of BEiT and DINO together)

Time:    as beit/finetune_in1k_100e.py
Options: From the original's weights, as the paper's row: --cfg-options
             model.backbone.init_cfg.checkpoint=dino_vitbase16_pretrain.pth model.backbone.init_cfg.prefix=None
Shorter: --cfg-options train_cfg.max_epochs=50 param_scheduler.1.end=50
Differs: from beit/finetune_in1k_100e.py in the weights it starts from: the teacher's, as DINO itself evaluates
"""
_base_ = '../beit/finetune_in1k_100e.py'

model = dict(
    backbone=dict(
        init_cfg=dict(checkpoint='work_dirs/pretrain_dino_400e/epoch_400.pth', prefix='teacher.backbone.')))

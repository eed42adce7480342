"""BEiT+ Base whose last blocks classify masks on ADE20K at 512 pixels after ImageNet-22K.

Result:  none published
Model:   ViT-Base, relative position bias in every block, LayerScale, 92,930,263 parameters; 512 x 512 pixels
Command: tools/dist_train.sh configs/beit_plus/pretrain_in22k_150e.py 16
         tools/dist_train.sh configs/beit_plus/finetune_in22k_90e.py 16
         tools/dist_train.sh configs/beit_plus/masks_512_ade20k_39k_after_in22k.py 8
         The last from the released weights:
           --cfg-options model.backbone.init_cfg.checkpoint=beit_base_patch16_224_pt22k_ft22k
Test:    tools/dist_test.sh configs/beit_plus/masks_512_ade20k_39k_after_in22k.py \
           work_dirs/beit_plus_masks_512_ade20k_39k_after_in22k/iter_39120.pth 8 [--tta]
Batch:   8 GPUs x 2 = 16 images, lr 1e-4
Steps:   39,120 updates, 1,500 of them warm-up
Data:    ADE20K, 20,210 images, 31.0 times
Cost:    989 GFLOP an image forward and backward; 1.4 GPU hours of an A100 at 40 %

Differs: from EoMT (arXiv 2503.19108), whose head and recipe these are, in the pretraining, whose file has no final norm
         of patches, in one warm-up of 1,500 steps in place of two, in drop path, in rates of the blocks that are lower
         by one factor of the layer decay, in having no weight decay on norms, biases and embeddings, in bfloat16
         instead of float16, in what pads a crop (the mean colour, which no loss counts; there black, outside of all
         masks), and in the windows' stride. The cost leaves out the points of the loss and the matching, for which the
         host waits. Not run here.
"""
_base_ = [
    '../_base_/models/masks_base.py',
    '../_base_/datasets/ade20k_masks_512.py',
    '../_base_/schedules/masks_adamw_bs16_39k.py',
]

work_dir = 'work_dirs/beit_plus_masks_512_ade20k_39k_after_in22k'
model = dict(
    backbone=dict(
        abs_pos_embed=False,
        rel_pos_bias='per_layer',
        layer_scale_init=0.1,
        init_cfg=dict(type='Pretrained', checkpoint='work_dirs/beit_plus_finetune_in22k_90e/epoch_90.pth')))

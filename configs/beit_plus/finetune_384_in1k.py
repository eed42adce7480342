"""BEiT+ Base fine-tuned on ImageNet-1K at 384 after ImageNet-22K: released `beit_base_patch16_384_pt22k_ft22kto1k`.

Command: tools/dist_train.sh configs/beit_plus/pretrain_in22k_150e.py 16
         tools/dist_train.sh configs/beit_plus/intermediate_in22k_90e.py 16
         tools/dist_train.sh configs/beit_plus/finetune_384_in1k.py 8
         The last alone, from the released weights: --cfg-options
         model.backbone.init_cfg.checkpoint=beit_base_patch16_224_pt22k_ft22k.pth
Batch:   8 GPUs x 64 = 512 images, lr 2e-5
Steps:   30 epochs x 2,502 = 75,060, ImageNet-1K with 1,281,167 images; warm-up 12,510
Writes:  work_dirs/finetune_384_in1k/epoch_30.pth
Model:   ViT-Base, relative position bias in every block, LayerScale, 86,744,104 parameters; 384 x 384 pixels
Result:  86.8 ImageNet-1K top-1 at 384 pixels (paper, comparison with supervised pretraining)
         86.820 ImageNet-1K top-1 at 384 pixels (microsoft/unilm beit get_started_for_image_classification.md)
         98.124 ImageNet-1K top-5 at 384 pixels (microsoft/unilm beit get_started_for_image_classification.md)

Time:    about 3.2 times finetune_224_in1k.py (333 against 105 GFLOP an image)
Shorter: finetune_224_in1k.py (85.2 top-1)
Differs: from finetune_224_in1k.py in the image size alone: the model of the intermediate fine-tuning at 224 goes to 384
         directly, its bias tables resampled. Evaluated on the whole height or width (crop ratio 1).
"""
_base_ = './finetune_224_in1k.py'

model = dict(backbone=dict(img_size=384))

train_pipeline = _base_.train_pipeline
train_pipeline[1].size = 384  # RandomResizedCrop
test_pipeline = _base_.test_pipeline
test_pipeline[1].scale = 384  # ResizeEdge: the whole height or width
test_pipeline[2].crop_size = 384  # CenterCrop
train_dataloader = dict(dataset=dict(pipeline=train_pipeline))
val_dataloader = dict(dataset=dict(pipeline=test_pipeline))
test_dataloader = val_dataloader

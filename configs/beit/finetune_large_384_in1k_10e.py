"""BEiT-Large, fine-tuned at 224 pixels, fine-tuned further at 384: 10 epochs.

Command: tools/dist_train.sh configs/beit/pretrain_large_800e.py 16
         tools/dist_train.sh configs/beit/finetune_large_in1k_50e.py 8
         tools/dist_train.sh configs/beit/finetune_large_384_in1k_10e.py 16
Batch:   16 GPUs x 16 x 2 accumulated = 512 images, lr 5e-6
Steps:   10 epochs x 2,502 = 25,020, ImageNet-1K with 1,281,167 images; warm-up 12,510
Writes:  work_dirs/finetune_large_384_in1k_10e/epoch_10.pth
Model:   ViT-Large, absolute position embedding, 304,691,176 parameters; 384 x 384 pixels
Result:  86.3 ImageNet-1K top-1 at 384 pixels (paper, classification table)

Time:    about 3.4 times finetune_384_in1k_10e.py (1146 against 333 GFLOP an image)
Shorter: finetune_384_in1k_10e.py (84.6 top-1)
Differs: from finetune_384_in1k_10e.py, whose unverified settings hold here too, in the model and in having no repeated
         augmentation, as the paper's large models
"""
_base_ = './finetune_384_in1k_10e.py'

model = dict(backbone=dict(arch='large'), head=dict(in_channels=1024))
load_from = 'work_dirs/finetune_large_in1k_50e/epoch_50.pth'
train_dataloader = dict(
    batch_size=16, sampler=dict(_delete_=True, type='beit_mm.SeededSampler', shuffle=True))
optim_wrapper = dict(accumulative_counts=2)

"""BEiT-Base, 300 epochs on ImageNet-1K: the baseline of the paper's ablation tables.

Command: tools/dist_train.sh configs/beit/pretrain_300e.py 16
Batch:   16 GPUs x 128 = 2048 images, lr 1.5e-3
Steps:   300 epochs x 625 = 187,500, ImageNet-1K with 1,281,167 images; warm-up 6,250
Writes:  work_dirs/pretrain_300e/epoch_300.pth
Model:   ViT-Base, absolute position embedding, 92,089,856 parameters; 224 x 224 pixels, 75 of 196 patches masked
Result:  82.86 ImageNet-1K top-1 at 224 pixels after fine-tuning (paper, tables of ablations, architecture variants and
           tokenizers)
         44.65 ADE20K mIoU with SETR-PUP after fine-tuning, single scale (paper, ablation table)
         44.86 ADE20K mIoU with UperNet after fine-tuning, single scale (paper, table of architecture variants; crop
           size not stated)

Time:    three eighths of pretrain_800e.py
Options: On 8 GPUs: --cfg-options train_dataloader.batch_size=256
Shorter: --cfg-options train_cfg.max_epochs=100 param_scheduler.1.end=100
Differs: from the released code's default command in the architecture, in bfloat16 instead of float16, and in colour
         jitter after the crop, not before it; see pretrain_800e.py
"""
_base_ = [
    '../_base_/models/mim_base.py',
    '../_base_/datasets/mim_in1k.py',
    '../_base_/schedules/mim_adamw_bs2048_300e.py',
]

"""BEiT-Base with SETR-PUP on ADE20K at 512 pixels after ImageNet-1K: the paper's intermediate fine-tuning.

Command: tools/dist_train.sh configs/beit/finetune_in1k_100e.py 8
         tools/dist_train.sh configs/beit/setr_pup_512_ade20k_160k_after_in1k.py 8
Batch:   8 GPUs x 2 = 16 images, lr 1e-3
Steps:   160,000, 126.7 times through the 20,210 images
Time:    as setr_pup_512_ade20k_160k.py
Result:  the paper: 47.7 mIoU at a single scale
         All scales with flip: tools/dist_test.sh configs/beit/setr_pup_512_ade20k_160k_after_in1k.py CHECKPOINT 8 --tta
Shorter: --cfg-options train_cfg.max_iters=80000 param_scheduler.1.end=80001
Differs: from setr_pup_512_ade20k_160k.py in the weights it starts from. The paper gives no settings of its own for
         this row.
"""
_base_ = [
    '../_base_/models/setr_pup_base.py',
    '../_base_/datasets/ade20k_512.py',
    '../_base_/schedules/segment_adamw_bs16.py',
    '../_base_/segmentation_runtime.py',
]

model = dict(
    backbone=dict(
        init_cfg=dict(type='Pretrained', checkpoint='work_dirs/finetune_in1k_100e/epoch_100.pth')))

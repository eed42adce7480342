"""BEiT-Base with SETR-PUP on ADE20K at 512 pixels: the paper's segmentation table.

Command: tools/dist_train.sh configs/beit/pretrain_800e.py 16
         tools/dist_train.sh configs/beit/setr_pup_512_ade20k_160k.py 8
         From the released weights, without the first: --cfg-options
         model.backbone.init_cfg.checkpoint=beit_base_patch16_224_pt1k_800ep.pth
Batch:   8 GPUs x 2 = 16 images, lr 1e-3
Steps:   160,000, 126.7 times through the 20,210 images
Time:    about a sixtieth of pretrain_800e.py (1,017 GFLOP an image without the auxiliary heads)
Result:  the paper: 45.6 mIoU at a single scale (45.58 in its ablation table)
         All scales with flip: tools/dist_test.sh configs/beit/setr_pup_512_ade20k_160k.py CHECKPOINT 8 --tta
Shorter: --cfg-options train_cfg.max_iters=80000 param_scheduler.1.end=80001
Differs: neither the paper nor its authors published this head's code. Heads, taps of a 12-layer model and windows are
         those of SETR's own code, with its four auxiliary heads (setr_pup_512_three_aux_ade20k_160k.py has mmseg's
         three), but mmseg's implementation: no bias before a batch norm, and logits after the last upsampling instead
         of before. Optimizer and schedule are the paper's; the warm-up starts at a millionth of the rate, as in the
         released UperNet code. bfloat16 as everywhere here; the paper does not say.
"""
_base_ = [
    '../_base_/models/setr_pup_base.py',
    '../_base_/datasets/ade20k_512.py',
    '../_base_/schedules/segment_adamw_bs16.py',
    '../_base_/segmentation_runtime.py',
]

model = dict(
    backbone=dict(
        init_cfg=dict(type='Pretrained', checkpoint='work_dirs/pretrain_800e/epoch_800.pth')))

"""BEiT+ Base with UperNet on ADE20K at 512 pixels, from weights without labels: the released `..._160k_ade20k_pt`.

Command: tools/dist_train.sh configs/beit_plus/pretrain_in22k_150e.py 16
         tools/dist_train.sh configs/beit_plus/upernet_512_ade20k_160k.py 8
         From the released weights, without the first: --cfg-options
         model.backbone.init_cfg.checkpoint=beit_base_patch16_224_pt22k.pth
Batch:   8 GPUs x 2 = 16 images, lr 7e-4
Steps:   160,000, 126.7 times through the 20,210 images
Time:    as beit/upernet_512_ade20k_160k.py
Result:  none of BEiT's own: the released code has this config and no figure for it
         All scales with flip: tools/dist_test.sh configs/beit_plus/upernet_512_ade20k_160k.py CHECKPOINT 8 --tta
Shorter: --cfg-options train_cfg.max_iters=80000 param_scheduler.1.end=80001
Differs: from the released upernet_beit_base_12_512_slide_160k_ade20k_pt.py in weight decay, which leaves the class
         token alone, and in bfloat16 instead of float16. Its sibling for weights after intermediate fine-tuning
         (`_pt2ft`): --cfg-options optim_wrapper.optimizer.lr=3e-5 optim_wrapper.paramwise_cfg.layer_decay_rate=0.9
         model.backbone.init_cfg.checkpoint=beit_base_patch16_224_pt22k_ft22k.pth
"""
_base_ = [
    '../_base_/models/upernet_base.py',
    '../_base_/datasets/ade20k_512.py',
    '../_base_/schedules/segment_adamw_bs16.py',
    '../_base_/segmentation_runtime.py',
]

work_dir = 'work_dirs/beit_plus_upernet_512_ade20k_160k'  # not that of beit/upernet_512_ade20k_160k.py
model = dict(
    backbone=dict(
        abs_pos_embed=False,
        rel_pos_bias='per_layer',
        layer_scale_init=0.1,
        init_cfg=dict(type='Pretrained', checkpoint='work_dirs/pretrain_in22k_150e/epoch_150.pth')))
optim_wrapper = dict(optimizer=dict(lr=7e-4))

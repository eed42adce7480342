"""DINO alone on the images of Caltech-101, without their labels, in minutes on one CPU core.

Command: python tools/train.py configs/demo/caltech101_dino.py
Data:    data/caltech101/train/<class>/*.jpg; class folders are not looked at
Batch:   1 process x 32 images, lr 5e-4
Steps:   400, 3 times through 4,084 images, 8 minutes on a free core
Expect:  loss_dino 6.77, 6.51, 6.55 at steps 50, 200, 400; teacher_entropy 6.40, 6.11, 6.28, below teacher_mean_entropy
         by 0.39, 0.54, 0.48: no collapse. In this short run the teacher hardly changes, because it moves only 0.4 % of
         the way to the student in each step
Differs: from caltech101_beit_dino.py in the tasks, rate and length, in the weight decay, which rises as in DINO, and in
         DINO's augmentation of the first global crop. There is no validation.
"""
_base_ = [
    '../_base_/models/demo_mim.py',
    '../_base_/datasets/demo_images.py',
    '../_base_/schedules/demo_mim_7k.py',
]

data_root = 'data/caltech101'

model = dict(
    type='beit_mm.DINOPretrainer',
    data_preprocessor=dict(type='beit_mm.MultiCropDataPreprocessor'),
    backbone=dict(arch=dict(num_layers=6), img_size=64),
    dino_head=dict(type='beit_mm.DINOHead', embed_dims=128, num_prototypes=1024, hidden_dims=256),
    head=None,
    target_generator=None)
custom_hooks = [*_base_.custom_hooks, dict(type='beit_mm.DINOHook')]

train_pipeline = [
    dict(type='beit_mm.LoadImage'),
    dict(
        type='beit_mm.MultiCrop', size=64, local_size=32, local_scale=(0.1, 0.4), num_local=4, blur_sigma=(0.1, 0.6)),
    dict(type='beit_mm.PackViews'),
]
train_dataloader = dict(batch_size=32, dataset=dict(data_root=data_root, pipeline=train_pipeline))
val_dataloader = None
val_evaluator = None
val_cfg = None
test_dataloader = None
test_evaluator = None
test_cfg = None

optim_wrapper = dict(optimizer=dict(lr=5e-4, betas=(0.9, 0.999), weight_decay=0.04))
auto_scale_lr = dict(base_batch_size=32)
train_cfg = dict(_delete_=True, type='beit_mm.IterLoop', max_iters=400)
param_scheduler = [
    dict(type='LinearLR', start_factor=1e-9, by_epoch=False, begin=0, end=40),
    dict(type='CosineAnnealingWeightDecay', by_epoch=False, begin=0, end=400, T_max=400, eta_min=0.4),
    dict(type='CosineAnnealingLR', by_epoch=False, begin=40, end=400, T_max=360, eta_min_ratio=0.02),
]

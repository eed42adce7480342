"""BEiT and DINO together on the images of Caltech-101, without their labels, in minutes on one CPU core.

Command: python tools/train.py configs/demo/caltech101_beit_dino.py
Data:    data/caltech101/{train,val}/<class>/*.jpg; class folders are not looked at
Batch:   1 process x 32 images, lr 1e-3
Steps:   400, 3 times through 4,084 images, half an hour on a free core
Expect:  loss_mim 6.08, loss_dino 6.71, teacher_entropy 6.27 at step 50; in a longer run 5.12, 6.23, 5.65 at step 1,150,
         while teacher_mean_entropy stays at 6.5 to 6.8: the gap, which a collapse would close, grows from 0.4 to 1.0
Differs: from pretrain.py in the second task, rate and length; from ../beit_dino/pretrain_beit_dino_300e.py in size
         (crops of 96 and 48 pixels in 8 x 8 patches, four small ones, 1024 prototypes) and in having no
         stochastic depth
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
    dino_head=dict(type='beit_mm.DINOHead', embed_dims=128, num_prototypes=1024, hidden_dims=256))
custom_hooks = [
    *_base_.custom_hooks, dict(type='beit_mm.ReconstructionHook'), dict(type='beit_mm.DINOHook')]

train_pipeline = [
    dict(type='beit_mm.LoadImage', cache_bytes=2**30),
    dict(type='beit_mm.TwoViewRandomResizedCrop', size=96, second_size=96, scale=(0.3, 1.0)),
    dict(type='beit_mm.TwoViewColorJitter', brightness=0.4, contrast=0.4, saturation=0.4),
    dict(type='beit_mm.BlockwiseMask', grid=(12, 12), num_masked=58, min_block=8),
    dict(
        type='beit_mm.MultiCrop', size=96, local_size=48, local_scale=(0.1, 0.4), num_local=4, blur_sigma=(0.1, 0.6)),
    dict(type='beit_mm.PackViews'),
]
val_pipeline = [
    dict(type='beit_mm.LoadImage'),
    dict(type='beit_mm.TwoViewCenterCrop', size=96, second_size=96),
    dict(type='beit_mm.BlockwiseMask', grid=(12, 12), num_masked=58, min_block=8),
    dict(type='beit_mm.PackViews'),
]
train_dataloader = dict(batch_size=32, dataset=dict(data_root=data_root, pipeline=train_pipeline))
val_dataloader = dict(dataset=dict(data_root=data_root, pipeline=val_pipeline))
test_dataloader = val_dataloader
val_evaluator = dict(type='beit_mm.MIMMetric')
test_evaluator = val_evaluator

optim_wrapper = dict(optimizer=dict(lr=1e-3))
auto_scale_lr = dict(base_batch_size=32)
train_cfg = dict(max_iters=400, val_interval=400)
param_scheduler = [
    dict(type='LinearLR', start_factor=1e-9, by_epoch=False, begin=0, end=40),
    dict(type='CosineAnnealingLR', by_epoch=False, begin=40, end=400, T_max=360, eta_min_ratio=0.01),
]

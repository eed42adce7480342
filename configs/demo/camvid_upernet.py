"""CamVid's 11 classes with UperNet and the packaged BEiT: 128-pixel crops, two CPU cores.

After:   the packaged weights, or your own pretraining: --cfg-options model.backbone.init_cfg.checkpoint=FILE
Command: python tools/train.py configs/demo/camvid_upernet.py
         From random weights, for comparison:
         python tools/train.py configs/demo/camvid_upernet.py --work-dir work_dirs/camvid_upernet_scratch \
             --cfg-options model.backbone.init_cfg=None optim_wrapper.paramwise_cfg.layer_decay_rate=1.0
         All scales with flip:
         python tools/test.py configs/demo/camvid_upernet.py work_dirs/camvid_upernet/iter_600.pth --tta
Data:    data/camvid/{images,annotations}/{training,validation} and data/camvid/classes.txt, 11 names;
         in the annotations 0 is unlabelled and 1 the first class
Batch:   1 process x 8 images, lr 2e-3
Differs: from segment_upernet.py in the data, as an example for your own folders and classes, and in length: 600 steps,
         13 times through the 367 frames
"""
_base_ = [
    '../_base_/models/upernet_base.py',
    '../_base_/datasets/demo_segmentation.py',
    '../_base_/schedules/segment_adamw_bs16_160k.py',
]

model = dict(
    data_preprocessor=dict(size=(128, 128)),
    backbone=dict(
        arch=dict(_delete_=True, embed_dims=128, num_layers=5, num_heads=4),
        img_size=128,
        patch_size=8,
        out_indices=(1, 2, 3, 4),
        init_cfg=dict(type='Pretrained', checkpoint='demo')),
    neck=dict(embed_dim=128, rescales=[2, 1, 0.5, 0.25]),
    decode_head=dict(in_channels=[128, 128, 128, 128], channels=64, num_classes=11),
    auxiliary_head=dict(in_channels=128, channels=64, num_classes=11),
    test_cfg=dict(crop_size=(128, 128), stride=(85, 85)))

folder = dict(data_root='data/camvid', classes='classes.txt', reduce_zero_label=True)
training = dict(img_path='images/training', seg_map_path='annotations/training')
validation = dict(img_path='images/validation', seg_map_path='annotations/validation')
train_dataloader = dict(dataset=dict(folder, data_prefix=training))
val_dataloader = dict(dataset=dict(folder, data_prefix=validation))
test_dataloader = val_dataloader

optim_wrapper = dict(paramwise_cfg=dict(layer_decay_rate=0.8), optimizer=dict(lr=2e-3))
auto_scale_lr = dict(base_batch_size=8)
train_cfg = dict(max_iters=600, val_interval=600)
# mmengine's schedulers arrive at their last factor one step before `end`
param_scheduler = [
    dict(type='LinearLR', start_factor=1e-6, by_epoch=False, begin=0, end=61),
    dict(type='PolyLR', power=1.0, eta_min=0, by_epoch=False, begin=0, end=601),
]
default_hooks = dict(checkpoint=dict(interval=100, max_keep_ckpts=2))

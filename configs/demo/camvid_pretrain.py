"""The small BEiT pretrained on CamVid's frames and on Caltech-101, from the packaged weights.

Command: python tools/train.py configs/demo/camvid_pretrain.py
Data:    data/caltech101/train/**/*.jpg and data/camvid/images/{training,validation}/*.jpg, without any labels, in two
         lists; in the first the 367 frames stand six times. Made in data/ with
             (find -L caltech101/train -type f
              for i in 1 2 3 4 5 6; do find -L camvid/images/training -type f; done) | sort > camvid_pretrain.txt
             find -L camvid/images/validation -type f | sort > camvid_pretrain_val.txt
Batch:   1 process x 64 images, lr 1e-3
Steps:   3,000, 30 times through the 6,286 lines of the list
Time:    half an hour on two CPU cores without bfloat16
Expect:  docs/camvid.md
Differs: from pretrain.py in starting from the packaged weights, and in crops of 10 to 60 % of an image, which
         show things as large as the segmentation's crops of images of 160 pixels do
"""
_base_ = './pretrain.py'

data_root = 'data'

model = dict(init_cfg=dict(type='Pretrained', checkpoint='demo'))

train_pipeline = [
    dict(type='beit_mm.LoadImage'),
    dict(type='beit_mm.TwoViewRandomResizedCrop', size=96, second_size=96, scale=(0.1, 0.6)),
    dict(type='beit_mm.TwoViewColorJitter', brightness=0.4, contrast=0.4, saturation=0.4),
    dict(type='beit_mm.BlockwiseMask', grid=(12, 12), num_masked=58, min_block=8),
    dict(type='beit_mm.PackViews'),
]
train_dataloader = dict(
    dataset=dict(
        data_root=data_root,
        data_prefix='',
        ann_file='camvid_pretrain.txt',
        pipeline=train_pipeline))
val_dataloader = dict(
    dataset=dict(data_root=data_root, data_prefix='', ann_file='camvid_pretrain_val.txt'))
test_dataloader = val_dataloader

optim_wrapper = dict(optimizer=dict(lr=1e-3))
train_cfg = dict(max_iters=3000)
param_scheduler = [
    dict(type='LinearLR', start_factor=1e-9, by_epoch=False, begin=0, end=200),
    dict(type='CosineAnnealingLR', by_epoch=False, begin=200, end=3000, T_max=2800, eta_min=1e-5),
]

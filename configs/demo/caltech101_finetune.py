"""The model of caltech101_pretrain.py fine-tuned on Caltech-101 with as many labels as a list names.

After:   configs/demo/caltech101_pretrain.py
Command: python tools/train.py configs/demo/caltech101_finetune.py
         From random weights, for comparison:
         python tools/train.py configs/demo/caltech101_finetune.py --work-dir work_dirs/caltech101_scratch \
             --cfg-options model.backbone.init_cfg=None optim_wrapper.optimizer.lr=1e-3 \
             optim_wrapper.paramwise_cfg.layer_decay_rate=1.0
Data:    data/caltech101/{train,val}/<class>/*.jpg of 97 classes. Fewer labels: --cfg-options
         train_dataloader.dataset.ann_file=labels.txt, a list in data/caltech101, one path a line, relative to train/
Batch:   1 process x 64 images, lr 4e-3
Expect:  docs/few_labels.md
Shorter: fewer epochs with more labels: 48 with 5 a class, 24 with 20, 10 with all; --cfg-options
             train_cfg.max_epochs=10 param_scheduler.0.end=2 param_scheduler.1.begin=2 param_scheduler.1.end=10
             param_scheduler.1.T_max=8
Differs: from finetune_folder.py in size (48 pixels), rate and length, and in lighter augmentation: without RandAugment,
         Mixup and CutMix
"""
_base_ = '../_base_/demo_finetuning.py'

data_root = 'data/caltech101'
model = dict(
    data_preprocessor=dict(num_classes=97),
    backbone=dict(
        img_size=48,
        init_cfg=dict(
            type='Pretrained', checkpoint='work_dirs/caltech101_pretrain/iter_8000.pth')),
    head=dict(num_classes=97),
    train_cfg=None)

train_pipeline = [
    dict(type='beit_mm.LoadImage', cache_bytes=2**30),
    dict(type='beit_mm.RandomResizedCrop', size=48, scale=(0.3, 1.0)),
    dict(type='beit_mm.RandomErasing', prob=0.25),
    dict(type='PackInputs', meta_keys=('img_path', 'erase_box', 'unreadable')),
]
test_pipeline = [
    dict(type='beit_mm.LoadImage'),
    dict(type='ResizeEdge', scale=54, edge='short', backend='pillow', interpolation='bicubic'),
    dict(type='CenterCrop', crop_size=48),
    dict(type='PackInputs'),
]
train_dataloader = dict(dataset=dict(data_root=data_root, pipeline=train_pipeline))
val_dataloader = dict(dataset=dict(data_root=data_root, pipeline=test_pipeline))
test_dataloader = val_dataloader

optim_wrapper = dict(optimizer=dict(lr=4e-3))
train_cfg = dict(max_epochs=24, val_interval=12)
param_scheduler = [
    dict(type='LinearLR', start_factor=1e-9, begin=0, end=4, convert_to_iter_based=True),
    dict(
        type='CosineAnnealingLR',
        eta_min_ratio=5e-4,
        begin=4,
        end=24,
        T_max=20,
        convert_to_iter_based=True),
]

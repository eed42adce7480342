"""A small BEiT fine-tuned on images with one folder a class, in minutes on two CPU cores.

After:   configs/demo/pretrain.py
Command: python tools/train.py configs/demo/finetune_folder.py
         From random weights, for comparison (with one rate for all layers, as none has learned anything):
         python tools/train.py configs/demo/finetune_folder.py --work-dir work_dirs/finetune_folder_scratch \
             --cfg-options model.backbone.init_cfg=None optim_wrapper.paramwise_cfg.layer_decay_rate=1.0
Data:    data/demo/train/<class>/*.jpg and data/demo/val/<class>/*.jpg of 10 classes. Other folders and numbers:
         python -m beit_mm finetune writes a config of its own; or --cfg-options data_root=images
         model.head.num_classes=7 model.data_preprocessor.num_classes=7, and without images/val --no-validate
         Fewer images: train_dataloader.dataset.ann_file=list.txt (one path a line, relative to data/demo/train)
Batch:   1 process x 64 images, lr 2e-3
Differs: from ../beit/finetune_in1k_100e.py in size (64-pixel images in 8 x 8 patches), in crops of at least 30 % of an
         image, in layer decay, and in having no repeated augmentation
"""
_base_ = '../_base_/demo_finetuning.py'

data_root = 'data/demo'
model = dict(
    data_preprocessor=dict(num_classes=10),
    backbone=dict(init_cfg=dict(type='Pretrained', checkpoint='work_dirs/pretrain/iter_3000.pth')),
    head=dict(num_classes=10))
train_dataloader = dict(dataset=dict(data_root=data_root))
val_dataloader = dict(dataset=dict(data_root=data_root))
test_dataloader = val_dataloader

"""Several labels per image: images in data/mine/images, labels in data/mine/train.json and val.json, of the form

{"metainfo": {"classes": ["red", "round", ...]}, "data_list": [{"img_path": "a.jpg", "gt_label": [0, 3]}, ...]}
"""

_base_ = '../../configs/demo/finetune_folder.py'
model = dict(
    head=dict(_delete_=True, type='MultiLabelLinearClsHead', num_classes=4, in_channels=128),
    data_preprocessor=dict(num_classes=4, to_onehot=False),
)
labels = dict(_delete_=True, type='MultiLabelDataset', data_root='data/mine')
train = dict(labels, ann_file='train.json', data_prefix='images', pipeline=_base_.train_pipeline)
test = dict(labels, ann_file='val.json', data_prefix='images', pipeline=_base_.test_pipeline, test_mode=True)
train_dataloader = dict(dataset=train)
val_dataloader = dict(dataset=test)
test_dataloader = val_dataloader
val_evaluator = [dict(type='AveragePrecision'), dict(type='MultiLabelMetric', thr=0.5)]
test_evaluator = val_evaluator

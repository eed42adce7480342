"""ade20k_512.py at 640 pixels."""
_base_ = './ade20k_512.py'

train_pipeline = _base_.train_pipeline
train_pipeline[2].scale = (2560, 640)  # RandomResize
train_pipeline[3].crop_size = (640, 640)  # RandomCrop
test_pipeline = _base_.test_pipeline
test_pipeline[1].scale = (2560, 640)  # Resize
tta_pipeline = _base_.tta_pipeline
tta_pipeline[2].update(short_side=640, crop_size=(640, 640))  # MultiScaleViews

train_dataloader = dict(dataset=dict(pipeline=train_pipeline))
val_dataloader = dict(dataset=dict(pipeline=test_pipeline))
test_dataloader = val_dataloader

"""finetune_in1k.py for backbones that know a mean of 0.5: rotations and shifts are filled with gray."""
_base_ = './finetune_in1k.py'

train_pipeline = _base_.train_pipeline
train_pipeline[3].hparams.pad_val = [128, 128, 128]  # RandAugment
train_dataloader = dict(dataset=dict(pipeline=train_pipeline))

"""Single views of ImageNet-1K images for training a tokenizer; the leaf sets their size and the batch."""
_base_ = './in1k.py'

train_dataloader = dict(dataset=dict(type='beit_mm.UnlabeledImages'))
val_dataloader = dict(dataset=dict(type='beit_mm.UnlabeledImages'))
test_dataloader = val_dataloader
val_evaluator = dict(type='beit_mm.TokenizerMetric')
test_evaluator = val_evaluator
val_cfg = dict()
test_cfg = dict()

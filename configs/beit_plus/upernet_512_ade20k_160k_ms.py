"""upernet_512_ade20k_160k.py tested at all scales with flip; for testing only.

Command: tools/dist_test.sh configs/beit_plus/upernet_512_ade20k_160k_ms.py CHECKPOINT 8
         The same: tools/dist_test.sh configs/beit_plus/upernet_512_ade20k_160k.py CHECKPOINT 8 --tta
Batch:   images one by one; their windows together
Result:  none of BEiT's own: the released code has no figure for it
Differs: short sides are 512 (counted three times), 640, 768 and 896 pixels, as the released code makes of its
         ratios 0.5 to 1.75, because none may be below the window
"""
_base_ = './upernet_512_ade20k_160k.py'

work_dir = 'work_dirs/beit_plus_upernet_512_ade20k_160k_ms'
model = dict(_delete_=True, type='beit_mm.MultiScaleTTA', module=_base_.model)  # noqa: F821
test_dataloader = dict(dataset=dict(pipeline=_base_.tta_pipeline))  # noqa: F821

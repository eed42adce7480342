"""upernet_512_ade20k_160k_after_in22k.py tested at all scales with flip; for testing only.

Command: tools/dist_test.sh configs/beit_plus/upernet_512_ade20k_160k_after_in22k_ms.py CHECKPOINT 8
         The same: tools/dist_test.sh configs/beit_plus/upernet_512_ade20k_160k_after_in22k.py CHECKPOINT 8 --tta
Scales:  short sides of 512 (counted three times), 640, 768 and 896 pixels, each with its mirror image
Model:   ViT-Base, relative position bias in every block, LayerScale, 163,080,812 parameters; 512 x 512 pixels
Result:  none of BEiT's own
"""
_base_ = './upernet_512_ade20k_160k_after_in22k.py'

model = dict(_delete_=True, type='beit_mm.MultiScaleTTA', module=_base_.model)
test_dataloader = dict(dataset=dict(pipeline=_base_.tta_pipeline))

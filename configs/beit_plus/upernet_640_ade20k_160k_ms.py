"""upernet_640_ade20k_160k.py tested at all scales with flip; for testing only.

Command: tools/dist_test.sh configs/beit_plus/upernet_640_ade20k_160k_ms.py CHECKPOINT 8
         The same: tools/dist_test.sh configs/beit_plus/upernet_640_ade20k_160k.py CHECKPOINT 8 --tta
Scales:  short sides of 640 (counted three times), 800, 960 and 1120 pixels, each with its mirror image
Model:   ViT-Base, relative position bias in every block, LayerScale, 163,407,980 parameters; 640 x 640 pixels
Result:  54.2 ADE20K mIoU, all scales with flip (paper, comparison with supervised pretraining)
         54.26 ADE20K mIoU, all scales with flip (microsoft/unilm beit semantic_segmentation/README.md)
         53.84 ADE20K mIoU, all scales with flip (mmsegmentation metafile, of its own training)
"""
_base_ = './upernet_640_ade20k_160k.py'

model = dict(_delete_=True, type='beit_mm.MultiScaleTTA', module=_base_.model)
test_dataloader = dict(dataset=dict(pipeline=_base_.tta_pipeline))

"""ViT-Base at 512 pixels for segmentation with sliding windows; the heads are in upernet_base.py, setr_pup_base.py."""
model = dict(
    type='beit_mm.SlidingSegmentor',
    # ImageNet's statistics, as the released code's, whatever those of the pretraining were
    data_preprocessor=dict(
        type='SegDataPreProcessor',
        mean=[123.675, 116.28, 103.53],
        std=[58.395, 57.12, 57.375],
        size=(512, 512),
        pad_val=0,
        seg_pad_val=255,
    ),
    backbone=dict(
        type='beit_mm.BEiTBackbone',
        arch='base',
        img_size=512,
        out_type='featmap',
        drop_path_rate=0.1,
    ),
    # in bfloat16; precision='float32' is the other way
    test_cfg=dict(mode='slide', crop_size=(512, 512), stride=(341, 341)),
)

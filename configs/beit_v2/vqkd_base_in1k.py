"""BEiT v2's tokenizer: 8192 visual tokens learned from the features of CLIP ViT-B/16 on ImageNet-1K.

Result:  none published
Model:   ViT-Base, VQ-KD with a decoder of three blocks, 110,038,435 parameters; 224 x 224 pixels
Command: tools/dist_train.sh configs/beit_v2/vqkd_base_in1k.py 8
Test:    tools/dist_test.sh configs/beit_v2/vqkd_base_in1k.py work_dirs/beit_v2_vqkd_base_in1k/epoch_100.pth 8
Batch:   8 GPUs x 64 = 512 images, lr 2e-4
Steps:   100 epochs x 2,502 = 250,200 updates, 25,020 of them warm-up
Data:    ImageNet-1K, 1,281,167 images

Needs:   pip install transformers, and its CLIP from the network, or model.teacher.name=FOLDER
Then:    name the checkpoint in model.target_generator.checkpoint of a pretraining of this folder
Differs: from the released command in bfloat16 (released: float16), in float32 arithmetic between encoder and decoder,
         in one k-means over all processes (released: each process has its own), and in a pixel decoder of 64 channels
         for pictures, which sends no gradient to the tokens
Options: The other released decoder: --cfg-options model.decoder_layers=1
         Restart codes that are hardly used: --cfg-options model.restart_below=0.1
"""
_base_ = ['../_base_/datasets/mim_in1k.py', '../_base_/default_runtime.py']

work_dir = 'work_dirs/beit_v2_vqkd_base_in1k'
model = dict(
    type='beit_mm.VQKD',
    arch='base',
    img_size=224,
    patch_size=16,
    vocab_size=8192,
    code_dims=32,
    decoder_layers=3,
    decay=0.99,
    kmeans_init=True,
    teacher=dict(type='beit_mm.CLIPTeacher', name='openai/clip-vit-base-patch16'),
    teacher_dims=512,
    pixel_decoder=dict(hidden=64, width=64, bottleneck_blocks=2),
    data_preprocessor=dict(type='beit_mm.TwoViewDataPreprocessor', mean=[0, 0, 0], std=[255, 255, 255]))

train_pipeline = [
    dict(type='beit_mm.LoadImage'),
    dict(type='beit_mm.TwoViewRandomResizedCrop', size=224, second_size=None, scale=(0.08, 1.0)),
    dict(type='beit_mm.PackViews'),
]
val_pipeline = [
    dict(type='beit_mm.LoadImage'),
    dict(type='beit_mm.TwoViewCenterCrop', size=224, second_size=None),
    dict(type='beit_mm.PackViews'),
]
train_dataloader = dict(batch_size=64, dataset=dict(pipeline=train_pipeline))
val_dataloader = dict(batch_size=64, dataset=dict(pipeline=val_pipeline))
test_dataloader = val_dataloader
val_evaluator = dict(type='beit_mm.TokenizerMetric')
test_evaluator = val_evaluator

optim_wrapper = dict(
    type='beit_mm.AutocastOptimWrapper',
    dtype='bfloat16',
    constructor='beit_mm.BEiTOptimWrapperConstructor',
    optimizer=dict(type='AdamW', lr=2e-4, betas=(0.9, 0.99), eps=1e-8, weight_decay=1e-4, fused=True))
auto_scale_lr = dict(base_batch_size=512)
train_cfg = dict(type='beit_mm.EpochLoop', max_epochs=100, val_interval=20)
val_cfg = dict()
test_cfg = dict()
param_scheduler = [
    dict(type='LinearLR', start_factor=1e-9, begin=0, end=10, convert_to_iter_based=True),
    dict(type='CosineAnnealingLR', eta_min_ratio=0.05, begin=10, end=100, convert_to_iter_based=True),
]
custom_hooks = [*_base_.custom_hooks, dict(type='beit_mm.ReconstructionHook')]

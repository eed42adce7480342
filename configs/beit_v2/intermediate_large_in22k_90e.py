"""BEiT v2 Large fine-tuned on ImageNet-22K, 90 epochs: released `beitv2_large_patch16_224_pt1k_ft21k`.

Command: tools/dist_train.sh configs/beit_v2/pretrain_large_1600e.py 16
         tools/dist_train.sh configs/beit_v2/intermediate_large_in22k_90e.py 32
         The last alone, from the released weights: --cfg-options
         model.backbone.init_cfg.checkpoint=beitv2_large_patch16_224_pt1k.pth
Batch:   32 GPUs x 128 = 4096 images, lr 6e-4
Steps:   90 epochs x 3,466 = 311,940, ImageNet-22K with 14,197,122 images; warm-up 69,320
Writes:  work_dirs/beit_v2_intermediate_large_in22k_90e/epoch_90.pth
Model:   ViT-Large, relative position bias in every block, LayerScale, 325,792,593 parameters; 224 x 224 pixels
Result:  88.4 ImageNet-1K top-1 at 224 pixels after fine-tuning (microsoft/unilm beit2 README)

Time:    about 3.5 times intermediate_in22k_90e.py (370 against 105 GFLOP an image)
Options: On 16 GPUs: --cfg-options optim_wrapper.accumulative_counts=2
Shorter: intermediate_in22k_90e.py
Differs: from intermediate_in22k_90e.py in the model and in stochastic depth, as the released command
"""
_base_ = './intermediate_in22k_90e.py'

work_dir = 'work_dirs/beit_v2_intermediate_large_in22k_90e'
model = dict(
    backbone=dict(
        arch='large',
        layer_scale_init=1e-5,
        drop_path_rate=0.2,
        init_cfg=dict(checkpoint='work_dirs/beit_v2_pretrain_large_1600e/epoch_1600.pth')),
    head=dict(in_channels=1024))

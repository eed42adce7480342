"""The rows of compare_methods.py: configs of BEiT's variants and of its peers for one small ViT on 64-pixel photos."""

import functools
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SIDE, PATCH, DIMS, DEPTH, HEADS, CODES, CLASSES, BATCH = 64, 8, 128, 5, 4, 1024, 200, 64
GRID, MASKED, MIN_BLOCK = (SIDE // PATCH,) * 2, 25, 5  # 39 % of the patches, as in the paper
IMAGENET = dict(mean=[123.675, 116.28, 103.53], std=[58.395, 57.12, 57.375])
ROWS = dict(
    tokens='BEiT, visual tokens',
    pixels='BEiT, pixels of the masked patches',
    single='BEiT, tokens, single patches masked',
    all='BEiT, tokens of all patches recovered',
    short='BEiT, tokens, a third of the steps',  # with the tokenizer's minutes as long as rows without one
    vqkd='BEiT, tokens of a VQ-KD',
    larger_start='BEiT, visual tokens, MLPs that start larger',
    features_demo='BEiT, features of the packaged BEiT',
    features_ema='BEiT, features of its own moving average',
    features_two='BEiT, its own moving average, second stage',  # with the minutes of both
    dino='DINO',
    beit_theirs="mmpretrain's BEiT, its data path",
    beit_ours="mmpretrain's BEiT, our data path",
    mae_theirs="mmpretrain's MAE, its data path",
    mae_ours="mmpretrain's MAE, our data path",
    simmim_theirs="mmpretrain's SimMIM, its data path",
    simmim_ours="mmpretrain's SimMIM, our data path",
    random='no pretraining',
    supervised='no pretraining, trained for the time of both',
    thumbnails='8 x 8 pixels of a photo',
)
UNTRAINED = ('random', 'supervised', 'thumbnails')
TOKENLESS = (*UNTRAINED, 'pixels', 'features', 'dino', 'mae', 'simmim')  # rows' methods that need no tokenizer
SHARED = dict(  # steps of another row: compared at equal steps
    single='tokens', all='tokens', vqkd='tokens', larger_start='tokens', features_two='features_ema'
)
TEACHERS = dict(features_demo='demo', features_ema='ema', features_two='')  # of the last, see `make_runner`
RATES = dict(tokens=2e-3, pixels=2e-3, features=2e-3, dino=1e-3, beit=2e-3, mae=2e-3, simmim=2e-3)  # peak, of pilots
# Each method's own (features: dBOT's), as are the norms of gradients
BETA2 = dict(features=0.95, dino=0.999, beit=0.999, mae=0.95, simmim=0.999)
CLIP = dict(mae=None, simmim=5.0)
STEPS = dict(  # in MINUTES of one core of an AMD EPYC (Zen 4), by --calibrate beside a training, 25 November 2026
    tokens=1746,
    pixels=2174,
    features_demo=1738,  # those of `tokens` by the ratio of both, timed in turn on 26 November 2026
    features_ema=1678,
    dino=599,
    beit_theirs=1497,
    beit_ours=1564,
    mae_theirs=2490,
    mae_ours=2565,
    simmim_theirs=2013,
    simmim_ours=1957,
    supervised=2300,  # of fine-tuning, at 0.206 to 0.209 s a step
)


def rate_of(row: str) -> float:
    return RATES.get(row.partition('_')[0], RATES['tokens'])


def settings(row: str, data: Path, out: Path) -> Any:
    """The config of a row's pretraining: model, pipeline and optimizer; the rest is of configs/demo/pretrain.py."""
    from mmengine.config import Config

    cfg = Config.fromfile(ROOT / 'configs/demo/pretrain.py')
    method, _, path = row.partition('_')
    cfg.model = model_of(row, cfg.model.to_dict(), out)
    cfg.train_dataloader.update(num_workers=0, persistent_workers=False, batch_size=BATCH)
    cfg.train_dataloader.dataset.update(data_root=str(data), pipeline=our_pipeline(row))
    if path == 'theirs':
        dataset = dict(type='CustomDataset', data_root=str(data), data_prefix='train', with_label=False)
        sampler = dict(type='DefaultSampler', shuffle=True)
        cfg.train_dataloader.update(sampler=sampler)
        cfg.train_dataloader.dataset = dict(dataset, pipeline=their_pipeline(method))
    cfg.optim_wrapper.optimizer.update(lr=rate_of(row), betas=(0.9, BETA2.get(method, 0.98)))
    if method in CLIP:
        cfg.optim_wrapper.clip_grad = CLIP[method] and dict(max_norm=CLIP[method])
    hooks = [hook for hook in cfg.custom_hooks if 'Reconstruction' not in hook.type and 'Meta' not in hook.type]
    if row == 'dino':
        hooks.append(dict(type='beit_mm.DINOHook', momentum=0.99, freeze_last_layer=0))
        cfg.optim_wrapper.optimizer.weight_decay = 0.04
    if row == 'features_ema':
        hooks.append(dict(type='beit_mm.TeacherMomentumHook', momentum=0.99))
    unused = (f'{loop}_{part}' for loop in ('val', 'test') for part in ('dataloader', 'evaluator', 'cfg'))
    log = dict(by_epoch=False, custom_cfg=None)
    cfg.merge_from_dict(dict(dict.fromkeys(unused), custom_hooks=hooks, log_processor=log))
    return cfg


def model_of(row: str, ours: dict, out: Path) -> dict:
    method, _, path = row.partition('_')
    ours['backbone'].update(img_size=SIDE)
    ours['target_generator'].update(checkpoint=str(out / 'tokenizer/iter_3000.pth'))
    norms = dict(type='TwoNormDataPreprocessor', second_mean=[0] * 3, second_std=[255] * 3, **IMAGENET, to_rgb=True)
    theirs = norms if method == 'beit' else dict(type='SelfSupDataPreprocessor', **IMAGENET, to_rgb=True)
    views = dict(type='beit_mm.PeerViews', **IMAGENET) if path == 'ours' else theirs
    arch = dict(embed_dims=DIMS, num_layers=DEPTH, num_heads=HEADS, feedforward_channels=4 * DIMS)
    vit = dict(arch=arch, img_size=SIDE, patch_size=PATCH)
    plain = dict(vit, use_abs_pos_emb=True, use_shared_rel_pos_bias=False, layer_scale_init_value=0)  # as ours
    truncated = [dict(type='TruncNormal', std=0.02, layer=layer) for layer in ('Linear', 'Conv2d')]
    init = dict(init_cfg=[*truncated, dict(type='Constant', layer='LayerNorm', val=1.0, bias=0.0)])
    loss = dict(type='PixelReconstructionLoss')
    if method in ('tokens', 'single', 'short', 'larger'):
        return ours
    if method == 'all':
        return dict(ours, recover='all')
    if method == 'pixels':
        return dict(
            ours,
            target_generator=None,
            head=dict(type='beit_mm.PixelRegressionHead', embed_dims=DIMS, patch_size=PATCH),
        )
    if method == 'features':
        head = dict(type='beit_mm.FeatureRegressionHead', embed_dims=DIMS, target_dims=DIMS)
        return dict(ours, head=head, target_generator=dict(type='beit_mm.FeatureTargets', teacher=TEACHERS[row]))
    if method == 'vqkd':
        tokenizer = dict(vqkd_model(), type='beit_mm.VQKDTokenizer', checkpoint=str(out / 'vqkd/iter_1000.pth'))
        return dict(ours, target_generator=tokenizer)
    if method == 'dino':
        head = dict(type='beit_mm.DINOHead', embed_dims=DIMS, num_prototypes=1024, hidden_dims=256)
        views = dict(type='beit_mm.MultiCropDataPreprocessor', **IMAGENET)
        return dict(type='beit_mm.DINOPretrainer', data_preprocessor=views, backbone=ours['backbone'], dino_head=head)
    if method == 'beit':
        return dict(
            type='BEiT',
            backbone=dict(plain, type='BEiTPretrainViT', **init),
            head=dict(type='BEiTV1Head', embed_dims=DIMS, num_embed=CODES, loss=dict(type='CrossEntropyLoss')),
            target_generator=dict(type='beit_mm.PeerTokenizer', tokenizer=ours['target_generator']),
            data_preprocessor=views,
        )
    if method == 'simmim':
        return dict(
            type='SimMIM',
            backbone=dict(plain, type='beit_mm.PeerViT', **init),
            neck=dict(type='SimMIMLinearDecoder', in_channels=DIMS, encoder_stride=PATCH),
            head=dict(type='SimMIMHead', patch_size=PATCH, loss=dict(loss, criterion='L1', channel=3)),
            data_preprocessor=views,
        )
    decoder = dict(decoder_embed_dim=96, decoder_depth=3, decoder_num_heads=4)  # two thirds of the encoder, as theirs
    return dict(
        type='MAE',
        backbone=dict(vit, type='MAEViT', mask_ratio=0.75),
        neck=dict(type='MAEPretrainDecoder', num_patches=64, patch_size=PATCH, embed_dim=DIMS, **decoder),
        head=dict(type='MAEPretrainHead', norm_pix=True, patch_size=PATCH, loss=dict(loss, criterion='L2')),
        init_cfg=[dict(type='Xavier', layer='Linear', distribution='uniform'), init['init_cfg'][-1]],
        data_preprocessor=views,
    )


def our_pipeline(row: str) -> list[dict]:
    load = dict(type='beit_mm.LoadImage', cache_bytes=2**30)
    pack = dict(type='beit_mm.PackViews')
    view = dict(type='beit_mm.TwoViewRandomResizedCrop', size=SIDE, second_size=None, scale=(0.3, 1.0))
    jitter = dict(type='beit_mm.TwoViewColorJitter', brightness=0.4, contrast=0.4, saturation=0.4)
    blocks = dict(type='beit_mm.BlockwiseMask', grid=GRID, num_masked=MASKED, min_block=MIN_BLOCK)
    if row == 'dino':
        crops = dict(size=SIDE, local_size=SIDE // 2, local_scale=(0.1, 0.4), num_local=4, blur_sigma=(0.1, 0.6))
        return [load, dict(type='beit_mm.MultiCrop', **crops), pack]
    if row == 'mae_ours':
        return [load, dict(view, scale=(0.2, 1.0)), pack]
    if row == 'simmim_ours':
        return [load, dict(view, scale=(0.67, 1.0)), their_pipeline('simmim')[-2], pack]
    if row == 'pixels' or row in TEACHERS:
        return [load, view, jitter, blocks, pack]
    if row == 'single':
        blocks = dict(type='beit_mm.RandomMask', grid=GRID, num_masked=MASKED)
    return [load, dict(view, second_size=SIDE), jitter, blocks, pack]


def their_pipeline(method: str) -> list[dict]:
    """mmpretrain's pipelines of the methods' configs, for smaller images."""
    load, flip, pack = dict(type='LoadImageFromFile'), dict(type='RandomFlip', prob=0.5), dict(type='PackInputs')
    crop = dict(type='RandomResizedCrop', scale=SIDE)
    if method == 'beit':
        views = dict(size=SIDE, second_size=SIDE, interpolation='bicubic', second_interpolation='lanczos')
        masks = dict(input_size=GRID, num_masking_patches=MASKED, max_num_patches=None, min_num_patches=MIN_BLOCK)
        return [
            load,
            dict(type='ColorJitter', brightness=0.4, contrast=0.4, saturation=0.4, hue=0.0),
            flip,
            dict(type='RandomResizedCropAndInterpolationWithTwoPic', scale=(0.3, 1.0), **views),
            dict(type='BEiTMaskGenerator', **masks),
            pack,
        ]
    if method == 'simmim':
        masks = dict(input_size=SIDE, mask_patch_size=2 * PATCH, model_patch_size=PATCH, mask_ratio=0.6)
        return [load, dict(crop, crop_ratio_range=(0.67, 1.0)), flip, dict(type='SimMIMMaskGenerator', **masks), pack]
    return [load, dict(crop, crop_ratio_range=(0.2, 1.0), backend='pillow', interpolation='bicubic'), flip, pack]


def vqkd_model() -> dict:
    decoder = dict(hidden=48, width=64, bottleneck_blocks=2)
    arch = dict(embed_dims=DIMS, num_layers=3, num_heads=HEADS)
    return dict(arch=arch, img_size=SIDE, patch_size=PATCH, vocab_size=CODES, code_dims=16, pixel_decoder=decoder)


@functools.cache
def register_peers() -> None:
    """What joins mmpretrain's methods with our data path, our tokenizer and a ViT."""
    import torch
    from mmpretrain.models import BEiTPretrainViT

    from beit_mm.models.beit import TwoViewDataPreprocessor
    from beit_mm.registry import MODELS

    @MODELS.register_module()
    class PeerViews(TwoViewDataPreprocessor):
        """Our batches as mmpretrain's methods take them."""

        def forward(self, data: dict, training: bool = False) -> dict:
            views = super().forward(data, training)['inputs']
            samples = [SimpleNamespace(mask=mask.float()) for mask in (() if views['mask'] is None else views['mask'])]
            second = views['tokenizer_images']
            return dict(inputs=views['images'] if second is None else [views['images'], second], data_samples=samples)

    @MODELS.register_module()
    class PeerTokenizer(torch.nn.Module):
        """Our tokens where mmpretrain's head takes the tokenizer's scores."""

        def __init__(self, tokenizer: dict) -> None:
            super().__init__()
            self.tokenizer = MODELS.build(tokenizer).requires_grad_(False)

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            codes = self.tokenizer.encode(images)[:, None]  # B, 1, h, w
            return torch.zeros(len(codes), CODES, *GRID, dtype=torch.uint8).scatter_(1, codes, 1)

    @MODELS.register_module()
    class PeerViT(BEiTPretrainViT):
        """A ViT as SimMIM takes it; mmpretrain has it with Swin alone."""

        def forward(self, x: torch.Tensor, mask: torch.Tensor | None) -> tuple:
            (hidden,) = super().forward(x, mask)
            return (hidden[:, 1:].transpose(1, 2).unflatten(2, GRID),)


def first_stage(folder: Path) -> Path:
    """Of `features_two`: where `features_ema` of the same seed, rate and number of steps lies."""
    return folder.with_name(folder.name.replace('features_two', 'features_ema'))


def make_runner(row: str, data: Path, out: Path, steps: int, folder: Path, seed: int, rate: float | None) -> Any:
    """mmengine's runner of a row's pretraining, which is resumed."""
    import torch
    from mmengine.runner import Runner
    from mmpretrain.models.utils import attention

    register_peers()
    cfg = settings(row, data, out)
    warmup, rate = max(2, steps // 20), rate or cfg.optim_wrapper.optimizer.lr
    cfg.optim_wrapper.optimizer.lr = rate
    cfg.param_scheduler = [
        dict(type='LinearLR', start_factor=1e-9, by_epoch=False, begin=0, end=warmup),
        dict(
            type='CosineAnnealingLR', by_epoch=False, begin=warmup, end=steps, T_max=steps - warmup, eta_min_ratio=0.01
        ),
    ]
    cfg.train_cfg = dict(type='beit_mm.IterLoop', max_iters=steps)
    cfg.default_hooks.checkpoint.update(interval=math.ceil(steps / 4), max_keep_ckpts=1)
    cfg.randomness = dict(seed=seed)
    cfg.resume, cfg.work_dir = True, str(folder)
    if row == 'features_two':
        cfg.model.target_generator.teacher = str(first_stage(folder) / f'encoder_{steps}.pth')
    runner = Runner.from_cfg(cfg)
    if row == 'larger_start':
        for block in runner.model.backbone.blocks:
            for layer in (block.mlp.fc1, block.mlp.fc2):  # mmpretrain's start, which then lessens fc2 by depth
                torch.nn.init.xavier_uniform_(layer.weight)
    for module in runner.model.modules():
        if isinstance(module, attention.MultiheadAttention):  # torch's kernel takes twice the time on a CPU in bfloat16
            module.scaled_dot_product_attention = attention.scaled_dot_product_attention_pyimpl
    return runner

"""What a training on somebody's images looks like: which model, tokenizer, batch and length, as configs.

A plan becomes ordinary configs on top of those of configs/, which tools/train.py runs too.
"""

import math
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from mmengine.config import Config

from beit_mm.apis import rebuild
from beit_mm.apis.configs import own_config
from beit_mm.apis.split import Images, LabelMaps
from beit_mm.checkpoint.checkpoint import Checkpoint, normalisation_of
from beit_mm.checkpoint.find import DEMO
from beit_mm.checkpoint.names import IMAGENET, released_out_indices
from beit_mm.checkpoint.read import CheckpointError
from beit_mm.datasets.transforms import as_size
from beit_mm.errors import UserError
from beit_mm.models.vit import sizes_of

MIN_STEPS = 20
MANY_IMAGES = 100_000  # from which on a GPU trains BEiT-Base
BACKBONE = 'beit_mm.BEiTBackbone'
NARROW = 192  # width of models up to which the demo's recipes hold
NARROW_PRETRAINING, WIDE_PRETRAINING = 'demo/pretrain.py', 'beit/pretrain_300e.py'
FINETUNING = 'demo/finetune_folder.py'
NARROW_SEGMENTOR, WIDE_SEGMENTOR = 'demo/segment_upernet.py', 'beit/upernet_512_ade20k_160k.py'
NONE, NEW = 'none', 'new'  # said for weights: random ones; for a tokenizer: one of these images
GIB_PER_IMAGE = 0.2  # of a GPU, for BEiT-Base at 224 pixels with the tokenizer
# Of a GPU, for an UperNet of 768 channels at 1,024 patches: its heads, and the blocks of BEiT-Base. Bytes that autograd
# keeps, counted for small, base and large, and a tenth more; base took 1.2 of its 1.26 on an H100.
GIB_OF_HEADS, GIB_OF_BLOCKS = 0.58, 0.68
HEAD_PARAMETERS = 100_000_000  # each has 16 bytes: weight, gradient and two of the optimizer
MAX_BATCH = 512  # on a GPU: more would leave a short training few steps
CPU_BATCH = 64, 16  # of a narrow model, as its recipes have it, and of a wide one, whose steps take seconds


@dataclass
class Plan:
    """What was chosen for a training, and why."""

    device: str  # 'cpu' or 'cuda', for which it was chosen
    base: str  # config below configs/ that it builds on
    backbone: dict[str, Any]  # arguments of the BEiTBackbone
    size: tuple[int, int]  # of the images, (height, width) in pixels
    preprocessing: dict[str, Any]  # mean and std, pixels 0-255
    assumed: str  # the warning where `init` does not say these; empty without one
    batch: int  # images of a step
    workers: int  # processes that read images
    init: str | None  # checkpoint to begin with; None for random weights
    tokenizer: dict[str, Any] | None  # config of the tokenizer; None: one is trained
    keeps_head: bool  # `init` predicts tokens of this tokenizer already; its head is trained further
    balance: bool  # images of small classes are shown more often
    reasons: list[str]  # lines for the user

    @property
    def tokenizer_name(self) -> str | None:
        """Kind and file of the tokenizer, by which a run that is resumed knows it; None: one is trained."""
        return f'{self.tokenizer["type"]} of {self.tokenizer.get("checkpoint")}' if self.tokenizer else None

    @property
    def grid(self) -> tuple[int, int]:
        height, width = (side // self.backbone['patch_size'] for side in self.size)
        return height, width

    @property
    def width(self) -> int:
        return sizes_of(self.backbone['arch'])['embed_dims']


def plan_training(
    images: Images,
    verb: str,
    init: str | None = None,
    tokenizer: str | None = None,
    workers: int | None = None,
    device: str | None = None,
    batch: int | None = None,
    levels: Mapping[str, Any] | None = None,
    balance: bool = False,
) -> Plan:
    """Model, batch and workers, from the number of images, the device and its memory.

    Args:
        init: checkpoint; 'none' for random weights; None: 'demo', but for pretraining on a GPU random weights.
        tokenizer: 'demo'; 'new' for one of these images; None: that of `init`, else DALL-E's on a GPU that has it.
        workers: processes that read images; None: as the cores allow.
        device: 'cpu' or 'cuda'; None: what there is.
        batch: images of a step; None: as memory and images allow.
        levels: `mean` and `std` of the images; by default those of `init`, ImageNet's for random weights.
        balance: of a classifier: show images of small classes more often.
    """
    device = device or ('cuda' if torch.cuda.is_available() else 'cpu')
    number = len(images.train.names)
    base = WIDE_PRETRAINING if device == 'cuda' else NARROW_PRETRAINING
    levels = levels or {}
    bands = images.bands if isinstance(images, LabelMaps) else None
    usual, channels = (bands, len(bands['mean'])) if bands else (IMAGENET, 3)
    preprocessing, assumed = normalisation_of('the new model', usual, (), channels, **levels)
    init = None if init == NONE else init or (DEMO if device == 'cpu' or verb == 'finetune' else None)
    checkpoint = Checkpoint.open(init, **({} if bands else levels)) if init else None
    if checkpoint:
        backbone = rebuild.backbone_config(checkpoint, channels)
        if not bands:
            preprocessing, assumed = checkpoint.normalisation
        backbone.update(drop_path_rate=0.0 if device == 'cpu' and verb == 'pretrain' else 0.1)
        why = f'as in {init}'
    else:
        backbone = dict(img_size=224, patch_size=16) | own_config(base).model.backbone.to_dict()
        why = 'small enough for a CPU'
        if device == 'cuda':
            backbone['arch'] = 'base' if number >= MANY_IMAGES else 'small'
            why = f'{"at least" if number >= MANY_IMAGES else "fewer than"} {MANY_IMAGES:,} images'
    backbone['in_channels'] = channels
    sizes = sizes_of(backbone['arch'])
    segments = isinstance(images, LabelMaps)
    if verb == 'finetune':
        base = FINETUNING
    if segments:
        base = NARROW_SEGMENTOR if sizes['embed_dims'] <= NARROW else WIDE_SEGMENTOR
        backbone['img_size'] = own_config(base).model.test_cfg.crop_size
    size = height, width = as_size(backbone['img_size'])
    limit = 'as given'
    if batch is None:
        most, limit = largest_batch(device, sizes, height * width / backbone['patch_size'] ** 2, segments)
        if segments:
            most = min(most, own_config(base).auto_scale_lr.base_batch_size)
        batch = 2 ** int(math.log2(max(2, min(most, max(4, number / 8)))))  # an epoch has several steps
        if device == 'cpu' and base == WIDE_SEGMENTOR:
            batch = 2  # 512 x 512 pixels each
    elif not 0 < batch <= number:
        raise UserError(f'a batch of {batch} images; expected 1 to {number:,}, the images to learn from')
    cores = len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count() or 1
    if workers is None:  # two cores are for the process that feeds a GPU; without one the training takes most cores
        workers = max(1, min(cores - 2, 16) if device == 'cuda' else cores // 4)
    shape = f'{sizes["num_layers"]} blocks of width {sizes["embed_dims"]}, {height} x {width} pixels'
    reasons = [
        f'images     {images}',
        f'model      {shape} in patches of {backbone["patch_size"]}: {why}',
        f'batch      {batch} images, read by {workers} process{"" if workers == 1 else "es"}: {limit}, {cores} cores',
    ]
    if isinstance(images, LabelMaps):
        reasons[1:1] = [f'labels     {note}' for note in images.notes]
    elif verb == 'finetune' and (few := images.few(balance)):
        reasons.insert(1, f'classes    {few}')
    if bands:
        which = bands['load']['bands'] or f'all {channels}'
        reasons.append(f'bands      {which}: 0 and 255 are the percentiles 1 and 99 of each in these images')
    if device == 'cuda' and (gpus := torch.cuda.device_count()) > 1:
        reasons.append(f'GPUs       1 of {gpus}; all of them: tools/dist_train.sh with the configs in the run folder')
    known, why, keeps_head = None, f'one is trained first, {tokenizer_batch(batch)} images a step', False
    if verb == 'pretrain':
        if tokenizer != NEW and checkpoint and 'head.lm_head.weight' in checkpoint.state_dict:  # our head's name
            with suppress(CheckpointError, FileNotFoundError):
                known, why = rebuild.tokenizer_config(checkpoint), f'that of {init}, whose head is trained further'
        keeps_head = known is not None and (tokenizer is None or known.get('checkpoint') == DEMO)
        if tokenizer == DEMO and not keeps_head:
            known, why = rebuild.own_tokenizer(DEMO), 'the packaged one'
        if tokenizer is None and not known and device == 'cuda' and (known := rebuild.find_dalle()):
            why = "DALL-E's, which is here"
        reasons.append(f'tokenizer  {why}')
    start = batch, workers, init, known, keeps_head, balance
    return Plan(device, base, backbone, size, preprocessing, assumed, *start, reasons)


def largest_batch(device: str, sizes: Mapping[str, int], patches: float, segments: bool) -> tuple[float, str]:
    """The most images of a step for a model of these sizes and this number of patches, and what limits them."""
    width, depth = sizes['embed_dims'], sizes['num_layers']
    if device == 'cpu':
        return CPU_BATCH[width > NARROW], 'a CPU'
    free = torch.cuda.mem_get_info()[0] / 2**30
    gib_per_image = GIB_PER_IMAGE * (width / 768) * (patches / 196)  # in proportion to BEiT-Base at 224 pixels
    limit = f'{free:.0f} GiB of GPU memory'
    if segments:
        gib_per_image = (GIB_OF_HEADS + GIB_OF_BLOCKS * (width / 768) * (depth / 12)) * patches / 1024
        free -= 16 * (12 * width**2 * depth + HEAD_PARAMETERS) / 2**30
    return min(free / gib_per_image, MAX_BATCH), limit


def resized(pipeline: Sequence[Mapping[str, Any]], size: tuple[int, int], **others: Any) -> list[dict[str, Any]]:
    """A recipe's pipeline for images of another size (height, width), with `others` where a step has the key."""
    values = dict(others, size=size, crop_size=size[::-1])
    steps = [{key: values.get(key, value) for key, value in step.items()} for step in pipeline]
    crop = next((step['crop_size'] for step in pipeline if 'crop_size' in step), None)
    for step in steps:
        if step['type'] == 'ResizeEdge':
            step['scale'] = round(step['scale'] * min(size) / crop)  # keeps the ratio of edge and crop
    return steps


def scaled(rate: float, ratio: float) -> float:
    """A recipe's learning rate for another batch size: by the square root of their ratio, as suits Adam."""
    return float(f'{rate * math.sqrt(ratio):.2g}')


def schedule(steps: int, warmup: int, batch: int, eta_min_ratio: float = 0.0) -> dict[str, Any]:
    warmup = max(2, min(warmup, steps // 5))  # mmengine never leaves a warm-up of one step
    end = max(steps, warmup + 1)
    cosine = dict(begin=warmup, end=end, T_max=end - warmup, eta_min_ratio=eta_min_ratio)
    return dict(
        param_scheduler=[
            dict(type='LinearLR', start_factor=1e-9, by_epoch=False, begin=0, end=warmup),
            dict(type='CosineAnnealingLR', by_epoch=False, **cosine),
        ],
        train_cfg=dict(_delete_=True, type='beit_mm.IterLoop', max_iters=steps, val_interval=steps),
        default_hooks=dict(
            logger=dict(interval=min(50, max(1, steps // 20)), log_metric_by_epoch=False),
            checkpoint=dict(by_epoch=False, interval=max(50, min(500, steps // 4)), max_keep_ckpts=2),
        ),
        log_processor=dict(by_epoch=False),
        auto_scale_lr=dict(base_batch_size=batch),
    )


def loaders(
    images: Images, lists: Path, plan: Plan, pipelines: Sequence[list], validated: str = 'validated', **data: Any
) -> dict[str, Any]:
    """Settings of the data loaders, for images of lists; `pipelines` of training and of validation."""
    loading = dict(batch_size=plan.batch, num_workers=plan.workers, persistent_workers=plan.workers > 0)
    train, val = (
        dict(loading, dataset=dict(images.dataset(lists, name), pipeline=pipeline, on_error='skip', **data))
        for name, pipeline in zip(('train', validated), pipelines, strict=True)
    )
    return dict(train_dataloader=train, val_dataloader=val, test_dataloader=val)


def tokenizer_batch(batch: int) -> int:
    """Images of a step of the tokenizer, at most as many as its rate is for."""
    return min(own_config(rebuild.TOKENIZER).train_dataloader.batch_size, batch)


def tokenizer_settings(base: Config, images: Images, plan: Plan, lists: Path, steps: int) -> dict[str, Any]:
    pipelines = [base.train_pipeline, base.val_pipeline]
    batch = tokenizer_batch(plan.batch)
    return dict(
        model=dict(temperature_steps=steps, kl_steps=max(1, steps // 4)),  # the recipe's shares of its length
        **loaders(images, lists, replace(plan, batch=batch), pipelines),
        **schedule(steps, 50, batch, base.param_scheduler[-1].eta_min_ratio),
    )


def pretraining_settings(base: Config, images: Images, plan: Plan, lists: Path, steps: int) -> dict[str, Any]:
    assert plan.tokenizer is not None
    stride, vocab_size = rebuild.stride_and_vocab(plan.tokenizer)
    pipelines = [resized(base[f'{name}_pipeline'], plan.size, **views(plan.grid, stride)) for name in ('train', 'val')]
    model = dict(
        backbone=dict(plan.backbone, _delete_=True, type=BACKBONE, masked_input=True, out_type='raw'),
        head=dict(embed_dims=plan.width, vocab_size=vocab_size),
        target_generator=dict(plan.tokenizer, _delete_=True),
        data_preprocessor=dict(plan.preprocessing),
    )
    length = schedule(steps, steps // 20, plan.batch, base.param_scheduler[-1].eta_min_ratio)
    if plan.keeps_head:
        length['train_cfg']['val_begin'] = 0  # what its weights predict already is told apart
    if plan.init:
        model['backbone']['init_cfg'] = dict(type='Pretrained', checkpoint=plan.init)
    if plan.keeps_head:  # by itself: an init_cfg of the whole model would overrule the backbone's
        model['head']['init_cfg'] = dict(type='Pretrained', checkpoint=plan.init, prefix='head.')
    rate = base.optim_wrapper.optimizer.lr
    if plan.base == NARROW_PRETRAINING:  # its rate is for a width of 128; models of twice that bear it, wider ones less
        rate *= min(1.0, 256 / plan.width) * (0.5 if plan.keeps_head else 1.0)  # what is trained already is kept
    return dict(
        model=model,
        **loaders(images, lists, plan, pipelines),
        optim_wrapper=dict(optimizer=dict(lr=scaled(rate, plan.batch / base.auto_scale_lr.base_batch_size))),
        **length,
    )


def views(grid: tuple[int, int], stride: int) -> dict[str, Any]:
    """What a pretraining's pipeline needs on a patch grid (h, w), with visual tokens of so many pixels.

    The recipe's 75 of 14 x 14 patches are masked, in proportion.
    """
    rows, columns = grid
    mask = dict(num_masked=round(75 / 196 * rows * columns), min_block=min(16, max(1, rows * columns // 9)))
    return dict(mask, grid=grid, second_size=(stride * rows, stride * columns))


def tuned_backbone(plan: Plan, **options: Any) -> dict[str, Any]:
    options = plan.backbone | dict(_delete_=True, type=BACKBONE, masked_input=False, drop_path_rate=0.1) | options
    options['rel_pos_bias'] = 'per_layer' if options.get('rel_pos_bias') else None
    return dict(options, init_cfg=dict(type='Pretrained', checkpoint=plan.init) if plan.init else None)


def finetuning_settings(base: Config, images: Images, plan: Plan, lists: Path, steps: int) -> dict[str, Any]:
    pipelines = [resized(base[f'{name}_pipeline'], plan.size) for name in ('train', 'test')]
    num_classes = dict(num_classes=len(images.classes))
    # the rate and batch of the demo's recipe, and of the paper's for BEiT-Base; layer decay likewise
    recipe_batch, layer_decay = (64, 0.8) if plan.width <= NARROW else (1024, 0.65)
    data = loaders(images, lists, plan, pipelines, 'held_out', classes=str(lists / 'classes.txt'))
    if plan.balance:
        learned = dict(type=base.train_dataloader.dataset.type, **data['train_dataloader']['dataset'])
        largest = max(images.learned.values()) / images.learned.total()  # whose images are shown once
        balanced = dict(_delete_=True, type='ClassBalancedDataset', oversample_thr=largest, dataset=learned)
        data['train_dataloader']['dataset'] = balanced
    return dict(
        model=dict(
            backbone=tuned_backbone(plan, out_type='avg_featmap'),
            head=dict(in_channels=plan.width, **num_classes),
            data_preprocessor=dict(plan.preprocessing, **num_classes),
        ),
        **data,
        optim_wrapper=dict(
            optimizer=dict(lr=scaled(4e-3 if plan.init else 1e-3, plan.batch / recipe_batch)),
            paramwise_cfg=dict(layer_decay_rate=layer_decay if plan.init else 1.0),  # random weights learn alike
        ),
        **schedule(steps, steps // 6, plan.batch, base.param_scheduler[-1].eta_min_ratio),
    )


def segmentation_settings(base: Config, images: Images, plan: Plan, lists: Path, steps: int) -> dict[str, Any]:
    assert isinstance(images, LabelMaps)
    indices = released_out_indices(sizes_of(plan.backbone['arch'])['num_layers'])
    recipe, channels, num_classes = base.optim_wrapper, plan.width, len(images.classes)
    auxiliary = dict(in_channels=channels, num_classes=num_classes)
    rescales = [4, 2, 1, 0.5] if plan.backbone['patch_size'] > 8 else [2, 1, 0.5, 0.25]
    model: dict[str, Any] = dict(
        backbone=tuned_backbone(plan, out_type='featmap', out_indices=indices),
        neck=dict(embed_dim=channels, rescales=rescales),
        decode_head=dict(in_channels=[channels] * 4, num_classes=num_classes),
        # of a narrow model it takes a sixth of a step, which more steps use better
        auxiliary_head=None if plan.base == NARROW_SEGMENTOR else auxiliary,
        data_preprocessor=dict(plan.preprocessing, size=plan.size),
        test_cfg=dict(crop_size=plan.size, stride=[side * 2 // 3 for side in plan.size]),
    )
    pipelines = [base.train_pipeline, base.test_pipeline, base.tta_pipeline]
    if images.bands:  # colours are not distorted
        pipelines = [[images.bands['load'], *steps[1:]] for steps in pipelines]
        pipelines[0] = [step for step in pipelines[0] if step['type'] != 'PhotoMetricDistortion']
    settings = dict(loaders(images, lists, plan, pipelines[:2]), tta_pipeline=pipelines[2])
    settings['val_dataloader'].update(batch_size=1)  # images differ in size
    return dict(
        model=model,
        **settings,
        optim_wrapper=dict(
            optimizer=dict(lr=scaled(recipe.optimizer.lr, plan.batch / base.auto_scale_lr.base_batch_size)),
            paramwise_cfg=dict(layer_decay_rate=recipe.paramwise_cfg.layer_decay_rate if plan.init else 1.0),
        ),
        **schedule(steps, steps // 10, plan.batch),
    )


# by the stages of a training; each takes the config that it builds on, images, plan, folder of lists and steps
SETTINGS = dict(
    tokenizer=tokenizer_settings,
    pretrain=pretraining_settings,
    finetune=finetuning_settings,
    segment=segmentation_settings,
)

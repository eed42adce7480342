"""What a training on somebody's images looks like: which model, batch and length, as configs.

A plan becomes ordinary configs on top of those of configs/, which tools/train.py runs too.
"""

import dataclasses
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from mmengine.config import Config

from beit_mm.apis.configs import own_config
from beit_mm.apis.split import Images, dataset_of
from beit_mm.apis.stored_config import RefusedError, check_part
from beit_mm.checkpoint.checkpoint import Checkpoint, CheckpointInput
from beit_mm.checkpoint.names import IMAGENET
from beit_mm.checkpoint.read import CheckpointError
from beit_mm.models.tokenizers.dalle import STRIDE
from beit_mm.models.tokenizers.discrete_vae import DiscreteVAE
from beit_mm.models.vit import sizes_of
from beit_mm.registry import MODELS
from beit_mm.terminal import UserError

MIN_STEPS = 20
MANY_IMAGES = 100_000  # from which on a GPU trains BEiT-Base
TOKENIZER = 'demo/dvae.py'  # the config of own tokenizers
BACKBONE = 'beit_mm.BEiTBackbone'
TOKENIZERS = ('beit_mm.DiscreteVAE', 'beit_mm.DALLETokenizer')  # that a checkpoint's config may name
DALLE_VOCABULARY = 8192
TOKENIZER_FILES = ('checkpoint', 'decoder_checkpoint', 'sha256')  # their arguments
TOKENIZER_KEYS = ('type', 'arch', 'hidden', 'vocab_size', 'embed_dims', 'num_levels', 'bottleneck_blocks')
NARROW = 192  # width of models up to which the demo's recipes hold
NARROW_PRETRAINING, WIDE_PRETRAINING = 'demo/caltech101_pretrain.py', 'beit/pretrain_300e.py'
NARROW_FINETUNING, WIDE_FINETUNING = 'demo/caltech101_finetune.py', 'demo/finetune_folder.py'
BASES = (NARROW_PRETRAINING, WIDE_PRETRAINING, NARROW_FINETUNING, WIDE_FINETUNING)
MAX_TOKENIZER_STEPS = 4000  # more of them make its tokens hardly better
GIB_PER_IMAGE = 0.2  # of a GPU, for BEiT-Base at 224 pixels with the tokenizer; in proportion to the model's width


@dataclass
class Plan:
    """What was chosen for a training, and why.

    Attributes:
        base: config of configs/ that it builds on.
        backbone: arguments of the BEiTBackbone.
        size: of the images, (height, width) in pixels.
        preprocessing: mean and std, pixels 0-255.
        batch: images of a step.
        workers: processes that read images.
        init: checkpoint to begin with; None for random weights.
        tokenizer: config of the tokenizer, that of `init` or DALL-E's; None: one is trained.
        keeps_head: `init` predicts tokens of this tokenizer already, and goes on doing so.
        reasons: lines for the user.
    """

    base: str
    backbone: dict[str, Any]
    size: tuple[int, int]
    preprocessing: dict[str, Any]
    batch: int
    workers: int
    init: str | None
    tokenizer: dict[str, Any] | None
    keeps_head: bool
    reasons: list[str]

    def __post_init__(self) -> None:
        """Refuses what only another file can say, as plan.json of a run: a base is executed, a type is built."""
        if self.base not in BASES:
            raise UserError(f'a plan on top of {self.base!r}')
        self.backbone = check_part(dict(self.backbone, type=BACKBONE), (BACKBONE,), 'backbone')
        del self.backbone['type']
        if self.tokenizer:
            files = {key: str(self.tokenizer[key]) for key in TOKENIZER_FILES if self.tokenizer.get(key)}
            rest = {key: value for key, value in self.tokenizer.items() if key not in TOKENIZER_FILES}
            self.tokenizer = check_part(rest, TOKENIZERS, 'tokenizer') | files
        height, width = self.size
        self.size = int(height), int(width)
        self.batch, self.workers = int(self.batch), int(self.workers)
        self.preprocessing = {key: [float(value) for value in self.preprocessing[key]] for key in ('mean', 'std')}

    @property
    def grid(self) -> tuple[int, int]:
        """Patches of an image, (rows, columns)."""
        height, width = (side // self.backbone['patch_size'] for side in self.size)
        return height, width


# --- settings ------------------------------------------------------------------------------------


def resized(pipeline: Sequence[Mapping[str, Any]], size: tuple[int, int], **others: Any) -> list[dict[str, Any]]:
    """A pipeline whose images have another size (height, width), and whose steps have other values of some keys.

    A value is changed where a step has the key; `scale` of ResizeEdge keeps its ratio to the crop.
    """
    steps = [dict(step) for step in pipeline]
    crop = next((step['crop_size'] for step in steps if 'crop_size' in step), size)
    for step in steps:
        if step['type'] == 'ResizeEdge':
            step['scale'] = round(step['scale'] * min(size) / min(height_and_width(crop)))
        elif step['type'] == 'RandomResizedCrop':
            step['scale'] = tuple(size[::-1])
        step.update({key: value for key, value in (others | dict(size=size)).items() if key in step})
        if 'crop_size' in step:
            step['crop_size'] = tuple(size[::-1])
    return steps


def height_and_width(size: int | Sequence[int]) -> Sequence[int]:
    """A side as a height and a width."""
    return (size, size) if isinstance(size, int) else size


def schedule(steps: int, warmup: int, batch: int, **cosine: float) -> dict[str, Any]:
    """Settings of a training of so many steps, with one validation at its end."""
    warmup = max(2, min(warmup, steps // 5))  # mmengine never leaves a warm-up of one step
    return dict(
        param_scheduler=[
            dict(type='LinearLR', start_factor=1e-9, by_epoch=False, begin=0, end=warmup),
            dict(type='CosineAnnealingLR', by_epoch=False, begin=warmup, end=steps, T_max=steps - warmup, **cosine),
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
    settings: dict[str, Any] = {}
    for split_name, name, pipeline in zip(('train', 'val'), ('train', validated), pipelines, strict=True):
        dataset = dict(dataset_of(images, lists, name), pipeline=pipeline, on_error='skip', **data)
        settings[f'{split_name}_dataloader'] = dict(
            batch_size=plan.batch, num_workers=plan.workers, persistent_workers=plan.workers > 0, dataset=dataset
        )
    return dict(settings, test_dataloader=settings['val_dataloader'])


# --- choices --------------------------------------------------------------------------------------


def backbone_of_file(checkpoint: CheckpointInput) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arguments of the backbone in a checkpoint, and the mean, std and size of its images.

    Raises:
        CheckpointError: no BEiT of RGB images.
    """
    checkpoint = Checkpoint.open(checkpoint)
    arguments = checkpoint.backbone_arguments()
    if arguments['in_channels'] != 3:
        raise CheckpointError(f'{checkpoint}: a model of images with {arguments["in_channels"]} bands; expected RGB')
    arguments['img_size'] = tuple(height_and_width(arguments['img_size']))
    return arguments, {**IMAGENET, **checkpoint.preprocessing}


def plan_training(
    images: Images,
    kind: str,
    init: str | None = None,
    workers: int | None = None,
    device: str | None = None,
    batch: int | None = None,
) -> Plan:
    """Model, batch and workers, from the number of images, the device and its memory.

    Args:
        images: to learn from.
        kind: 'pretrain' or 'finetune'.
        init: checkpoint to begin with.
        workers: processes that read images; None: as the cores allow.
        device: 'cpu' or 'cuda'; None: what there is.
        batch: images of a step; None: as memory and images allow.

    Raises:
        CheckpointError: `init` is no BEiT.
    """
    device = device or ('cuda' if torch.cuda.is_available() else 'cpu')
    number = len(images.train.paths)
    base = WIDE_PRETRAINING if device == 'cuda' else NARROW_PRETRAINING
    preprocessing: dict[str, Any] = dict(IMAGENET)
    if init:
        backbone, preprocessing = backbone_of_file(init)
        backbone.update(drop_path_rate=0.0 if device == 'cpu' and kind == 'pretrain' else 0.1)
        why = f'as in {init}'
    else:
        backbone = Config.fromfile(str(own_config(base))).model.backbone.to_dict()
        backbone.setdefault('img_size', 224)
        backbone.setdefault('patch_size', 16)
        why = 'small enough for a CPU'
        if device == 'cuda':
            backbone['arch'] = 'base' if number >= MANY_IMAGES else 'small'
            why = f'{"at least" if number >= MANY_IMAGES else "fewer than"} {MANY_IMAGES:,} images'
    sizes = sizes_of(backbone['arch'])
    if kind == 'finetune':
        base = NARROW_FINETUNING if sizes['embed_dims'] <= NARROW else WIDE_FINETUNING
    height, width = height_and_width(backbone['img_size'])
    if device == 'cuda':
        free = torch.cuda.mem_get_info()[0] / 2**30
        room = free / GIB_PER_IMAGE * 768 / sizes['embed_dims'] * 196 / (height * width / backbone['patch_size'] ** 2)
        most, limit = min(room, 512), f'{free:.0f} GiB of GPU memory'
    else:
        most, limit = 64 if sizes['embed_dims'] <= NARROW else 16, 'a CPU'
    if batch is None:
        batch = 2 ** int(math.log2(max(4, min(most, number / 8))))
    elif not 0 < batch <= number:
        raise UserError(f'a batch of {batch} images; expected 1 to {number:,}, the images to learn from')
    cores = len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count() or 1
    if workers is None:
        workers = max(1, min(cores - 2, 16) if device == 'cuda' else cores // 4)
    shape = f'{sizes["num_layers"]} blocks of width {sizes["embed_dims"]}, {height} x {width} pixels'
    reasons = [
        f'images     {images}',
        f'model      {shape} in patches of {backbone["patch_size"]}: {why}',
        f'batch      {batch} images, read by {workers} process{"" if workers == 1 else "es"}: {limit}, {cores} cores',
    ]
    if device == 'cuda' and (gpus := torch.cuda.device_count()) > 1:
        reasons.append(f'GPUs       1 of {gpus}; all of them: tools/dist_train.sh with the configs in the run folder')
    tokenizer = tokenizer_of_init(init) if init and kind == 'pretrain' else None
    keeps_head = tokenizer is not None
    if kind == 'pretrain':
        why = f'that of {init}, whose head goes on too'
        if tokenizer is None and device == 'cuda':
            tokenizer, why = find_dalle(), "DALL-E's, which is here"
        reasons.append(f'tokenizer  {why if tokenizer else "one is trained first"}')
    return Plan(base, backbone, (height, width), preprocessing, batch, workers, init, tokenizer, keeps_head, reasons)


def find_dalle() -> dict[str, Any] | None:
    """Arguments of the DALLETokenizer whose weights lie in $BEIT_MM_WEIGHTS or torch hub's cache; None without."""
    folders = [Path(torch.hub.get_dir(), 'checkpoints')]
    if named := os.environ.get('BEIT_MM_WEIGHTS'):
        folders.insert(0, Path(named))
    for encoder in (folder / name for folder in folders for name in ('dalle_encoder.pth', 'encoder.pkl')):
        if encoder.is_file():
            decoder = encoder.with_name('decoder.pkl')
            found = dict(type='beit_mm.DALLETokenizer', checkpoint=str(encoder.resolve()))
            return dict(found, decoder_checkpoint=str(decoder.resolve())) if decoder.is_file() else found
    return None


def located(checkpoint: str) -> str:
    """A checkpoint's absolute path, or its address. Links stay: a file's name and neighbours say what is in it."""
    return checkpoint if '://' in checkpoint else str(Path(checkpoint).absolute())


def tokenizer_of(checkpoint: Checkpoint) -> dict[str, Any]:
    """The config of the tokenizer that a checkpoint was trained with, and its file.

    Of a file that does not say it, as the released ones, it is DALL-E's where the vocabulary fits, but for BEiT v2.

    Raises:
        CheckpointError: it cannot be known, or is no tokenizer of ours.
        FileNotFoundError: its file is gone.
    """
    meta, weights = checkpoint.meta, checkpoint.converted.state_dict
    model = (meta.get('config_dict') or {}).get('model') or {}
    stored = dict(model.get('target_generator') or {})
    files = {key: stored.pop(key) for key in TOKENIZER_FILES if stored.get(key)}
    try:
        config = check_part(stored, TOKENIZERS, 'target_generator') if stored else None
    except RefusedError as error:
        raise CheckpointError(f'The config in {checkpoint} asks for {error}, which is no tokenizer of ours') from None
    of_v2 = any(name.startswith('patch_aggregation.') for name in weights)
    if config is None and not of_v2 and len(weights.get('head.lm_head.weight', ())) == DALLE_VOCABULARY:
        config = find_dalle()
    if config is None:
        raise CheckpointError(f'{checkpoint} does not say which tokenizer its visual tokens are of')
    if config['type'] == 'beit_mm.DiscreteVAE' and 'checkpoint' not in files:
        raise CheckpointError(f'{checkpoint} does not name the file of its tokenizer')
    for key in ('checkpoint', 'decoder_checkpoint'):
        if key not in files:
            continue
        name = Path(str(files[key])).name
        beside = checkpoint.path.resolve().parent  # the run may have been moved
        places = [Path(str(files[key])), *(beside / place / name for place in ('tokenizer', '../tokenizer', '.'))]
        # files of /proc have no size, and reading one may wait for ever
        found = next((place for place in places if place.is_file() and place.stat().st_size), None)
        if found is None:
            raise FileNotFoundError(
                f'the tokenizer of {checkpoint} is gone: looked for {" and ".join(map(str, places))}'
            )
        config[key] = str(found)
    if config['type'] == 'beit_mm.DiscreteVAE':
        check_tokenizer_size(config)
    known = meta.get('tokenizer')
    if 'checkpoint' in files and isinstance(known, dict) and (digest := known.get('sha256')):
        if not isinstance(digest, str) or not re.fullmatch('[0-9a-f]{64}', digest):
            raise CheckpointError(f'{checkpoint} gives no SHA-256 of its tokenizer, but {ascii(digest)[:80]}')
        config['sha256'] = digest
    return config


def tokenizer_of_init(init: CheckpointInput) -> dict[str, Any] | None:
    """The config of the tokenizer that weights were pretrained with; None where there is none, or it cannot be had."""
    checkpoint = Checkpoint.open(init)
    if 'head.lm_head.weight' not in checkpoint.state_dict:  # by which mmengine finds our head
        return None
    try:
        return tokenizer_of(checkpoint)
    except (CheckpointError, FileNotFoundError):
        return None


def stride_and_vocab(tokenizer: Mapping[str, Any]) -> tuple[int, int]:
    """Pixels of a visual token's side, and how many different tokens there are, by a tokenizer's config."""
    if tokenizer['type'] == 'beit_mm.DALLETokenizer':
        return STRIDE, tokenizer.get('vocab_size', DALLE_VOCABULARY)
    built = without_weights(tokenizer)
    return built.stride, built.vocab_size


def without_weights(tokenizer: Mapping[str, Any]) -> DiscreteVAE:
    """A tokenizer's shapes, which take no memory."""
    with torch.device('meta'):
        return MODELS.build({key: value for key, value in tokenizer.items() if key not in TOKENIZER_FILES})


def check_tokenizer_size(tokenizer: Mapping[str, Any]) -> None:
    """Raises CheckpointError where a stored config asks for more memory than the tokenizer's file has weights for."""
    needed = sum(tensor.numel() * tensor.element_size() for tensor in without_weights(tokenizer).state_dict().values())
    size = sum(Path(tokenizer[key]).stat().st_size for key in ('checkpoint', 'decoder_checkpoint') if key in tokenizer)
    if needed > 4 * size:  # weights may be stored in fewer bits
        raise CheckpointError(
            f'{tokenizer["checkpoint"]} has {size:,} bytes; the tokenizer that a stored config describes has {needed:,}'
        )


def tokenizer_settings(images: Images, plan: Plan, lists: Path, steps: int, work_dir: Path) -> dict[str, Any]:
    """Settings of an own tokenizer's training, on top of TOKENIZER."""
    base = Config.fromfile(str(own_config(TOKENIZER)))
    side = max(base.train_pipeline[1].size, 4 * max(plan.grid))
    pipelines = [resized(base.train_pipeline, (side, side)), resized(base.val_pipeline, (64, 64))]
    batch = min(16, plan.batch)
    data = loaders(images, lists, dataclasses.replace(plan, batch=batch), pipelines)
    return dict(
        work_dir=str(work_dir),
        model=dict(temperature_steps=steps, kl_steps=max(1, steps // 4)),
        **data,
        **schedule(steps, 50, batch, eta_min=6e-5),
    )


def pretraining_settings(
    images: Images, plan: Plan, lists: Path, steps: int, work_dir: Path, tokenizer: Path | None
) -> dict[str, Any]:
    """Settings of a pretraining; `tokenizer` is the checkpoint of one trained for it, None where the plan has one."""
    base = Config.fromfile(str(own_config(plan.base)))
    rows, columns = plan.grid
    head: dict[str, Any] = {}
    if plan.tokenizer:
        target = plan.tokenizer
        stride, vocab_size = stride_and_vocab(target)
        if plan.keeps_head and plan.init:
            head['init_cfg'] = dict(type='Pretrained', prefix='head.', checkpoint=located(plan.init))
    else:
        model = Config.fromfile(str(own_config(TOKENIZER))).model
        target = {key: model[key] for key in TOKENIZER_KEYS} | dict(checkpoint=tokenizer and str(tokenizer))
        stride, vocab_size = 2**model.num_levels, model.vocab_size
    views = dict(second_size=(stride * rows, stride * columns), **masking(plan.grid))
    pipelines = [resized(base[f'{name}_pipeline'], plan.size, **views) for name in ('train', 'val')]
    backbone = dict(plan.backbone, _delete_=True, type='beit_mm.BEiTBackbone', masked_input=True, out_type='raw')
    if plan.init:
        backbone['init_cfg'] = dict(type='Pretrained', checkpoint=located(plan.init))
    width = sizes_of(backbone['arch'])['embed_dims']
    wide = base.auto_scale_lr.base_batch_size
    return dict(
        work_dir=str(work_dir),
        model=dict(
            backbone=backbone,
            head=dict(head, embed_dims=width, vocab_size=vocab_size),
            target_generator=dict(target, _delete_=True),
            data_preprocessor=dict(mean=plan.preprocessing['mean'], std=plan.preprocessing['std']),
        ),
        **loaders(images, lists, plan, pipelines),
        optim_wrapper=dict(optimizer=dict(lr=scaled(base.optim_wrapper.optimizer.lr, plan.batch / wide, width))),
        **schedule(steps, steps // 20, plan.batch, eta_min=1e-5),
    )


def masking(grid: tuple[int, int]) -> dict[str, Any]:
    """Arguments of BlockwiseMask on a patch grid (h, w): the recipe's 75 of 14 x 14 patches, in proportion."""
    patches = grid[0] * grid[1]
    return dict(grid=grid, num_masked=round(75 / 196 * patches), min_block=min(16, max(1, patches // 9)))


def scaled(rate: float, ratio: float, width: int) -> float:
    """A recipe's learning rate for another batch, by the root of the ratio, as Adam's steps want it.

    The demo's 2e-3 is for a width of 128; much wider models get less.
    """
    bearable = min(1.0, 256 / width) if rate > 1.5e-3 else 1.0
    return float(f'{rate * math.sqrt(ratio) * bearable:.2g}')


def finetuning_settings(images: Images, plan: Plan, lists: Path, steps: int, work_dir: Path) -> dict[str, Any]:
    """Settings of a fine-tuning on class folders, on top of `plan.base`."""
    base = Config.fromfile(str(own_config(plan.base)))
    options = {key: value for key, value in plan.backbone.items() if key not in ('masked_input', 'out_type')}
    backbone = dict(options, _delete_=True, type='beit_mm.BEiTBackbone', out_type='avg_featmap', drop_path_rate=0.1)
    backbone['rel_pos_bias'] = 'per_layer' if backbone.get('rel_pos_bias') else None
    backbone['init_cfg'] = dict(type='Pretrained', checkpoint=located(plan.init)) if plan.init else None
    width = sizes_of(backbone['arch'])['embed_dims']
    small = width <= NARROW
    pipelines = [resized(base[f'{name}_pipeline'], plan.size) for name in ('train', 'test')]
    classes, num_classes = dict(classes=str(lists / 'classes.txt')), dict(num_classes=len(images.classes))
    return dict(
        work_dir=str(work_dir),
        model=dict(
            backbone=backbone,
            head=dict(in_channels=width, **num_classes),
            data_preprocessor=dict(mean=plan.preprocessing['mean'], std=plan.preprocessing['std'], **num_classes),
        ),
        **loaders(images, lists, plan, pipelines, 'held_out', **classes),
        optim_wrapper=dict(
            optimizer=dict(lr=scaled(4e-3, plan.batch / (64 if small else 1024), 192)),
            paramwise_cfg=dict(layer_decay_rate=(0.8 if small else 0.65) if plan.init else 1.0),
        ),
        **schedule(steps, steps // 6, plan.batch, eta_min_ratio=5e-4),
    )

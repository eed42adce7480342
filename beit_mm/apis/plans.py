"""Chooses model, tokenizer and batch size for training on a user's images, and records the call.

A plan becomes ordinary configs that build on the ones in configs/; tools/train.py can run them too.
"""

import json
import math
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from mmengine.config import Config

from beit_mm.apis import rebuild
from beit_mm.apis.configs import bundled_config, mask_settings, pipeline_for_size, rate_for_batch, warmup_and_cosine
from beit_mm.apis.memory import NARROW, choose_batch, largest_batch
from beit_mm.apis.split import Images, LabelMaps
from beit_mm.checkpoint.checkpoint import Checkpoint, given_mean_std, normalisation_of
from beit_mm.checkpoint.description import IMAGENET
from beit_mm.checkpoint.find import DEMO, WEIGHTS_VARIABLE, first_at_hand, path_of_checkpoint
from beit_mm.checkpoint.names import released_out_indices
from beit_mm.checkpoint.read import CheckpointError
from beit_mm.datasets.transforms import as_size
from beit_mm.errors import UserError, check_choice
from beit_mm.files import atomic_file
from beit_mm.models.feature_targets import EMA
from beit_mm.models.lora import with_lora
from beit_mm.models.vit import sizes_of

NONE, NEW, ALL = 'none', 'new', 'all'  # options: random weights; a tokenizer trained on these images; all blocks
TOKENS, FEATURES = 'tokens', 'features'  # what a pretraining predicts
# Released models to start or learn from on a GPU, best first: name in `plain_vits` and architecture
STARTS = dict(dinov2_vitb14_reg4_pretrain='base', dinov2_vits14_reg4_pretrain='small')
LEAST_BATCH = 8  # images per step that must fit in memory
MOST_PIXELS, USUAL_PIXELS = 384, 224  # sides of images: a model for larger ones than the first is trained at the second
MANY_IMAGES = 100_000  # with at least this many, a new model on a GPU is BEiT-Base
FEW_IMAGES = 5000  # with fewer, minutes of further pretraining gained nothing
BACKBONE = 'beit_mm.BEiTBackbone'
NARROW_PRETRAINING, WIDE_PRETRAINING = 'demo/pretrain.py', 'beit/pretrain_300e.py'
FEATURE_RECIPES = {  # the same recipes with features instead of visual tokens
    NARROW_PRETRAINING: 'demo/pretrain_features.py',
    WIDE_PRETRAINING: 'beit/pretrain_features_dinov2_300e.py',
}
NARROW_FINETUNING, WIDE_FINETUNING = 'demo/finetune_folder.py', 'beit/finetune_in1k_100e.py'
HEADS = dict(  # of a segmentor: configs to build on, for narrow and for wide models
    upernet=('demo/segment_upernet.py', 'beit/upernet_512_ade20k_160k.py'),
    setr_pup=('demo/segment_setr_pup.py', 'beit/setr_pup_512_ade20k_160k.py'),
    masks=('demo/segment_masks.py', 'beit_plus/masks_512_ade20k_39k_after_in22k.py'),
    masks_decoder=('demo/segment_masks.py', 'beit_plus/masks_decoder_512_ade20k_39k_after_in22k.py'),
    linear=('demo/segment_upernet.py', 'beit_plus/linear_512_ade20k_39k_after_in22k.py'),
)
NARROW_HEAD, WIDE_HEAD = 'linear', 'upernet'  # the best heads, for calls that name none; see docs/results.md
LORA_RATE = 2.0  # times the recipe's learning rate, for all layers alike
LINEAR_RATE = 4.0  # times the recipe's rate, for a narrow segmentor with a linear head, trained as a whole
RANDOM_RATE = 1e-3  # learning rate of a classifier that starts from random weights


@dataclass(frozen=True)
class Length:
    number: float
    unit: str  # 'minutes', 'steps' or 'epochs'

    def __str__(self) -> str:
        return f'{self.number:.12g} {self.unit}'


@dataclass
class Record:
    """The call that started a run, its plan and its results. What the call leaves out is None until planned."""

    verb: str  # 'pretrain' or 'finetune'
    images: str = ''  # folder
    init: str | None = None
    tokenizer_option: str | None = None
    targets: str | None = None  # TOKENS or FEATURES
    teacher: str | None = None
    length: Length | None = None
    batch: int | None = None
    seed: int | None = None
    reduce_zero_label: bool | None = None
    balance: bool | None = None
    bands: str | list[int] | None = None
    lora: int | None = None  # rank
    freeze: int | str | None = None  # number of blocks, ALL or None
    head: str | None = None  # of a segmentor, one of HEADS
    mean_std: dict[str, list[float]] | None = None  # mean and std
    workers: int | None = None
    device: str | None = None  # 'cpu' or 'cuda'

    tokenizer: str | None = None  # or teacher, see Plan.targets_name
    found: str = ''  # how many images
    digest: str = ''  # of their names
    seconds: float = 0.0  # how long the run has taken
    stages: dict[str, dict[str, Any]] = field(default_factory=dict)  # steps, time, and what its validation measured
    metrics: dict[str, Any] = field(default_factory=dict)  # of the report: value, standard error, number of images
    verdict: str = ''

    @classmethod
    def read(cls, path: Path) -> 'Record':
        stored = json.loads(path.read_text())
        length = stored.pop('length')
        number, unit = length.split() if isinstance(length, str) else length  # 0.2.0 wrote '15 minutes'
        return cls(**stored, length=Length(float(number), unit))

    def write(self, path: Path) -> None:
        with atomic_file(path) as file:
            file.write(json.dumps(vars(self), indent=2, default=astuple).encode())

    def check_call(self, call: 'Record', folder: Path) -> None:
        """Refuses to resume a run with other options; an option that the call leaves out keeps its value."""
        left_out = vars(Record(verb=''))  # the value of each option that a call does not give
        for option, given in vars(call).items():
            known = getattr(self, option)
            if option != 'workers' and given not in (left_out[option], known):
                began = f'{folder} began with {option}={known}, this call says {option}={given}'
                raise UserError(f'{began}; choose another --out')


def new_call(verb: str, images: str | Path, init: str | Path | None = None, **options: Any) -> Record:
    """The record of a call before anything is planned; minutes, steps or epochs become its length."""
    options = {name: value for name, value in options.items() if value is not None}
    if (processes := os.environ.get('WORLD_SIZE', '1')) not in ('', '1'):  # set by torchrun
        found = f'{verb} runs in one process, and WORLD_SIZE is {processes}'
        raise UserError(f'{found}; start it without a launcher, or train its config with dist_train.sh')
    units = [unit for unit in ('minutes', 'epochs', 'steps') if unit in options]
    if len(units) > 1:
        raise UserError(f'{" and ".join(units)} are given; expected one of them')
    if 'tokenizer_option' in options:
        check_choice('tokenizer', options['tokenizer_option'], (DEMO, NEW))
    check_choice('targets', options.get('targets', TOKENS), (TOKENS, FEATURES))
    if 'teacher' in options:
        if options.get('targets') != FEATURES:
            raise UserError('--teacher is for features; give --targets features too')
        if options['teacher'] not in (DEMO, EMA):  # also for a URL, because the report needs the file again
            options['teacher'] = str(path_of_checkpoint(options['teacher']).absolute())
    if options.get('targets') == FEATURES and 'tokenizer_option' in options:
        raise UserError('--targets features needs no tokenizer; leave --tokenizer out')
    if 'head' in options:
        check_choice('head', options['head'], HEADS)
    if {'lora', 'freeze'} <= {*options}:
        raise UserError('--lora and --freeze are both given; leave one out: --lora freezes the whole backbone')
    options['mean_std'] = given_mean_std(options.pop('mean', None), options.pop('std', None)) or None
    options['length'] = next((Length(options.pop(unit), unit) for unit in units), None)
    return Record(verb, str(Path(images).expanduser().resolve()), None if init is None else lasting(init), **options)


def lasting(source: str | Path) -> str:
    """The absolute path of a checkpoint, for later calls from other folders; words and URLs stay as they are."""
    if source in (DEMO, NONE) or '://' in str(source):
        return str(source)
    return str(path_of_checkpoint(source).absolute())  # links stay: the name and the files beside it say what it is


@dataclass
class Plan:
    """What was chosen for a training."""

    device: str  # 'cpu' or 'cuda'
    verb: str  # 'pretrain' or 'finetune'
    base: str  # config below configs/ that it builds on
    backbone: dict[str, Any]  # arguments of the BEiTBackbone
    size: tuple[int, int]  # of the images, (height, width) in pixels
    preprocessing: dict[str, Any]  # mean and std, pixels 0-255
    advice: str  # which start or teacher would be better; empty if none is known
    assumed: str  # the warning if `init` does not record mean and std; otherwise empty
    batch: int  # images per step
    workers: int  # processes that read images
    init: str | None  # checkpoint to begin with; None for random weights
    targets: dict[str, Any] | None  # of a pretraining: config of the tokenizer or FeatureTargets; None: train one
    teacher_width: int | None  # of a frozen teacher
    keeps_head: bool  # `init` already predicts tokens of this tokenizer; its head is trained further
    balance: bool  # images of small classes are shown more often
    lora: int | None  # rank of the matrices that are trained in place of the backbone's layers
    frozen: int | None  # how many of the first blocks are not trained, with the embeddings before them
    fits_head: bool  # only the head of a classifier is trained, on features that are computed once
    head: str | None  # of a segmentor, one of HEADS

    @property
    def targets_name(self) -> str | None:
        """Type and file of the tokenizer or teacher, which a resumed run must find again; None until there is one."""
        targets = self.targets
        return f'{targets["type"]} of {targets.get("teacher") or targets.get("checkpoint")}' if targets else None

    @property
    def teacher(self) -> str | None:
        """Describes the model whose features are predicted; None if tokens are predicted."""
        name = (self.targets or {}).get('teacher')
        return "this model's moving average" if name == EMA else name

    @property
    def grid(self) -> tuple[int, int]:
        height, width = (side // self.backbone['patch_size'] for side in self.size)
        return height, width

    @property
    def width(self) -> int:
        return sizes_of(self.backbone['arch'])['embed_dims']


def plan_training(images: Images, call: Record) -> Plan:
    """Plans a training; the number of images, the device and its memory decide what the call leaves open."""
    device = call.device or ('cuda' if torch.cuda.is_available() else 'cpu')
    advice, init = '', call.init or (DEMO if device == 'cpu' or call.verb == 'finetune' else NONE)
    segments = isinstance(images, LabelMaps)
    if call.init is None and device == 'cuda' and call.verb == 'finetune':
        init, advice = released_start((call.head or WIDE_HEAD) if segments else None)
    mean_std: dict[str, Any] = call.mean_std or {}
    bands = images.bands if isinstance(images, LabelMaps) else None
    checkpoint = None if init == NONE else Checkpoint.open(init, **({} if bands else mean_std))
    if checkpoint and not bands:
        preprocessing, assumed = checkpoint.normalisation
    else:  # bands are measured, whatever the checkpoint records for its RGB images
        usual = bands or IMAGENET
        preprocessing, assumed = normalisation_of('the new model', usual, (), len(usual['mean']), **mean_std)
    base, backbone = choose_model(images, call.verb, device, checkpoint, len(bands['mean']) if bands else 3)
    head = None
    if segments:
        is_wide = sizes_of(backbone['arch'])['embed_dims'] > NARROW
        # runs that were planned before there was a choice have UperNet
        head = call.head or (WIDE_HEAD if is_wide or call.digest else NARROW_HEAD)
        base = HEADS[head][is_wide]
        side = bundled_config(base).model.test_cfg.crop_size[0]
        backbone['img_size'] = as_size(side - side % backbone['patch_size'])
    targets, keeps_head, teacher_width = None, False, None
    if call.targets == FEATURES:
        teacher = call.teacher or DEMO
        if call.teacher is None and device == 'cuda':  # the packaged model is too small to teach what a GPU trains
            teacher, advice = released_start(None)
        base, targets = FEATURE_RECIPES[base], dict(type='beit_mm.FeatureTargets', teacher=teacher)
        if targets['teacher'] != EMA:
            teacher_backbone = rebuild.backbone_config(Checkpoint.open(targets['teacher']))
            teacher_width = sizes_of(teacher_backbone['arch'])['embed_dims']
    elif call.verb == 'pretrain':
        targets, keeps_head = choose_tokenizer(call.tokenizer_option, checkpoint, device)
    depth = sizes_of(backbone['arch'])['num_layers']
    frozen = None
    if call.freeze is not None:
        frozen = depth if call.freeze == ALL else int(call.freeze)
    if init == NONE and (call.lora, frozen) != (None, None):
        raise UserError('--lora and --freeze keep what weights have learned; give a checkpoint with --init')
    if frozen is not None and not 0 <= frozen <= depth:
        raise UserError(f'--freeze is {frozen}; expected {ALL}, or blocks from 0 to {depth}')
    workers, batch, number = call.workers, call.batch, len(images.train.names)
    if workers is None:  # feeding a GPU takes two cores; without a GPU the training itself takes most of them
        cores = len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count() or 1
        workers = max(1, min(cores - 2, 16) if device == 'cuda' else cores // 4)
    if batch is None:
        batch = choose_batch(images, base, backbone, device, head)
    elif not 0 < batch <= number:
        raise UserError(f'a batch of {batch} images; expected 1 to {number:,}, the images to learn from')
    return Plan(
        device=device,
        verb=call.verb,
        base=base,
        backbone=backbone,
        size=as_size(backbone['img_size']),
        preprocessing=preprocessing,
        advice=advice,
        assumed=assumed,
        batch=batch,
        workers=workers,
        init=None if init == NONE else init,
        targets=targets,
        teacher_width=teacher_width,
        keeps_head=keeps_head,
        balance=bool(call.balance),
        lora=call.lora,
        frozen=frozen,
        fits_head=call.freeze == ALL and not isinstance(images, LabelMaps),
        head=head,
    )


def released_start(head: str | None) -> tuple[str, str]:
    """The released model to start or learn from on a GPU, and ''; or else 'demo', and which model would be better."""
    side = bundled_config(HEADS[head][1]).model.test_cfg.crop_size[0] if head else USUAL_PIXELS
    most = {name: largest_batch('cuda', sizes_of(arch), (side // 14) ** 2, head) for name, arch in STARTS.items()}
    wanted = [name for name, batch in most.items() if batch >= LEAST_BATCH]
    path, reason = first_at_hand(wanted)
    if path or not wanted:
        return str(path or DEMO), ''
    return DEMO, f'{wanted[0]} would be better, with its file in ${WEIGHTS_VARIABLE}: {reason}'


def choose_model(
    images: Images, verb: str, device: str, checkpoint: Checkpoint | None, channels: int
) -> tuple[str, dict[str, Any]]:
    """The config to build on, and the backbone's arguments: the checkpoint's, or chosen by device and images."""
    base = WIDE_PRETRAINING if device == 'cuda' else NARROW_PRETRAINING
    if checkpoint:
        backbone = rebuild.backbone_config(checkpoint, channels)
        backbone['drop_path_rate'] = 0.0 if device == 'cpu' and verb == 'pretrain' else 0.1
    else:
        backbone = dict(img_size=224, patch_size=16) | bundled_config(base).model.backbone.to_dict()
        if device == 'cuda':
            backbone['arch'] = 'base' if len(images.train.names) >= MANY_IMAGES else 'small'
    backbone['in_channels'] = channels
    if verb == 'finetune':
        base = NARROW_FINETUNING  # for any width: in a short run mixup and RandAugment cost more than they gain
    if max(as_size(backbone['img_size'])) > MOST_PIXELS:
        backbone['img_size'] = as_size(USUAL_PIXELS - USUAL_PIXELS % backbone['patch_size'])
    return base, backbone


def choose_tokenizer(
    option: str | None, checkpoint: Checkpoint | None, device: str
) -> tuple[dict[str, Any] | None, bool]:
    """The config of the tokenizer (None: train one), and whether the checkpoint's head predicts its tokens."""
    if option == NEW:
        return None, False
    stored = None
    if checkpoint and 'head.lm_head.weight' in checkpoint.state_dict:
        with suppress(CheckpointError, FileNotFoundError):
            stored = rebuild.targets_config(checkpoint)
    if stored and (option is None or stored.get('checkpoint') == DEMO):
        return stored, True
    if option == DEMO:
        return rebuild.trained_tokenizer(DEMO), False
    return (rebuild.find_dalle() if device == 'cuda' else None), False


def describe_plan(plan: Plan, images: Images) -> list[str]:
    sizes, (height, width) = sizes_of(plan.backbone['arch']), plan.size
    shape = f'{sizes["num_layers"]} blocks of width {sizes["embed_dims"]}, {height} x {width} pixels'
    start = f'as in {plan.init}' if plan.init else 'random weights'
    notes = images.notes if isinstance(images, LabelMaps) else []
    few = images.few(plan.balance) if plan.base == NARROW_FINETUNING else ''
    lines = [
        f'images     {images}',
        *(f'labels     {note}' for note in notes),
        f'classes    {few}' if few else '',
        f'model      {shape} in patches of {plan.backbone["patch_size"]}: {start}',
        f'advice     {plan.advice}' if plan.advice else '',
        f'head       {plan.head}' if plan.head else '',
        f'batch      {plan.batch} images, processes that read them: {plan.workers}; on {plan.device}',
    ]
    if isinstance(images, LabelMaps) and images.bands:
        which = images.bands['load']['bands'] or f'all {len(images.bands["mean"])}'
        lines.append(f'bands      {which}: scaled so that percentiles 1 and 99 of each become 0 and 255')
    if plan.verb == 'pretrain' and plan.init and len(images.train.names) < FEW_IMAGES:
        lines.append('pays       with few images `finetune` alone did as well: see "What pays" in docs/own_images.md')
    if plan.fits_head:
        lines.append('trained    only the head, on features that are computed once: images are not augmented')
    if plan.teacher:
        lines.append(f'targets    features of {plan.teacher}')
    elif plan.keeps_head:
        lines.append(f'tokenizer  that of {plan.init}, whose head is trained further')
    elif plan.targets:
        lines.append(f'tokenizer  {plan.targets_name}')
    elif plan.verb == 'pretrain':
        lines.append(f'tokenizer  one is trained first, {tokenizer_batch(plan.batch)} images a step')
    return [*filter(None, lines)]


def loaders(
    images: Images, lists: Path, plan: Plan, pipelines: Sequence[list], validated: str = 'validated', **data: Any
) -> dict[str, Any]:
    """Settings of the data loaders for the listed images; `pipelines` are those of training and validation."""
    loading = dict(batch_size=plan.batch, num_workers=plan.workers, persistent_workers=plan.workers > 0)
    train, val = (
        dict(loading, dataset=dict(images.dataset(lists, name), pipeline=pipeline, on_error='skip', **data))
        for name, pipeline in zip(('train', validated), pipelines, strict=True)
    )
    return dict(train_dataloader=train, val_dataloader=val, test_dataloader=val)


def tokenizer_batch(batch: int) -> int:
    """Images per step of the tokenizer, at most the number that its learning rate was chosen for."""
    return min(bundled_config(rebuild.TOKENIZER).train_dataloader.batch_size, batch)


def tokenizer_settings(base: Config, images: Images, plan: Plan, lists: Path, steps: int) -> dict[str, Any]:
    pipelines = [base.train_pipeline, base.val_pipeline]
    batch = tokenizer_batch(plan.batch)
    return dict(
        model=dict(temperature_steps=steps, kl_steps=max(1, steps // 4)),  # the same shares of the run as in the recipe
        **loaders(images, lists, replace(plan, batch=batch), pipelines),
        **warmup_and_cosine(steps, 50, batch, base.param_scheduler[-1].eta_min_ratio),
    )


def pretraining_settings(base: Config, images: Images, plan: Plan, lists: Path, steps: int) -> dict[str, Any]:
    assert plan.targets is not None
    if plan.teacher:
        stride, outputs = None, dict(target_dims=plan.teacher_width or plan.width)
    else:
        stride, vocab_size = rebuild.stride_and_vocab(plan.targets)
        outputs = dict(vocab_size=vocab_size)
    pipelines = [
        pipeline_for_size(base[f'{name}_pipeline'], plan.size, **mask_settings(plan.grid, stride))
        for name in ('train', 'val')
    ]
    model = dict(
        backbone=dict(plan.backbone, _delete_=True, type=BACKBONE, masked_input=True, out_type='raw'),
        head=dict(outputs, embed_dims=plan.width),
        target_generator=dict(plan.targets, _delete_=True),
        data_preprocessor=dict(plan.preprocessing),
    )
    length = warmup_and_cosine(steps, steps // 20, plan.batch, base.param_scheduler[-1].eta_min_ratio)
    if plan.init:
        model['backbone']['init_cfg'] = dict(type='Pretrained', checkpoint=plan.init)
    if plan.keeps_head:
        length['train_cfg']['val_begin'] = 0  # to show what its weights already predict
        # loaded separately: an init_cfg of the whole model would override the backbone's
        model['head']['init_cfg'] = dict(type='Pretrained', checkpoint=plan.init, prefix='head.')
    rate = base.optim_wrapper.optimizer.lr
    if plan.base.startswith('demo/'):  # its rate, chosen at width 128, is too high above width 256
        rate *= min(1.0, 256 / plan.width) * (0.5 if plan.keeps_head else 1.0)  # half, to keep what is already learned
    if plan.targets.get('teacher') == EMA:
        length['custom_hooks'] = [*base.custom_hooks, dict(type='beit_mm.TeacherMomentumHook')]
    return dict(
        model=model,
        **loaders(images, lists, plan, pipelines),
        optim_wrapper=dict(optimizer=dict(lr=rate_for_batch(rate, plan.batch / base.auto_scale_lr.base_batch_size))),
        **length,
    )


def tuned_backbone(plan: Plan, **options: Any) -> dict[str, Any]:
    options = plan.backbone | dict(type=BACKBONE, masked_input=False, drop_path_rate=0.1) | options
    options['rel_pos_bias'] = 'per_layer' if options.get('rel_pos_bias') else None
    options['init_cfg'] = dict(type='Pretrained', checkpoint=plan.init) if plan.init else None
    if plan.frozen is not None:
        options['frozen_stages'] = plan.frozen
    return dict(with_lora(options, plan.lora), _delete_=True) if plan.lora else dict(options, _delete_=True)


def tuned_optimizer(plan: Plan, recipe: Config, rate: float) -> dict[str, Any]:
    """The recipe's rate for the plan's batch, and its layer decay, which LoRA and random weights do without."""
    decay = recipe.optim_wrapper.paramwise_cfg.layer_decay_rate if plan.init and not plan.lora else 1.0
    if plan.lora:  # at first its matrices add nothing to the frozen layers, so they tolerate larger steps
        rate *= LORA_RATE
    rate = rate_for_batch(rate, plan.batch / recipe.auto_scale_lr.base_batch_size)
    return dict(optimizer=dict(lr=rate), paramwise_cfg=dict(layer_decay_rate=decay))


def finetuning_settings(base: Config, images: Images, plan: Plan, lists: Path, steps: int) -> dict[str, Any]:
    pipelines = [pipeline_for_size(base[f'{name}_pipeline'], plan.size) for name in ('train', 'test')]
    num_classes = dict(num_classes=len(images.classes))
    length = warmup_and_cosine(steps, steps // 6, plan.batch, base.param_scheduler[-1].eta_min_ratio)
    if plan.fits_head:
        pack = dict(type='PackInputs', meta_keys=('sample_idx', 'img_path', 'unreadable'))
        pipelines[0] = [*pipelines[1][:-1], pack]
        length['train_cfg']['type'] = 'beit_mm.HeadFitLoop'
    recipe = bundled_config(NARROW_FINETUNING if plan.width <= NARROW else WIDE_FINETUNING)
    rate = recipe.optim_wrapper.optimizer.lr if plan.init else RANDOM_RATE
    data = loaders(images, lists, plan, pipelines, 'held_out', classes=str(lists / 'classes.txt'))
    if plan.fits_head:
        data['train_dataloader'].update(drop_last=False, sampler=dict(shuffle=False))
    if plan.balance:
        dataset = dict(type=base.train_dataloader.dataset.type, **data['train_dataloader']['dataset'])
        largest = max(images.learned.values()) / images.learned.total()  # the share of a class shown once
        balanced = dict(_delete_=True, type='ClassBalancedDataset', oversample_thr=largest, dataset=dataset)
        data['train_dataloader']['dataset'] = balanced
    return dict(
        model=dict(
            backbone=tuned_backbone(plan, out_type='avg_featmap'),
            head=dict(in_channels=plan.width, **num_classes),
            data_preprocessor=dict(plan.preprocessing, **num_classes),
        ),
        **data,
        optim_wrapper=tuned_optimizer(plan, recipe, rate),
        **length,
    )


def segmentation_heads(base: Config, plan: Plan, num_classes: int) -> dict[str, Any]:
    head: dict[str, Any] = dict(in_channels=plan.width, num_classes=num_classes)
    if plan.head == 'linear':
        linear = bundled_config(HEADS['linear'][1]).model.decode_head.to_dict()
        return dict(neck=None, decode_head=dict(linear | head, _delete_=True, channels=plan.width), auxiliary_head=None)
    if plan.head == 'masks':
        depth = sizes_of(plan.backbone['arch'])['num_layers']
        return dict(decode_head=dict(head, where='backbone', in_index=-1, num_blocks=min(4, math.ceil(depth / 4))))
    if plan.head == 'masks_decoder':
        return dict(decode_head=head)
    small_patches = plan.backbone['patch_size'] <= 8
    # on a narrow model an auxiliary head costs a sixth of the time, which is better spent on more steps
    if plan.head == 'setr_pup':
        auxiliary = None if plan.width <= NARROW else [dict(each, **head) for each in base.model.auxiliary_head]
        return dict(decode_head=dict(head, num_convs=3 if small_patches else 4), auxiliary_head=auxiliary)
    return dict(
        neck=dict(embed_dim=plan.width, rescales=[2, 1, 0.5, 0.25] if small_patches else [4, 2, 1, 0.5]),
        decode_head=dict(head, in_channels=[plan.width] * 4),
        auxiliary_head=None if plan.width <= NARROW else head,
    )


def segmentation_settings(base: Config, images: Images, plan: Plan, lists: Path, steps: int) -> dict[str, Any]:
    assert isinstance(images, LabelMaps)
    heads = segmentation_heads(base, plan, len(images.classes))
    uses_last_only = plan.head in ('masks', 'linear')
    indices = -1 if uses_last_only else released_out_indices(sizes_of(plan.backbone['arch'])['num_layers'])
    model: dict[str, Any] = dict(
        backbone=tuned_backbone(plan, out_type='featmap', out_indices=indices),
        **heads,
        data_preprocessor=dict(plan.preprocessing, size=plan.size),
        test_cfg=dict(crop_size=plan.size, stride=[side * 2 // 3 for side in plan.size]),
    )
    pipelines = [pipeline_for_size(base[f'{name}_pipeline'], plan.size) for name in ('train', 'test', 'tta')]
    if images.bands:  # no distortion of colours
        pipelines = [[images.bands['load'], *steps[1:]] for steps in pipelines]
        pipelines[0] = [step for step in pipelines[0] if step['type'] != 'PhotoMetricDistortion']
    settings = dict(loaders(images, lists, plan, pipelines[:2]), tta_pipeline=pipelines[2])
    settings['val_dataloader'].update(batch_size=1)  # images differ in size
    rate, tunes_all = base.optim_wrapper.optimizer.lr, plan.lora is None and plan.frozen is None
    if plan.head == 'linear' and plan.width <= NARROW and tunes_all:
        rate *= LINEAR_RATE
    return dict(
        model=model,
        **settings,
        optim_wrapper=tuned_optimizer(plan, base, rate),
        **warmup_and_cosine(steps, steps // 10, plan.batch),
    )


# for each stage of a training; each takes its base config, the images, the plan, the folder of lists and the steps
SETTINGS = dict(
    tokenizer=tokenizer_settings,
    pretrain=pretraining_settings,
    finetune=finetuning_settings,
    segment=segmentation_settings,
)

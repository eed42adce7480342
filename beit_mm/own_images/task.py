"""What every kind of run does: plans, configures its stages, and reports. Each kind is a subclass in its own file."""

import math
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from mmengine.config import Config

from beit_mm.apis import rebuild
from beit_mm.apis.configs import NARROW_PRETRAINING, bundled_config, rate_for_batch
from beit_mm.checkpoint.checkpoint import Checkpoint, normalisation_of
from beit_mm.checkpoint.description import IMAGENET
from beit_mm.checkpoint.find import DEMO, WEIGHTS_VARIABLE, first_at_hand, plain_vits
from beit_mm.datasets.transforms import as_size
from beit_mm.errors import UserError
from beit_mm.features.extractor import FeatureExtractor
from beit_mm.models.lora import with_lora
from beit_mm.models.vit import sizes_of
from beit_mm.own_images.images import Images, evenly, in_turn
from beit_mm.own_images.record import ALL, NONE, USUAL_LENGTH, Record
from beit_mm.own_images.report import ROWS, Metrics, Report

# Released models to start or learn from on a GPU, best first: name in `plain_vits` and architecture
STARTS = dict(dinov2_vitb14_reg4_pretrain='base', dinov2_vits14_reg4_pretrain='small')
FEATURES_SHARE = 0.6  # of a run's minutes, for features of the images to learn from; the rest: fit, validation, report
TIMED = 3  # images by which that is timed
MIN_BATCH = 8  # images per step that must fit in memory
MAX_SIDE, USUAL_SIDE = 384, 224  # pixels; a model for larger images than the first is trained at the second
MANY_IMAGES = 100_000  # with at least this many, a new model on a GPU is BEiT-Base
NARROW = 192  # largest width of a model for which the demo's recipes hold
WIDE_PRETRAINING = 'beit/pretrain_300e.py'
BACKBONE = 'beit_mm.BEiTBackbone'
LORA_RATE = 2.0  # times the recipe's learning rate, for all layers alike
HEAD = 'head'  # the stage that fits or trains a head, with which all then begins to train
HEAD_SHARE = 0.3  # of the time, at most, that it takes
FITTED_RATE = 0.4  # times the recipe's rate, for a wide model that begins with a fitted head
GIB_PER_IMAGE = 0.2  # on a GPU, for BEiT-Base at 224 pixels with the tokenizer
MAX_BATCH = 512  # on a GPU: more would leave a short training few steps
CPU_BATCH = 64, 16  # for a narrow model, as in its recipes, and for a wide one, whose steps take seconds

Settings = tuple[str, dict[str, Any]]  # name of the config that a stage builds on, and what differs from it


@dataclass(kw_only=True)
class Plan:
    """What was chosen for a training. Each kind of run adds its own choices."""

    device: str  # 'cpu' or 'cuda'
    base: str  # config below configs/ that it builds on
    backbone: dict[str, Any]  # arguments of the BEiTBackbone
    preprocessing: dict[str, Any]  # mean and std, pixels 0-255
    init: str | None  # checkpoint to begin with; None for random weights
    advice: str = ''  # on the start or teacher: which would be better, or why it was chosen; empty if none is known
    assumed: str = ''  # the warning if `init` does not record mean and std; otherwise empty
    batch: int = 0  # images per step
    workers: int = 0  # processes that read images

    @property
    def size(self) -> tuple[int, int]:
        """Of the images, (height, width) in pixels."""
        return as_size(self.backbone['img_size'])

    @property
    def grid(self) -> tuple[int, int]:
        """Of the images, (rows, columns) of patches."""
        height, width = self.size
        return height // self.backbone['patch_size'], width // self.backbone['patch_size']

    @property
    def width(self) -> int:
        return sizes_of(self.backbone['arch'])['embed_dims']

    @property
    def depth(self) -> int:
        return sizes_of(self.backbone['arch'])['num_layers']


class Task(ABC):
    """A run of one kind, on the images of its call; `make_plan` makes its `plan`."""

    model: ClassVar[str]  # what is trained: 'pretrained', 'classifier' or 'segmentor', as for `Checkpoint.open`
    plan_type: ClassVar[type[Plan]] = Plan
    plan: Any  # a `plan_type`
    images: Any  # Images, or LabelMaps
    channels: Any = 3  # of the images
    fits_head: Any = False  # whether only a head is trained, on features that are computed once
    num_validated: Any = 256  # most held-out images that losses are computed on
    targets_name: Any = None  # what is predicted, if a resumed run must find the same
    shares_of_time: ClassVar[dict[str, float]] = {}  # of a stage: its part of the time left, all if not named
    most_steps: Mapping[str, int] = {}  # of a stage; any number if not named

    def __init__(self, record: Record, images: Images) -> None:
        self.record, self.images = record, images
        self.call = SimpleNamespace(**record.options)  # the options of the call, as attributes
        self.timed: dict[str, float] = {}  # `seconds_of_features`, so that a model is loaded for it once

    @property
    def stages(self) -> list[str]:
        """What is trained one after the other; the last stage gives the run's weights."""
        return [self.record.verb]

    # Planning

    def make_plan(self) -> None:
        """Plans the training; the number of images, the device and its memory decide what the call leaves open."""
        device = self.record.device or ('cuda' if torch.cuda.is_available() else 'cpu')
        init, advice = (self.call.init, '') if self.call.init else self.usual_start(device)
        checkpoint = None if init == NONE else Checkpoint.open(init)
        base, backbone = self.choose_model(device, checkpoint)
        preprocessing, assumed = self.normalisation(checkpoint)
        self.plan = self.plan_type(
            device=device,
            base=base,
            backbone=backbone,
            preprocessing=preprocessing,
            init=None if checkpoint is None else init,
            advice=advice,
            assumed=assumed,
            workers=usual_workers(device) if self.call.workers is None else self.call.workers,
        )
        self.choose_parts(checkpoint)
        self.plan.batch = self.choose_batch() if self.call.batch is None else self.call.batch
        number = len(self.images.train.names)
        if not 0 < self.plan.batch <= number:
            raise UserError(f'a batch of {self.plan.batch} images; expected 1 to {number:,}, the images to learn from')

    @abstractmethod
    def usual_start(self, device: str) -> tuple[str, str]:
        """What to begin with if the call does not say, and which released model would be better, or ''."""

    def released_start(self) -> tuple[str, str]:
        """The best released model at hand for a GPU, or 'demo', and why it was chosen or which would be better."""
        wanted = [name for name, arch in STARTS.items() if self.largest_released(sizes_of(arch)) >= MIN_BATCH]
        path, reason = first_at_hand(wanted)
        if path:
            known = plain_vits()[path.stem]
            free = f'{known["model"]} ({known["licence"]}), the best free one that fits'
            return str(path), f'{free} by the figures of its authors, on ImageNet-1K {known["figures"]} %'
        if not wanted:
            return DEMO, ''
        return DEMO, f'{wanted[0]} would be better; put its file into ${WEIGHTS_VARIABLE} ({reason})'

    def largest_released(self, sizes: Mapping[str, int]) -> float:
        """The most images per step on a GPU for a released model of these sizes, which has patches of 14 pixels."""
        return largest_batch('cuda', sizes, (USUAL_SIDE // 14) ** 2)

    @property
    def mean_std(self) -> dict[str, Any]:
        """The `mean` and `std` that the call gives, pixels 0-255, else None."""
        return dict(mean=self.call.mean, std=self.call.std)

    def normalisation(self, checkpoint: Checkpoint | None) -> tuple[dict[str, Any], str]:
        """Mean and std of the images, and a warning if they are assumed."""
        if checkpoint:
            return Checkpoint.open(checkpoint, **self.mean_std).normalisation
        return normalisation_of('the new model', IMAGENET, (), 3, **self.mean_std)

    def choose_model(self, device: str, checkpoint: Checkpoint | None) -> tuple[str, dict[str, Any]]:
        """The config to build on, and the backbone's arguments: the checkpoint's, or chosen by device and images."""
        base = WIDE_PRETRAINING if device == 'cuda' else NARROW_PRETRAINING
        if checkpoint:
            backbone = rebuild.backbone_config(checkpoint, self.channels)
        else:
            backbone = dict(img_size=224, patch_size=16) | bundled_config(base).model.backbone.to_dict()
            if device == 'cuda':
                backbone['arch'] = 'base' if len(self.images.train.names) >= MANY_IMAGES else 'small'
        backbone['in_channels'] = self.channels
        if max(as_size(backbone['img_size'])) > MAX_SIDE:
            backbone['img_size'] = as_size(USUAL_SIDE - USUAL_SIDE % backbone['patch_size'])
        return base, backbone

    @abstractmethod
    def choose_parts(self, checkpoint: Checkpoint | None) -> None:
        """Adds to the plan what only this kind of run has."""

    def choose_batch(self) -> int:
        """The largest power of two that fits in memory and leaves several steps in an epoch."""
        limit = max(4, len(self.images.train.names) / 8)
        return 2 ** int(math.log2(max(2, min(self.largest_batch(), limit))))

    def largest_batch(self) -> float:
        rows, columns = self.plan.grid
        return largest_batch(self.plan.device, sizes_of(self.plan.backbone['arch']), rows * columns)

    def decided(self) -> dict[str, Any]:
        """What was planned for options that the call may leave out."""
        plan = self.plan
        return dict(init=plan.init or NONE, batch=plan.batch, workers=plan.workers, seed=self.call.seed or 0)

    # What the user is told

    def described(self) -> list[tuple[str, str]]:
        """The plan, by subject; empty texts are left out."""
        plan, (height, width) = self.plan, self.plan.size
        shape = f'{plan.depth} blocks of width {plan.width}, {height} x {width} pixels'
        start = f'as in {plan.init}' if plan.init else 'random weights'
        return [
            ('images', str(self.images)),
            ('classes', self.images.named_classes() if self.images.classes else ''),
            *((self.images.subject, note) for note in self.images.notes),
            ('model', f'{shape} in patches of {plan.backbone["patch_size"]}: {start}'),
            ('advice', plan.advice),
            ('batch', f'{plan.batch} images, processes that read them: {plan.workers}; on {plan.device}'),
        ]

    @property
    def passes(self) -> float:
        """How often the last stage saw each image."""
        return self.record.stages[self.stages[-1]]['steps'] * self.plan.batch / len(self.images.train.names)

    # Stages

    @abstractmethod
    def settings(self, stage: str, lists: Path, steps: int, earlier: Mapping[str, Path]) -> Settings:
        """The config of a stage.

        Args:
            lists: folder that `write_lists` wrote.
            steps: length of the stage.
            earlier: the checkpoints of the stages before it.
        """

    def fits(self, stage: str) -> bool:
        """Whether the stage only fits a head, to features that are computed once."""
        return self.fits_head

    def loaders(
        self, lists: Path, pipelines: Sequence[list], validated: str = 'validated', fits: bool = False, **data: Any
    ) -> dict[str, Any]:
        """Settings of the data loaders for the listed images; `pipelines` are those of training and validation."""
        workers = self.plan.workers
        loading = dict(batch_size=self.plan.batch, num_workers=workers, persistent_workers=workers > 0)
        train, val = (
            dict(loading, dataset=dict(self.images.dataset(lists, name), pipeline=pipeline, on_error='skip', **data))
            for name, pipeline in zip(('train', validated), pipelines, strict=True)
        )
        if fits:
            train.update(drop_last=False, sampler=dict(shuffle=False))
        return dict(train_dataloader=train, val_dataloader=val, test_dataloader=val)

    @property
    def validation_cost(self) -> int:
        """Of a validation, in training images."""
        return min(len(self.images.held_out.names), self.num_validated)

    # Results

    def results_of(self, validations: Sequence[Mapping[str, float]]) -> dict[str, float]:
        """The metrics that a stage's validations measured."""
        return {name: float(validations[-1][name]) for name in ROWS if name in validations[-1]}

    @abstractmethod
    def make_report(self, weights: Path, metrics: Metrics, seconds: float, images_in_time: float) -> Report:
        """Compares the trained model with baselines, and draws pictures beside its weights.

        Args:
            metrics: of the validations.
            seconds: time for the report.
            images_in_time: how many images would be trained in that time.
        """


class FineTuning(Task):
    """What classifiers and segmentors have in common: a backbone that may be frozen or adapted by LoRA."""

    shares_of_time: ClassVar[dict[str, float]] = {HEAD: HEAD_SHARE}
    trains_fitted: ClassVar[bool] = False  # whether all is trained after that fit, where the call leaves it open

    @property
    def stages(self) -> list[str]:
        return [HEAD, *super().stages] if self.begins_with_head else super().stages

    @property
    def begins_with_head(self) -> bool:
        """Whether a linear head is fitted to the features of the start before all is trained."""
        return bool(self.plan.init) and not self.fits_head

    @staticmethod
    def check(call: Record) -> None:
        """Refuses options that do not fit each other."""
        lora = call.options['lora']
        if lora is not None and lora < 1:
            raise UserError(f'--lora is {lora}; expected a rank of at least 1')
        if lora is not None and call.options['freeze'] is not None:
            raise UserError('--lora and --freeze are both given; leave one out: --lora freezes the whole backbone')

    def usual_start(self, device: str) -> tuple[str, str]:
        if device == 'cuda':
            return self.released_start()
        call, name = self.call, next(name for name, arch in STARTS.items() if arch == 'small')
        others = call.lora, call.head, call.full_size, call.freeze not in (None, ALL), self.channels != 3
        if any(others) or self.seconds_for_features == math.inf:
            return DEMO, ''
        path, reason = first_at_hand([name])
        if path is None:
            wanted = f'--init {name}' if self.trains_fitted else f'--init {name} --freeze all'
            return DEMO, f'{wanted} would be better; put its file into ${WEIGHTS_VARIABLE} ({reason})'
        seconds = self.seconds_of_features(str(path))
        if seconds > self.seconds_for_features:
            needed = math.ceil(seconds / 60 / FEATURES_SHARE)
            return DEMO, (
                f'--init {name} --freeze all would be better, but its features take {seconds / 60:.1f} minutes here: '
                f'give --minutes {needed}'
            )
        if self.trains_fitted and seconds <= HEAD_SHARE / FEATURES_SHARE * self.seconds_for_features:
            return str(path), f'a head on frozen features of {name} in {seconds / 60:.1f} minutes; then all is trained'
        call.freeze = self.record.options['freeze'] = ALL
        chosen = f'frozen features of {name} in about {seconds / 60:.1f} minutes'
        return str(path), f'{chosen}; --init {DEMO} trains the packaged model as a whole, which learns less in minutes'

    @property
    def seconds_for_features(self) -> float:
        """Time for the features of the images to learn from."""
        length = self.record.length or USUAL_LENGTH
        return FEATURES_SHARE * 60 * length.number if length.unit == 'minutes' else math.inf

    def seconds_of_features(self, init: str) -> float:
        """Time on a CPU for features of all images to learn from, at --short-side or USUAL_SIDE, by a few of them."""
        if init not in self.timed:
            segments = self.model == 'segmentor'
            extract = FeatureExtractor(init, 'cpu', self.call.short_side or USUAL_SIDE, segments, mean=127.5, std=127.5)
            files = [str(self.images.train.root / name) for name in evenly(self.images.train.names, TIMED)]
            for timed in (files[:1], files):  # the first image takes longer
                began = time.monotonic()
                list(extract(timed, ['mean'], None if segments else -1, on_error='skip'))
            self.timed[init] = (time.monotonic() - began) * len(self.images.train.names) / len(files)
        return self.timed[init]

    def choose_parts(self, checkpoint: Checkpoint | None) -> None:
        if self.fits_head or self.begins_with_head:  # where the time is short, images of each class come first
            self.images.train = in_turn(self.images.train)
        if not self.tunes_all and not self.plan.init:
            raise UserError('--lora and --freeze keep what weights have learned; give a checkpoint with --init')
        if self.frozen is not None and not 0 <= self.frozen <= self.plan.depth:
            raise UserError(f'--freeze is {self.frozen}; expected {ALL}, or blocks from 0 to {self.plan.depth}')

    @property
    def frozen(self) -> int | None:
        """How many of the first blocks are not trained, with the embeddings before them; None without --freeze."""
        if self.call.freeze is None:
            return None
        return self.plan.depth if self.call.freeze == ALL else int(self.call.freeze)

    def fits(self, stage: str) -> bool:
        return super().fits(stage) or stage == HEAD

    def described(self) -> list[tuple[str, str]]:
        trained = 'first the head, on features that are computed once; then all that is not frozen'
        if self.fits_head:
            trained = 'only the head, on features that are computed once: images are not augmented'
        return [*super().described(), ('trained', trained if self.fits_head or self.begins_with_head else '')]

    @property
    def tunes_all(self) -> bool:
        return self.call.lora is None and self.call.freeze is None

    def backbone(self, **options: Any) -> dict[str, Any]:
        """Config of the backbone."""
        config = self.plan.backbone | dict(type=BACKBONE, masked_input=False, drop_path_rate=0.1) | options
        config['rel_pos_bias'] = 'per_layer' if config.get('rel_pos_bias') else None
        config['init_cfg'] = dict(type='Pretrained', checkpoint=self.plan.init) if self.plan.init else None
        if self.frozen is not None:
            config['frozen_stages'] = self.frozen
        return dict(with_lora(config, self.call.lora) if self.call.lora else config, _delete_=True)

    def optimizer(self, recipe: Config, rate: float) -> dict[str, Any]:
        """The recipe's rate for the plan's batch, and its layer decay, which LoRA and random weights do without."""
        plan, lora = self.plan, self.call.lora
        decay = recipe.optim_wrapper.paramwise_cfg.layer_decay_rate if plan.init and not lora else 1.0
        if lora:  # at first its matrices add nothing to the frozen layers, so they tolerate larger steps
            rate *= LORA_RATE
        elif self.begins_with_head and plan.width > NARROW:
            rate *= FITTED_RATE
        rate = rate_for_batch(rate, plan.batch / recipe.auto_scale_lr.base_batch_size)
        return dict(optimizer=dict(lr=rate), paramwise_cfg=dict(layer_decay_rate=decay))


def fitted_in(checkpoint: Path, prefix: str) -> dict[str, Any]:
    """Config of a head's initialisation by the part of a checkpoint that begins with `prefix`."""
    return dict(type='Pretrained', checkpoint=str(checkpoint), prefix=prefix)


def usual_workers(device: str) -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count() or 1
    # feeding a GPU takes two cores; without a GPU the training itself takes most of them
    return max(1, min(cores - 2, 16) if device == 'cuda' else cores // 4)


def largest_batch(device: str, sizes: Mapping[str, int], patches: float) -> float:
    """The most images per step for a model of these sizes and this number of patches."""
    width = sizes['embed_dims']
    if device == 'cpu':
        return CPU_BATCH[width > NARROW]
    free = torch.cuda.mem_get_info()[0] / 2**30
    gib_per_image = GIB_PER_IMAGE * (width / 768) * (patches / 196)  # in proportion to BEiT-Base at 224 pixels
    return min(free / gib_per_image, MAX_BATCH)

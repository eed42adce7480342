"""What happens around the steps of a run: seeds, logs, throughput, compilation, neighbours, a teacher's schedules."""

import logging
import math
import os
import random
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from mmengine.dataset import BaseDataset
from mmengine.dist import all_gather_object, get_rank, get_world_size
from mmengine.hooks import Hook
from mmengine.hooks import LoggerHook as EngineLoggerHook
from mmengine.hooks import RuntimeInfoHook as EngineRuntimeInfoHook
from mmengine.logging import print_log
from mmengine.runner import Runner
from torch import Tensor, nn
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
from torch.utils.data import DataLoader

from beit_mm.datasets.samplers import mixed_seed
from beit_mm.datasets.segmentation_folder import SegmentationFolder
from beit_mm.engine.checks import backbone_of, unwrap
from beit_mm.engine.optim import STEPS_BETWEEN_LOOKS, AutocastOptimWrapper
from beit_mm.engine.probing import (
    Standardise,
    image_features,
    knn_predict,
    knn_shares,
    mean_iou,
    patch_dataset,
    patch_features,
    pixel_confusion,
    sample_patches,
)
from beit_mm.models.beit import BEiTPretrainer
from beit_mm.models.dino import DINOPretrainer
from beit_mm.models.vit import BEiTBackbone
from beit_mm.registry import HOOKS
from beit_mm.terminal import printable_record

STEPS_TO_JUDGE = 20  # before it is said that reading limits a training
HISTORY = 10_000  # steps of which the logged numbers are kept
DETERMINISTIC = (
    'Deterministic: on the same machine the same run gives the same bits. It costs time on a GPU: cuDNN chooses '
    'convolutions without measuring, gradients of indexing (bias tables, masked positions) and of attention are summed '
    'in a fixed order. Where a GPU has no such kernel, as for segmentation losses, torch names the operation and stops.'
)


@HOOKS.register_module()
class StepSeedHook(Hook):
    """Seeds all random generators before each training step, from the run's seed, the rank and the step's number.

    What a step draws (mixup, drop path, erasing) then follows from these alone: a run that goes on draws what it would
    have drawn, whatever was loaded, validated or drawn meanwhile, and a single step can be run again. Weights are drawn
    before and samples by their own keys (see datasets.samplers), so both are the same for any number of processes.
    """

    priority = 'VERY_HIGH'

    def before_run(self, runner: Runner) -> None:
        """Completes mmengine's `randomness.deterministic`, before the first multiplication of matrices on a GPU."""
        if runner.deterministic:
            os.environ.setdefault('CUBLAS_WORKSPACE_CONFIG', ':4096:8')  # without it cuBLAS is refused
            print_log(DETERMINISTIC, logger='current')

    def before_train_iter(self, runner: Runner, batch_idx: int, data_batch: dict | None = None) -> None:
        """Seeds the generators that a step may draw from."""
        seed = mixed_seed(runner.seed, get_rank(), runner.iter)
        random.seed(seed)
        np.random.seed(seed >> 32)
        torch.default_generator.manual_seed(seed >> 1)  # torch.manual_seed takes 1 ms where there is no GPU
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed(seed >> 1)


@HOOKS.register_module()
class RuntimeInfoHook(EngineRuntimeInfoHook):
    """mmengine's, with a step's numbers left on the device until a line of the log, or a checkpoint, needs them.

    mmengine fetches each loss at each step. The host then waits until the device is done, and the device until the host
    has sent the next step.
    """

    def __init__(self):
        self.waiting: list[dict[str, Any]] = []  # what the steps since the last fetch gave

    def before_train(self, runner: Runner) -> None:
        """Takes over the logger's interval."""
        super().before_train(runner)
        self.waiting = []
        self.intervals = look_intervals(runner)

    def after_train_iter(
        self, runner: Runner, batch_idx: int, data_batch: Any = None, outputs: dict | None = None
    ) -> None:
        """Keeps the numbers, and fetches them where a line of the log is due."""
        held = {key: value.detach() if isinstance(value, Tensor) else value for key, value in (outputs or {}).items()}
        self.waiting.append(held)
        if (
            any(self.every_n_inner_iters(batch_idx, interval) for interval in self.intervals)
            or self.end_of_epoch(runner.train_dataloader, batch_idx)
            or runner.iter + 1 == runner.max_iters
        ):
            self.fetch(runner)

    def after_train(self, runner: Runner) -> None:
        """Fetches the last numbers."""
        self.fetch(runner)
        super().after_train(runner)

    def fetch(self, runner: Runner) -> None:
        """Brings the numbers of all steps since the last fetch into the history, with one wait for the device."""
        waiting, self.waiting = self.waiting, []
        tensors = [value for step in waiting for value in step.values() if isinstance(value, Tensor)]
        together = [tensor.reshape(()).to(tensors[0].device, torch.float32) for tensor in tensors]
        numbers = iter(torch.stack(together).tolist() if together else [])
        for step in waiting:
            for key, value in step.items():
                runner.message_hub.update_scalar(f'train/{key}', next(numbers) if isinstance(value, Tensor) else value)


def look_intervals(runner: Runner) -> list[int]:
    """Steps between two lines of the log, and the 50 after which numbers on the device are fetched at the latest."""
    return [STEPS_BETWEEN_LOOKS, *(hook.interval for hook in runner.hooks if isinstance(hook, EngineLoggerHook))]


def fetch_logs(runner: Runner) -> None:
    """Makes the history of logged numbers complete."""
    for hook in runner.hooks:
        if isinstance(hook, RuntimeInfoHook):
            hook.fetch(runner)


@contextmanager
def written_if_possible(runner: Runner) -> Iterator[None]:
    """Where logs or pictures are written: a full disk, or a folder that is gone, is a warning and not the run's end."""
    try:
        yield
    except OSError as error:
        warn_unwritten(runner, error)


def warn_unwritten(runner: Runner, error: BaseException | None) -> None:
    """Says that logs and pictures are lost; mmengine logs a warning of the same words once in a run."""
    reason = getattr(error, 'strerror', None) or error
    message = f'Some logs and pictures cannot be written to {runner.work_dir}: {reason}. The training goes on.'
    print_log(message, logger='current', level=logging.WARNING)


@contextmanager
def threads_warn(runner: Runner) -> Iterator[None]:
    """The time of a training loop, in which TensorBoard's thread warns of a full disk, once, instead of a traceback."""
    before = threading.excepthook

    def of_thread(args: threading.ExceptHookArgs) -> None:
        if isinstance(args.exc_value, OSError) and type(args.thread).__module__.startswith('tensorboard.'):
            warn_unwritten(runner, args.exc_value)
        else:
            before(args)

    threading.excepthook = of_thread
    try:
        yield
    finally:
        threading.excepthook = before


@HOOKS.register_module()
class LoggerHook(EngineLoggerHook):
    """mmengine's, for which a file that cannot be written, log, scalars or TensorBoard's, is one warning.

    What a name holds that a terminal would obey is logged in letters.
    """

    def before_run(self, runner: Runner) -> None:
        """Sees to the text log, which the logging module writes."""
        super().before_run(runner)
        for handler in runner.logger.handlers:
            handler.addFilter(printable_record)
            if isinstance(handler, logging.FileHandler):
                handler.handleError = lambda record: warn_unwritten(runner, sys.exc_info()[1])  # type: ignore[method-assign]

    def after_train_iter(self, runner: Runner, *args: Any, **kwargs: Any) -> None:
        """Logs a step."""
        with written_if_possible(runner):
            super().after_train_iter(runner, *args, **kwargs)

    def after_val_epoch(self, runner: Runner, metrics: dict[str, float] | None = None) -> None:
        """Logs a validation."""
        with written_if_possible(runner):
            super().after_val_epoch(runner, metrics)

    def after_run(self, runner: Runner) -> None:
        """Closes the files."""
        with written_if_possible(runner):
            super().after_run(runner)


@HOOKS.register_module()
class ThroughputHook(Hook):
    """Logs `images_per_second` of all processes in the last 50 steps, with the wait for data, without validation.

    Where more than half of that time is the wait, it says so once.

    It also keeps mmengine's histories of logged numbers to 10,000 entries. They are copied whole at every step: at a
    million of them that takes 14 ms, and 64 MB in each checkpoint.
    """

    def __init__(self):
        self.steps: deque[tuple[int, float]] = deque(maxlen=50)  # images, seconds
        self.waits: deque[tuple[float, float]] = deque(maxlen=50)  # seconds of waiting for images, of all the step
        self.last = self.begun = 0.0
        self.warned = False

    def before_train_epoch(self, runner: Runner) -> None:
        """Starts the clock."""
        self.last = time.perf_counter()

    def after_val_epoch(self, runner: Runner, metrics: dict | None = None) -> None:
        """Starts the clock again; iteration-based runs validate in the middle of an epoch."""
        self.last = time.perf_counter()

    def before_train_iter(self, runner: Runner, batch_idx: int, data_batch: Any = None) -> None:
        """Ends the wait for data."""
        self.begun = time.perf_counter()

    def after_train_iter(self, runner: Runner, batch_idx: int, data_batch: dict, outputs: dict) -> None:
        """Counts the images of this step."""
        now = time.perf_counter()
        inputs = data_batch['inputs']  # a dict in pretraining, the images themselves in classification
        images = inputs['images'] if isinstance(inputs, dict) else inputs
        self.steps.append((len(images) * get_world_size(), now - self.last))
        if batch_idx:  # for the first one workers had to start
            self.waits.append((self.begun - self.last, now - self.last))
        self.last = now
        if not self.warned and len(self.waits) >= STEPS_TO_JUDGE:
            waiting, seconds = map(sum, zip(*self.waits, strict=True))
            self.warned = waiting > seconds / 2
            if self.warned:
                print_log(f'{waits_for_images(waiting / seconds)}.', logger='current', level=logging.WARNING)
        count, seconds = map(sum, zip(*self.steps, strict=True))
        runner.message_hub.update_scalar('train/images_per_second', count / seconds)
        for history in runner.message_hub.log_scalars.values():
            history.max_length = HISTORY


def waits_for_images(share: float) -> str:
    """What to say where a training waits for its images for a share of its time."""
    return (
        f'Reading images limits the training: {share:.0%} of the time is spent waiting for them. More workers help, or '
        'smaller copies of the images (tools/datasets/prepare_resized.py)'
    )


@HOOKS.register_module()
class CompileHook(Hook):
    """Compiles the model's part of a training step, as one graph for one shape.

    mmengine's `compile` takes all of a step, logs included: it falls into many graphs. Validation, which has other
    sizes, runs as ever. Where compilation fails, the run goes on without it and the log says why. So it does where
    shapes change with every batch, as with masks of variant 'paper' or of mmpretrain, after eight compilations. With
    several processes torch cuts the graph where gradients are exchanged. The graph draws random numbers of its own:
    with drop path a compiled run is another one than that which is not compiled, but it can be repeated and resumed
    like it.

    Args:
        method: of the model. Without it 'loss' of a BEiTPretrainer, else 'extract_feat', which classifiers and
            segmentors have: their losses work on lists of samples.
        options: of torch.compile: backend, mode, options.

    Raises:
        ValueError: the model has no such method.
    """

    def __init__(self, method: str | None = None, **options: Any):
        self.method = method
        self.options = options

    def before_train(self, runner: Runner) -> None:
        """Puts the compiled method in the plain one's place."""
        model = unwrap(runner)
        self.method = self.method or ('loss' if isinstance(model, BEiTPretrainer) else 'extract_feat')
        plain = getattr(model, self.method, None)
        if not callable(plain):
            raise ValueError(f'a {type(model).__name__} has no method {self.method!r} that CompileHook could compile')
        setattr(model, self.method, compiled_in_training(model, plain, self.options))
        print_log(f'{self.method} will be compiled; the first step takes minutes.', logger='current')

    def after_train(self, runner: Runner) -> None:
        """Puts the plain method back."""
        vars(unwrap(runner)).pop(self.method, None)


def compiled_in_training(model: nn.Module, plain: Callable, options: dict) -> Callable:
    """A method of a model that is compiled while the model is being trained, until that fails."""
    compiled = torch.compile(plain, **dict(fullgraph=True, dynamic=False) | options)
    usable = True

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal usable
        if not (usable and model.training):
            return plain(*args, **kwargs)
        try:
            return compiled(*args, **kwargs)
        except (TorchDynamoException, FailOnRecompileLimitHit) as error:
            usable = False
            reason = ' '.join(str(error).split())[:300]
            message = f'{plain.__name__} could not be compiled and runs as it is ({type(error).__name__}: {reason})'
            print_log(message, logger='current', level=logging.WARNING)
        return plain(*args, **kwargs)  # out here, where nothing holds on to the failed attempt's tensors

    return call


@HOOKS.register_module()
class KNNHook(Hook):
    """Logs `knn_accuracy` (percent) after each validation: labelled images classified by their nearest neighbours.

    The features are the mean of the patch tokens after two thirds of the blocks, for the whole, unmasked image. The
    labels have no part in training.

    Args:
        train_dataloader, val_dataloader: configs with an ImageFolder whose pipeline crops to one size and ends with
            PackInputs; a subset of the images will do. They are read at every validation.
        k: neighbours that vote.

    Raises:
        ValueError: the two datasets have different classes, samples lack `sample_idx`, or the model has no
            BEiTBackbone.
    """

    def __init__(self, train_dataloader: dict, val_dataloader: dict, k: int = 20):
        self.configs = train_dataloader, val_dataloader
        self.loaders: list[DataLoader] = []
        self.k = k

    def before_train(self, runner: Runner) -> None:
        """Builds the loaders, so that a wrong path shows before the first step."""
        probed_backbone(self, unwrap(runner))
        self.loaders = [runner.build_dataloader(config, seed=0) for config in self.configs]
        check_classes(self, *(loader.dataset for loader in self.loaders))

    def after_val_epoch(self, runner: Runner, metrics: dict | None = None) -> None:
        """Classifies the images; runs before the log is written."""
        if not self.loaders:  # a validation outside training
            return
        model = unwrap(runner)
        backbone, pixels = probed_backbone(self, model), model.data_preprocessor
        (bank, labels), (features, truth) = (
            image_features(backbone, pixels.mean, pixels.std, loader) for loader in self.loaders
        )
        num_classes = len(self.loaders[0].dataset.metainfo['classes'])
        predicted = knn_predict(features, bank, labels, num_classes, self.k)
        accuracy = 100 * (predicted == truth).float().mean().item()
        runner.message_hub.update_scalar('val/knn_accuracy', accuracy)
        if metrics is not None:
            metrics['knn_accuracy'] = accuracy  # CheckpointHook's save_best can follow it


@HOOKS.register_module()
class DenseKNNHook(Hook):
    """Logs `dense_knn_miou` (percent) after each validation: pixels classified by the nearest patches of other images.

    The features are those of KNNHook, of each patch; see docs/features.md. The labels have no part in training. mmseg
    is not needed.

    Args:
        train, val: configs of SegmentationFolders without type and pipeline, as
            `dict(data_root='data/camvid', classes='classes.txt', reduce_zero_label=True,
            data_prefix=dict(img_path='images/training', seg_map_path='annotations/training'))`.
        short_side: of the images, which are shown whole, in pixels; None: the backbone's image size.
        k: neighbours that vote.
        max_images: of each of the two that are looked at, evenly spread.
        max_patches: of the training images that may be neighbours, drawn at random, the same at each validation.

    Raises:
        ValueError: a number below 1; when training starts, the two datasets have different classes, or the model has
            no BEiTBackbone for RGB images.
    """

    def __init__(
        self,
        train: dict,
        val: dict,
        short_side: int | None = None,
        k: int = 30,
        max_images: int = 200,
        max_patches: int = 20_000,
    ):
        for name, number in dict(k=k, max_images=max_images, max_patches=max_patches).items():
            if number < 1:
                raise ValueError(f'DenseKNNHook: {name} is {number}; expected 1 or more')
        self.configs = train, val
        self.datasets: list[SegmentationFolder] = []
        self.short_side = short_side
        self.k = k
        self.max_images = max_images
        self.max_patches = max_patches

    def before_train(self, runner: Runner) -> None:
        """Lists the images, so that a wrong path shows before the first step."""
        backbone = probed_backbone(self, unwrap(runner))
        self.datasets = [patch_dataset(backbone, self.short_side, **config) for config in self.configs]
        check_classes(self, *self.datasets)
        if (number := len(self._rows(self.datasets[0]))) < get_world_size():
            raise ValueError(f'DenseKNNHook: {number} training images for {get_world_size()} processes; each needs one')

    def after_val_epoch(self, runner: Runner, metrics: dict | None = None) -> None:
        """Classifies the pixels; runs before the log is written."""
        if not self.datasets:  # a validation outside training
            return
        model = unwrap(runner)
        train, val = (self._maps(model, dataset) for dataset in self.datasets)
        num_classes = len(self.datasets[0].metainfo['classes'])
        shares = [-(-number // get_world_size()) for number in (len(self._rows(self.datasets[0])), self.max_patches)]
        own = [tensor.cpu() for tensor in sample_patches(train, num_classes, *shares)[:2]]
        device = model.data_preprocessor.mean.device
        # all processes together; objects, as each has a number of patches of its own
        bank, targets = (torch.cat(parts).to(device) for parts in zip(*all_gather_object(own), strict=True))
        standardise = Standardise(bank)
        bank = standardise(bank)
        counts = torch.zeros(num_classes, num_classes, dtype=torch.float64)
        for patches, labels in val:
            scores = knn_shares(standardise(patches.flatten(0, 1)), bank, targets, self.k)  # h*w, K
            counts += pixel_confusion(scores.view(*patches.shape[:2], -1), labels)
        miou = 100 * mean_iou(sum(all_gather_object(counts)))
        runner.message_hub.update_scalar('val/dense_knn_miou', miou)
        if metrics is not None:
            metrics['dense_knn_miou'] = miou  # CheckpointHook's save_best can follow it

    def _rows(self, dataset: SegmentationFolder) -> list[int]:
        """The images that are looked at."""
        number = min(self.max_images, len(dataset))
        return [row * len(dataset) // number for row in range(number)]

    def _maps(self, model: nn.Module, dataset: SegmentationFolder) -> Iterator[tuple[Tensor, Tensor]]:
        """What `patch_features` yields, of this process's part of the images."""
        rows = self._rows(dataset)[get_rank() :: get_world_size()]
        pixels = model.data_preprocessor
        return patch_features(probed_backbone(self, model), pixels.mean, pixels.std, map(dataset.__getitem__, rows))


def probed_backbone(hook: Hook, model: nn.Module) -> BEiTBackbone:
    """The backbone whose features a hook looks at; raises ValueError where the model has none of ours."""
    backbone = backbone_of(model)
    if backbone is None:
        raise ValueError(
            f'{type(hook).__name__} looks at the blocks of a BEiTBackbone; the {type(model).__name__} has none'
        )
    return backbone


def check_classes(hook: Hook, train: BaseDataset, val: BaseDataset) -> None:
    """Raises ValueError where a hook's two datasets have different classes."""
    classes, others = train.metainfo['classes'], val.metainfo['classes']
    if classes != others:
        raise ValueError(
            f'{type(hook).__name__}: its training images have {len(classes)} classes, its validation images '
            f'{len(others)}, or their names differ; give both datasets the same classes=...'
        )


@HOOKS.register_module()
class DINOHook(Hook):
    """Schedules of a DINOPretrainer, all from the number of the step, so that a resumed run needs no state of them.

    After each step of the optimizer the teacher follows the student, but not after one that AutocastOptimWrapper skips.
    The logs have `teacher_momentum` and `teacher_temperature`. Weight decay has a schedule of mmpretrain's,
    CosineAnnealingWeightDecay.

    Args:
        momentum: of the teacher at the first step; rises to 1 at the end of the run, along half a cosine.
        temperature: of the teacher in the first epoch, and after the warm-up.
        warmup_epochs: epochs in which the temperature rises, by equal steps.
        freeze_last_layer: epochs in which the last layer of the student's head is not trained.

    Raises:
        ValueError: a momentum outside of 0 to 1, other temperatures; when training starts, another model.

    Source: facebookresearch/dino `main_dino.py`.
    """

    def __init__(
        self,
        momentum: float = 0.996,
        temperature: tuple[float, float] = (0.04, 0.04),
        warmup_epochs: int = 0,
        freeze_last_layer: int = 1,
    ):
        if not 0 <= momentum <= 1:
            raise ValueError(f'momentum is {momentum}; expected 0, a teacher that is the student, to 1')
        if np.shape(temperature) != (2,) or not min(temperature) > 0:
            raise ValueError(f'temperature is {temperature}; expected two numbers above 0, first and last')
        self.momentum = momentum
        self.temperature = temperature
        self.warmup_epochs = warmup_epochs
        self.freeze_last_layer = freeze_last_layer

    def before_train(self, runner: Runner) -> None:
        """Sees to it that the optimizer leaves the last layer alone while it is frozen."""
        model = unwrap(runner)
        if not isinstance(model, DINOPretrainer):
            raise ValueError(f'DINOHook belongs to a DINOPretrainer, the model is a {type(model).__name__}')

        def drop_gradients(*_: object) -> None:
            # After clipping. Without a gradient neither decay nor moments are touched; with one of 0 they would be.
            if epoch_of(runner) < self.freeze_last_layer:
                for parameter in model.dino_head.last_layer.parameters():
                    parameter.grad = None

        runner.optim_wrapper.optimizer.register_step_pre_hook(drop_gradients)

    def before_train_iter(self, runner: Runner, batch_idx: int, data_batch: dict | None = None) -> None:
        """Sets the teacher's temperature."""
        temperature = self.temperature_at(epoch_of(runner))
        unwrap(runner).teacher_temperature = torch.tensor(temperature)  # a number would be a constant of compiled code
        runner.message_hub.update_scalar('train/teacher_temperature', temperature)

    def after_train_iter(
        self, runner: Runner, batch_idx: int, data_batch: dict | None = None, outputs: dict | None = None
    ) -> None:
        """Moves the teacher, unless gradients are still being accumulated."""
        if runner.optim_wrapper.should_update():
            momentum = self.momentum_at(runner.iter / runner.max_iters)
            wrapper = runner.optim_wrapper
            taken = wrapper.taken if isinstance(wrapper, AutocastOptimWrapper) else None  # mmengine's do not say
            unwrap(runner).update_teacher(momentum, taken)
            runner.message_hub.update_scalar('train/teacher_momentum', momentum)

    def momentum_at(self, progress: float) -> float:
        """The momentum where a part `progress` of the run, 0 to 1, is over."""
        return 1 - (1 - self.momentum) * (1 + math.cos(math.pi * progress)) / 2

    def temperature_at(self, epoch: int) -> float:
        """The temperature in an epoch, from 0."""
        first, last = self.temperature
        if epoch >= self.warmup_epochs:
            return last
        return first + (last - first) * epoch / max(self.warmup_epochs - 1, 1)


def epoch_of(runner: Runner) -> int:
    """The epoch of the present step, from 0; loops that count iterations have one too."""
    return runner.iter // len(runner.train_dataloader)

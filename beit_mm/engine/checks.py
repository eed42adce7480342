"""Checks at the start of a run for mistakes that would go unnoticed."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
from mmengine.dist import get_world_size
from mmengine.evaluator import Evaluator
from mmengine.hooks import EarlyStoppingHook, EMAHook, Hook
from mmengine.optim import OptimWrapper, OptimWrapperDict
from mmengine.runner import Runner
from mmengine.structures import BaseDataElement
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from beit_mm.checkpoint.checkpoint import check_finite
from beit_mm.checkpoint.description import class_names, meta_of
from beit_mm.checkpoint.names import preview
from beit_mm.checkpoint.read import as_checkpoint_error
from beit_mm.datasets import UnlabeledImages
from beit_mm.datasets.reading import LoadImage
from beit_mm.datasets.samplers import SeededSampler
from beit_mm.datasets.transforms import RandomErasing
from beit_mm.engine.checkpoints import checkpoint_hook_of, resume_by_config
from beit_mm.engine.dino import TeacherMomentumHook
from beit_mm.engine.metrics import DenseKNNHook, KNNHook
from beit_mm.engine.optim import AutocastOptimWrapper, check_state
from beit_mm.engine.resuming import batch_size_of, resumed_from, sampler_of
from beit_mm.engine.steps import unwrap
from beit_mm.errors import UserError, log, warn
from beit_mm.models import ClassificationDataPreprocessor
from beit_mm.models.beit import BEiTPretrainer
from beit_mm.models.provenance import backbone_of, preprocessing_of_model, target_provenance
from beit_mm.models.vit import BEiTBackbone
from beit_mm.registry import HOOKS


@HOOKS.register_module()
class FitCheckHook(Hook):
    """Refuses or warns if model, data, weights and optimizer do not match; logs the effective batch.

    The recipe's batch is `auto_scale_lr.base_batch_size` of the config.
    """

    def __init__(self):
        self.checkpoint: dict | None = None  # the source of the weights, until a training or a test begins
        self.first_batch = True

    def before_train(self, runner: Runner) -> None:
        self.checkpoint = None  # a test afterwards uses this run's weights
        check_sampler(runner.train_dataloader)
        check_effective_batch(runner)
        check_validation(runner)
        check_training(runner)
        log_targets(runner)

    def before_train_iter(self, runner: Runner, batch_idx: int, data_batch: dict | None = None) -> None:
        if not self.first_batch:
            return
        self.first_batch = False
        samples = data_batch.get('data_samples')
        if samples and 'gt_sem_seg' in samples[0]:  # then the model is a segmentor
            for module in unwrap(runner).modules():
                if hasattr(module, 'num_classes') and hasattr(module, 'ignore_index'):  # a head
                    check_labels(samples, module.num_classes, module.ignore_index)
        check_size(unwrap(runner), data_batch.get('inputs'))

    def after_load_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        self.checkpoint = checkpoint
        weights = checkpoint.get('state_dict', checkpoint)
        expected = unwrap(runner).state_dict()
        # a backbone, a teacher's too, fits and checks its own tensors when it loads them
        others = [name for name in expected if not name.startswith('backbone.') and name in weights]
        check_finite({name: weights[name] for name in others}, 'The checkpoint')
        path, wrapper = resumed_from(runner), runner.optim_wrapper
        if path is None:
            return
        unfit = [name for name in others if 'backbone.' not in name and weights[name].shape != expected[name].shape]
        if unfit:  # without resume mmengine prints them
            raise UserError(
                f"{path}: shapes differ from this model's: {preview(unfit)}; resume with the sizes that the run had"
            )
        if isinstance(wrapper, OptimWrapper):
            if 'optimizer' in checkpoint and not isinstance(wrapper, (AutocastOptimWrapper, OptimWrapperDict)):
                check_state(checkpoint['optimizer'], wrapper.optimizer)  # AutocastOptimWrapper does it itself
            if checkpoint_hook_of(runner) is None:  # which does it itself
                resume_by_config(runner, path, checkpoint)

    def before_test(self, runner: Runner) -> None:
        dataset = runner.test_dataloader.dataset
        if self.checkpoint is not None:
            load_whole(unwrap(runner), self.checkpoint.get('state_dict', self.checkpoint))
            with as_checkpoint_error('the checkpoint'):
                classes = class_names(meta_of(self.checkpoint)) or ()
            check_same_classes(classes_of(dataset), path_of(dataset), classes, 'the checkpoint')
            self.checkpoint = None
        check_model(unwrap(runner), dataset)
        check_topk(runner.test_loop.evaluator, dataset)
        check_label_files(runner.test_loop.evaluator, dataset)


def check_effective_batch(runner: Runner) -> None:
    """Logs the effective batch; refuses an auto_scale_lr that would scale the wrong number, or only a part."""
    processes, batch = get_world_size(), batch_size_of(runner.train_dataloader)
    if batch is None:  # of a batch sampler; mmengine's auto_scale_lr refuses it too
        check_schedules(runner, is_scaled=False)
        return log('Effective batch: the batch sampler of train_dataloader does not say its batch_size.')
    accumulation = runner.cfg.get('optim_wrapper', {}).get('accumulative_counts', 1)
    effective = processes * batch * accumulation
    auto_scale_lr = runner.cfg.get('auto_scale_lr') or {}
    expected, enabled = auto_scale_lr.get('base_batch_size'), auto_scale_lr.get('enable', False)
    if enabled and accumulation > 1:
        raise UserError(f'auto_scale_lr would ignore the accumulation of {accumulation} batches; scale lr yourself')
    for hook in runner.hooks:
        if isinstance(hook, EMAHook) and hook.ema_cfg.get('interval', 1) % accumulation:
            warn(f'The EMAHook counts batches, and a step has {accumulation}; set its interval={accumulation}.')
    check_schedules(runner, is_scaled=enabled and expected != effective)
    line = f'Effective batch: {processes} processes x {batch} images x {accumulation} accumulated = {effective}'
    if enabled or expected in (None, effective):
        log(f'{line}.')
    else:
        warn(
            f'{line}; the recipe has {expected}: change train_dataloader.batch_size or '
            'optim_wrapper.accumulative_counts, or scale the learning rate (half the batch, half the rate).'
        )


def check_schedules(runner: Runner, is_scaled: bool) -> None:
    """Raises UserError for a schedule that ends above a group's rate, or that auto_scale_lr scales only in part."""
    if isinstance(runner.optim_wrapper, OptimWrapperDict):
        return  # a schedule belongs to one of several optimizers
    groups = runner.optim_wrapper.optimizer.param_groups
    start = min(group.get('initial_lr', group['lr']) for group in groups)
    for number, scheduler in enumerate(runner.param_schedulers or []):
        end, highest = (getattr(scheduler, key, None) or 0.0 for key in ('eta_min', 'eta_max'))
        if scheduler.param_name != 'lr':  # weight decay may rise
            continue
        name = f'param_scheduler.{number} ({type(scheduler).__name__})'
        if is_scaled and (end or highest):
            raise UserError(f'auto_scale_lr does not scale the {end or highest:g} of {name}; use eta_min_ratio instead')
        if end > start:
            raise UserError(f'{name} lets a learning rate rise from {start:.3g} to {end:.3g}; use eta_min_ratio')


def check_number_of_images(loader: DataLoader) -> None:
    if not len(loader):  # mmpretrain's vis_scheduler.py gives a list, without a batch size
        images, batch = loader.dataset, loader.batch_size
        raise UserError(f'{path_of(images)} has {len(images)} images, fewer than one batch of {batch} for each process')


def check_sampler(loader: DataLoader) -> None:
    """Raises UserError if a dataset of this package lacks SeededSampler: all epochs would have the same views."""
    seeded = [type(one).__name__ for one in datasets_in(loader.dataset) if isinstance(one, UnlabeledImages)]
    if seeded and not isinstance(sampler_of(loader), SeededSampler):
        raise UserError(f"{seeded[0]} has new views in each epoch only with sampler.type='beit_mm.SeededSampler'")


def datasets_in(dataset: Dataset) -> Iterator[Dataset]:
    """A dataset and the datasets inside it, for mmengine's wrappers and torch's Subset."""
    yield dataset
    for one in (*getattr(dataset, 'datasets', ()), getattr(dataset, 'dataset', None)):
        if one is not None:
            yield from datasets_in(one)


def transforms_of(dataset: Dataset) -> Sequence:
    pipelines = (getattr(one, 'pipeline', None) for one in datasets_in(dataset))
    return [transform for pipeline in pipelines for transform in getattr(pipeline, 'transforms', ())]


def path_of(dataset: Dataset) -> str:
    """Where a dataset's images lie, or the name of its type."""
    prefix = getattr(dataset, 'data_prefix', {})
    return prefix.get('img_path') or getattr(dataset, 'data_root', '') or type(dataset).__name__


def classes_of(dataset: Dataset) -> tuple[str, ...]:
    return tuple(getattr(dataset, 'metainfo', {}).get('classes') or ())


def check_same_classes(one: Sequence[str], name: str, other: Sequence[str], other_name: str) -> None:
    """Raises UserError if two lists number the classes differently; lists that share no name pass."""
    if one == other or not set(one) & set(other):
        return
    pairs = enumerate(zip_longest(one, other))
    label, (first, second) = next((label, pair) for label, pair in pairs if pair[0] != pair[1])
    raise UserError(f'class {label} of {name} is {first!r}, of {other_name} {second!r}; give both the same classes=...')


def check_same_zero(one: Dataset, other: Dataset) -> None:
    """Warns if 0 in label maps marks unlabelled pixels in one dataset only."""
    reduced, expected = (getattr(dataset, 'metainfo', {}).get('reduce_zero_label', False) for dataset in (one, other))
    if reduced != expected:
        warn(f'reduce_zero_label is {reduced} for {path_of(one)}, {expected} for {path_of(other)}. Is this intended?')


def check_labels(samples: Sequence[BaseDataElement], num_classes: int, ignore_index: int | None) -> None:
    """Raises UserError for a label without a class, where a GPU would only assert; warns if most are ignored."""
    ignore_index = -1 if ignore_index is None else ignore_index  # with None all pixels count
    shares = []
    for sample in samples:
        labels = sample.gt_sem_seg.data
        ignored = labels == ignore_index
        wrong = labels[~ignored & ((labels < 0) | (labels >= num_classes))]
        if len(wrong):
            raise UserError(
                f'{sample.get("seg_map_path", "an annotation")} has label {wrong.min()}, the heads have num_classes='
                f'{num_classes}; set num_classes as in the data, and reduce_zero_label=True only if 0 is unlabelled'
            )
        shares.append(ignored.float().mean())
    share = sum(shares) / len(shares)
    if share > 0.5:
        labels_ignored = f'label {ignore_index}, and label 0 with reduce_zero_label=True'
        warn(f'{share:.0%} of the pixels of the first batch are ignored ({labels_ignored}). Is this intended?')


def load_whole(model: nn.Module, weights: Mapping[str, Any]) -> None:
    """Loads a checkpoint's weights; raises UserError if they are another model's, which mmengine would load in part.

    An auxiliary head may be missing: a test does not use it.
    """
    if any(name.startswith('module.') for name in weights):  # of DistributedDataParallel
        weights = {name.removeprefix('module.'): tensor for name, tensor in weights.items()}
    try:
        missing, unexpected = model.load_state_dict(weights, strict=False)
    except RuntimeError as error:
        shapes = ' '.join(str(error).split())[:300].rstrip('.')
        raise UserError(
            f'the checkpoint is of another model: {shapes}; set num_classes and sizes as in its training'
        ) from None
    needed = [name for name in missing if not name.startswith('auxiliary_head.')]
    unused = [name for name in unexpected if not name.startswith('auxiliary_head.')]
    if needed or unused:
        raise UserError(
            f'the checkpoint is of another model: it lacks {preview(needed)}, this model lacks {preview(unused)}; '
            'test it with the config that it was trained with'
        )


def check_model(model: nn.Module, dataset: Dataset) -> None:
    check_out_type(model)
    check_num_classes(model, dataset)
    check_normalisation(model)
    check_colours(model, dataset)


def check_out_type(model: nn.Module) -> None:
    """Raises UserError if a known head would get the default output of a backbone, all its tokens."""
    model = getattr(model, 'module', model)  # inside a wrapper for test-time augmentation
    backbone = backbone_of(getattr(model, 'backbone', nn.Identity()))
    if backbone is None or backbone.out_type != 'raw' or getattr(model, 'queries_join_backbone', False):
        return
    heads = dict(decode_head="'featmap'", head="'avg_featmap' or 'cls_token'")
    for name, expected in heads.items():
        library = type(getattr(model, name, None)).__module__.partition('.')[0]
        if library in ('mmseg', 'mmpretrain') or (library == 'beit_mm' and name == 'decode_head'):
            raise UserError(f"model.backbone.out_type is 'raw', all tokens; for this {name} set it to {expected}")


def check_num_classes(model: nn.Module, dataset: Dataset) -> None:
    """Raises UserError if a part of a model is for another number of classes than the dataset has."""
    classes = classes_of(dataset)
    model = getattr(model, 'module', model)  # inside a wrapper for test-time augmentation
    numbers = {name: getattr(module, 'num_classes', None) for name, module in model.named_modules()}
    wrong = {name: number for name, number in numbers.items() if isinstance(number, int) and number != len(classes)}
    if classes and wrong:
        parts = [f'.{name}' for name in wrong if name] or ['']  # a segmentor repeats the number of its head
        settings = ' '.join(f'model{part}.num_classes={len(classes)}' for part in parts)
        raise UserError(
            f'{path_of(dataset)} has {len(classes)} classes, the model is built for {next(iter(wrong.values()))}; set '
            f'{settings}, or give the right folder'
        )


def check_topk(evaluator: Evaluator, dataset: Dataset) -> None:
    """Raises UserError for a top-k accuracy of too few classes, at which mmpretrain would fail after the epoch."""
    classes = classes_of(dataset)
    for metric in evaluator.metrics:
        most = np.max(getattr(metric, 'topk', None) or 1)  # `topk` is one number, several, or None
        if classes and most > len(classes):
            raise UserError(
                f'the evaluator counts the best {most} of {len(classes)} classes; '
                'add --cfg-options val_evaluator.topk=1 test_evaluator.topk=1'
            )


def check_label_files(evaluator: Evaluator, dataset: Any) -> None:
    """Raises UserError if mmseg's IoUMetric lacks label maps or an output folder, or would write two maps to a file."""
    lacks_maps = isinstance(dataset, UnlabeledImages) and dataset.data_prefix.get('seg_map_path') is None
    for metric in evaluator.metrics:
        if lacks_maps and getattr(metric, 'format_only', None) is False:
            raise UserError(
                f'{path_of(dataset)} has no label maps to compare predictions with; set seg_map_path in data_prefix, '
                'or format_only=True and output_dir of the evaluator'
            )
        if getattr(metric, 'format_only', False) and metric.output_dir is None:
            raise UserError('format_only=True only writes label maps; give the evaluator an output_dir for them')
        first: dict[str, str] = {}  # the image of each file
        for index in range(len(dataset) if getattr(metric, 'output_dir', None) else 0):
            image = dataset.get_data_info(index)['img_path']
            other = first.setdefault(Path(image).stem, image)
            if image != other:
                raise UserError(
                    f'output_dir would have one label map for {other} and {image}; test each folder by itself, '
                    'or use `beit-mm segment`, which numbers files'
                )


def check_size(model: nn.Module, inputs: Any) -> None:
    """Warns if training images have another size than the backbone is built for, as positions are then resampled."""
    if (backbone := backbone_of(model)) is None:
        return
    images = inputs.get('images') if isinstance(inputs, dict) else inputs
    size = getattr(model.data_preprocessor, 'size', None)  # mmseg's, which pads to it
    if isinstance(images, Tensor):  # B, H, W, C in pretraining, else B, C, H, W
        size = images.shape[1:3] if isinstance(inputs, dict) else images.shape[2:]
    if size and tuple(-(-side // backbone.patch_size) for side in size) != backbone.grid:
        built_for = tuple(side * backbone.patch_size for side in backbone.grid)
        warn(
            f'The images have {tuple(size)} pixels, the backbone is built for {built_for}: its positions are resampled '
            'at each step. Set model.backbone.img_size to the size in the pipelines, unless this is intended.'
        )


def check_normalisation(model: nn.Module) -> None:
    """Warns if the weights were trained with another normalisation: the model would work, but worse."""
    report, current = getattr(backbone_of(model), 'load_report', None), preprocessing_of_model(model)
    if report is None:
        return
    for name in {'mean', 'std'} & report.preprocessing.keys() & current.keys():
        before, after = report.preprocessing[name], current[name]
        if len(before) == len(after) and not np.allclose(before, after, atol=1):  # published ones are rounded
            warn(
                f'The weights from {report.source} were trained on images with {name} {before}; this config '
                f'normalises with {name} {after}. Set data_preprocessor.{name}, unless this is intended.'
            )


def check_colours(model: nn.Module, dataset: Dataset) -> None:
    """Raises UserError if a library's data preprocessor would swap the red and blue that LoadImage reads."""
    if swaps_colours(model) and any(isinstance(transform, LoadImage) for transform in transforms_of(dataset)):
        raise UserError('LoadImage gives RGB, the preprocessor would swap red and blue; set to_rgb or bgr_to_rgb=False')


def swaps_colours(model: nn.Module) -> bool:
    """Whether a model's data preprocessor swaps the red and blue of its images."""
    names = ('to_rgb', 'channel_conversion', '_channel_conversion')  # mmpretrain's, mmseg's in its two versions
    return any(getattr(getattr(model, 'data_preprocessor', None), name, False) for name in names)


def check_views(model: BEiTPretrainer, transforms: Sequence) -> None:
    """Raises UserError if a view for the tokenizer is made twice, or without a tokenizer."""
    in_pipeline = any(getattr(transform, 'second_size', None) for transform in transforms)
    in_preprocessor = getattr(model.data_preprocessor, 'tokenizer_scale', None)
    if in_pipeline and in_preprocessor:
        raise UserError("second_size and tokenizer_scale both make the tokenizer's view; set one to None")
    if (in_pipeline or in_preprocessor) and getattr(model.target_generator, 'gives', None) == 'features':
        raise UserError('features need no second view; set second_size and tokenizer_scale to None')


def check_erasing(model: nn.Module, transforms: Sequence) -> None:
    """Raises UserError if the boxes of a RandomErasing do not reach a data preprocessor that fills them."""
    erases = any(isinstance(transform, RandomErasing) for transform in transforms)
    is_packed = any('erase_box' in getattr(transform, 'meta_keys', ()) for transform in transforms)
    if erases and not (is_packed and isinstance(model.data_preprocessor, ClassificationDataPreprocessor)):
        raise UserError(
            "RandomErasing would have no effect; it needs 'erase_box' in the meta_keys of PackInputs, and a "
            'beit_mm.ClassificationDataPreprocessor'
        )


def check_groups(backbone: BEiTBackbone, groups: Sequence[dict]) -> None:
    """Raises UserError if an optimizer's groups miss the layers or the norms of a BEiTBackbone.

    Other libraries' constructors find both by name: mmseg's looks for the blocks of a "BEiT" under `layers.0`,
    mmpretrain's recipes exempt norms called `.ln` from weight decay. Ours are called `blocks.0` and `norm1`.
    """
    scale_of = {id(parameter): group.get('lr_scale', 1) for group in groups for parameter in group['params']}

    def scales(module: nn.Module) -> set[float]:
        return {scale_of[id(p)] for p in module.parameters() if id(p) in scale_of}

    of_blocks = [found for found in map(scales, backbone.blocks) if found]  # frozen ones have none
    differs = len(of_blocks) > 1 and scales(backbone.patch_embed) - of_blocks[0]  # scales that the first block lacks
    if differs and of_blocks[0] == of_blocks[-1]:
        raise UserError(
            'the optimizer gives all blocks of the BEiTBackbone one learning rate and its patch embedding another; use'
            " constructor='beit_mm.BEiTOptimWrapperConstructor' with paramwise_cfg=dict(layer_decay_rate=...)"
        )
    decay_of = {id(parameter): group.get('weight_decay', 0) for group in groups for parameter in group['params']}
    for name, norm in backbone.named_modules():
        if isinstance(norm, nn.LayerNorm) and decay_of.get(id(norm.weight)) and decay_of.get(id(norm.bias)) == 0:
            raise UserError(
                f'weight decay applies to the weight of {name} of the BEiTBackbone, but not to its bias; '
                'set norm_decay_mult=0.0 in optim_wrapper.paramwise_cfg'
            )


def check_validation(runner: Runner) -> None:
    """Checks what a training is validated on; without validations, warns of hooks that wait for one."""
    if runner.val_loop is None:
        for hook in runner.hooks:
            if isinstance(hook, (EarlyStoppingHook, KNNHook, DenseKNNHook)) or getattr(hook, 'save_best', None):
                warn(f'What {type(hook).__name__} does after validations has no effect: this run has none.')
        return
    if runner.train_loop.val_interval < 1:
        interval = runner.train_loop.val_interval
        raise UserError(f'train_cfg.val_interval is {interval}; expected a number from 1, or --no-validate')
    dataset, held_out = runner.train_dataloader.dataset, runner.val_dataloader.dataset
    check_same_classes(classes_of(held_out), path_of(held_out), classes_of(dataset), path_of(dataset))
    check_same_zero(dataset, held_out)
    check_topk(runner.val_loop.evaluator, held_out)
    check_label_files(runner.val_loop.evaluator, held_out)


def check_training(runner: Runner) -> None:
    """Checks the model with its images and its optimizer."""
    model, dataset = unwrap(runner), runner.train_dataloader.dataset
    check_model(model, dataset)
    check_erasing(model, transforms_of(dataset))
    backbone = backbone_of(model)
    if backbone is not None:
        check_groups(backbone, runner.optim_wrapper.param_groups)
    if isinstance(model, BEiTPretrainer):
        check_views(model, transforms_of(dataset))
        is_average = getattr(model.target_generator, 'ema', None) is not None
        if is_average and not any(isinstance(hook, TeacherMomentumHook) for hook in runner.hooks):
            raise UserError("teacher='ema' needs dict(type='beit_mm.TeacherMomentumHook') in custom_hooks")


def log_targets(runner: Runner) -> None:
    provenance = target_provenance(unwrap(runner))
    if provenance is not None:
        log(f'Targets: {provenance}')
        if provenance.get('path') == 'random weights':
            warn('The tokenizer has random weights: give its file as model.target_generator.checkpoint.')

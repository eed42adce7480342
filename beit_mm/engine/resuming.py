"""A resumed run takes its position from the checkpoint, and every setting from its config."""

import ast
import inspect
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from typing import Any

from mmengine.dist import get_world_size
from mmengine.optim import OptimWrapperDict
from mmengine.runner import EpochBasedTrainLoop, Runner
from torch.utils.data import DataLoader

from beit_mm.checkpoint.read import as_checkpoint_error
from beit_mm.engine.optim import match_groups
from beit_mm.errors import UserError, warn
from beit_mm.files import quoted
from beit_mm.terminal import without_output

# The sections of a config that say what is trained, and how.
SECTIONS = 'model train_dataloader train_cfg optim_wrapper param_scheduler auto_scale_lr default_hooks custom_hooks'
NOT_SET = 'not set'
CHOSEN = 'resumed_from'  # in the message hub, of this call only: the file that `resume_instead` chose


def asked_for(runner: Runner) -> tuple[bool | str, str | None]:
    """A run's `resume` and `load_from`."""
    # mmengine 0.10.7 and onedl-mmengine 0.10.12 keep them under private names alone, and the config may lack them.
    resume = getattr(runner, '_resume', runner.cfg.get('resume', False))
    return resume, getattr(runner, '_load_from', runner.cfg.get('load_from'))


def resumed_from(runner: Runner) -> str | None:
    """The checkpoint that a training goes on from; None if it starts from the beginning."""
    resume, load_from = asked_for(runner)
    return runner.message_hub.get_info(CHOSEN, (load_from or runner.work_dir) if resume else None)


def resume_instead(runner: Runner, path: str | None) -> None:
    """Makes a run resume from `path`, whatever it asked for; None: it starts afresh, with the weights it asked for."""
    _, weights = asked_for(runner)

    @cache  # the Runner calls it when its weights are initialised, and again for a test after the training
    def load_or_resume() -> None:
        if path is not None:
            runner.resume(path)
        elif weights is not None:
            runner.load_checkpoint(weights)

    runner.load_or_resume = load_or_resume  # type: ignore[method-assign]
    runner._resume = path is not None  # by which an EMAHook tells the weights in a file from their average
    runner.message_hub.update_info(CHOSEN, path, resumed=False)


def batch_size_of(loader: DataLoader) -> int | None:
    """Images in a batch of one process; None if a batch sampler does not say it."""
    return loader.batch_size or getattr(loader.batch_sampler, 'batch_size', None)


def sampler_of(loader: DataLoader) -> Any:
    """What orders the images: a batch sampler has it, if one is set, and `loader.sampler` is an unused one of torch."""
    samplers = [getattr(loader, 'batch_sampler', None), loader]  # mmpretrain's vis_scheduler.py uses a list as loader
    return next((part.sampler for part in samplers if hasattr(part, 'sampler')), None)


def batch_units(runner: Runner) -> dict[str, dict[str, int]]:
    """What a position counts, as `batch`: `images` of all processes, batches `accumulated`, `per_epoch`; or {}."""
    loader = runner.train_dataloader
    accumulated = runner.cfg.get('optim_wrapper', {}).get('accumulative_counts', 1)
    if (images := batch_size_of(loader)) is None:
        return {}
    return dict(batch=dict(images=get_world_size() * images, accumulated=accumulated, per_epoch=len(loader)))


def fit_position(runner: Runner, path: str, meta: dict, weights: dict) -> bool:
    """Converts the position in a checkpoint's meta and weights to this run's batches; returns whether these differ."""
    stored, batch = meta['batch'], batch_units(runner)['batch']
    old, new = (entry['images'] * entry['accumulated'] for entry in (stored, batch))
    if old != new:
        raise UserError(
            f'{path}: the checkpoint was trained with {old} images a step, this run has {new}; change batch_size'
        )
    by_epoch = isinstance(runner.train_loop, EpochBasedTrainLoop)
    moved = stored['images'] != batch['images'] or (by_epoch and stored['per_epoch'] != batch['per_epoch'])
    if moved:
        epoch, seen = divmod(meta['iter'], stored['per_epoch'])
        counted = epoch * batch['per_epoch'] + seen * stored['images'] // batch['images']
        was, now = (f'{entry["per_epoch"]} batches of {entry["images"]} images an epoch' for entry in (stored, batch))
        warn(f'Iteration {meta["iter"]}, with {was}, becomes {counted}, with {now}; schedules count these.')
        if 'steps' in weights:  # of DiscreteVAE, whose temperature is a schedule too
            weights['steps'] = (weights['steps'] + counted - meta['iter']).clamp(min=0)
        meta['iter'] = counted
    if by_epoch and meta['iter'] > (meta['epoch'] + 1) * batch['per_epoch']:  # the earlier run only counted iterations
        meta['epoch'] = meta['iter'] // batch['per_epoch']
    return moved


def follow_config(runner: Runner, path: str, checkpoint: dict, config: dict) -> bool:
    """Changes the checkpoint of a file to this run's settings and batches; returns whether the batches differ.

    Without CheckpointMetaHook a file has its config as mmengine's text.
    """
    meta = checkpoint['meta']
    with as_checkpoint_error(path):
        says_batch = 'batch' in meta and 'batch' in batch_units(runner)
        moved = says_batch and fit_position(runner, path, meta, checkpoint['state_dict'])
        stored = meta['config_dict'] if 'config_dict' in meta else values_in(meta.get('cfg', ''))
        current = config if 'config_dict' in meta else values_in(runner.cfg.pretty_text)
        changes = changed_settings(current, stored) if stored else {}
    if changes:
        lines = [f'\n  {quoted(name)} {new:.100}, was {old:.100}' for name, (new, old) in changes.items()]
        warn(f"The config differs from the checkpoint's, and applies from iteration {meta['iter']} on:{''.join(lines)}")
    if not stored:
        warn(f"{path} holds no config: this run's config applies from iteration {meta['iter']} on.")
    if not says_batch and changes.keys() & {'train_dataloader.batch_size', 'optim_wrapper.accumulative_counts'}:
        warn(f'Iteration {meta["iter"]} is not converted, because the number of images in a batch is unknown.')
    kind, old = changes.get('optim_wrapper.optimizer.type', (NOT_SET, NOT_SET))
    if old != NOT_SET:
        raise UserError(f'{kind} cannot use the state of {old}; set {old} again, or load only the weights: load_from')
    if changes or moved or not stored:
        set_states(runner, checkpoint, moved)
    return moved


def values_in(text: str) -> dict[str, Any]:
    """The settings in a config's text, as mmengine writes it, without running it; {} if it is not Python."""

    def value(node: ast.expr) -> Any:
        with suppress(ValueError):
            return ast.literal_eval(node)
        if isinstance(node, (ast.List, ast.Tuple)):
            return [value(item) for item in node.elts]
        if isinstance(node, ast.Dict):  # of keys that are not names
            return {value(key): value(item) for key, item in zip(node.keys, node.values, strict=True) if key}
        if isinstance(node, ast.Call) and ast.unparse(node.func) == 'dict':
            entries = [*map(value, node.args), {word.arg: value(word.value) for word in node.keywords}]
            return {key: item for entry in entries for key, item in dict(entry).items()}
        return ast.unparse(node)  # of a class, or inf

    try:
        lines = ast.parse(text).body
    except (SyntaxError, MemoryError):  # the latter of brackets nested too deeply
        return {}
    return {ast.unparse(line.targets[0]): value(line.value) for line in lines if isinstance(line, ast.Assign)}


def changed_settings(config: dict, other: dict) -> dict[str, tuple[str, str]]:
    """Settings of a training that differ between two configs: name -> (value in `config`, value in `other`)."""
    values, others = settings_by_name(config), settings_by_name(other)
    names = [name for name in {**values, **others} if name.partition('.')[0] in SECTIONS.split()]
    pairs = {name: (values.get(name, NOT_SET), others.get(name, NOT_SET)) for name in names}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def settings_by_name(value: Any, name: str = '') -> dict[str, str]:
    """The values in nested dicts and lists of dicts, by their names in --cfg-options."""
    if isinstance(value, (list, tuple)) and any(isinstance(item, dict) for item in value):
        value = dict(enumerate(value))
    if not isinstance(value, dict):
        return {name: repr(value)}
    settings: dict[str, str] = {}
    for key, item in value.items():
        settings |= settings_by_name(item, f'{name}.{key}'.lstrip('.'))
    return settings


def set_states(runner: Runner, checkpoint: dict, moved: bool) -> None:
    """Changes a checkpoint's optimizer and schedulers to the config's settings; moments and counters stay."""
    if isinstance(runner.optim_wrapper, OptimWrapperDict):
        return warn('With several optimizers, settings and schedules come from the checkpoint, not from the config.')
    wrapper = runner.optim_wrapper = runner.build_optim_wrapper(runner.optim_wrapper)
    schedulers = runner.param_schedulers = runner.build_param_scheduler(runner.param_schedulers or [])
    optimizer, states = wrapper.optimizer, checkpoint.get('param_schedulers') or []
    # Some optimizers keep state in their groups, besides the arguments that they were built with.
    kept = optimizer.defaults.keys() - inspect.signature(type(optimizer)).parameters.keys()
    measuring = any(getattr(scheduler, 'need_val_args', False) for scheduler in schedulers)
    if measuring and [scheduler.state_dict().keys() for scheduler in schedulers] == [state.keys() for state in states]:
        names = {scheduler.param_name for scheduler in schedulers}
        kept |= names | {f'initial_{name}' for name in names}
        warn(f'With ReduceOnPlateau, schedules and {", ".join(names)} come from the checkpoint, not from the config.')
    else:
        # The clock moves the schedules of a timed run, so they have their own count.
        counts = [state['_global_step'] for state in states if not state['by_epoch']]
        steps = counts[0] if counts and not moved else checkpoint['meta']['iter']
        take_steps(runner, schedulers, steps, checkpoint['meta']['epoch'])
        checkpoint['param_schedulers'] = [scheduler.state_dict() for scheduler in schedulers]
    saved = checkpoint['optimizer']
    match_groups(saved, optimizer)
    pairs = [*zip(saved['param_groups'], optimizer.state_dict()['param_groups'], strict=True)]
    if wrapper.base_param_settings is not None:  # mmengine's own group, logged as base_lr
        pairs.append((saved.setdefault('base_param_settings', {}), wrapper.base_param_settings))
    for group, settings in pairs:
        group.update({key: value for key, value in settings.items() if key not in kept or key not in group})


def take_steps(runner: Runner, schedulers: Sequence, steps: int, epochs: int) -> None:
    """Steps new schedulers to a position one by one, as a run does: each value is computed from the one before."""
    epochs = epochs if isinstance(runner.train_loop, EpochBasedTrainLoop) else 0
    per_epoch = len(runner.train_dataloader)
    with without_output():  # mmengine warns that the optimizer has not stepped yet
        for step in range(1, min(steps, runner.max_iters) + 1):
            ended = step % per_epoch == 0 and step // per_epoch <= epochs
            for scheduler in sorted(schedulers, key=lambda scheduler: scheduler.by_epoch):
                if ended or not scheduler.by_epoch:
                    scheduler.step()

"""A run's checkpoints, each complete on the disk, which resume a run to the last bit."""

import math
import os
import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import mmengine
import numpy as np
from mmengine.dist import all_gather_object, broadcast, broadcast_object_list, is_main_process, master_only
from mmengine.hooks import EarlyStoppingHook, EMAHook, Hook
from mmengine.optim import OptimWrapper
from mmengine.runner import EpochBasedTrainLoop, Runner
from mmengine.utils import apply_to
from torch import Tensor

from beit_mm.checkpoint.description import FORMAT_VERSION, meta_of
from beit_mm.checkpoint.read import CheckpointError, as_checkpoint_error, read_checkpoint, save_torch
from beit_mm.datasets.samplers import SeededSampler
from beit_mm.engine.resuming import asked_for, batch_units, follow_config, resume_instead, resumed_from, sampler_of
from beit_mm.engine.steps import unwrap
from beit_mm.errors import UserError, check_choice, log, warn
from beit_mm.files import atomic_file, inert, remove_leftovers
from beit_mm.models.provenance import backbone_of, preprocessing_of_model, target_provenance
from beit_mm.registry import HOOKS

PLAIN_TYPES = (str, int, float, bool, type(None))
NUMBERED = re.compile(r'(epoch|iter)_\d+\.pth')
RUN_FILE = 'run_id'  # in the work directory: names the last run that wrote there
LAST = 'last_checkpoint'  # as in mmengine: holds the path of the checkpoint that was written last
INTERRUPTED = 'interrupted.pth'  # written when a signal ends the run
VALIDATED = 'last_validation'  # in the message hub: the iteration of the last complete validation
KEPT = 'kept_checkpoints'  # in the message hub: names of the run's numbered checkpoints on the disk
RESTARTS = ('TORCHELASTIC_RESTART_COUNT', 'SLURM_RESTART_COUNT')  # above 0 after a restart by the launcher
HIGHER_IS_BETTER = ('acc', 'top', 'ar@', 'auc', 'precision', 'map', 'mdice', 'iou')  # mmengine's and IoU/<class>


@HOOKS.register_module()
class CheckpointHook(Hook):
    """Saves checkpoints, and chooses the one that a run resumes from.

    The files are named as mmengine's: `epoch_N.pth` or `iter_N.pth`, `best_METRIC_epoch_N.pth` (weights only), and
    `last_checkpoint`, a text file with the path of the newest one. While gradients are being accumulated, a checkpoint
    waits for the step that uses them.

    With `resume=True` and no `load_from`, with `resume='auto'`, or after a restart by torchrun or Slurm, the run
    resumes from the newest readable checkpoint of the folder's last run; without one it starts afresh.

    Args:
        interval: epochs or iterations between two checkpoints; -1 saves none but the last.
        by_epoch: whether the interval is in epochs.
        max_keep_ckpts: how many of the numbered checkpoints to keep; -1 keeps all.
        save_last: whether to save the end of the training too.
        save_best: metrics whose best checkpoint is kept; 'auto' is the first metric of a validation.
        rule: 'greater' or 'less', whichever is better; by default the metric's name decides.
    """

    priority = 'VERY_LOW'  # after all other hooks, so that what they changed is saved

    def __init__(
        self,
        interval: int = -1,
        by_epoch: bool = True,
        max_keep_ckpts: int = -1,
        save_last: bool = True,
        save_best: str | Sequence[str] | None = None,
        rule: str | None = None,
    ):
        check_choice('rule', rule, ('greater', 'less', None))
        self.interval, self.save_last = interval, save_last
        self.unit = 'epoch' if by_epoch else 'iter'
        self.max_keep_ckpts, self.rule = max_keep_ckpts, rule
        self.save_best = [save_best] if isinstance(save_best, str) else list(save_best or ())
        self.run_id = ''  # id that the run's checkpoints share
        self.due: str | None = None  # name of the checkpoint to be saved
        self.kept: list[str] = []  # names of this run's numbered checkpoints on the disk, oldest first

    def before_run(self, runner: Runner) -> None:
        """Chooses the checkpoint to resume from."""
        if not is_training(runner):
            return
        folder = Path(runner.work_dir)
        if is_main_process():
            remove_leftovers(folder)
        resume, weights = asked_for(runner)
        is_searched = resume == 'auto' or (resume and weights is None)
        # torchrun counts restarts on each node: a node that lost no process has 0
        is_restarted = any(all_gather_object(any(int(os.environ.get(name) or 0) for name in RESTARTS)))
        if not (is_searched or is_restarted):
            return
        path = in_main_process(lambda: newest_checkpoint(folder, is_restarted))
        if path is not None:
            if not all(all_gather_object(Path(path).is_file())):
                raise UserError(f'{path} is not on all nodes; put --work-dir on a file system that they share')
            resume_instead(runner, path)
            if weights is not None:
                log(f'load_from={weights} is not read: the weights come from {path}.')
        elif is_searched:
            resume_instead(runner, None)
            warn(f'No checkpoint of this run in {folder}: the run starts from the beginning, load_from={weights}.')

    def after_load_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        """Takes over the id, position, seed and files of the resumed run."""
        meta, path = meta_of(checkpoint), resumed_from(runner)
        if path is None:
            return
        moved = resume_by_config(runner, path, checkpoint)
        if 'run' not in meta:  # mmengine wrote the file
            return
        run_id = meta['run']
        self.run_id = run_id if isinstance(run_id, str) and re.fullmatch(r'\w{1,40}', run_id) else ''
        keep_seed(runner, meta['seed'])
        with as_checkpoint_error(path):
            info = checkpoint['message_hub']['runtime_info']
            if moved:
                info.pop(VALIDATED, None)
            if Path(path).resolve().parent == Path(runner.work_dir).resolve():
                self.kept = [name for name in info.get(KEPT, ()) if NUMBERED.fullmatch(name)]
            else:  # in another folder: the files of the earlier run stay
                for key in [key for key in info if key.startswith('best_number')]:
                    del info[key]

    def before_train(self, runner: Runner) -> None:
        for name, buffer in runner.model.named_buffers():
            if runner.iter == 0 and name.removeprefix('module.') == 'steps':
                buffer.zero_()  # DiscreteVAE's temperature begins anew, as the learning rate does
        if self.unit == 'epoch' and self.interval > 0 and not isinstance(runner.train_loop, EpochBasedTrainLoop):
            warn('The CheckpointHook counts epochs, the run iterations: set by_epoch=False, or only its end is saved.')
        self.run_id = self.run_id or f'{runner.timestamp}_{secrets.token_hex(4)}'
        runner.message_hub.update_info(KEPT, self.kept)
        if is_main_process():
            with suppress(OSError), atomic_file(Path(runner.work_dir, RUN_FILE)) as file:
                file.write(self.run_id.encode())

    def after_train(self, runner: Runner) -> None:
        if self.save_last and runner.iter < runner.max_iters and self.current_name(runner) not in self.kept:
            self.due = self.current_name(runner)  # another hook has ended the run
            self.save_due(runner, ended=True)

    def current_name(self, runner: Runner) -> str:
        return f'{self.unit}_{getattr(runner, self.unit)}.pth'

    def after_train_iter(self, runner: Runner, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        last = self.save_last and self.is_last_train_iter(runner)
        if self.unit == 'iter' and (last or self.every_n_train_iters(runner, self.interval)):
            self.due = f'iter_{runner.iter + 1}.pth'
        self.save_due(runner, epoch=runner.epoch, iter=runner.iter + 1)

    def after_train_epoch(self, runner: Runner) -> None:
        last = self.save_last and self.is_last_train_epoch(runner)
        if self.unit == 'epoch' and (last or self.every_n_epochs(runner, self.interval)):
            self.due = f'epoch_{runner.epoch + 1}.pth'
        self.save_due(runner, epoch=runner.epoch + 1, iter=runner.iter)

    def before_val_epoch(self, runner: Runner) -> None:
        # Each process has its own statistics of batch norm; only those of the main process are saved.
        for buffer in unwrap(runner).buffers():
            broadcast(buffer)

    def after_val_epoch(self, runner: Runner, metrics: dict[str, float] | None = None) -> None:
        if not is_training(runner):
            return
        runner.message_hub.update_info(VALIDATED, runner.iter)
        for metric in self.save_best:
            self.save_if_best(runner, metric, metrics or {})

    def save_due(self, runner: Runner, ended: bool = False, **position: int) -> None:
        # Between accumulated batches a run cannot be resumed exactly.
        if self.due is None or not (ended or runner.optim_wrapper.should_update()):
            return
        name, self.due = self.due, None
        others = [other for other in self.kept if other != name]
        self.kept = [*others, name]
        # Stored before the deletion, so that a resumed run deletes what a killed one left.
        runner.message_hub.update_info(KEPT, self.kept)
        outdated = self.kept[: -self.max_keep_ckpts] if self.max_keep_ckpts > 0 else []
        path = self.save(runner, name, replaces=[*outdated, INTERRUPTED], **position)
        self.kept = others if path is None else self.kept[len(outdated) :]

    def save_if_best(self, runner: Runner, metric: str, metrics: dict[str, float]) -> None:
        """Saves the weights if a metric is the best so far."""
        metric = next(iter(metrics), metric) if metric == 'auto' else metric
        if metric not in metrics:
            raise UserError(f'save_best is {metric!r}; the validation measures {", ".join(metrics) or "nothing"}')
        higher = self.is_higher_better(metric)
        hub, number = runner.message_hub, getattr(runner, self.unit)
        best = -math.inf if higher else math.inf
        if any(Path(runner.work_dir).glob(f'best_{metric}_*.pth'.replace('/', '_'))):
            best = hub.get_info('best_score', best)  # of 0.3.0, which followed a single metric
        best = hub.get_info(f'best_score_{metric}', best)
        if not (metrics[metric] > best if higher else metrics[metric] < best):
            return
        numbers = hub.get_info(f'best_number_{metric}', hub.get_info('best_number', number)), number
        old, name = (f'best_{metric}_{self.unit}_{one}.pth'.replace('/', '_') for one in numbers)
        if self.save(runner, name, resumable=False, replaces=[old] if old != name else []) is not None:
            hub.update_info(f'best_score_{metric}', metrics[metric])
            hub.update_info(f'best_number_{metric}', number)

    def is_higher_better(self, metric: str) -> bool:
        if self.rule is not None:
            return self.rule == 'greater'
        higher = any(word in metric.lower() for word in HIGHER_IS_BETTER)
        if not higher and 'loss' not in metric.lower():
            raise UserError(f"whether a high {metric} is good is unknown; set the CheckpointHook's rule")
        return higher

    def save_interrupted(self, runner: Runner) -> Path | None:
        """Writes `interrupted.pth`, unless the run stops in its last validation: then its last checkpoint serves."""
        name = self.current_name(runner)
        if runner.iter == runner.max_iters and name in self.kept:
            return Path(runner.work_dir, name)
        return self.save(runner, INTERRUPTED)

    @master_only
    def save(self, runner: Runner, name: str, resumable: bool = True, replaces: Sequence = (), **meta) -> Path | None:
        """Writes a checkpoint, then deletes the files that it replaces; None if writing fails, and in other processes.

        `meta`: `epoch` and `iter` of the next step, by default the current ones.
        """
        path = Path(runner.work_dir, name)
        content = run_state(runner, resumable, dict(meta, run=self.run_id))
        try:
            with atomic_file(path) as file:
                save_torch(content, file)
            if resumable:
                with atomic_file(Path(runner.work_dir, LAST)) as file:
                    file.write(os.fsencode(path))
            for old in replaces:
                path.with_name(old).unlink(missing_ok=True)
        except OSError as error:
            warn(f'{path} could not be written ({error}); the training continues, older checkpoints stay.')
            return None
        log(f'{path} is saved.')
        return path


def resume_by_config(runner: Runner, path: str, checkpoint: dict) -> bool:
    """Makes the content of a file that is resumed fit the run's config; returns whether the batches differ."""
    meta = meta_of(checkpoint)
    if 'optimizer' not in checkpoint or 'iter' not in meta:
        raise CheckpointError(f'{path} has only weights to load_from, not a run to resume')
    with as_checkpoint_error(path):
        checkpoint['message_hub']['runtime_info'].pop('cfg', None)  # this run has its own
        if not any(isinstance(hook, EMAHook) for hook in runner.hooks):
            undo_average(checkpoint)
    return follow_config(runner, path, checkpoint, plain_values(runner.cfg.to_dict()))


def undo_average(checkpoint: dict) -> None:
    """Puts the trained weights back in their place, where an EMAHook stored their average."""
    swapped = checkpoint.get('ema_state_dict', {})
    trained = {name.removeprefix('module.'): swapped[name] for name in swapped if name.startswith('module.')}
    checkpoint['state_dict'].update(trained)


def keep_seed(runner: Runner, seed: int) -> None:
    """Gives the sampler the seed that the run began with, as the Runner does for the rest; warns if another is set."""
    given = runner.cfg.get('randomness', {}).get('seed')
    if given not in (None, seed):
        warn(f'randomness.seed={given} has no effect: a run keeps the seed that it began with, {seed}.')
    sampler = sampler_of(runner.train_dataloader)
    if isinstance(sampler, SeededSampler) and sampler.seed == runner.seed:  # the config gave the sampler no seed
        sampler.seed = seed


def is_training(runner: Runner) -> bool:
    """Whether the run trains: mmengine has then built its optimizer wrapper by now."""
    return isinstance(runner.optim_wrapper, OptimWrapper)


def checkpoint_hook_of(runner: Runner) -> CheckpointHook | None:
    """The run's CheckpointHook; None if it uses another hook."""
    return next((hook for hook in runner.hooks if isinstance(hook, CheckpointHook)), None)


def in_main_process(function: Callable[[], Any]) -> Any:
    """Calls a function in the main process; all processes get its result, or its UserError or OSError."""
    answer: list[Any] = [None, None]
    if is_main_process():
        try:
            answer[0] = function()
        except (UserError, OSError) as error:
            answer[1] = error
    broadcast_object_list(answer)
    if answer[1] is not None:
        raise answer[1]
    return answer[0]


def newest_checkpoint(folder: Path, restarted: bool = False) -> str | None:
    """Path of the newest checkpoint that the folder's last run can resume from; None if it has saved none.

    The newest is the one that `last_checkpoint` names, then `interrupted.pth`, then the one with the highest number.

    Args:
        restarted: a launcher has restarted the run, which may have saved nothing yet.
    """
    run_file, last_file = folder / RUN_FILE, folder / LAST
    last_run = run_file.read_text(errors='replace').partition(' ')[0] if run_file.is_file() else None  # 0.3.0 adds iter
    last_written = Path(last_file.read_text(errors='replace')).name if last_file.is_file() else ''
    numbered = [path for path in folder.glob('*.pth') if NUMBERED.fullmatch(path.name)]
    numbered.sort(key=lambda path: int(path.stem.partition('_')[2]), reverse=True)
    candidates = [*folder.glob(INTERRUPTED), *numbered]
    candidates.sort(key=lambda path: path.name != last_written)  # that one first; the others keep their order
    earlier, unusable = [], []
    for path in candidates:
        try:
            meta = meta_of(read_checkpoint(path))
        except (CheckpointError, OSError) as error:
            unusable.append(str(error).replace(f'{folder}/', '').rstrip('.'))
            continue
        if last_run is not None and meta.get('run', last_run) != last_run:
            earlier.append(path.name)
            continue
        if unusable:
            warn(f'Skipped checkpoints: {"; ".join(unusable)}.')
        log(f'Resuming from {path}, the newest checkpoint.')
        return str(path)
    if unusable:
        raise CheckpointError(f"None of this run's checkpoints in {folder} can be resumed: {'; '.join(unusable)}")
    if earlier and not restarted:
        found = f'{folder} has checkpoints of an earlier run only'
        raise CheckpointError(f'{found}; start without --resume, or give --resume {earlier[0]}')
    return None


def run_state(runner: Runner, resumable: bool, meta: dict) -> dict[str, Any]:
    """What mmengine's Runner writes into a checkpoint, with all tensors on the CPU."""
    meta = dict(epoch=runner.epoch, iter=runner.iter) | meta
    meta |= dict(
        cfg=inert(runner.message_hub.runtime_info.get('cfg', '')),  # text that mmengine's inferencers ask for
        **batch_units(runner),
        seed=runner.seed,
        experiment_name=runner.experiment_name,
        time=time.strftime('%Y%m%d_%H%M%S'),
        mmengine_version=mmengine.__version__,
    )
    if (dataset_meta := getattr(runner.train_dataloader.dataset, 'metainfo', None)) is not None:
        meta['dataset_meta'] = dataset_meta
    content = dict(meta=meta, state_dict=unwrap(runner).state_dict(), message_hub=dict(runner.message_hub.state_dict()))
    if resumable:
        content['optimizer'] = runner.optim_wrapper.state_dict()
        states = [scheduler.state_dict() for scheduler in runner.param_schedulers or []]
        for state in states:
            state.pop('anneal_func', None)  # of OneCycleLR: a function, which no checkpoint may name
        content['param_schedulers'] = states
    runner.call_hook('before_save_checkpoint', checkpoint=content)
    on_cpu = apply_to(content, lambda value: isinstance(value, Tensor), lambda tensor: tensor.detach().cpu())
    # torch's own dict, because it holds the versions of the modules too
    content['state_dict'].update(on_cpu['state_dict'])
    return dict(on_cpu, state_dict=content['state_dict'])


@HOOKS.register_module()
class CheckpointMetaHook(Hook):
    """Writes config, preprocessing and tokenizer into each checkpoint; warns if a loaded one had another tokenizer.

    mmengine would store the config as Python text, which has to be executed, and the log as pickled objects, which
    torch.load refuses.
    """

    priority = 'VERY_LOW'  # last to change the content

    def before_save_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        model, meta = unwrap(runner), checkpoint['meta']
        meta['beit_mm_format'] = FORMAT_VERSION
        if 'batch' not in meta:  # after mmengine's CheckpointHook
            meta |= batch_units(runner)
        meta['config_dict'] = plain_values(runner.cfg.to_dict())
        meta['preprocessing'] = preprocessing_of_model(model)
        meta['architecture'] = {}  # what the shapes of the weights do not show
        if (backbone := backbone_of(model)) is not None:
            shown = dict(num_heads=backbone.num_heads, interpolate_mode=backbone.interpolate_mode)
            meta['architecture'] = dict(shown, out_indices=list(backbone.out_indices))
        if (provenance := target_provenance(model)) is not None:
            meta['tokenizer'] = provenance
        for hook in runner.hooks:
            if isinstance(hook, EMAHook):  # mmpretrain's LoRAModel drops the count, and the average would begin anew
                checkpoint.get('ema_state_dict', {}).update(hook.ema_model.named_buffers(recurse=False))
        info = {**checkpoint['message_hub']['runtime_info'], **early_stopping(runner)}.items()
        storable = (*PLAIN_TYPES, np.generic, Tensor, dict, list, tuple)
        kept = {key: plain_values(item) for key, item in info if isinstance(item, storable)}
        checkpoint['message_hub'] = stored_hub(kept)

    def after_load_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        resumed, (_, load_from) = resumed_from(runner), asked_for(runner)
        with as_checkpoint_error(resumed or load_from or 'the checkpoint'):
            warn_of_other_targets(meta_of(checkpoint).get('tokenizer'), target_provenance(unwrap(runner)))
            if resumed is None or 'message_hub' not in checkpoint:
                return
            # No text: the file's `cfg` would get into this run's checkpoints, and mmengine executes it.
            info = checkpoint['message_hub']['runtime_info'].items()
            kept = {key: item for key, item in info if isinstance(item, (int, float, Tensor)) and key.isprintable()}
            checkpoint['message_hub'] = stored_hub(kept)
            early_stopping(runner, kept)


def warn_of_other_targets(stored: dict | None, current: dict | None) -> None:
    """Warns if a checkpoint was trained on other targets; paths may differ, as the same file may lie elsewhere."""
    if not stored or not current:
        return
    keys = [key for key in stored | current if not key.endswith('path')]
    if any(stored.get(key) != current.get(key) for key in keys):
        warn(f'The checkpoint was trained on the targets of {stored}; this run has {current}.')


def early_stopping(runner: Runner, stored: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The state of each EarlyStoppingHook, which mmengine does not store; first restores `stored` values, if given."""
    state = {}
    hooks = [hook for hook in runner.hooks if isinstance(hook, EarlyStoppingHook)]
    for hook in hooks:
        for name in ('wait_count', 'best_score'):
            key = f'early_stopping_{name}_{hook.monitor}'
            if stored and isinstance(stored.get(key), (int, float)):
                setattr(hook, name, stored[key])
            state[key] = getattr(hook, name)
    return state


def plain_values(value: Any) -> Any:
    """Copies nested containers with their plain values and tensors; anything else becomes its text."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, dict):
        return {key if isinstance(key, PLAIN_TYPES) else str(key): plain_values(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = map(plain_values, value)
        return tuple(items) if type(value) is tuple else list(items)
    return value if type(value) in (*PLAIN_TYPES, Tensor) else str(value)


def stored_hub(info: dict) -> dict:
    """A message hub as mmengine stores it, without the history of the log."""
    return dict(log_scalars={}, runtime_info=info, resumed_keys=dict.fromkeys(info, True))

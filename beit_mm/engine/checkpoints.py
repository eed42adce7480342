"""A run's checkpoints: never half there, with all that a run needs to go on as if it had never stopped.

What is drawn in a step follows from its number (engine.steps.StepSeedHook), and what a sample looks like from its key
(datasets.samplers), so no state of a random generator is stored anywhere.
"""

import copy
import logging
import os
import re
import secrets
import time
import zipfile
import zlib
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import mmengine
import numpy as np
import torch
from mmengine.dist import all_gather_object, broadcast_object_list, get_world_size, is_main_process, master_only
from mmengine.hooks import CheckpointHook as EngineCheckpointHook
from mmengine.hooks import Hook
from mmengine.logging import HistoryBuffer, print_log
from mmengine.runner import BaseLoop, Runner
from torch import Tensor

from beit_mm.checkpoint.names import FORMAT_VERSION, meta_of
from beit_mm.checkpoint.read import CheckpointError, blaming, check_zip, read_checkpoint, save_torch
from beit_mm.datasets.samplers import SeededSampler
from beit_mm.engine.checks import backbone_of, preprocessing_of_model, tokenizer_provenance, unwrap
from beit_mm.engine.steps import fetch_logs
from beit_mm.files import atomic_file, inert, remove_leftovers
from beit_mm.registry import HOOKS
from beit_mm.terminal import UserError

PLAIN_TYPES = (str, int, float, bool, type(None))
RUN = re.compile(r'\w{1,40}')  # `new_run`
RUN_FILE = 'run_id'  # in the checkpoints' folder: the run that writes there
INTERRUPTED = 'interrupted.pth'  # written when a signal ends the run
IGNORED = {'backend_args', 'file_client_args', 'filename_tmpl', 'save_optimizer', 'save_param_scheduler'}
RESTARTS = ('TORCHELASTIC_RESTART_COUNT', 'SLURM_RESTART_COUNT')  # set where a launcher has started the run again


class EarlierRunError(CheckpointError):
    """A folder's checkpoints are of an earlier run; no reason for a run that is restarted not to begin."""


@HOOKS.register_module()
class CheckpointHook(EngineCheckpointHook):
    """mmengine's CheckpointHook that always leaves a good checkpoint on the disk, and finds it again.

    A file gets its name when all of it is there, and the one that it takes the place of goes after that. A full or
    read-only disk ends no run: the log says so, and the last good file stays. Where gradients are accumulated a
    checkpoint waits for the step that uses them. A run that is to be resumed (or that torchrun or Slurm has started
    again) goes on from the newest file of the folder's last run (named in `run_id`) that can be read; what a killed
    process left half written is removed.

    Args:
        kwargs: mmengine's: interval, by_epoch, max_keep_ckpts, save_best, out_dir, ...

    Raises:
        CheckpointError: there are checkpoints to resume from, but none of the last run that can be read.
        ValueError: the effective batch is not the checkpoint's; an option of mmengine's that has no use here.
    """

    keep_ckpt_ids: deque[int]  # numbers of the checkpoints that are kept; mmengine sets it

    def __init__(self, *args, **kwargs):
        if ignored := sorted(IGNORED & kwargs.keys()):
            raise UserError(
                f'CheckpointHook has no {", ".join(ignored)}: it writes local files that a run resumes from'
            )
        super().__init__(*args, **kwargs)
        if '://' in str(self.out_dir or ''):
            raise UserError(f'out_dir is {self.out_dir!r}; expected a local folder')
        self.run = ''  # of which start from the beginning the checkpoints are
        self.outdated: list[str] = []  # names of files to be removed once another one is written
        self.postponed: int | None = None  # number of a checkpoint that waits for the end of an accumulation

    # --- going on ---------------------------------------------------------------------------------

    def before_run(self, runner: Runner) -> None:
        """Cleans up, and chooses the checkpoint to go on from."""
        if not isinstance(runner._train_loop, BaseLoop):  # a test, perhaps beside the training
            return
        folder = self.folder(runner)
        if is_main_process():
            remove_leftovers(folder)
        # torchrun counts on each node for itself: where no process has died it says 0.
        restarted = any(all_gather_object(any(int(os.environ.get(name) or 0) for name in RESTARTS)))
        if not (runner._resume and runner._load_from is None or restarted):
            return
        found = [newest_checkpoint(folder)] if is_main_process() else [None]
        broadcast_object_list(found)
        if isinstance(found[0], CheckpointError) and not (restarted and isinstance(found[0], EarlierRunError)):
            raise found[0]
        if isinstance(found[0], str):
            runner._resume, runner._load_from = True, found[0]
        else:
            runner._resume = False  # a run of its own, with an id of its own
            print_log(f'No checkpoint of this run in {folder}: it starts at its beginning.', logger='current')

    def after_load_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        """Makes the position fit this run's batches, and notes which files the checkpoint has taken the place of."""
        meta = meta_of(checkpoint)
        if not runner._resume or 'epoch' not in meta:
            return
        check_position(meta, runner._load_from)
        if 'batch' not in meta:
            return
        run = meta.get('run')
        self.run = run if isinstance(run, str) and RUN.fullmatch(run) else new_run(runner)
        fit_position(checkpoint, batch_of(runner))
        sampler = runner.train_dataloader.sampler
        if isinstance(sampler, SeededSampler) and sampler.seed == runner.seed:  # where no config names one
            sampler.seed = meta['seed']
        if Path(runner._load_from).resolve().parent == self.folder(runner).resolve():
            outdated = meta.get('outdated')
            names = [name for name in outdated if self._is_ours(name)] if isinstance(outdated, list) else []
            self.outdated = [name for name in names if name != Path(runner._load_from).name]

    def before_train(self, runner: Runner) -> None:
        """mmengine's preparation; what it removes later is removed once the next file stands."""
        super().before_train(runner)
        self.file_backend = _Later(self.outdated)
        if not runner._resume:
            self.run = new_run(runner)
        if is_main_process():
            with suppress(OSError), atomic_file(Path(self.out_dir, RUN_FILE)) as file:
                file.write(self.run.encode())

    def folder(self, runner: Runner) -> Path:
        """Where the checkpoints are; mmengine sets `out_dir` later, in before_train."""
        if self.out_dir in (None, runner.work_dir):
            return Path(runner.work_dir)
        name = Path(runner.work_dir).name
        return Path(self.out_dir) if Path(self.out_dir).name == name else Path(self.out_dir, name)

    def _is_ours(self, name: Any) -> bool:
        """Whether a file's name is one of those that this hook gives."""
        return isinstance(name, str) and bool(re.fullmatch(r'(epoch|iter)_\d+\.pth|best_[^/\\]+\.pth', name))

    # --- saving -----------------------------------------------------------------------------------

    def after_train_iter(
        self, runner: Runner, batch_idx: int, data_batch: Any = None, outputs: dict | None = None
    ) -> None:
        """Saves where it is due, or was and had to wait."""
        super().after_train_iter(runner, batch_idx, data_batch, outputs)
        if self.postponed is not None and at_boundary(runner):
            step = self.postponed if self.by_epoch else runner.iter + 1
            self._save_checkpoint_with_step(runner, step, meta=dict(epoch=runner.epoch, iter=runner.iter + 1))

    def _save_checkpoint_with_step(self, runner: Runner, step: int, meta: dict) -> None:
        """Writes a numbered checkpoint and notes the one that goes for it; called by mmengine's methods."""
        if not at_boundary(runner):
            self.postponed = step
            return
        self.postponed = None
        name = self.filename_tmpl.format(step)
        if self.max_keep_ckpts > 0:
            kept = [number for number in self.keep_ckpt_ids if number != step] + [step]
            self.outdated += [self.filename_tmpl.format(number) for number in kept[: -self.max_keep_ckpts]]
            self.keep_ckpt_ids = deque(kept[-self.max_keep_ckpts :], self.max_keep_ckpts)
            runner.message_hub.update_info('keep_ckpt_ids', list(self.keep_ckpt_ids))
        self.last_ckpt = str(Path(self.out_dir, name))
        runner.message_hub.update_info('last_ckpt', self.last_ckpt)
        self.save(runner, name, **meta)

    def _save_best_checkpoint(self, runner: Runner, metrics: dict) -> None:
        super()._save_best_checkpoint(_Saver(runner, self), metrics)

    @master_only
    def save(self, runner: Runner, name: str, resumable: bool = True, **meta) -> Path | None:
        """Writes a checkpoint now, from the main process; other processes may call this and do nothing.

        Args:
            runner: the run.
            name: of the file in the checkpoints' folder; may begin with a new folder.
            resumable: with the optimizer's and the schedules' state; resuming takes it into account.
            meta: entries of the file's `meta`; `epoch` and `iter` are the position, by default the present one.

        Returns:
            The file; None where it cannot be written.
        """
        path, pointer, outdated = Path(self.out_dir, name), None, []
        if path.parent == Path(self.out_dir):
            pointer = Path(runner.work_dir, 'last_checkpoint') if resumable else None
            # only by their like: a best one that could be written is no reason to remove the last to resume from
            names = dict.fromkeys([*self.outdated, INTERRUPTED])
            outdated = [old for old in names if old.startswith('best_') != resumable and old != name]
        content = run_state(runner, resumable, dict(meta, outdated=outdated, run=self.run))
        copies = torch.cuda.current_stream().record_event() if torch.cuda.is_initialized() else None
        return self._write(path, content, pointer, outdated, copies)

    def _write(self, path: Path, content: dict, pointer: Path | None, outdated: list[str], copies: Any) -> Path | None:
        try:
            if copies is not None:
                copies.synchronize()  # to the host, which may still be under way
            with atomic_file(path) as file:
                save_torch(content, file)
                check_written(file)
            if pointer is not None:
                with atomic_file(pointer) as file:
                    file.write(os.fsencode(path))
            for name in outdated:
                Path(self.out_dir, name).unlink(missing_ok=True)
            self.outdated[:] = [name for name in self.outdated if name not in outdated]
        except OSError as error:
            message = f'{path} could not be written ({error}); the training goes on, older checkpoints stay.'
            print_log(message, logger='current', level=logging.WARNING)
            return None
        return path


class _Later:
    """Stands for the file backend where mmengine removes the file of which a new one takes the place, too early."""

    def __init__(self, outdated: list[str]):
        self.outdated = outdated

    def isfile(self, path: str) -> bool:
        return os.path.isfile(path)

    def isdir(self, path: str) -> bool:
        return os.path.isdir(path)

    def join_path(self, *parts: str) -> str:
        return os.path.join(*parts)

    def remove(self, path: str) -> None:
        self.outdated.append(os.path.basename(path))


class _Saver:
    """The runner, but for its `save_checkpoint`, which becomes CheckpointHook's."""

    def __init__(self, runner: Runner, hook: CheckpointHook):
        self._runner, self._hook = runner, hook

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def save_checkpoint(self, out_dir: str, filename: str, meta: dict, **kwargs: Any) -> None:
        self._hook.save(self._runner, filename, resumable=False, **meta)


def checkpoint_hook_of(runner: Runner) -> CheckpointHook | None:
    """The run's CheckpointHook; None where it has another one."""
    return next((hook for hook in runner.hooks if isinstance(hook, CheckpointHook)), None)


def new_run(runner: Runner) -> str:
    """An id for a run that begins now."""
    return f'{runner.timestamp}_{secrets.token_hex(4)}'


def at_boundary(runner: Runner) -> bool:
    """Whether no gradients wait for more of an accumulation: a place where a run can stop and go on exactly."""
    return bool(runner.optim_wrapper.should_update())


def newest_checkpoint(folder: Path) -> str | CheckpointError | None:
    """The resumable checkpoint of a folder's last run that is farthest on and can be read.

    Returns:
        Its path; None where there are no checkpoints; an error to raise where there are, but none can be read, or only
        those of an earlier run.
    """
    found, broken, others = [], [], []
    run_file = folder / RUN_FILE
    run = run_file.read_text(errors='replace') if run_file.is_file() else None
    for path in sorted(folder.glob('*.pth')):
        try:
            content = read_checkpoint(path, mapped=True)
            if 'optimizer' in content:
                meta = meta_of(content) if isinstance(content.get('state_dict'), dict) else {}
                check_position(meta, str(path))
                foreign = run is not None and meta.get('run', run) != run
                (others if foreign else found).append((meta['iter'], path))
        except (CheckpointError, OSError) as error:
            broken.append(f'{path.name} ({type(error).__name__})')
    for _, path in sorted(found, reverse=True):
        try:
            check_zip(path)
        except (OSError, CheckpointError, zipfile.BadZipFile, zlib.error) as error:
            broken.append(f'{path.name} ({error})')
            continue
        if broken:
            message = f'Passed over, since they cannot be read: {", ".join(broken)}.'
            print_log(message, logger='current', level=logging.WARNING)
        print_log(f'Going on from {path}, the newest checkpoint.', logger='current')
        return str(path)
    if broken:
        return CheckpointError(
            f'None of the checkpoints in {folder} can be read: {", ".join(broken)}; take them away to start anew'
        )
    if others:
        message = (
            f'{folder} has checkpoints of an earlier run only, such as {max(others)[1].name}; go on from one of them '
            'with --resume FILE, or start without --resume'
        )
        return EarlierRunError(message)
    return None


def check_written(file: BinaryIO) -> None:
    """Raises OSError unless a file that torch.save wrote is there to its end."""
    file.flush()
    try:
        with zipfile.ZipFile(file.name) as archive:
            written = sum(entry.file_size for entry in archive.infolist())
    except zipfile.BadZipFile as error:
        raise OSError(f'the file cannot be read back: {error}') from error
    if not 0 < written <= os.path.getsize(file.name):
        raise OSError('the file cannot be read back: parts of it are missing')


# --- what is in a file ----------------------------------------------------------------------------


def run_state(runner: Runner, resumable: bool, meta: dict) -> dict[str, Any]:
    """What mmengine's Runner writes into a checkpoint, with all tensors on the CPU or on their way there."""
    meta = dict(epoch=runner.epoch, iter=runner.iter) | meta
    meta |= dict(
        cfg=inert(runner.message_hub.runtime_info.get('cfg', '')),  # text that mmengine's inferencers ask for
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
        content['param_schedulers'] = [scheduler.state_dict() for scheduler in runner.param_schedulers or []]
    runner.call_hook('before_save_checkpoint', checkpoint=content)
    return map_tensors(content, on_host)


def map_tensors(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Nested containers with each tensor replaced; dicts stay what they are, with the `_metadata` of a module's."""
    if isinstance(value, Tensor):
        return function(value.detach())
    if isinstance(value, dict):
        mapped: Any = copy.copy(value)  # of its own type, with its attributes
        for key, item in value.items():
            mapped[key] = map_tensors(item, function)
        return mapped
    if isinstance(value, (list, tuple)) and not hasattr(value, '_fields'):
        return type(value)(map_tensors(item, function) for item in value)
    return value


def on_host(tensor: Tensor) -> Tensor:
    """The tensor in the CPU's memory; of a GPU's it is on its way there, in the order of the GPU's work."""
    if not tensor.is_cuda:
        return tensor
    try:
        return torch.empty_like(tensor, device='cpu', pin_memory=True).copy_(tensor, non_blocking=True)
    except RuntimeError:  # no more memory can be pinned
        return tensor.cpu()


@HOOKS.register_module()
class CheckpointMetaHook(Hook):
    """Writes the config, the logged history, the preprocessing and the origin of the visual tokens as plain values.

    mmengine stores its history as pickled objects, which torch.load refuses, and its config as Python text, which has
    to be executed to be read.
    """

    priority = 'VERY_LOW'  # last to touch the file, so that nothing is added after it

    def before_save_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        """Replaces the history's objects, and adds what only the run knows of its weights."""
        fetch_logs(runner)
        model, meta, hub = unwrap(runner), checkpoint['meta'], runner.message_hub.state_dict()
        meta['beit_mm_format'] = FORMAT_VERSION
        meta['batch'] = batch_of(runner)
        meta['config_dict'] = plain_values(runner.cfg.to_dict())
        meta['preprocessing'] = preprocessing_of_model(model)
        backbone = backbone_of(model)
        meta['architecture'] = {}  # what the shapes of the weights do not show
        if backbone is not None:
            meta['architecture'] = dict(num_heads=backbone.num_heads, out_indices=list(backbone.out_indices))
        if (provenance := tokenizer_provenance(model)) is not None:
            meta['tokenizer'] = provenance
        storable = (*PLAIN_TYPES, np.generic, Tensor, dict, list, tuple)
        info = {key: plain_values(value) for key, value in hub['runtime_info'].items() if isinstance(value, storable)}
        scalars = {}
        for key, history in hub['log_scalars'].items():
            values, counts = (torch.from_numpy(np.asarray(numbers, np.float64)) for numbers in history.data)
            scalars[key] = dict(values=values, counts=counts, max_length=history.max_length)
        resumed = {key: flag for key, flag in hub['resumed_keys'].items() if key in info or key in scalars}
        checkpoint['message_hub'] = dict(log_scalars=scalars, runtime_info=info, resumed_keys=resumed)

    def after_load_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        """Restores the history, and says so when the tokens are not those of the earlier run.

        Raises:
            ValueError: a run is to go on from a file that holds weights only.
        """
        meta = meta_of(checkpoint)
        if runner._resume and 'epoch' not in meta:
            raise UserError(
                'The checkpoint holds weights without the state of a run: there is nothing to resume. To start a new '
                'run from it, name it as load_from instead of --resume.'
            )
        with blaming(runner._load_from):
            before, now = meta.get('tokenizer'), tokenizer_provenance(unwrap(runner))
            if before and now and any(before.get(k) != now.get(k) for k in {*before, *now} if not k.endswith('path')):
                message = f'The checkpoint was trained on the visual tokens of {before}; this run has {now}.'
                print_log(message, logger='current', level=logging.WARNING)
            if runner._resume and 'message_hub' in checkpoint:
                checkpoint['message_hub'] = resumed_hub(runner, checkpoint['message_hub'])


def plain_values(value: Any) -> Any:
    """Nested containers with their plain values and tensors; anything else by its text."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, dict):
        return {key if isinstance(key, PLAIN_TYPES) else str(key): plain_values(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = map(plain_values, value)
        return tuple(items) if type(value) is tuple else list(items)
    return value if type(value) in (*PLAIN_TYPES, Tensor) else str(value)


def resumed_hub(runner: Runner, hub: dict) -> dict:
    """What a run takes over of a file's `message_hub`: the history of its log, numbers, and which files are its own.

    No text: mmengine would write the file's `cfg` into the run's checkpoints, where its inferencers execute it. No file
    that is no checkpoint of this run: CheckpointHook would delete it.
    """
    scalars = {}
    for key, history in hub['log_scalars'].items():
        if isinstance(history, dict):  # ours; mmengine's own are read as they are
            history = HistoryBuffer(history['values'].numpy(), history['counts'].numpy(), history['max_length'])
        if str(key).isprintable():  # the log shows it
            scalars[key] = history
    folders = [runner.work_dir, *(hook.out_dir for hook in runner.hooks if isinstance(hook, CheckpointHook))]
    folders = [Path(folder).resolve() for folder in folders if folder]
    info = {}
    for key, value in hub['runtime_info'].items():
        if key.startswith('best_ckpt'):
            path = Path(str(value)).resolve()
            ours = path.name.startswith('best_') and path.is_file()
            if ours and set(folders) & {path.parent, path.parent.parent}:
                info[key] = value
        elif key == 'keep_ckpt_ids':
            here = not runner._load_from or Path(runner._load_from).resolve().parent in folders
            if here and isinstance(value, list) and all(type(step) is int for step in value):
                info[key] = value
        elif isinstance(value, (int, float, Tensor)) and key.isprintable():
            info[key] = value
    resumed = {key: bool(flag) for key, flag in hub['resumed_keys'].items() if key in info or key in scalars}
    return dict(log_scalars=scalars, runtime_info=info, resumed_keys=resumed)


# --- position -------------------------------------------------------------------------------------


def batch_of(runner: Runner) -> dict[str, int]:
    """What a position counts: `images` of all processes in a batch, batches `accumulated`, batches `per_epoch`."""
    loader = runner.train_dataloader
    accumulated = runner.cfg.get('optim_wrapper', {}).get('accumulative_counts', 1)
    return dict(images=get_world_size() * loader.batch_size, accumulated=accumulated, per_epoch=len(loader))


def fit_position(checkpoint: dict, batch: dict[str, int]) -> None:
    """Counts position and schedules of a checkpoint in batches of this run, so that the order of images stays.

    Args:
        checkpoint: what is loaded; changed in place.
        batch: this run's (see `batch_of`).

    Raises:
        ValueError: another effective batch.
    """
    meta = checkpoint['meta']
    before = meta['batch']
    old, new = (entry['images'] * entry['accumulated'] for entry in (before, batch))
    if old != new:
        raise UserError(
            f'the checkpoint was trained with {old} images a step, this run has {new}: set train_dataloader.batch_size '
            'or optim_wrapper.accumulative_counts to have as many, or begin a new run from its weights with load_from'
        )
    if before['images'] == batch['images'] and before['per_epoch'] == batch['per_epoch']:
        return
    epoch, seen = divmod(meta['iter'], before['per_epoch'])
    counted = epoch * batch['per_epoch'] + seen * before['images'] // batch['images']
    message = (
        f'Iteration {meta["iter"]} of {before["images"]} images each goes on as {counted} of {batch["images"]}; what '
        'the config counts in iterations (max_iters, intervals, schedules) counts those of this run.'
    )
    print_log(message, logger='current', level=logging.WARNING)
    for state in schedules_of(checkpoint):
        if not state['by_epoch']:
            progress = {
                key: round(state[key] * counted / max(meta['iter'], 1)) for key in ('last_step', '_global_step')
            }
            kept = {key: state[key] for key in ('base_values', '_last_value', 'by_epoch', 'param_name') if key in state}
            state.clear()
            state.update(kept | progress)  # its lengths are this run's
    meta['iter'] = counted


def check_position(meta: dict, path: str) -> None:
    """Raises CheckpointError unless a checkpoint's position is made of whole numbers; mmengine's own has no batch."""
    numbers = [meta.get('iter'), meta.get('epoch')]
    if 'batch' in meta:
        batch = meta['batch'] if isinstance(meta['batch'], dict) else {}
        numbers += [batch.get(key) or -1 for key in ('images', 'accumulated', 'per_epoch')]
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise CheckpointError(f'{path} has no position to go on from: iter, epoch and batch of its meta are {numbers}')


def schedules_of(checkpoint: dict) -> list[dict]:
    """States of the schedules in a checkpoint."""
    return checkpoint.get('param_schedulers') or []

"""What a run's checkpoints say beside weights, and what is believed of it when a run goes on."""
import logging
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mmengine.hooks import CheckpointHook, Hook
from mmengine.logging import HistoryBuffer, print_log
from mmengine.model import is_model_wrapper
from mmengine.runner import Runner

from beit_mm.checkpoint.loader import FORMAT_VERSION
from beit_mm.registry import HOOKS

from .preprocessing import preprocessing_of_model

VALUES = (str, int, float, bool, type(None))


@HOOKS.register_module()
class CheckpointMetaHook(Hook):
    """Writes the config, the logged history, the preprocessing and the origin of the visual tokens as plain values.

    mmengine stores its history as pickled objects and its config as Python text: torch.load refuses the first, the
    second has to be executed to be read. A file of tensors and plain values needs neither.
    """

    priority = 'VERY_LOW'  # last to touch the file, so that nothing is added after it

    def before_save_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        """Replaces the history's objects, and adds what only the run knows of its weights."""
        meta = checkpoint['meta']
        meta['beit_mm_format'] = FORMAT_VERSION
        meta['config_dict'] = plain_values(runner.cfg.to_dict())
        meta['preprocessing'] = preprocessing_of_model(runner.model)
        meta['architecture'] = architecture_of_model(runner.model)
        if (origin := tokenizer_origin(runner)) is not None:
            meta['tokenizer'] = origin
        hub = checkpoint['message_hub']
        scalars, info = hub['log_scalars'], hub['runtime_info']
        info = {key: value.item() if isinstance(value, np.generic) else value for key, value in info.items()}
        info = {key: value for key, value in info.items() if _is_plain(value)}
        checkpoint['message_hub'] = dict(
            log_scalars={key: _buffer_to_tensors(buffer) for key, buffer in scalars.items()},
            runtime_info=info,
            resumed_keys={key: flag for key, flag in hub['resumed_keys'].items() if key in info or key in scalars})

    def after_load_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        """Restores the history, and says so when the tokens are not those of the earlier run.

        Raises:
            ValueError: a run is to go on from a file that holds weights only.
        """
        meta = checkpoint.get('meta', {})
        if runner.cfg.get('resume') and 'epoch' not in meta:
            raise ValueError('The checkpoint holds weights without the state of a run: there is nothing to resume. To '
                             'start a new run from it, name it as load_from instead of --resume.')
        before, now = meta.get('tokenizer'), tokenizer_origin(runner)
        if before and now and _without_path(before) != _without_path(now):
            print_log(
                f'The checkpoint was trained on the visual tokens of {before}; this run has {now}.',
                logger='current',
                level=logging.WARNING)
        if 'message_hub' in checkpoint:
            scalars, info = checkpoint['message_hub']['log_scalars'], checkpoint['message_hub']['runtime_info']
            for key, history in scalars.items():
                if isinstance(history, dict):  # ours; mmengine's own are read as they are
                    scalars[key] = HistoryBuffer(history['values'].numpy(), history['counts'].numpy(),
                                                 history['max_length'])
            _forget_foreign_files(runner, info)


def plain_values(value: Any) -> Any:
    """Nested containers and plain values of a config; anything else by its text."""
    if isinstance(value, dict):
        return {key if isinstance(key, VALUES) else str(key): plain_values(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(plain_values, value)) if type(value) in (list, tuple) else [*map(plain_values, value)]
    return value if type(value) in VALUES else str(value)


def tokenizer_origin(runner: Runner) -> dict | None:
    """Type, path, SHA-256 and precision of the tokenizer that the targets come from; None without one."""
    model = runner.model.module if is_model_wrapper(runner.model) else runner.model
    return getattr(getattr(model, 'target_generator', None), 'provenance', None)


def architecture_of_model(model: torch.nn.Module) -> dict:
    """What the shapes of a backbone's weights do not show: `num_heads`, and the blocks `out_indices`."""
    backbone = getattr(model.module if is_model_wrapper(model) else model, 'backbone', None)
    if not hasattr(backbone, 'load_report'):  # of another library, or none at all
        return {}
    return dict(num_heads=backbone.blocks[0].attn.num_heads, out_indices=list(backbone.out_indices))


def _forget_foreign_files(runner: Runner, info: dict) -> None:
    """Takes out of a file's `runtime_info` what names no checkpoint of this run: CheckpointHook would delete it."""
    folders = [runner.work_dir, *(hook.out_dir for hook in runner.hooks if isinstance(hook, CheckpointHook))]
    folders = [Path(folder).resolve() for folder in folders if folder]
    for key in [key for key in info if key.startswith('best_ckpt')]:
        path = Path(str(info[key])).resolve()
        if not (path.name.startswith('best_') and path.is_file() and set(folders) & {path.parent, path.parent.parent}):
            del info[key]
    resumed, ids = runner.cfg.get('load_from'), info.get('keep_ckpt_ids', [])
    elsewhere = resumed and Path(resumed).resolve().parent not in folders
    if elsewhere or not (isinstance(ids, list) and all(type(step) is int for step in ids)):
        info.pop('keep_ckpt_ids', None)


def _is_plain(value: object) -> bool:
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return isinstance(value, (*VALUES, torch.Tensor))


def _without_path(origin: dict) -> dict:
    return {key: value for key, value in origin.items() if not key.endswith('path')}


def _buffer_to_tensors(buffer: HistoryBuffer) -> dict:
    values, counts = buffer.data
    return dict(
        values=torch.from_numpy(np.asarray(values, dtype=np.float64)),
        counts=torch.from_numpy(np.asarray(counts, dtype=np.float64)),
        max_length=buffer.max_length)

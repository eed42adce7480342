"""Checkpoints that hold tensors and plain values only."""
import logging

import numpy as np
import torch
from mmengine.hooks import Hook
from mmengine.logging import HistoryBuffer, print_log
from mmengine.model import is_model_wrapper
from mmengine.runner import Runner

from beit_mm.checkpoint.content import FORMAT_VERSION
from beit_mm.registry import HOOKS

from .preprocessing import preprocessing_of_model

PLAIN = (str, int, float, bool, type(None), torch.Tensor)


@HOOKS.register_module()
class CheckpointMetaHook(Hook):
    """Writes the logged history as tensors, and remembers preprocessing and where the visual tokens came from.

    mmengine stores its history as pickled objects; torch >= 2.6 refuses to read them, so mmengine
    0.10.7 cannot resume its own files, and later releases read them by executing the pickle. A file of
    tensors and plain values needs neither.
    """

    priority = 'VERY_LOW'  # last to touch the file, so that nothing is added after it

    def before_save_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        """Replaces the history's objects, and adds what only the run knows of its weights."""
        meta = checkpoint['meta']
        meta['beit_mm_format'] = FORMAT_VERSION
        meta['preprocessing'] = preprocessing_of_model(runner.model)
        meta['architecture'] = architecture_of_model(runner.model)
        if (origin := tokenizer_origin(runner)) is not None:
            meta['tokenizer'] = origin
        hub = checkpoint['message_hub']
        scalars, info = hub['log_scalars'], hub['runtime_info']
        info = {key: value.item() if isinstance(value, np.generic) else value for key, value in info.items()}
        info = {key: value for key, value in info.items() if _is_plain(value)}
        checkpoint['message_hub'] = dict(
            log_scalars={key: _buffer_to_plain(buffer) for key, buffer in scalars.items()},
            runtime_info=info,
            resumed_keys={key: flag for key, flag in hub['resumed_keys'].items() if key in info or key in scalars})

    def after_load_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        """Restores the history, and says so when the tokens are not those of the earlier run.

        Raises:
            ValueError: a run is to go on from a file that holds weights only.
        """
        meta = checkpoint.get('meta', {})
        if runner._resume and 'epoch' not in meta:
            raise ValueError('The checkpoint holds weights without the state of a run: there is nothing to resume. To '
                             'start a new run from it, name it as load_from instead of --resume.')
        before, now = meta.get('tokenizer'), tokenizer_origin(runner)
        if before and now and _without_path(before) != _without_path(now):
            print_log(
                f'The checkpoint was trained on the visual tokens of {before}; this run has {now}.',
                logger='current',
                level=logging.WARNING)
        if 'beit_mm_format' in meta and 'message_hub' in checkpoint:
            scalars = checkpoint['message_hub']['log_scalars']
            for key, plain in scalars.items():
                scalars[key] = _buffer_from_plain(plain)


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


def _is_plain(value: object) -> bool:
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return isinstance(value, PLAIN)


def _without_path(origin: dict) -> dict:
    return {key: value for key, value in origin.items() if not key.endswith('path')}


def _buffer_to_plain(buffer: HistoryBuffer) -> dict:
    values, counts = buffer.data
    return dict(
        values=torch.from_numpy(np.asarray(values, dtype=np.float64)),
        counts=torch.from_numpy(np.asarray(counts, dtype=np.float64)),
        max_length=buffer.max_length)


def _buffer_from_plain(plain: dict) -> HistoryBuffer:
    return HistoryBuffer(plain['values'].numpy(), plain['counts'].numpy(), plain['max_length'])

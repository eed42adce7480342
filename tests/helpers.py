"""Configs that are read once, a narrow model, a runner and the tools, for tests that call them with their changes."""

import ast
import copy
import functools
import importlib
import json
import os
import pickle
import resource
import runpy
import secrets
import shutil
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from mmengine.config import Config
from mmengine.hooks import Hook
from mmengine.registry import init_default_scope
from mmengine.runner import Runner

from beit_mm.apis.commands import merge_options
from beit_mm.datasets.masking import masked_positions
from beit_mm.engine.logs import ProgressHook
from beit_mm.engine.loops import EpochLoop, IterLoop
from beit_mm.models import BEiTBackbone, FeatureTargets
from beit_mm.registry import MODELS

ROOT = Path(__file__).parents[1]
WEIGHT_AND_BIAS = ('weight', 'bias')
# Names of a block's parameters in the released code, less LayerScale and bias tables
RELEASED_BLOCK = ['attn.q_bias', 'attn.v_bias', 'attn.qkv.weight', 'attn.proj.weight', 'attn.proj.bias']
RELEASED_BLOCK += [f'{layer}.{part}' for layer in ('norm1', 'norm2', 'mlp.fc1', 'mlp.fc2') for part in WEIGHT_AND_BIAS]


def list_configs(*prefixes: str, demo: bool = False) -> list[str]:
    """Configs relative to configs/ whose file names start with one of the prefixes."""
    skipped = {'_base_'} if demo else {'_base_', 'demo'}
    paths = [path.relative_to(ROOT / 'configs') for path in (ROOT / 'configs').rglob('*.py')]
    return sorted(str(p) for p in paths if not skipped & set(p.parts) and p.name.startswith(prefixes or ('',)))


def positions_of(mask: torch.Tensor) -> torch.Tensor:
    """int64 (B, K): the masked patches of masks (B, h, w), padded with -1 to the largest number of a mask."""
    num_slots = max(int(mask.flatten(1).sum(dim=1).max()), 1)
    return torch.from_numpy(np.stack([masked_positions(image.numpy(), num_slots) for image in mask]))


@functools.cache
def load_config(name: str) -> Config:
    """A config of configs/, parsed once in a session: not to be changed, but to be copied."""
    return Config.fromfile(ROOT / 'configs' / name)


def with_options(name: str, options: list[str]) -> Config:
    """A config with --cfg-options, whose keys tools/train.py would take."""
    cfg = Config(load_config(name).to_dict())
    merge_options(cfg, options)
    return cfg


def header_of(name: str) -> str:
    return ast.get_docstring(ast.parse((ROOT / 'configs' / name).read_text()))


def build_on_meta(name: str) -> torch.nn.Module:
    """The model of a config without memory and without weight files; models that are alike are one."""
    return model_on_meta(load_config(name))


def model_on_meta(cfg: Config) -> torch.nn.Module:
    model = cfg.model.to_dict()
    target = model.get('target_generator')
    if target and target['type'] == 'beit_mm.FeatureTargets':
        target.update(teacher='ema', channels=None)
    elif target:
        target.update(dict(checkpoint=None) if target['type'] == 'beit_mm.DiscreteVAE' else dict(random_weights=True))
    backbone = model.get('backbone', {})
    backbone.get('module', backbone).pop('init_cfg', None)
    for weights in ('checkpoint', 'decoder_checkpoint'):
        model.pop(weights, None)
    return _build_on_meta(json.dumps(model), cfg.default_scope)


@functools.cache
def _build_on_meta(model: str, scope: str) -> torch.nn.Module:
    init_default_scope(scope)  # as a runner does
    no_values = patch.object(BEiTBackbone, 'init_weights', lambda _: None)  # LoRAModel calls it when it is built
    none_drawn = patch.object(torch.nn.init, 'trunc_normal_', lambda tensor, **_: tensor)  # half of the time
    with torch.device('meta'), no_values, none_drawn:
        built = MODELS.build(Config(json.loads(model)))
    if isinstance(getattr(built, 'target_generator', None), FeatureTargets):
        built.target_generator.__class__ = type('FeatureTargets', (OfAnyWidth, FeatureTargets), {})
        built.target_generator.width = built.head.target_dims
    return built


class OfAnyWidth:
    """In front of FeatureTargets: its stand-in for a teacher has more features than some teachers."""

    def targets(self, *args: object) -> torch.Tensor:
        return super().targets(*args)[..., : self.width]


def count_parameters(name: str) -> int:
    """Trainable parameters of a config's model."""
    return sum(p.numel() for p in build_on_meta(name).parameters() if p.requires_grad)


def check_all(names: Iterable[str], check: Callable[[str], None]) -> None:
    """Runs `check` on every name and reports all that fail, not the first alone."""
    failures = {}
    for name in names:
        try:
            check(name)
        except Exception as error:
            failures[name] = f'{type(error).__name__}: {error}'
    assert not failures, '\n'.join(f'{name}: {failure}' for name, failure in failures.items())


def narrow_model(**changes: object) -> dict:
    """Config of a pretrainer with 16 patches of 8 pixels and a vocabulary of 32 random tokens."""
    arch = dict(embed_dims=32, num_layers=2, num_heads=4)
    tokenizer = dict(type='beit_mm.DALLETokenizer', random_weights=True, precision='fp32', hidden=8, vocab_size=32)
    model = dict(
        type='beit_mm.BEiTPretrainer',
        data_preprocessor=dict(type='beit_mm.TwoViewDataPreprocessor', mean=[127.5] * 3, std=[127.5] * 3),
        backbone=dict(type='beit_mm.BEiTBackbone', arch=arch, img_size=32, patch_size=8, masked_input=True),
        head=dict(type='beit_mm.BEiTMIMHead', embed_dims=32, vocab_size=32),
        target_generator=tokenizer,
    )
    return model | changes


def narrow_batch(mask: torch.Tensor | None = None) -> dict:
    """Views for the narrow model; by default of images with 5, 2 and 0 masked patches."""
    if mask is None:
        mask = (torch.rand(3, 16).argsort(dim=1) < torch.tensor([[5], [2], [0]])).view(3, 4, 4)
    images = torch.rand(len(mask), 3, 32, 32)
    positions = positions_of(mask)
    return dict(images=2 * images - 1, tokenizer_images=torch.rand_like(images), mask=mask, positions=positions)


def narrow_dino_model(**changes: object) -> dict:
    """The same of a BEiT + DINO pretrainer; with `head=None, target_generator=None` of DINO alone."""
    head = dict(type='beit_mm.DINOHead', embed_dims=32, num_prototypes=24, hidden_dims=32, bottleneck_dims=16)
    preprocessor = dict(type='beit_mm.MultiCropDataPreprocessor', mean=[127.5] * 3, std=[127.5] * 3)
    return narrow_model(type='beit_mm.DINOPretrainer', dino_head=head, data_preprocessor=preprocessor) | changes


def narrow_feature_model(head: dict | None = None, backbone: dict | None = None, **options: object) -> dict:
    """The same with features as targets: of its own moving average, unless `options` name another teacher.

    Args:
        head, backbone: what differs there.
        options: of the FeatureTargets; `data_preprocessor`: what differs there.
    """
    model = narrow_model()
    model['data_preprocessor'].update(options.pop('data_preprocessor', {}))
    model['backbone'].update(backbone or {})
    head = dict(type='beit_mm.FeatureRegressionHead', embed_dims=32) | dict(target_dims=32) | (head or {})
    return model | dict(head=head, target_generator=dict(type='beit_mm.FeatureTargets') | dict(teacher='ema') | options)


def make_runner(cfg: Config) -> Runner:
    """A runner; mmengine wants a name of its own for each in one process."""
    cfg.experiment_name = f'{Path(cfg.work_dir).parent.name}_{make_runner.count}'
    make_runner.count += 1
    return Runner.from_cfg(cfg)


make_runner.count = 0


def train(config: Config, *hooks: Hook, **changes: object) -> Runner:
    """The runner after a training, with more hooks than the config's; the config stays as it is."""
    config = copy.deepcopy(config)
    config.merge_from_dict(changes)
    runner = make_runner(config)
    for hook in hooks:
        runner.register_hook(hook)
    runner.train()
    return runner


def interrupt_after(patch: pytest.MonkeyPatch, title: str, step: int) -> list[tuple[str, int]]:
    """Ctrl-C after a step, from 0 on, of the training with a title; returns the list that will hold all steps made."""
    after, made = ProgressHook.after_train_iter, []

    def after_train_iter(hook: ProgressHook, runner: Runner, *args: object, **kwargs: object) -> None:
        after(hook, runner, *args, **kwargs)
        made.append((hook.title, runner.iter))
        if made[-1] == (title, step):
            signal.raise_signal(signal.SIGINT)

    patch.setattr(ProgressHook, 'after_train_iter', after_train_iter)
    return made


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """Writing beyond `size` bytes fails, as on a full disk; the kernel says EFBIG instead of ENOSPC."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def run_ranks(function: Callable[[int], object], folder: Path, world_size: int = 2) -> list[object]:
    """Calls `function(rank)` in processes of one gloo group, and returns what they return, by rank.

    They are forked: a new process takes seconds to import everything.
    """
    store = folder / f'store_{secrets.token_hex(4)}'
    answers = [store.with_name(f'{store.name}_{rank}.pkl') for rank in range(world_size)]

    def of_rank(rank: int) -> None:
        torch.set_num_threads(1)  # OpenMP's threads do not outlive a fork
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))  # as torchrun does
        torch.distributed.init_process_group('gloo', f'file://{store}', rank=rank, world_size=world_size)
        answers[rank].write_bytes(pickle.dumps(function(rank)))
        torch.distributed.barrier()  # nobody hangs up on a process that still waits for the last collective
        # the group ends with its process: torch 2.6 may wait for ever in destroy_process_group

    torch.multiprocessing.start_processes(of_rank, nprocs=world_size, daemon=True, start_method='fork')
    return [pickle.loads(path.read_bytes()) for path in answers]


@contextmanager
def last_steps() -> Iterator[None]:
    """Training loops begin two steps, or one epoch, before their end."""
    run_iter, run_epoch = IterLoop.run_iter, EpochLoop.run_epoch

    def last_iters(self: IterLoop, batch: list) -> None:
        self._iter = max(self._iter, self.max_iters - 2)
        run_iter(self, batch)

    def last_epoch(self: EpochLoop) -> None:
        self._epoch = max(self._epoch, self.max_epochs - 1)
        self._iter = self._epoch * len(self.dataloader)
        run_epoch(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(IterLoop, 'run_iter', last_iters)
        patch.setattr(EpochLoop, 'run_epoch', last_epoch)
        yield


# --cfg-options for runs in this process: it waits five seconds for each worker to end.
NO_WORKERS = [
    f'{split}_dataloader.{option}'
    for split in ('train', 'val', 'test')
    for option in ('num_workers=0', 'persistent_workers=False')
]


def library_tools(package: str) -> Path:
    """Folder of the tools of mmpretrain or mmseg, which `mim train` and `mim test` run."""
    return Path(importlib.import_module(package).__file__).parent / '.mim/tools'


def run_tool(script: str, *arguments: object, folder: Path = ROOT / 'tools') -> None:
    """Runs `python tools/SCRIPT ARGUMENTS` in this process, which has paid for the imports already.

    Args:
        script: path below `folder`.
        arguments: words of the command line.
        folder: of other tools, such as a library's.
    """
    if script in ('train.py', 'test.py'):  # mmengine wants a name of its own for each run in one process
        arguments = (*arguments, '--cfg-options', f'experiment_name=tool_{make_runner.count}')
        make_runner.count += 1
    path = folder / script
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, 'argv', [str(path), *map(str, arguments)])
        patch.syspath_prepend(path.parent)  # as Python does
        runpy.run_path(str(path), run_name='__main__')


def refused(message: str, tool: str, *arguments: object) -> None:
    """A tool of tools/datasets ends with one line that holds the message."""
    with pytest.raises(SystemExit) as end:
        run_tool(f'datasets/{tool}.py', *arguments)
    assert str(end.value.code).startswith('error: ') and str(end.value.code).isprintable(), end.value.code
    assert message in end.value.code, end.value.code


def tree(folder: Path) -> dict[str, bytes]:
    """Files below a folder, by their path relative to it."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob('*') if path.is_file()}


def put(content: Any, place: str, value: object) -> Any:
    """A copy of nested containers with another value at a place such as 'model/backbone/0'."""
    content = inner = copy.deepcopy(content)
    *outer, last = (int(key) if key.isdigit() else key for key in place.split('/'))
    for key in outer:
        inner = inner[key]
    inner[last] = value
    return content


def draw_caltech101(folder: Path) -> None:
    """Drawn images in the layout of Caltech-101, of as many classes: those without drawings have one image each."""
    run_tool('demo/draw_images.py', folder, '--num-train', '70', '--num-val', '10', '--size', '64')
    for split in ('train', 'val'):
        (image, *_), drawn = sorted((folder / split).rglob('*.jpg')), len(list((folder / split).iterdir()))
        for number in range(drawn, 97):
            (folder / split / f'z{number}').mkdir()
            shutil.copy(image, folder / split / f'z{number}')

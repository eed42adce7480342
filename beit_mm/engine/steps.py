"""What surrounds the computation of a step: seeds, exchange of gradients, compilation."""

import os
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from mmengine.dist import get_rank
from mmengine.hooks import Hook
from mmengine.model import BaseTTAModel, is_model_wrapper
from mmengine.runner import Runner
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

from beit_mm.datasets.samplers import mixed_seed
from beit_mm.errors import UserError, log, warn
from beit_mm.models.beit import BEiTPretrainer
from beit_mm.registry import HOOKS


def unwrap(runner: Runner) -> nn.Module:
    """The model of a run, without DistributedDataParallel and test-time augmentation around it."""
    model = runner.model.module if is_model_wrapper(runner.model) else runner.model
    return model.module if isinstance(model, BaseTTAModel) else model


@HOOKS.register_module()
class StepSeedHook(Hook):
    """Seeds all random generators before each training step with the run's seed, the rank and the step's number.

    Mixup, drop path and erasing then draw the same numbers in a resumed run. Samples have their own seeds.
    """

    priority = 'VERY_HIGH'

    def before_run(self, runner: Runner) -> None:
        if runner.deterministic:  # set before the first matrix product on a GPU
            os.environ.setdefault('CUBLAS_WORKSPACE_CONFIG', ':4096:8')  # without it torch refuses cuBLAS

    def before_train_iter(self, runner: Runner, batch_idx: int, data_batch: dict | None = None) -> None:
        seed = mixed_seed(runner.seed, get_rank(), runner.iter)
        random.seed(seed)
        np.random.seed(seed >> 32)
        torch.default_generator.manual_seed(seed >> 1)  # torch.manual_seed takes 1 ms where there is no GPU
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed(seed >> 1)


@HOOKS.register_module()
class CompressGradientsHook(Hook):
    """Sends gradients between processes in bfloat16, half the bytes; torch's hook also adds them in bfloat16."""

    def before_train(self, runner: Runner) -> None:
        if is_model_wrapper(runner.model):
            runner.model.register_comm_hook(None, bf16_compress_hook)


@HOOKS.register_module()
class CompileHook(Hook):
    """Compiles the model's part of a training step, as one graph for one shape.

    This part is `loss` of a BEiTPretrainer, and `extract_feat` of classifiers and segmentors; probes and tokenizers are
    refused. Validation stays eager. If compiling fails, the run falls back to eager and warns. It also fails after
    eight compilations, when shapes change with every batch, as with masks of variant 'paper'. The graph draws its own
    random numbers: with drop path a compiled run differs from an eager one, but can be repeated and resumed.

    Args:
        options: of torch.compile: backend, mode, options.
    """

    def __init__(self, **options: Any):
        self.options = options

    def before_train(self, runner: Runner) -> None:
        model = unwrap(runner)
        self.method = 'loss' if isinstance(model, BEiTPretrainer) else 'extract_feat'
        eager = getattr(model, self.method, None)
        if eager is None:
            raise UserError(f'CompileHook cannot compile the training of a {type(model).__name__}: leave --compile out')
        self.compiled = CompiledInTraining(model, eager, self.options)
        setattr(model, self.method, self.compiled)
        log(f'{self.method} will be compiled; the first step takes minutes.')

    def after_train(self, runner: Runner) -> None:
        vars(unwrap(runner)).pop(self.method, None)
        if self.compiled.failure:
            warn(f'At least a part of this run was not compiled: {self.compiled.failure}')


class CompiledInTraining:
    """A method of a model that runs compiled in training, and eager from the first call that fails to compile."""

    def __init__(self, model: nn.Module, eager: Callable, options: dict):
        self.model, self.eager = model, eager
        self.compiled = torch.compile(eager, **dict(fullgraph=True, dynamic=False) | options)
        self.failure = ''  # why it is no longer compiled

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.failure or not self.model.training:
            return self.eager(*args, **kwargs)
        try:
            return self.compiled(*args, **kwargs)
        except Exception as error:  # torch's own types are private; an error of the method comes again from `eager`
            self.failure = f'{type(error).__name__}: {" ".join(str(error).split())[:300]}'
            warn(f'{self.eager.__name__} could not be compiled and runs uncompiled ({self.failure})')
        return self.eager(*args, **kwargs)  # out here, where nothing holds on to the failed attempt's tensors

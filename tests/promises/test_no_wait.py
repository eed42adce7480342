"""The host never waits for the device within a step: nothing asks for a value on it, except where the log is due."""

from collections import Counter

import pytest
import torch
from helpers import make_runner
from mmengine.hooks import Hook
from torch.utils._python_dispatch import TorchDispatchMode

# What makes the host wait where its argument is on a CUDA device: values, and shapes that depend on values.
WAITING = {'_local_scalar_dense', 'is_nonzero', 'equal', 'nonzero', 'masked_select', '_unique2', 'unique_dim'}
WAITING |= {'repeat_interleave', 'bincount', 'unique_consecutive'}
INDEXING = {'index', 'index_put', 'index_put_'}  # by a boolean tensor
METHODS = ('tolist', 'item', 'cpu', 'numpy')  # on a CPU some of them call no operation that could be counted


class Waits(TorchDispatchMode):
    """Counts the operations, and calls of methods, that would wait."""

    def __init__(self):
        super().__init__()
        self.counts: Counter = Counter()
        self.patch = pytest.MonkeyPatch()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        boolean_index = name in INDEXING and any(i is not None and i.dtype == torch.bool for i in args[1])
        if name in WAITING or boolean_index:
            self.counts[name] += 1
        return function(*args, **(kwargs or {}))

    def __enter__(self):
        for name in METHODS:
            self.patch.setattr(torch.Tensor, name, self.counted(name, getattr(torch.Tensor, name)))
        return super().__enter__()

    def __exit__(self, *error):
        self.patch.undo()
        super().__exit__(*error)

    def counted(self, name, method):
        def call(*args, **kwargs):
            self.counts[name] += 1
            return method(*args, **kwargs)

        return call


class Count(Hook):
    """Counts from before every other hook of a step (`priority` 0) or up to after them (100)."""

    steps: list[Counter] = []
    mode: Waits

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        if self.priority == 0:
            Count.mode = Waits().__enter__()

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        if self.priority == 100:
            self.mode.__exit__(None, None, None)
            self.steps.append(self.mode.counts)


def test_a_step_asks_for_no_value_of_the_device(pretrain_config):
    config = pretrain_config
    config.train_cfg.update(max_epochs=4, val_interval=4)  # 12 batches
    config.optim_wrapper.accumulative_counts = 2
    config.default_hooks.logger.interval = 5
    config.default_hooks.checkpoint.interval = 100
    runner = make_runner(config)
    Count.steps.clear()
    runner.register_hook(Count(), priority=0)
    runner.register_hook(Count(), priority=100)
    runner.train()
    due = {2, 5, 8, 11}  # the ends of the epochs, whose three steps are fewer than the logger's five
    first = {0, 1}  # where the optimizer has no state, the host decides
    assert all(Count.steps[step] for step in due)
    assert not {step: counts for step, counts in enumerate(Count.steps) if counts and step not in {*due, *first}}

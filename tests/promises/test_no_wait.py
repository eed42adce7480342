"""The host never waits for the device within a step: nothing asks for a value on it, except where the log is due."""

import copy
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
            self.patch.setattr(torch.Tensor, name, self._counted(name, getattr(torch.Tensor, name)))
        return super().__enter__()

    def __exit__(self, *error):
        self.patch.undo()
        super().__exit__(*error)

    def _counted(self, name, method):
        def call(*args, **kwargs):
            self.counts[name] += 1
            return method(*args, **kwargs)

        return call


class Begin(Hook):
    """Starts to count before every other hook of a step."""

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        self.mode = Waits()
        self.mode.__enter__()


class End(Hook):
    """Ends it after every other hook."""

    def __init__(self, begin: Begin):
        self.begin = begin
        self.steps: list[Counter] = []

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        self.begin.mode.__exit__(None, None, None)
        self.steps.append(self.begin.mode.counts)


@pytest.mark.parametrize('accumulative_counts', [1, 2])
def test_a_step_asks_for_no_value_of_the_device(pretrain_config, accumulative_counts):
    config = copy.deepcopy(pretrain_config)
    config.train_cfg.update(max_epochs=4, val_interval=4)  # 12 steps
    config.optim_wrapper.accumulative_counts = accumulative_counts
    config.default_hooks.logger.interval = 5
    config.default_hooks.checkpoint.interval = 100
    runner = make_runner(config)
    begin = Begin()
    end = End(begin)
    runner.register_hook(begin, priority=0)
    runner.register_hook(end, priority=100)
    runner.train()
    due = {2, 5, 8, 11}  # the ends of the epochs, whose three steps are fewer than the logger's five
    first = range(accumulative_counts)  # where the optimizer has no state, the host decides
    assert all(end.steps[step] for step in due)
    assert not {step: counts for step, counts in enumerate(end.steps) if counts and step not in {*due, *first}}


def test_the_check_sees_what_waits():
    x = torch.arange(4.0)
    waits = (
        lambda: x.sum().item(),
        lambda: bool(x[0] > 1),
        lambda: x[x > 1],
        lambda: x.clone().index_put_((x > 1,), x[:2]),
        lambda: x.long().bincount(),
        lambda: x.repeat_interleave(x.long()),
        lambda: x.nonzero(),
        lambda: x.tolist(),
        lambda: x.cpu(),
        lambda: float(x[0]),
    )
    for wait in waits:
        with Waits() as mode:
            wait()
        assert mode.counts
    with Waits() as mode:
        x.sum() * 2
    assert not mode.counts

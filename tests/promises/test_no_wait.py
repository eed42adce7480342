"""The host never waits for the device within a step: nothing asks for a value on it, except where the log is due."""

from collections import Counter

import torch
from helpers import make_runner
from torch.utils._python_dispatch import TorchDispatchMode

from beit_mm.engine.interruption import EpochLoop

# What makes the host wait where its argument is on a CUDA device: values, and shapes that depend on values.
WAITING = {'_local_scalar_dense', 'is_nonzero', 'equal', 'nonzero', 'masked_select', '_unique2', 'unique_dim'}
WAITING |= {'repeat_interleave', 'bincount', 'unique_consecutive'}
INDEXING = {'index', 'index_put', 'index_put_'}  # by a boolean tensor
METHODS = ('tolist', 'item', 'cpu', 'numpy')  # on a CPU some of them call no operation that could be counted


def test_a_step_asks_for_no_value_of_the_device(pretrain_config, monkeypatch):
    pretrain_config.train_cfg.update(max_epochs=4, val_interval=4)  # 12 batches
    pretrain_config.optim_wrapper.accumulative_counts = 2
    pretrain_config.default_hooks.logger.interval = 5
    pretrain_config.default_hooks.checkpoint.interval = 100
    run_iter, waits, steps = EpochLoop.run_iter, Counter(), []

    class Operations(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            name = function.overloadpacket.__name__
            boolean_index = name in INDEXING and any(i is not None and i.dtype == torch.bool for i in args[1])
            waits.update([name] if name in WAITING or boolean_index else ())
            return function(*args, **(kwargs or {}))

    def counted(method):
        return lambda *args, **kwargs: waits.update([method.__name__]) or method(*args, **kwargs)

    def step(self, index, batch):  # with all its hooks
        waits.clear()
        with Operations():
            run_iter(self, index, batch)
        steps.append(waits.copy())

    for name in METHODS:
        monkeypatch.setattr(torch.Tensor, name, counted(getattr(torch.Tensor, name)))
    monkeypatch.setattr(EpochLoop, 'run_iter', step)
    make_runner(pretrain_config).train()
    due = {2, 5, 8, 11}  # the ends of the epochs, whose three steps are fewer than the logger's five
    first = {0, 1}  # where the optimizer has no state, the host decides
    assert all(steps[step] for step in due)
    assert not {step: counts for step, counts in enumerate(steps) if counts and step not in {*due, *first}}

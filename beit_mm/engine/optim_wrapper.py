"""Mixed precision on whatever device there is."""
import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from mmengine.device import get_device
from mmengine.logging import print_log
from mmengine.optim import OptimWrapper
from torch import Tensor, nn

from beit_mm.registry import OPTIM_WRAPPERS

DTYPES = ('bfloat16', 'float16', 'float32')
MAX_STEPS_WITHOUT_GRADIENT = 25


@OPTIM_WRAPPERS.register_module()
class AutocastOptimWrapper(OptimWrapper):
    """Runs the forward pass under autocast; scales the loss when, and only when, the type is float16.

    Args:
        dtype: 'bfloat16', 'float16' or 'float32'. A CPU has no fast float16, and not every CPU has
            bfloat16: float32 is used there instead, and the log says so.
        kwargs: mmengine's OptimWrapper arguments: optimizer, accumulative_counts, clip_grad.

    Raises:
        ValueError: an unknown dtype.

    Differs from mmengine's AmpOptimWrapper in: it runs on a CPU (that one refuses), so one config serves
    every machine under `mim train` too; bfloat16 needs no scaler and gets none; a step whose gradient is not
    finite is left out in every precision; with `accumulative_counts` above 1 each update uses the learning rate
    that its first batch found. Schedules step with every batch, so with lengths given in epochs they then are at
    the same point at every update as with whole batches. Lengths given in steps count batches, as `max_iters` does.
    """

    def __init__(self, dtype: str = 'bfloat16', **kwargs):
        super().__init__(**kwargs)
        if dtype not in DTYPES:
            raise ValueError(f'dtype is {dtype!r}; choose one of {DTYPES}')
        self.device_type = torch.device(get_device()).type
        used = usable_dtype(dtype, self.device_type)
        self.dtype = getattr(torch, used)
        self.loss_scaler = torch.amp.GradScaler(self.device_type, enabled=used == 'float16')
        self.steps_without_gradient = 0
        self.update_rates: list[float] = []
        instead = '' if used == dtype else f' ({dtype} is not available there)'
        print_log(f'Training on {self.device_type} in {used}{instead}.', logger='current')

    @contextmanager
    def optim_context(self, model: nn.Module) -> Iterator[None]:
        """Autocast around the forward pass, and no gradient exchange while accumulating."""
        enabled = self.dtype is not torch.float32
        with super().optim_context(model), torch.autocast(
                self.device_type, self.dtype, enabled=enabled):
            yield

    def backward(self, loss: Tensor, **kwargs) -> None:
        """Backward pass of the scaled loss."""
        if self._inner_count % self._accumulative_counts == 0:
            self.update_rates = [group['lr'] for group in self.optimizer.param_groups]
        super().backward(self.loss_scaler.scale(loss), **kwargs)

    def step(self, **kwargs) -> None:
        """Unscales and clips the gradients, then steps if they are finite.

        Gradients are the same on all ranks, so all decide alike. With float16 an overflow only means that the
        loss scale is being found; it is left to the scaler.

        Raises:
            FloatingPointError: no finite gradient in 25 steps in a row. (A loss scale of 2**16 has come down to
                2**-9 by then.)
        """
        self.loss_scaler.unscale_(self.optimizer)
        norm = self._clip_grad()
        self.steps_without_gradient = 0 if torch.isfinite(norm) else self.steps_without_gradient + 1
        with self._rates_of_first_batch():
            if self.loss_scaler.is_enabled():
                self.loss_scaler.step(self.optimizer, **kwargs)
                self.loss_scaler.update()
            elif self.steps_without_gradient == 0:
                self.optimizer.step(**kwargs)
            else:
                print_log('The gradient is not finite, the step is left out.', logger='current', level=logging.WARNING)
        if self.steps_without_gradient == MAX_STEPS_WITHOUT_GRADIENT:
            raise FloatingPointError(
                f'the gradient was not finite in {MAX_STEPS_WITHOUT_GRADIENT} steps in a row; go on from the last '
                'checkpoint with a smaller learning rate, or with optim_wrapper.dtype=float32')

    @contextmanager
    def _rates_of_first_batch(self) -> Iterator[None]:
        """The learning rates at the first batch of this update; schedules go on from today's, which come back."""
        groups = self.optimizer.param_groups
        scheduled = [group['lr'] for group in groups]
        for group, rate in zip(groups, self.update_rates or scheduled, strict=True):
            group['lr'] = rate
        try:
            yield
        finally:
            for group, rate in zip(groups, scheduled, strict=True):
                group['lr'] = rate

    def _clip_grad(self) -> Tensor:
        """Clips the gradients where that is asked for, logs their norm and returns it."""
        parameters = [p for group in self.optimizer.param_groups for p in group['params'] if p.grad is not None]
        norm = torch.nn.utils.clip_grad_norm_(parameters, **(self.clip_grad_kwargs or dict(max_norm=math.inf)))
        self.message_hub.update_scalar('train/grad_norm', float(norm))
        return norm

    def state_dict(self) -> dict:
        """The optimizer's state, and the loss scale of float16."""
        return dict(super().state_dict(), loss_scaler=self.loss_scaler.state_dict())

    def load_state_dict(self, state_dict: dict) -> None:
        """Restores what `state_dict` returned; a checkpoint of another precision keeps its optimizer."""
        state_dict = dict(state_dict)
        scaler = state_dict.pop('loss_scaler', None)
        if scaler and self.loss_scaler.is_enabled():
            self.loss_scaler.load_state_dict(scaler)
        super().load_state_dict(state_dict)


def usable_dtype(dtype: str, device_type: str) -> str:
    """The type that the device computes in, when `dtype` is asked for."""
    if device_type != 'cpu' or dtype == 'float32':
        return dtype
    if dtype == 'bfloat16' and torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return dtype
    return 'float32'

"""Mixed precision on whatever device there is."""
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from mmengine.device import get_device
from mmengine.logging import print_log
from mmengine.optim import OptimWrapper
from torch import Tensor, nn

from beit_mm.registry import OPTIM_WRAPPERS

DTYPES = ('bfloat16', 'float16', 'float32')


@OPTIM_WRAPPERS.register_module()
class AutocastOptimWrapper(OptimWrapper):
    """Runs the forward pass under autocast; scales the loss when, and only when, the type is float16.

    Args:
        dtype: 'bfloat16', 'float16' or 'float32'. A CPU has no fast float16, and not every CPU has
            bfloat16: float32 is used there instead, and the log says so.
        init_scale: first loss scale of float16; it doubles every 2000 steps without overflow.
        kwargs: mmengine's OptimWrapper arguments: optimizer, accumulative_counts, clip_grad.

    Raises:
        ValueError: an unknown dtype.

    Differs from mmengine's AmpOptimWrapper in: it runs on a CPU (that one refuses), so one config serves
    every machine under `mim train` too; bfloat16 needs no scaler and gets none.
    """

    def __init__(self, dtype: str = 'bfloat16', init_scale: float = 2.0**16, **kwargs):
        super().__init__(**kwargs)
        if dtype not in DTYPES:
            raise ValueError(f'dtype is {dtype!r}; choose one of {DTYPES}')
        self.device_type = torch.device(get_device()).type
        used = _usable(dtype, self.device_type)
        self.dtype = getattr(torch, used)
        self.loss_scaler = torch.amp.GradScaler(
            self.device_type, init_scale=init_scale, enabled=used == 'float16')
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
        super().backward(self.loss_scaler.scale(loss), **kwargs)

    def step(self, **kwargs) -> None:
        """Unscales and clips the gradients, then steps unless float16 overflowed."""
        if self.clip_grad_kwargs:
            self.loss_scaler.unscale_(self.optimizer)
            self._clip_grad()
        self.loss_scaler.step(self.optimizer, **kwargs)
        self.loss_scaler.update()

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


def _usable(dtype: str, device_type: str) -> str:
    """The type that the device computes in, when `dtype` is asked for."""
    if device_type != 'cpu' or dtype == 'float32':
        return dtype
    if dtype == 'bfloat16' and torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return dtype
    return 'float32'

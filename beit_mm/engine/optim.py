"""How a model learns: mixed precision on whatever device there is, weight decay, layer-wise learning rates."""

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from mmengine.device import get_device
from mmengine.logging import print_log
from mmengine.optim import OptimWrapper
from mmengine.registry import OPTIMIZERS
from torch import Tensor, nn

from beit_mm.models.vit import BEiTBackbone
from beit_mm.registry import OPTIM_WRAPPER_CONSTRUCTORS, OPTIM_WRAPPERS

DTYPES = ('bfloat16', 'float16', 'float32')
MAX_STEPS_WITHOUT_GRADIENT = 25


@OPTIM_WRAPPERS.register_module()
class AutocastOptimWrapper(OptimWrapper):
    """Runs the forward pass under autocast; scales the loss when, and only when, the type is float16.

    Args:
        dtype: 'bfloat16', 'float16' or 'float32'. A CPU has no fast float16, and not every CPU has bfloat16: float32 is
            used there instead, and the log says so.
        kwargs: mmengine's OptimWrapper arguments: optimizer, accumulative_counts, clip_grad.

    Raises:
        ValueError: an unknown dtype.
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
        instead = '' if used == dtype else f' ({dtype} is not available there)'
        print_log(f'Training on {self.device_type} in {used}{instead}.', logger='current')

    @contextmanager
    def optim_context(self, model: nn.Module) -> Iterator[None]:
        """Autocast around the forward pass, and no gradient exchange while accumulating."""
        enabled = self.dtype is not torch.float32
        with super().optim_context(model), torch.autocast(self.device_type, self.dtype, enabled=enabled):
            yield

    def backward(self, loss: Tensor, **kwargs) -> None:
        """Backward pass of the scaled loss."""
        super().backward(self.loss_scaler.scale(loss), **kwargs)

    def step(self, **kwargs) -> None:
        """Unscales and clips the gradients, then steps if they are finite.

        Gradients are the same on all ranks, so all decide alike. With float16 the scaler handles an overflow, which
        only means that the loss scale is still too high.

        Raises:
            FloatingPointError: no finite gradient in 25 steps in a row; a loss scale of 2**16 is down to 2**-9 by then.
        """
        self.loss_scaler.unscale_(self.optimizer)
        parameters = [p for group in self.optimizer.param_groups for p in group['params'] if p.grad is not None]
        norm = torch.nn.utils.clip_grad_norm_(parameters, **(self.clip_grad_kwargs or dict(max_norm=math.inf)))
        self.message_hub.update_scalar('train/grad_norm', float(norm))
        self.steps_without_gradient = 0 if torch.isfinite(norm) else self.steps_without_gradient + 1
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
                'checkpoint with a smaller learning rate, or with optim_wrapper.dtype=float32'
            )

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


@OPTIM_WRAPPER_CONSTRUCTORS.register_module()
class BEiTOptimWrapperConstructor:
    """Parameter groups: with and without weight decay and, for fine-tuning, one learning rate for each layer.

    No decay for vectors (norms, biases, LayerScale) and for the backbone's class token and position embedding. The
    mask token and bias tables decay. Frozen parameters are in no group.

    Args:
        optim_wrapper_cfg: config of the wrapper with its `optimizer`.
        paramwise_cfg: `dict(layer_decay_rate=d)`, 0 < d <= 1: with d below 1 each layer learns d times as fast as the
            one above it. The layers are those of the BEiTBackbone; everything outside of it learns at the full rate.
            Schedules scale with the group; their lowest rate does only when it is given as a ratio (`eta_min_ratio`
            of CosineAnnealingLR).

    Raises:
        ValueError: another key or rate, an optimizer without `lr`, or not exactly one BEiTBackbone.

    Source: microsoft/unilm `beit/optim_factory.py`.
    """

    def __init__(self, optim_wrapper_cfg: dict, paramwise_cfg: dict | None = None):
        self.optim_wrapper_cfg = dict(optim_wrapper_cfg)
        paramwise_cfg = dict(paramwise_cfg or {})
        self.layer_decay_rate = rate = paramwise_cfg.pop('layer_decay_rate', 1.0)
        if paramwise_cfg:
            keys = sorted(paramwise_cfg)
            raise ValueError(f'paramwise_cfg of BEiTOptimWrapperConstructor has {keys}; it takes layer_decay_rate only')
        if isinstance(rate, bool) or not isinstance(rate, (int, float)) or not 0 < rate <= 1:
            raise ValueError(f'layer_decay_rate is {rate!r}; expected a number above 0, and at most 1 (no layer decay)')

    def __call__(self, model: nn.Module) -> OptimWrapper:
        wrapper = dict(self.optim_wrapper_cfg)
        wrapper.setdefault('type', 'OptimWrapper')
        optimizer = dict(wrapper.pop('optimizer'))
        groups = parameter_groups(model, self.layer_decay_rate, optimizer.get('lr'))
        wrapper['optimizer'] = OPTIMIZERS.build(dict(optimizer, params=groups))
        return OPTIM_WRAPPERS.build(wrapper)


def parameter_groups(model: nn.Module, rate: float = 1.0, lr: float | None = None) -> list[dict]:
    """Splits the trainable parameters by weight decay and, with a `rate` below 1, by layer, first layer first.

    Each group also lists the `names` of its parameters; the learning rate of the last layer is `lr`.
    """
    modules = model.named_modules()
    backbones = [(f'{name}.'.lstrip('.'), module) for name, module in modules if isinstance(module, BEiTBackbone)]
    if rate != 1 and lr is None:
        raise ValueError('layer_decay_rate needs the learning rate of the last layer; set optim_wrapper.optimizer.lr')
    if rate != 1 and len(backbones) != 1:
        name, number = type(model).__name__, len(backbones)
        raise ValueError(f'layer_decay_rate needs one BEiTBackbone, whose layers it counts; {name} has {number}')
    no_decay = {f'{prefix}{name}' for prefix, backbone in backbones for name in backbone.no_weight_decay()}
    groups: dict = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        decayed = parameter.dim() > 1 and name not in no_decay
        layer, settings = 0, {} if decayed else dict(weight_decay=0.0)
        if rate != 1:
            prefix, backbone = backbones[0]
            layer, num_layers = backbone.get_layer_depth(name, prefix)
            settings['lr'] = lr * rate ** (num_layers - 1 - layer)  # type: ignore[operator]
        group = groups.setdefault((layer, not decayed), dict(settings, names=[], params=[]))
        group['names'].append(name)
        group['params'].append(parameter)
    return [groups[key] for key in sorted(groups)]

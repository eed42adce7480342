"""Optimization: mixed precision, skipped steps, weight decay, layer-wise learning rates."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from mmengine.device import get_device
from mmengine.dist import all_reduce
from mmengine.hooks import Hook
from mmengine.optim import OptimWrapper
from mmpretrain.models import BEiTViT, VisionTransformer
from torch import Tensor, nn

from beit_mm.checkpoint.read import CheckpointError
from beit_mm.errors import UserError, check_choice, log, warn
from beit_mm.models.vit import BEiTBackbone
from beit_mm.precision import usable_dtype
from beit_mm.registry import HOOKS, OPTIM_WRAPPER_CONSTRUCTORS, OPTIM_WRAPPERS, OPTIMIZERS

TRUST = 0.001  # of LARS
DTYPES = ('bfloat16', 'float16', 'float32')
KERNEL_OPTIONS = ('amsgrad', 'capturable', 'differentiable', 'foreach', 'fused', 'maximize')  # of torch's optimizers
MAX_SKIPPED_IN_A_ROW = 25  # by then a float16 loss scale has fallen from 2**16 to 1
LAYERED = (BEiTBackbone, BEiTViT, VisionTransformer)  # backbones that know the layer of a parameter
STEPS_BETWEEN_FETCHES = 50  # at most; fetching the counters makes the host wait for the device
# What a forward pass changes: statistics of batch norm, the step that sets DiscreteVAE's temperature, the center of
# DINOPretrainer, and the codes of VQKD with the counts of their use.
CHANGED_BY_FORWARD = set('running_mean running_var num_batches_tracked steps center codebook usage started'.split())


def changed_by_forward(model: nn.Module) -> list[Tensor]:
    """A model's tensors named in CHANGED_BY_FORWARD that are not trained, except in parts in evaluation mode."""
    tensors: list[Tensor] = []
    for part in model.modules():
        if part.training:
            named = [*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)]
            tensors += [one for name, one in named if name in CHANGED_BY_FORWARD and not one.requires_grad]
    return tensors


class SkippedSteps(NamedTuple):
    """The counters of AutocastOptimWrapper, in their order on the device."""

    in_a_row: int = 0  # up to now
    not_finite: int = 0  # in the whole run, overflows excluded
    overflows: int = 0  # in the whole run, of float16 only


@OPTIM_WRAPPERS.register_module()
class AutocastOptimWrapper(OptimWrapper):
    """Runs the forward pass under autocast; scales the loss if the type is float16.

    A step without a finite gradient is skipped on all ranks, with all its accumulated batches. With a fused optimizer
    the decision and the counters stay on the device until RuntimeInfoHook reads them.

    With float16 a skipped step counts as an overflow, which halves the loss scale, if the losses of all ranks were
    finite and the scale was above 1. Every other skipped step counts as `not_finite` and keeps the scale.

    Args:
        dtype: 'bfloat16', 'float16' or 'float32'. Where bfloat16 is not fast, a GPU (V100, T4) uses float16 and a CPU
            float32. A CPU uses float32 instead of float16 too. The log says which is used.
        kwargs: mmengine's OptimWrapper arguments: optimizer, accumulative_counts, clip_grad.
    """

    def __init__(self, dtype: str = 'bfloat16', **kwargs):
        super().__init__(**kwargs)
        check_choice('dtype', dtype, DTYPES)
        self.device_type = torch.device(get_device()).type
        used = usable_dtype(dtype, self.device_type)
        self.dtype = getattr(torch, used)
        self.loss_scaler = torch.amp.GradScaler(self.device_type, enabled=used == 'float16')
        self.accumulative_counts = kwargs.get('accumulative_counts', 1)
        self.seen = SkippedSteps()  # the counters when they were last read
        self.counters = torch.tensor(self.seen)  # after a step in float32, which counts to 16 million exactly
        self.norms: list[Tensor] = []  # gradient norms since they were last read
        self.bad_loss: Tensor | bool = False  # whether this rank had a loss that is not finite in this step
        self.model: nn.Module | None = None  # as of the last step
        self.buffers: list[Tensor] = []  # the model's tensors that the forward pass changes
        self.buffers_before: list[Tensor] = []  # as they were before the step, to undo a NaN
        if used == dtype:
            log(f'Training on {self.device_type} in {used}.')
        else:
            warn(f'Training on {self.device_type} in {used}; {dtype} is not fast there.')

    @contextmanager
    def optim_context(self, model: nn.Module) -> Iterator[None]:
        if self.should_update():  # before a batch, True means that it is the first of a step
            if model is not self.model:
                self.model, self.buffers = model, changed_by_forward(model)
            self.buffers_before = [buffer.clone() for buffer in self.buffers]
        enabled = self.dtype is not torch.float32
        with super().optim_context(model), torch.autocast(self.device_type, self.dtype, enabled=enabled):
            yield

    def backward(self, loss: Tensor, **kwargs) -> None:
        if self.loss_scaler.is_enabled():
            self.bad_loss = ~loss.detach().isfinite() | self.bad_loss
        super().backward(self.loss_scaler.scale(loss), **kwargs)

    def step(self, **kwargs) -> None:
        self.loss_scaler.unscale_(self.optimizer)
        parameters = [p for group in self.optimizer.param_groups for p in group['params'] if p.grad is not None]
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters])
        if self.clip_grad_kwargs:
            self.clip_func(parameters, **self.clip_grad_kwargs)
        self.norms.append(norm)
        bad = ~norm.isfinite()
        self._step_unless(bad, **kwargs)
        for buffer, before in zip(self.buffers, self.buffers_before, strict=True):
            torch.where(bad, before, buffer, out=buffer)
        overflow = self._update_scale(bad) if self.loss_scaler.is_enabled() else torch.zeros_like(bad)
        in_a_row, not_finite, overflows = self.counters.to(norm.device, torch.float32).unbind()
        self.counters = torch.stack([(in_a_row + 1) * bad, not_finite + (bad & ~overflow), overflows + overflow])
        if len(self.norms) >= 2 * STEPS_BETWEEN_FETCHES:  # in a run without our RuntimeInfoHook
            self.read_counters()

    @property
    def taken(self) -> Tensor:
        """Whether the last step was taken: bool (), on the device."""
        return self.counters[0] == 0

    def read_counters(self) -> SkippedSteps:
        """Fetches the counters, equal on all ranks, and logs them and the norms; UserError after 25 skips in a row."""
        norms, self.norms = self.norms, []
        numbers = torch.cat([norm.to(self.counters).view(-1) for norm in (self.counters, *norms)]).tolist()
        for norm in numbers[len(self.counters) :]:
            self.message_hub.update_scalar('train/grad_norm', norm)
        last_read, counters = self.seen, SkippedSteps(*map(int, numbers[: len(self.counters)]))
        self.seen = counters
        self.message_hub.update_scalar('train/skipped_steps', counters.not_finite)
        if skipped := counters.not_finite - last_read.not_finite:
            in_run = counters.not_finite
            warn(f'Skipped {skipped} of the last {len(norms)} steps (gradients not finite), {in_run} in this run.')
        if self.loss_scaler.is_enabled():
            self.message_hub.update_scalar('train/overflows', counters.overflows)
        if counters.in_a_row >= MAX_SKIPPED_IN_A_ROW:
            first = (self.inner_count // self.accumulative_counts - counters.in_a_row) * self.accumulative_counts
            raise UserError(
                f'the gradient was not finite in {counters.in_a_row} steps in a row, from iteration {first} on; resume '
                'the last checkpoint with a lower optim_wrapper.optimizer.lr, or with optim_wrapper.dtype=float32'
            )
        return counters

    def state_dict(self) -> dict:
        skipped = dict(counters=self.counters)
        return dict(super().state_dict(), loss_scaler=self.loss_scaler.state_dict(), skipped_steps=skipped)

    def load_state_dict(self, state_dict: dict) -> None:
        state_dict = dict(state_dict)
        scaler = state_dict.pop('loss_scaler', None)
        if scaler and self.loss_scaler.is_enabled():
            self.loss_scaler.load_state_dict(scaler)
        if skipped := state_dict.pop('skipped_steps', None):
            self.counters = skipped['counters'][: len(self.seen)].clone()  # older checkpoints have more
            self.seen = SkippedSteps(*map(int, self.counters))
        check_state(state_dict, self.optimizer)
        super().load_state_dict(state_dict)

    def _step_unless(self, bad: Tensor, **kwargs) -> None:
        optimizer = self.optimizer
        fused = all(group.get('fused') for group in optimizer.param_groups)
        # A fused SGD that skips its very first step leaves its momentum uninitialised, so the host decides that step.
        # It decides every step if torch no longer has this private mark for its GradScaler; torch 2.13 has it.
        if fused and optimizer.state and getattr(optimizer, '_step_supports_amp_scaling', False):
            optimizer.found_inf, optimizer.grad_scale = bad.float(), None  # as torch's GradScaler does
            try:
                optimizer.step(**kwargs)
            finally:
                del optimizer.found_inf, optimizer.grad_scale
        elif not bad:  # waits for the device
            optimizer.step(**kwargs)

    def _update_scale(self, bad: Tensor) -> Tensor:
        """Updates the loss scale; returns whether the step overflowed float16, which lowers it."""
        one = torch.ones((), device=bad.device)
        scale = self.loss_scaler.scale(one)
        bad_loss = torch.as_tensor(self.bad_loss, device=bad.device).float()
        all_reduce(bad_loss, op='max')
        self.bad_loss = False
        overflow = bad & (bad_loss == 0) & (scale > 1)
        # The first update halves the scale after any bad step, and raises it after many good ones. If the scale was not
        # the cause of the bad step, the second one, which is given a value, puts the old scale back.
        self.loss_scaler.update()
        self.loss_scaler.update(torch.where(bad & ~overflow, scale, self.loss_scaler.scale(one)))
        return overflow


@HOOKS.register_module()
class BadStepHook(Hook):
    """Does nothing; configs of earlier versions name it. AutocastOptimWrapper itself stops a run."""


def check_state(state_dict: dict, optimizer: torch.optim.Optimizer) -> None:
    """Raises CheckpointError unless an optimizer's state has the shapes that fused kernels trust."""
    match_groups(state_dict, optimizer)
    for saved, group in zip(state_dict['param_groups'], optimizer.param_groups, strict=False):
        # this run's config chooses the kernel
        saved.update({key: group[key] for key in KERNEL_OPTIONS if key in group})
        for number, parameter in zip(saved['params'], group['params'], strict=False):
            state = state_dict['state'].get(number, {})
            for name, value in state.items():
                if not isinstance(value, Tensor):
                    continue
                expected = torch.Size() if name == 'step' else parameter.shape
                if 'fused' in group and value.shape != expected:
                    raise CheckpointError(f'optimizer of another model: {name} is {[*value.shape]}, not {[*expected]}')
                state[name] = value.contiguous()


def match_groups(state_dict: dict, optimizer: torch.optim.Optimizer) -> None:
    """Sorts an optimizer's state into this run's groups, by the names that BEiTOptimWrapperConstructor stores."""
    saved, groups = state_dict['param_groups'], optimizer.state_dict()['param_groups']
    saved_numbers, numbers_here = numbers_by_name(saved), numbers_by_name(groups)
    alike = [group['params'] for group in saved] == [group['params'] for group in groups]
    if alike and saved_numbers == numbers_here:
        return
    if saved_numbers and numbers_here:
        numbers = {saved_numbers[name]: numbers_here[name] for name in saved_numbers.keys() & numbers_here.keys()}
        state = state_dict['state'].items()
        state_dict.update(state={numbers[key]: value for key, value in state if key in numbers}, param_groups=groups)
    elif not alike:
        raise CheckpointError(
            f"the optimizer's {len(saved)} groups of parameters do not match this run's {len(groups)}; restore "
            'constructor and paramwise_cfg, or load only the weights: load_from'
        )


def numbers_by_name(groups: list[dict]) -> dict[str, int]:
    """Name of each parameter -> its number in an optimizer's state."""
    pairs = [pair for group in groups for pair in zip(group.get('names', ()), group['params'], strict=False)]
    return {name.removeprefix('module.'): number for name, number in pairs}  # DistributedDataParallel's


@OPTIM_WRAPPER_CONSTRUCTORS.register_module()
class BEiTOptimWrapperConstructor:
    """Parameter groups: with and without weight decay and, for fine-tuning, one learning rate for each layer.

    Vectors (norms, biases, LayerScale) and the backbone's class token, registers and position embedding do not decay.
    The mask token and bias tables do. Frozen parameters are in no group.

    Args:
        optim_wrapper_cfg: config of the wrapper with its `optimizer`.
        paramwise_cfg: `dict(layer_decay_rate=d)`, 0 < d <= 1: each layer of the BEiTBackbone, or of mmpretrain's
            BEiTViT or VisionTransformer, learns d times as fast as the one above it; everything else learns at the full
            rate. A schedule's lowest rate is scaled too only if it is a ratio (`eta_min_ratio`).

    Source: microsoft/unilm `beit/optim_factory.py`.
    """

    def __init__(self, optim_wrapper_cfg: dict, paramwise_cfg: dict | None = None):
        self.optim_wrapper_cfg = dict(optim_wrapper_cfg)
        paramwise_cfg = paramwise_cfg or {}
        for key in paramwise_cfg:
            check_choice('a key of paramwise_cfg for BEiTOptimWrapperConstructor', key, ('layer_decay_rate',))
        self.layer_decay_rate = rate = paramwise_cfg.get('layer_decay_rate', 1.0)
        if not 0 < rate <= 1:
            raise UserError(f'layer_decay_rate is {rate!r}; expected a number above 0, and at most 1 (no layer decay)')

    def __call__(self, model: nn.Module) -> OptimWrapper:
        optimizer = self.optim_wrapper_cfg['optimizer']
        groups = parameter_groups(model, self.layer_decay_rate, optimizer.get('lr'))
        built = OPTIMIZERS.build(dict(optimizer, params=groups))
        return OPTIM_WRAPPERS.build(dict(type='OptimWrapper') | self.optim_wrapper_cfg | dict(optimizer=built))


def parameter_groups(model: nn.Module, rate: float = 1.0, lr: float | None = None) -> list[dict]:
    """Splits the trainable parameters by weight decay and, with a `rate` below 1, by layer, first layer first."""
    modules = model.named_modules()
    backbones = [(f'{name}.'.lstrip('.'), module) for name, module in modules if isinstance(module, LAYERED)]
    if rate != 1 and (lr is None or len(backbones) != 1):
        raise UserError(
            'layer_decay_rate needs optim_wrapper.optimizer.lr and one BEiTBackbone, BEiTViT or VisionTransformer; '
            f'found lr={lr} and {len(backbones)}'
        )
    no_decay = {f'{prefix}{name}' for prefix, _ in backbones for name in ('cls_token', 'pos_embed', 'register_tokens')}
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


@OPTIMIZERS.register_module()
class LARS(torch.optim.SGD):
    """torch's SGD; the gradient of each matrix first gets TRUST times the matrix's length.

    Unlike mmpretrain's LARS, it applies the learning rate after the momentum, and never waits for the device.
    Raises UserError for a weight decay. Source: facebookresearch/mae `util/lars.py`.
    """

    def add_param_group(self, param_group: dict) -> None:
        super().add_param_group(param_group)
        if decay := self.param_groups[-1]['weight_decay']:  # MAE's adds it to the gradients of matrices alone, first
            raise UserError(f'weight_decay is {decay} for LARS; expected 0, as in the recipes of probes')

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for parameter in [parameter for group in self.param_groups for parameter in group['params']]:
            if parameter.grad is not None and parameter.dim() > 1:
                length, steepness = parameter.norm(), parameter.grad.norm()
                ratio = torch.where((length > 0) & (steepness > 0), TRUST * length / steepness, 1.0)
                parameter.grad.mul_(ratio)
        super().step()

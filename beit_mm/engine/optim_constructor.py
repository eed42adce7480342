"""Which parameters decay, and how fast each layer learns."""
from mmengine.optim import OptimWrapper
from mmengine.registry import OPTIM_WRAPPERS, OPTIMIZERS
from torch import nn

from beit_mm.registry import OPTIM_WRAPPER_CONSTRUCTORS


@OPTIM_WRAPPER_CONSTRUCTORS.register_module()
class BEiTOptimWrapperConstructor:
    """Parameter groups: with and without weight decay and, for fine-tuning, one learning rate for each layer.

    No decay for vectors (norms, biases, LayerScale) and for what a module names in `no_weight_decay()` (the
    backbone: class token and position embedding). The mask token and bias tables decay.

    Args:
        optim_wrapper_cfg: config of the wrapper with its `optimizer`.
        paramwise_cfg: `dict(layer_decay_rate=d)`, 0 < d <= 1: with d below 1 each layer learns d times as fast as the
            one above it. The layers are those of the module that has mmpretrain's `get_layer_depth` (the backbone);
            everything outside of it learns at the full rate. Schedules scale with the group; their lowest rate does
            only when it is given as a ratio (`eta_min_ratio` of CosineAnnealingLR).

    Raises:
        ValueError: another key or rate, an optimizer without `lr`, or not exactly one module with layers.

    Source: microsoft/unilm `beit/optim_factory.py`.
    Differs from it in: names are found below any prefix, so class token and position embedding are
    spared in a segmentor too; frozen parameters are in no group. A few groups instead of one for each
    parameter (mmengine's way) let the fused optimizer work on hundreds of tensors at once.
    """

    def __init__(self, optim_wrapper_cfg: dict, paramwise_cfg: dict | None = None):
        self.optim_wrapper_cfg = dict(optim_wrapper_cfg)
        paramwise_cfg = dict(paramwise_cfg or {})
        self.layer_decay_rate = rate = paramwise_cfg.pop('layer_decay_rate', 1.0)
        if paramwise_cfg:
            raise ValueError(f'paramwise_cfg of BEiTOptimWrapperConstructor has {sorted(paramwise_cfg)}; it takes '
                             'layer_decay_rate only')
        if isinstance(rate, bool) or not isinstance(rate, (int, float)) or not 0 < rate <= 1:
            raise ValueError(f'layer_decay_rate is {rate!r}; expected a number above 0, and at most 1 (no layer decay)')

    def __call__(self, model: nn.Module) -> OptimWrapper:
        wrapper = dict(self.optim_wrapper_cfg)
        wrapper.setdefault('type', 'OptimWrapper')
        optimizer = dict(wrapper.pop('optimizer'))
        groups = decay_groups(model) if self.layer_decay_rate == 1 else layer_groups(
            model, self.layer_decay_rate, optimizer.get('lr'))
        wrapper['optimizer'] = OPTIMIZERS.build(dict(optimizer, params=groups))
        return OPTIM_WRAPPERS.build(wrapper)


def decay_groups(model: nn.Module) -> list[dict]:
    """Splits the trainable parameters; each group also lists their names under `names`."""
    spared = {
        f'{prefix}.{name}'.lstrip('.')
        for prefix, module in model.named_modules() if hasattr(module, 'no_weight_decay')
        for name in module.no_weight_decay()
    }
    decayed = dict(names=[], params=[])
    plain = dict(names=[], params=[], weight_decay=0.0)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            group = plain if parameter.dim() <= 1 or name in spared else decayed
            group['names'].append(name)
            group['params'].append(parameter)
    return [group for group in (decayed, plain) if group['params']]


def layer_groups(model: nn.Module, rate: float, lr: float | None) -> list[dict]:
    """Splits the groups of `decay_groups` by layer, first layer first, each with its `lr`: that of the last layer
    times `rate` for every layer above."""
    if lr is None:
        raise ValueError('layer_decay_rate needs the learning rate of the last layer; set optim_wrapper.optimizer.lr')
    prefix, module = _layered_module(model)
    groups = {}
    for kind, whole in enumerate(decay_groups(model)):
        for name, parameter in zip(whole['names'], whole['params'], strict=True):
            layer, layers = module.get_layer_depth(name, prefix)
            group = groups.setdefault((layer, kind), dict(
                whole, names=[], params=[], lr=lr * rate**(layers - 1 - layer)))
            group['names'].append(name)
            group['params'].append(parameter)
    return [groups[key] for key in sorted(groups)]


def _layered_module(model: nn.Module) -> tuple[str, nn.Module]:
    """The one module that knows its layers, and what stands before its names. mmpretrain's classifier only passes the
    question on to its backbone, so the innermost counts."""
    holders = {name: module for name, module in model.named_modules() if hasattr(module, 'get_layer_depth')}
    inner = [name for name in holders if not any(
        other != name and other.startswith(f'{name}.' if name else '') for other in holders)]
    if len(inner) != 1:
        raise ValueError(f'layer_decay_rate needs one module with get_layer_depth, such as BEiTBackbone; '
                         f'{type(model).__name__} has {inner or "none"}')
    return f'{inner[0]}.'.lstrip('.'), holders[inner[0]]

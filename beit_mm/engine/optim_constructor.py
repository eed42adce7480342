"""Which parameters decay."""
from mmengine.optim import OptimWrapper
from mmengine.registry import OPTIM_WRAPPERS, OPTIMIZERS
from torch import nn

from beit_mm.registry import OPTIM_WRAPPER_CONSTRUCTORS


@OPTIM_WRAPPER_CONSTRUCTORS.register_module()
class BEiTOptimWrapperConstructor:
    """Two parameter groups: with and without weight decay.

    No decay for vectors (norms, biases, LayerScale) and for what a module names in `no_weight_decay()` (the
    backbone: class token and position embedding). The mask token and bias tables decay.

    Args:
        optim_wrapper_cfg: config of the wrapper with its `optimizer`.
        paramwise_cfg: must be empty; the rule above is the recipe.

    Source: microsoft/unilm `beit/optim_factory.py`.
    Differs from it in: names are found below any prefix, so class token and position embedding are
    spared in a segmentor too; frozen parameters are in no group. Two groups instead of one for each
    parameter (mmengine's way) let the fused optimizer work on hundreds of tensors at once.
    """

    def __init__(self, optim_wrapper_cfg: dict, paramwise_cfg: dict | None = None):
        if paramwise_cfg:
            raise ValueError(f'BEiTOptimWrapperConstructor takes no paramwise_cfg, got {paramwise_cfg}')
        self.optim_wrapper_cfg = dict(optim_wrapper_cfg)

    def __call__(self, model: nn.Module) -> OptimWrapper:
        wrapper = dict(self.optim_wrapper_cfg)
        wrapper.setdefault('type', 'OptimWrapper')
        optimizer = dict(wrapper.pop('optimizer'), params=decay_groups(model))
        wrapper['optimizer'] = OPTIMIZERS.build(optimizer)
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

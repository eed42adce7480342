"""Stops a training whose optimizer was made by rules for other names than our backbone's.

Constructors of other libraries find layers and norms by their names. mmseg's counts the blocks of any class whose name
contains "BEiT" by `layers.0`, and mmpretrain's recipes spare norms called `.ln`: with `blocks.0` and `norm1` neither
applies, and nothing says so.
"""

import weakref
from collections.abc import Sequence

from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from beit_mm.terminal import UserError

ADVICE = "use optim_wrapper.constructor='beit_mm.BEiTOptimWrapperConstructor' with paramwise_cfg="


def check_groups_at_next_step(backbone: nn.Module) -> None:
    """Has `check_groups` look at the backbone's optimizer when it takes its next step, once.

    A backbone meets its optimizer nowhere else. torch calls the hook for every optimizer, those of other models too,
    until it is removed: after that step, or when the backbone is gone.
    """
    alive = weakref.ref(backbone)

    def check(optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
        module = alive()
        if module is not None:
            own = set(map(id, module.parameters()))
            if not any(id(parameter) in own for group in optimizer.param_groups for parameter in group['params']):
                return
            try:
                check_groups(module, optimizer.param_groups)
            except ValueError:
                handle.remove()
                raise
        optimizer.register_step_post_hook(lambda *_: handle.remove())  # not here: torch goes through its hooks

    handle = register_optimizer_step_pre_hook(check)


def check_groups(backbone: nn.Module, groups: Sequence[dict]) -> None:
    """Raises ValueError when an optimizer's groups mistake the layers or the norms of a BEiTBackbone.

    Args:
        backbone: a BEiTBackbone; parameters that are in no group do not count.
        groups: the optimizer's.
    """
    group_of = {id(parameter): group for group in groups for parameter in group['params']}
    scales = [
        {group_of[id(p)].get('lr_scale', 1) for p in block.parameters() if id(p) in group_of}
        for block in backbone.blocks
    ]
    trained = [scale for scale in scales if scale]
    of_embedding = {group_of[id(p)].get('lr_scale', 1) for p in backbone.patch_embed.parameters() if id(p) in group_of}
    if len(trained) > 1 and trained[0] == trained[-1] and of_embedding - trained[0]:
        raise UserError(
            'the optimizer gives all blocks of the BEiTBackbone one learning rate and its patch embedding another: the '
            f'layer decay of its constructor does not know our names; {ADVICE}dict(layer_decay_rate=...)'
        )
    for name, norm in backbone.named_modules():
        if not isinstance(norm, nn.LayerNorm) or not {id(norm.weight), id(norm.bias)} <= group_of.keys():
            continue
        of_weight, of_bias = (group_of[id(p)].get('weight_decay', 0) for p in (norm.weight, norm.bias))
        if of_weight and not of_bias:
            raise UserError(
                f'weight decay {of_weight:g} applies to the weight of {name} of the BEiTBackbone and not to its bias: '
                "the paramwise_cfg has other names for norms; add 'norm': dict(decay_mult=0.0) to its custom_keys, or "
                f'{ADVICE}dict(layer_decay_rate=...)'
            )

"""Low-rank adaptation (LoRA) by mmpretrain's LoRAModel.

Source: LoRA, arXiv 2106.09685.
"""

from mmpretrain.models.peft.lora import LoRALinear, LoRAModel
from torch import nn

TARGETS = ('attn.qkv', 'attn.proj', 'mlp.fc1', 'mlp.fc2')  # all linear layers of a block


def with_lora(backbone: dict, rank: int) -> dict:
    """Config of a backbone that trains low-rank matrices, scaled by 2, beside its frozen linear layers."""
    targets = [dict(type=name) for name in TARGETS]
    return dict(type='mmpretrain.LoRAModel', module=backbone, rank=rank, alpha=2 * rank, targets=targets)


def merge_lora(model: nn.Module) -> nn.Module:
    """Adds the low-rank matrices to the weights beside them and removes LoRA's wrappers, in place."""
    for name, module in list(model.named_modules()):
        if isinstance(module, LoRALinear):
            layer = module.original_layer
            layer.weight.data += module.scaling * module.lora_up.weight.data @ module.lora_down.weight.data
            model.set_submodule(name, layer)
    for name, module in list(model.named_modules()):
        if isinstance(module, LoRAModel):
            model.set_submodule(name, module.module)
    return model

"""What a checkpoint records about preprocessing, tokenizer and teacher."""

from typing import Any

from torch import nn

from beit_mm.models.tokenizers.base import TargetGenerator
from beit_mm.models.vit import BEiTBackbone


def backbone_of(model: nn.Module) -> BEiTBackbone | None:
    """The BEiTBackbone inside a model; None if there is none."""
    return next((module for module in model.modules() if isinstance(module, BEiTBackbone)), None)


def preprocessing_of_model(model: nn.Module) -> dict[str, Any]:
    """`mean` and `std` of the channels, pixels 0-255, and `size` (height, width): each a list, if the model has it."""
    preprocessing = {}
    for name in ('mean', 'std'):
        if (values := getattr(getattr(model, 'data_preprocessor', None), name, None)) is not None:
            # six digits, because the float32 of 123.675 is 123.675003
            preprocessing[name] = [float(f'{value:.6g}') for value in values.flatten().tolist()]
    if (backbone := backbone_of(model)) is not None:
        preprocessing['size'] = [side * backbone.patch_size for side in backbone.grid]
    return preprocessing


def target_provenance(model: nn.Module) -> dict[str, Any] | None:
    """Type, path, SHA-256 and settings of the tokenizer or teacher; None for a model without one."""
    found = next((module.provenance for module in model.children() if isinstance(module, TargetGenerator)), None)
    return found or None  # pixels have none

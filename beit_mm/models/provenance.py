"""What a checkpoint records about any model with a BEiTBackbone or a Tokenizer in it."""

from typing import Any

from torch import nn

from beit_mm.models.tokenizers.base import Tokenizer
from beit_mm.models.vit import BEiTBackbone


def backbone_of(model: nn.Module) -> BEiTBackbone | None:
    """The BEiTBackbone in a model; None where it has none."""
    return next((module for module in model.modules() if isinstance(module, BEiTBackbone)), None)


def preprocessing_of_model(model: nn.Module) -> dict[str, Any]:
    """Lists `mean` and `std` of the channels, pixels 0-255, and `size` (height, width), each where the model has it."""
    preprocessing = {}
    for name in ('mean', 'std'):
        if (values := getattr(getattr(model, 'data_preprocessor', None), name, None)) is not None:
            # six digits are what a float32 keeps of 123.675
            preprocessing[name] = [float(f'{value:.6g}') for value in values.flatten().tolist()]
    if (backbone := backbone_of(model)) is not None:
        preprocessing['size'] = [side * backbone.patch_size for side in backbone.grid]
    return preprocessing


def tokenizer_provenance(model: nn.Module) -> dict[str, Any] | None:
    """Type, path, SHA-256 and precision of the tokenizer that the targets come from; None without one."""
    return next((module.provenance for module in model.children() if isinstance(module, Tokenizer)), None)

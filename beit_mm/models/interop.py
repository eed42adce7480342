"""Components of mmpretrain in our algorithms, ours in theirs, and what a checkpoint records of any such model."""

from typing import Any

import torch
from mmpretrain.models.selfsup import beit, cae
from mmpretrain.models.selfsup.beit import BEiTPretrainViT
from torch import Tensor, nn

from beit_mm.checkpoint.find import path_of_checkpoint
from beit_mm.checkpoint.names import convert_state_dict, detect_format
from beit_mm.errors import UserError
from beit_mm.files import file_sha256
from beit_mm.models.tokenizers.base import Tokenizer, map_pixels, without_autocast
from beit_mm.models.tokenizers.dalle import STRIDE
from beit_mm.models.vit import BEiTBackbone
from beit_mm.registry import MODELS


class MMPretrainTokenizer(Tokenizer):
    """A target generator of mmpretrain's, DALL-E or VQKD, as a Tokenizer.

    Its `init_cfg` names its weights, as in mmpretrain's recipes. They are loaded here: a test never calls
    `init_weights`, and a pretraining's checkpoints hold no tokenizer.
    """

    def __init__(self, generator: cae.DALLEEncoder | beit.VQKD) -> None:
        super().__init__()
        self.generator = generator
        if isinstance(generator, cae.DALLEEncoder):
            self.vocab_size, self.stride = generator.blocks.output.conv.w.shape[0], STRIDE
        else:
            self.vocab_size = generator.quantize.num_tokens
            self.stride = generator.encoder.patch_embed.projection.stride[0]
        generator.init_weights()
        self.provenance = dict(type=type(generator).__name__, precision='fp32', **_weight_file(generator.init_cfg))

    @torch.no_grad()
    def encode(self, images: Tensor) -> Tensor:
        with without_autocast(images):
            if isinstance(self.generator, cae.DALLEEncoder):
                return self.generator(map_pixels(images)).argmax(dim=1)
            return self.generator(2 * images - 1).unflatten(1, self.grid_size(*images.shape[-2:]))


def _weight_file(init_cfg: dict | list[dict] | None) -> dict[str, str]:
    """Path and SHA-256 of the file of an `init_cfg`."""
    configs = [init_cfg] if isinstance(init_cfg, dict) else init_cfg or []
    source = next((config['checkpoint'] for config in configs if 'checkpoint' in config), None)
    if source is None:
        return dict(path='random weights', sha256='')
    path = path_of_checkpoint(source)
    return dict(path=str(path), sha256=file_sha256(path))


def as_tokenizer(module: nn.Module) -> Tokenizer:
    """A target generator, of ours or of mmpretrain's, as a Tokenizer."""
    if isinstance(module, (cae.DALLEEncoder, beit.VQKD)):
        return MMPretrainTokenizer(module)
    if not isinstance(module, Tokenizer):
        raise UserError(f'target_generator is a {type(module).__name__}; expected a Tokenizer, DALL-E or VQKD')
    return module


def expect_own_backbone(config: dict, algorithm: str) -> None:
    """Raises UserError where the config of a backbone is not that of a BEiTBackbone, before it is built."""
    kind = config['type']
    if isinstance(kind, str):
        with MODELS.switch_scope_and_registry(config.get('_scope_')) as registry:  # as `build` finds it
            kind = registry.get(kind)
    if isinstance(kind, type) and not issubclass(kind, BEiTBackbone):
        raise UserError(f'the backbone is a {kind.__name__}; {algorithm} takes a beit_mm.BEiTBackbone')


def rename_mmpretrain_weights(model: nn.Module, state_dict: dict, prefix: str, *_: object) -> None:
    """Load hook of a pretrainer: gives mmpretrain's weights our names and leaves those of a tokenizer out."""
    weights = {name.removeprefix(prefix): state_dict[name] for name in state_dict if name.startswith(prefix)}
    if not isinstance(model.backbone, BEiTBackbone) or detect_format(weights) != 'mmpretrain':
        return
    for name in weights:
        del state_dict[prefix + name]
    renamed = convert_state_dict(weights, 'mmpretrain').state_dict
    state_dict.update((prefix + name, tensor) for name, tensor in renamed.items())


def as_pretraining_backbone(module: nn.Module) -> nn.Module:
    """A backbone that takes masks: ours, or mmpretrain's with the `patch_size` that ours has."""
    if isinstance(module, BEiTPretrainViT):
        (module.patch_size, _) = module.patch_embed.projection.stride
    elif not isinstance(module, BEiTBackbone):
        raise UserError(f'the backbone is a {type(module).__name__}; expected a BEiTBackbone or BEiTPretrainViT')
    return module


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

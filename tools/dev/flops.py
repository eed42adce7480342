"""Parameters and arithmetic of a config's model, part by part, for one image in a forward pass.

    python tools/dev/flops.py configs/beit/pretrain_300e.py
    python tools/dev/flops.py configs/beit_plus/upernet_512_ade20k_160k.py --shape 640 640

Counted are products of matrices and convolutions, as training has them: of a pretraining the tokenizer too, and the
last block and the head at the masked patches only; of a segmentor the auxiliary heads, which tests do without. Nothing
is computed and no weights are needed.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING
from unittest.mock import patch

from beit_mm.apis.commands import argument_parser, load_config
from beit_mm.errors import UserError
from beit_mm.terminal import run

if TYPE_CHECKING:
    from mmengine.config import Config
    from torch import Tensor, nn

# Children of a model that are one part; the rest of it is taken apart by the types of its modules.
CHILDREN = dict(target_generator='tokenizer', teacher='teacher', neck='neck', auxiliary_head='auxiliary heads')
CHILDREN |= dict.fromkeys(('head', 'heads', 'decode_head', 'dino_head'), 'head')
REST = 'tokens, norms, the rest'


def main() -> None:
    parser = argument_parser(__doc__, config_only=True)
    parser.add_argument('--shape', type=int, nargs=2, metavar=('H', 'W'), help="of the image (default: the config's)")
    args = parser.parse_args()
    from beit_mm.terminal import quiet

    cfg = load_config(args)
    with quiet():
        parameters, flops, (height, width) = count_config(cfg, args.shape)
    print(f'{args.config}: forward pass of one image of {height} x {width} pixels')
    print(f'{"":24}{"parameters":>14}{"GMAC":>12}{"GFLOP":>12}')
    rows = [(part, parameters[part], flops[part]) for part in parameters if parameters[part] or flops[part]]
    for part, number, flop in (*rows, ('total', parameters.total(), flops.total())):
        print(f'{part:24}{number:14,}{flop / 2e9:12,.3f}{flop / 1e9:12,.3f}')
    print('A multiplication with its addition is 1 MAC and 2 FLOP. Forward and backward together take three times as')
    print('much of what is trained, and once of tokenizer and teacher.')


def count_config(cfg: Config, shape: Sequence[int] | None = None) -> tuple[Counter[str], Counter[str], tuple[int, int]]:
    """Counts a config's model for one image in a forward pass; the config stays as it is.

    Args:
        cfg: of a pretraining, a classifier or a segmentor.
        shape: height and width of the image in pixels; None takes the backbone's.

    Returns:
        Parameters of each part; FLOP of each part; height and width.

    Raises:
        UserError: the model has no BEiTBackbone, or the image is smaller than a patch.
    """
    import torch._dynamo  # torch 2.6 cannot import it below a meta device

    cfg = copy.deepcopy(cfg)
    # meta tensors have shapes and no values, and no autocast
    with torch.device('meta'), patch('torch.autocast', lambda *_, **__: nullcontext()):
        model = build(cfg)
        backbone = dict(model.backbone.named_children()).get('module', model.backbone)  # in LoRAModel
        side, channels = backbone.patch_size, backbone.patch_embed.proj.in_channels
        height, width = shape or (side * number for number in backbone.grid)
        if min(height, width) < side:
            raise UserError(f'--shape {height} {width}: expected at least a patch of the model, {side} x {side} pixels')
        image = torch.zeros(1, channels, height, width)
    with patch('torch.autocast', lambda *_, **__: nullcontext()):
        parameters, flops = count(model, cfg, image)
    return parameters, flops, (height, width)


def build(cfg: Config) -> nn.Module:
    """The model of a config in evaluation mode, without weights of files."""
    from mmengine.registry import init_default_scope

    from beit_mm.models.vit import BEiTBackbone
    from beit_mm.registry import MODELS

    init_default_scope(cfg.default_scope)
    tokenizer = cfg.model.get('target_generator')
    if (
        tokenizer and tokenizer.type == 'beit_mm.FeatureTargets'
    ):  # of a teacher as large as the backbone, without a file
        tokenizer.update(teacher='ema', channels=None)
    elif tokenizer:
        unread = dict(checkpoint=None, decoder_checkpoint=None)
        tokenizer.update(unread if tokenizer.type == 'beit_mm.DiscreteVAE' else dict(random_weights=True))
    with patch.object(BEiTBackbone, 'init_weights', lambda _: None):  # which LoRAModel calls when it is built
        model = MODELS.build(cfg.model.get('module', cfg.model))  # of a config that tests at all scales its segmentor
    backbone = dict(model.named_children()).get('backbone')
    if not isinstance(getattr(backbone, 'module', backbone), BEiTBackbone):
        raise UserError(
            f'the model is a {type(model).__name__} without a BEiTBackbone; expected the config of a pretraining, a '
            'classifier or a segmentor'
        )
    if tokenizer and tokenizer.type == 'beit_mm.FeatureTargets':
        targets = model.target_generator.targets
        model.target_generator.targets = lambda *args: targets(*args)[..., : model.head.target_dims]
    if tokenizer and tokenizer.type == 'beit_mm.DALLETokenizer' and not tokenizer.get('decoder_checkpoint'):
        model.target_generator.decoder = None  # random weights come with one
    return model.eval()


def parts_of(model: nn.Module) -> dict[str, list[nn.Module]]:
    """The modules that each part consists of, none inside another."""
    from torch.nn import ModuleDict, ModuleList

    from beit_mm.models.layers import MLP, PatchEmbed, SwiGLU
    from beit_mm.models.vit import Attention, SharedRelativePositionBias

    kinds = {PatchEmbed: 'patch embedding', Attention: 'attention', SharedRelativePositionBias: 'attention'}
    kinds |= {MLP: 'MLP', SwiGLU: 'MLP'}
    parts: dict[str, list[nn.Module]] = {name: [] for name in ('tokenizer', 'teacher', *kinds.values(), 'neck', 'head')}
    for name, child in model.named_children():
        if part := CHILDREN.get(name):
            parts.setdefault(part, []).extend(
                child.children() if isinstance(child, ModuleDict | ModuleList) else [child]
            )
        else:
            for module in child.modules():
                if part := kinds.get(type(module)):
                    parts[part].append(module)
    return parts


def count(model: nn.Module, cfg: Config, image: Tensor) -> tuple[Counter[str], Counter[str]]:
    """Parameters, and FLOP for an image (1, C, H, W), of each part."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from beit_mm.models import BEiTPretrainer
    from beit_mm.models.tokenizers.base import TargetGenerator

    parts = parts_of(model)
    parameters = Counter({part: sum(p.numel() for m in parts[part] for p in m.parameters()) for part in parts})
    parameters[REST] = sum(p.numel() for p in model.parameters()) - parameters.total()
    counter, flops = FlopCounterMode(display=False), Counter[str]()

    def measure(module: nn.Module, method: str, part: str) -> None:
        function = getattr(module, method)

        def measured(*args: object, **kwargs: object) -> object:
            before = counter.get_total_flops() - flops.total()  # a mask head runs blocks, which are other parts
            result = function(*args, **kwargs)
            flops[part] += counter.get_total_flops() - flops.total() - before
            return result

        setattr(module, method, measured)

    inputs = views(model, cfg, image) if isinstance(model, BEiTPretrainer) else {}
    for part, modules in parts.items():
        for module in modules:
            measure(module, 'targets' if isinstance(module, TargetGenerator) else 'forward', part)
    with torch.enable_grad(), counter:  # without gradients UperNet goes a shorter way
        if inputs:
            model(inputs, mode='loss')
        elif cfg.default_scope == 'mmseg':
            features = model.extract_feat(image)
            model.decode_head.train(hasattr(model.decode_head, 'mask_losses'))  # it predicts before each block
            for head in (*parts['head'], *parts.get('auxiliary heads', [])):
                head(features)
        else:
            model(image, mode='tensor')
    flops[REST] = counter.get_total_flops() - flops.total()
    return parameters, flops


def views(model: nn.Module, cfg: Config, image: Tensor) -> dict[str, Tensor | None]:
    """What the preprocessor would give a pretraining; the same part of the patches is masked as in the config."""
    from beit_mm.models import DINOPretrainer

    grid = [-(-side // model.backbone.patch_size) for side in image.shape[2:]]
    found = dict.fromkeys(('tokenizer_images', 'mask', 'positions')) | dict(images=image, second_images=image)
    if stride := getattr(model.target_generator, 'stride', None):
        found['tokenizer_images'] = image.new_zeros(*image.shape[:2], *(side * stride for side in grid))
    for step in cfg.train_dataloader.dataset.pipeline:
        if step.type.endswith('Mask'):
            number = round(step.num_masked / (step.grid[0] * step.grid[1]) * grid[0] * grid[1])
            found.update(mask=image.new_zeros(1, *grid).bool(), positions=image.new_zeros(1, number).long())
        elif step.type == 'beit_mm.MultiCrop':
            side = step.get('local_size', 96)
            found['local_images'] = image.new_zeros(step.get('num_local', 8), image.shape[1], side, side)
    if isinstance(model, DINOPretrainer):
        model.teacher_temperature = 1.0
    return found


if __name__ == '__main__':
    run(main)

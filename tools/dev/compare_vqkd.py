"""Trains VQ-KD beside the released code, from the same weights on the same noise, and prints how far they are apart.

    git clone https://github.com/microsoft/unilm
    python tools/dev/compare_vqkd.py unilm/beit2

ViT-Base, 512 codes of 32 numbers that begin by k-means, AdamW; the teacher's features are drawn. Gradients
are apart by parts of the largest one. Needs timm and einops.
"""

import argparse
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from beit_mm.models import VQKD
from beit_mm.terminal import Parser, UserError, run

SIZES = dict(img_size=224, patch_size=16)
WIDTH, CODES, CODE_DIMS, FEATURES = 768, 512, 32, 512


def released(folder: Path, layers: int) -> nn.Module:
    """Its classes, from files of 2022: modules that are gone since then, or are its teachers, are stood in for."""
    import timm.layers

    if not (folder / 'modeling_vqkd.py').exists():
        raise UserError(f'{folder} holds no modeling_vqkd.py; expected the folder beit2 of microsoft/unilm')
    registry, constants = (ModuleType(f'timm.{name}') for name in ('models.registry', 'data.constants'))
    registry.register_model = lambda function: function
    constants.IMAGENET_DEFAULT_MEAN = constants.IMAGENET_DEFAULT_STD = None
    teachers = ModuleType('vqkd_teacher')
    teachers.clip = teachers.get_dino_vit_base = None
    stand_ins = {'timm.models.registry': registry, 'timm.data.constants': constants, 'vqkd_teacher': teachers}
    sys.modules |= stand_ins | {'timm.models.layers': timm.layers, 'utils': ModuleType('utils')}
    sys.path.insert(0, str(folder))
    import modeling_vqkd

    config = dict(modeling_vqkd.get_model_default_params(), num_classes=0)
    decoder = dict(config, img_size=14, patch_size=1, in_chans=CODE_DIMS, depth=layers)
    model = modeling_vqkd.VQKD(config, decoder, CODES, CODE_DIMS, teacher_model_type=None, decoder_out_dim=FEATURES)
    model.get_regress_target = lambda images: model.features  # in the place of a teacher's
    return model


def main() -> None:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('folder', type=Path, help='beit2 of microsoft/unilm')
    parser.add_argument('--layers', type=int, default=3, choices=(1, 3), help='of the decoder')
    parser.add_argument('--steps', type=int, default=3)
    parser.add_argument('--images', type=int, default=8, help='of a step')
    args = parser.parse_args()
    torch.manual_seed(0)
    theirs = released(args.folder.resolve(), args.layers).train()
    options: dict[str, Any] = dict(SIZES, vocab_size=CODES, code_dims=CODE_DIMS, decoder_layers=args.layers)
    ours = VQKD(arch='base', teacher={}, teacher_dims=FEATURES, **options).train()
    missing = ours.load_state_dict(theirs.state_dict(), strict=False).missing_keys
    ours.started.fill_(False)  # the codes begin by k-means
    ours.teacher = (lambda images, grid: theirs.features,)
    print(f'of ours alone: {", ".join(missing)}')
    named = dict(theirs.named_parameters())
    pairs = {
        name: (parameter, named[name.replace('coder.norm.', 'coder.fc_norm.')])
        for name, parameter in ours.named_parameters()
        if parameter.requires_grad
    }
    optimizers = [torch.optim.AdamW(side, 1e-4) for side in zip(*pairs.values(), strict=True)]
    for step in range(args.steps):
        images = torch.rand(args.images, 3, 224, 224)
        theirs.features = torch.randn(args.images, 196, FEATURES)
        torch.manual_seed(step)  # k-means begins with vectors that are drawn
        loss, log = theirs(images)
        torch.manual_seed(step)
        losses = ours(dict(images=images))
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        (losses['loss_feature'] + losses['loss_commit']).backward()
        largest = max(other.grad.abs().max() for _, other in pairs.values())
        apart = dict(
            feature=losses['loss_feature'].detach() - log['train/rec_loss'],
            commit=losses['loss_commit'].detach() - log['train/quant_loss'],
            gradients=max((one.grad - other.grad).abs().max() for one, other in pairs.values()) / largest,
            codebook=(ours.codebook - theirs.quantize.embedding.weight).abs().max(),
        )
        for optimizer in optimizers:
            optimizer.step()
        apart['weights'] = max((one - other).abs().max().detach() for one, other in pairs.values())
        figures = '  '.join(f'{name} {abs(float(value)):.1e}' for name, value in apart.items())
        print(f'step {step + 1}  loss {loss.item():.6f}  apart: {figures}', flush=True)


if __name__ == '__main__':
    run(main)

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

from beit_mm.errors import UserError
from beit_mm.models import VQKD
from beit_mm.terminal import Parser, run

SIZES = dict(img_size=224, patch_size=16)
CODES, CODE_DIMS, FEATURES, IMAGES, STEPS = 512, 32, 512, 8, 3


def released(folder: Path, layers: int) -> nn.Module:
    """Its model, without the modules of its teachers and its logs, which want packages of 2022."""
    if not (folder / 'modeling_vqkd.py').exists():
        raise UserError(f'{folder} holds no modeling_vqkd.py; expected the folder beit2 of microsoft/unilm')
    teachers = ModuleType('vqkd_teacher')
    teachers.clip = teachers.get_dino_vit_base = None
    sys.modules |= dict(vqkd_teacher=teachers, utils=ModuleType('utils'))
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
    args = parser.parse_args()
    torch.manual_seed(0)
    theirs = released(args.folder.resolve(), args.layers).train()
    options: dict[str, Any] = dict(SIZES, vocab_size=CODES, code_dims=CODE_DIMS, decoder_layers=args.layers)
    ours = VQKD(arch='base', teacher={}, teacher_dims=FEATURES, **options).train()
    started = {name: parameter.detach().std() for name, parameter in ours.named_parameters()}
    missing = ours.load_state_dict(theirs.state_dict(), strict=False).missing_keys
    ours.started.fill_(False)  # the codes begin by k-means
    ours.teacher = (lambda images, grid: [theirs.features],)
    print(f'only in beit_mm: {", ".join(missing)}')
    named = dict(theirs.named_parameters())
    pairs = {
        name: (parameter, named[name.replace('coder.norm.', 'coder.fc_norm.')])
        for name, parameter in ours.named_parameters()
        if parameter.requires_grad
    }
    ratios = [float(started[name] / other.detach().std()) for name, (_, other) in pairs.items() if started[name] > 0]
    print(f'standard deviations at the start, beit_mm to the released code: {min(ratios):.2f} to {max(ratios):.2f}')
    optimizers = [torch.optim.AdamW(side, 1e-4) for side in zip(*pairs.values(), strict=True)]
    for step in range(STEPS):
        images = torch.rand(IMAGES, 3, 224, 224)
        theirs.features = torch.randn(IMAGES, 196, FEATURES)
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

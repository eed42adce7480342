"""Draws what chosen points of an image attend to: one picture a point, with every head of a layer.

    python tools/visualization/attention_maps.py beit_base_patch16_224_pt1k_800ep.pth image.jpg --points 210,140 400,90

The checkpoint is enough, of any BEiT and of plain ViTs such as DeiT's and DINO's. Each head's tile is dark where the
point looks least and white where it looks most; the contour encloses the smallest set of patches that holds 60 % of it.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from _cli import run  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('checkpoint', help='path or URL')
    parser.add_argument('image', help='path of the image')
    parser.add_argument(
        '--points',
        nargs='+',
        default=['0.5,0.5'],
        metavar='X,Y',
        help='pixels of the image as a viewer shows it (210,140), or shares of its width and height, '
        'with decimal points (0.5,0.25) (default: its middle)',
    )
    parser.add_argument('--layer', type=int, default=-1, help='block, 0-based, negative from the end (default: -1)')
    parser.add_argument('--scores', action='store_true', help='before the softmax, relative position bias included')
    parser.add_argument('--mass', type=float, default=0.6, help='share of the attention in the contour (default: 0.6)')
    parser.add_argument(
        '--short-side', type=int, metavar='PIXELS', help="of the resized image (default: the checkpoint's image size)"
    )
    parser.add_argument('--long-side', type=int, metavar='PIXELS', help='instead of --short-side')
    parser.add_argument(
        '--mean', type=float, nargs=3, help="of pixels 0-255 (default: the checkpoint's, or ImageNet's)"
    )
    parser.add_argument('--std', type=float, nargs=3, help='as --mean')
    parser.add_argument('--device', help='such as cpu or cuda:1 (default: what there is)')
    parser.add_argument('--out', default='work_dirs/attention', metavar='FOLDER', help='default: work_dirs/attention')
    parser.add_argument('--npz', action='store_true', help='also write points, patches, maps and masks as numbers')
    args = parser.parse_args()
    if any(side is not None and side < 1 for side in (args.short_side, args.long_side)):
        parser.error('--short-side and --long-side are numbers of pixels; expected at least 1')
    if args.short_side and args.long_side:
        parser.error('give one of --short-side and --long-side')
    if not 0 < args.mass <= 1:
        parser.error(f'--mass {args.mass:g} is no share; expected more than 0, at most 1')
    import numpy as np
    import torch
    from mmengine.device import get_device

    from beit_mm.checkpoint.names import IMAGENET
    from beit_mm.datasets.reading import read_image
    from beit_mm.datasets.resize import resize_bicubic
    from beit_mm.models.vit import BEiTBackbone
    from beit_mm.visualization.attention import attention_of_patches, draw_attention, largest_mass_mask, patches_at

    pixels = read_image(args.image)
    points = [parse_point(text, pixels.shape[:2]) for text in args.points]
    backbone = BEiTBackbone.from_checkpoint(args.checkpoint).to(args.device or get_device())
    if (channels := backbone.patch_embed.proj.in_channels) != 3:
        raise ValueError(f'{args.checkpoint}: a model of images with {channels} bands; expected RGB images, 3 bands')

    patch = backbone.patch_size
    sides = pixels.shape[:2]
    if args.long_side:
        scale = args.long_side / max(sides)
    else:
        scale = (args.short_side or min(backbone.grid) * patch) / min(sides)
    grid = tuple(max(1, round(side * scale / patch)) for side in sides)
    patches = patches_at(points, sides, grid)

    image = torch.from_numpy(resize_bicubic(pixels, tuple(side * patch for side in grid))).permute(2, 0, 1).float()
    known = {**IMAGENET, **backbone.load_report.preprocessing}
    mean, std = args.mean or known['mean'], args.std or known['std']
    print(f'{args.image}: {grid[0]} x {grid[1]} patches, mean {mean}, std {std}')
    normalised = (image - torch.tensor(mean).view(-1, 1, 1)) / torch.tensor(std).view(-1, 1, 1)
    normalised = normalised.to(next(backbone.parameters()).device)
    maps = attention_of_patches(backbone, normalised, patches, args.layer, softmax=not args.scores)

    folder = Path(args.out)
    folder.mkdir(parents=True, exist_ok=True)
    stem = f'{Path(args.image).stem}_layer{args.layer % backbone.num_layers}' + '_scores' * args.scores
    for (x, y), where, attention in zip(points, patches, maps, strict=True):
        path = folder / f'{stem}_{x:.0f}_{y:.0f}.png'
        draw_attention(image / 255, where, attention, None if args.scores else args.mass).save(path)
        print(path)
    if args.npz:
        numbers = dict(points=np.array(points), patches=np.array(patches), maps=maps.numpy())
        if not args.scores:
            numbers['masks'] = largest_mass_mask(maps, args.mass).numpy()
        np.savez(folder / f'{stem}.npz', **numbers)
        print(folder / f'{stem}.npz')


def parse_point(text: str, size: tuple[int, int]) -> tuple[float, float]:
    """'210,140' or '0.5,0.25' as (x, y) in pixels of an image of (height, width)."""
    try:
        x, y = (
            float(number) * (side if '.' in number else 1)
            for number, side in zip(text.split(','), size[::-1], strict=True)
        )
    except ValueError:
        raise ValueError(
            f'--points: {text!r} is no point; expected X,Y in pixels (210,140) or shares (0.5,0.25)'
        ) from None
    return x, y


if __name__ == '__main__':
    run(main)

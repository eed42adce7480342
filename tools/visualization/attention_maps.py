"""Draws what chosen points of an image attend to: one picture a point, with every head of a layer.

    python tools/visualization/attention_maps.py beit_base_patch16_224_pt1k_800ep.pth image.jpg --points 210,140 400,90

The checkpoint is enough, of any BEiT and of plain ViTs such as DeiT's and DINO's. Each head's tile is dark where the
point looks least and white where it looks most; the contour encloses the smallest set of patches that holds 60 % of it.
"""

import argparse
from pathlib import Path

from beit_mm.terminal import run


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
    from beit_mm.terminal import quiet

    with quiet():
        import numpy as np

        from beit_mm.datasets.reading import read_image
        from beit_mm.features.extractor import FeatureExtractor
        from beit_mm.pictures import attention_of_image, draw_attention, largest_mass_mask

        size = args.short_side
        if args.long_side:
            sides = read_image(args.image).shape[:2]
            size = args.long_side * min(sides) / max(sides)
        extractor = FeatureExtractor(args.checkpoint, args.device, size, whole=True, mean=args.mean, std=args.std)
        found = attention_of_image(extractor, args.image, args.points, args.layer, softmax=not args.scores)
        rows, columns = found.maps.shape[-2:]
        mean, std = (levels.flatten().tolist() for levels in (extractor.mean, extractor.std))
        print(f'{args.image}: {rows} x {columns} patches, mean {mean}, std {std}')
        folder = Path(args.out)
        folder.mkdir(parents=True, exist_ok=True)
        stem = f'{Path(args.image).stem}_layer{extractor.layer(args.layer)}' + '_scores' * args.scores
        for (x, y), patch, maps in zip(found.points, found.patches, found.maps, strict=True):
            path = folder / f'{stem}_{x:.0f}_{y:.0f}.png'
            draw_attention(found.image, [patch], maps[None], None if args.scores else args.mass).savefig(path)
            print(path)
        if args.npz:
            numbers = dict(points=np.array(found.points), patches=np.array(found.patches), maps=found.maps.numpy())
            if not args.scores:
                numbers['masks'] = largest_mass_mask(found.maps, args.mass).numpy()
            np.savez(folder / f'{stem}.npz', **numbers)
            print(folder / f'{stem}.npz')


if __name__ == '__main__':
    run(main)

"""Draws the features of a checkpoint: principal components of patches, and nearest neighbours of images.

    python tools/visualization/features.py CKPT image.jpg other.jpg --out work_dirs/features
    python tools/visualization/features.py CKPT image.jpg --among data/caltech101/val --out work_dirs/features

pca.png shows each image, uncropped, beside the first three principal components of its patches as red, green and blue,
computed over all images together. neighbours.png (--among) shows the centre of each image beside the five images of a
folder with the nearest features, and their cosines.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from beit_mm.apis.commands import add_mean_std
from beit_mm.terminal import quiet, run

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

SPREAD = 0.01  # share of the patches that are clipped at either end of the colours


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('checkpoint', help='any BEiT or plain ViT, by file, run folder, name or URL')
    parser.add_argument('images', nargs='+', help='files or folders')
    parser.add_argument('--among', metavar='FOLDER', help='folder whose images may be neighbours')
    parser.add_argument('--layer', type=int, help='block, 0-based, negative from the end (default: at two thirds)')
    side = "short side of images in pca.png (default: the checkpoint's size)"
    parser.add_argument('--short-side', type=int, metavar='PIXELS', help=side)
    parser.add_argument('--kind', choices=['mean', 'class_token'], help='feature for --among (default: mean)')
    parser.add_argument('--device', help='such as cpu or cuda:1 (default: a GPU if there is one)')
    parser.add_argument('--out', type=Path, default=Path('work_dirs/features'), help='default: %(default)s')
    add_mean_std(parser)
    args = parser.parse_args()
    if args.kind and not args.among:
        parser.error('--kind has no effect here; add --among FOLDER')
    with quiet():
        from beit_mm.features.extractor import FeatureExtractor, embed, iterate_images
        from beit_mm.pictures import draw_neighbours, sheet

        files = [str(path) for path in iterate_images(args.images)]
        mean_std = dict(mean=args.mean, std=args.std)
        whole = FeatureExtractor(args.checkpoint, args.device, args.short_side, whole=True, **mean_std)
        whole.check_whole()
        colours = pca_colours([sample['patches'] for sample in whole(files, ['patches'], args.layer)])
        rows = [
            [(Path(path).name, whole.prepared(path).float() / 255), ('components', part)]
            for path, part in zip(files, colours, strict=True)
        ]
        args.out.mkdir(parents=True, exist_ok=True)
        sheet(rows).save(args.out / 'pca.png')
        print(args.out / 'pca.png')
        if args.among:
            options = dict(
                kind=args.kind or 'mean', layer=args.layer, device=args.device, mean=whole.mean, std=whole.std
            )
            bank = embed(args.checkpoint, args.among, on_error='skip', **options)
            queries = embed(args.checkpoint, files, progress=False, **options)
            names = {path: Path(path).absolute().parent.name for path in (*queries['paths'], *bank['paths'])}
            draw_neighbours(queries, bank, names).save(args.out / 'neighbours.png')
            print(args.out / 'neighbours.png')


def pca_colours(maps: Sequence[np.ndarray]) -> list[Tensor]:
    """Turns patches (h, w, C) of images into three principal components as red, green and blue (3, h, w) in [0, 1].

    The components are those of all images together, and the outermost hundredths are clipped. The sign of a component
    is chosen so that large values are rarer than small values.
    """
    import torch

    flat = torch.cat([torch.from_numpy(values).flatten(0, 1).double() for values in maps])
    centred = flat - flat.mean(dim=0)
    _, directions = torch.linalg.eigh(centred.T @ centred)  # in rising order
    parts = centred @ directions.flip(1)[:, :3]
    parts *= torch.where(parts.pow(3).sum(dim=0) < 0, -1, 1)
    low, high = parts.quantile(torch.tensor([SPREAD, 1 - SPREAD]).double(), dim=0)
    colours = ((parts - low) / (high - low).clamp(min=1e-12)).clamp(0, 1).float().T
    sizes = [values.shape[0] * values.shape[1] for values in maps]
    return [part.unflatten(1, values.shape[:2]) for part, values in zip(colours.split(sizes, 1), maps, strict=True)]


if __name__ == '__main__':
    run(main)

"""Pictures of a checkpoint's features: principal components of patches, nearest neighbours, a map of images.

    python tools/visualization/features.py CKPT image.jpg other.jpg --out work_dirs/features
    python tools/visualization/features.py CKPT image.jpg --among data/caltech101/val --out work_dirs/features
    python tools/visualization/features.py CKPT image.jpg --among data/caltech101/val --scatter tsne

pca.png shows each image, whole, beside the first three principal components of its patches as red, green and blue,
jointly for all of them; neighbours.png (--among) each image and the five of a folder whose features are nearest, with
the cosine; scatter.png (--scatter) the folder's images in a plane, coloured by the folder that each lies in.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from _cli import run  # noqa: E402

from beit_mm.terminal import UserError

PACKAGES = dict(tsne='scikit-learn', umap='umap-learn')
MIN_POINTS = 5  # fewer have no neighbourhoods


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('checkpoint', help='path or URL of any BEiT')
    parser.add_argument('images', nargs='+', help='files or folders')
    parser.add_argument('--among', metavar='FOLDER', help='whose images may be neighbours')
    parser.add_argument('--scatter', choices=list(PACKAGES), help='draw the images of --among in a plane')
    parser.add_argument(
        '--foreground', type=float, metavar='LEVEL', help='0 to 1: below it patches are black (try 0.5)'
    )
    parser.add_argument('--layer', type=int, help='block, 0-based, negative from the end (default: at two thirds)')
    parser.add_argument(
        '--short-side', type=int, metavar='PIXELS', help="of images in pca.png (default: the checkpoint's size)"
    )
    parser.add_argument('--kind', choices=['mean', 'class_token'], default='mean', help='of an image (default: mean)')
    parser.add_argument('--device', help='such as cpu or cuda:1 (default: what there is)')
    parser.add_argument('--out', type=Path, default=Path('work_dirs/features'), help='folder')
    args = parser.parse_args()
    if args.scatter and not args.among:
        parser.error('--scatter draws the images of --among FOLDER; give that too')
    if args.foreground is not None and not 0 < args.foreground < 1:
        parser.error(f'--foreground {args.foreground:g}; expected a level between 0 and 1')
    project = projection(args.scatter) if args.scatter else None
    from beit_mm.terminal import quiet

    with quiet():
        import numpy as np

        from beit_mm.features.extractor import FeatureExtractor, embed, iterate_images
        from beit_mm.pictures.features import draw_neighbours, draw_pca, draw_points

        args.out.mkdir(parents=True, exist_ok=True)
        files = [str(path) for path in iterate_images(args.images)]
        whole = FeatureExtractor(args.checkpoint, args.device, args.short_side, whole=True)
        if (bands := whole.backbone.patch_embed.proj.in_channels) != 3:
            raise UserError(f'{args.checkpoint}: a model of images with {bands} bands; expected RGB images, 3 bands')
        maps = [sample['patches'] for sample in whole(files, ['patches'], args.layer)]
        shown = [whole.prepared(path).float() / 255 for path in files]
        draw_pca(files, shown, maps, args.foreground).save(args.out / 'pca.png')
        print(args.out / 'pca.png')
        if not args.among:
            return
        options = dict(kind=args.kind, layer=args.layer, device=args.device)
        bank = embed(args.checkpoint, args.among, on_error='skip', **options)
        queries = embed(args.checkpoint, files, progress=False, **options)
        draw_neighbours(queries, bank).save(args.out / 'neighbours.png')
        print(args.out / 'neighbours.png')
        if project:
            if len(bank['paths']) < MIN_POINTS:
                raise UserError(f'--among has {len(bank["paths"])} images; --scatter needs {MIN_POINTS} or more')
            labels = [Path(path).parent.name for path in bank['paths']]
            draw_points(np.asarray(project(bank['features'])), labels).savefig(args.out / 'scatter.png', dpi=100)
            print(args.out / 'scatter.png')


def projection(name: str) -> Callable:
    """What brings features (N, C) into a plane, (N, 2)."""
    try:
        if name == 'umap':
            from umap import UMAP

            def project(features):
                return UMAP(random_state=0, n_jobs=1, n_neighbors=min(15, len(features) - 1)).fit_transform(features)

            return project
        from sklearn.manifold import TSNE

        def project(features):
            return TSNE(random_state=0, perplexity=min(30, (len(features) - 1) / 3)).fit_transform(features)

        return project
    except ImportError:
        raise UserError(f'--scatter {name} needs {PACKAGES[name]}: pip install {PACKAGES[name]}') from None


if __name__ == '__main__':
    run(main)

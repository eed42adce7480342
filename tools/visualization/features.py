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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from beit_mm.terminal import UserError, run

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.figure import Figure
    from torch import Tensor

PACKAGES = dict(tsne='scikit-learn', umap='umap-learn')
MIN_POINTS = 5  # fewer have no neighbourhoods
NEIGHBOURS = 5
SPREAD = 0.01  # share of the patches beyond either end of the colours
BORDER = 1  # patches at an image's edge that are more often background than its middle


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

        args.out.mkdir(parents=True, exist_ok=True)
        files = [str(path) for path in iterate_images(args.images)]
        whole = FeatureExtractor(args.checkpoint, args.device, args.short_side, whole=True)
        whole.check_whole()
        maps = [sample['patches'] for sample in whole(files, ['patches'], args.layer)]
        shown = [whole.prepared(path).float() / 255 for path in files]
        draw_pca(files, shown, maps, args.foreground).savefig(args.out / 'pca.png')
        print(args.out / 'pca.png')
        if not args.among:
            return
        options = dict(kind=args.kind, layer=args.layer, device=args.device)
        bank = embed(args.checkpoint, args.among, on_error='skip', **options)
        queries = embed(args.checkpoint, files, progress=False, **options)
        draw_neighbours(queries, bank).savefig(args.out / 'neighbours.png')
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


def pca_colours(maps: Sequence[np.ndarray], foreground: float | None = None) -> list[Tensor]:
    """The first three principal components of patches as red, green and blue, jointly for all images.

    Args:
        maps: float (h, w, C) of each image.
        foreground: None, or a level between 0 and 1 of the first component's range: what lies below it is taken for
            background and black, and the components of the rest alone are drawn. Of the component's two signs that one
            is taken that is lower at the images' edges.

    Returns:
        float (3, h, w) in [0, 1] of each image. The sign of a component is that which makes its larger values the rarer
        ones.

    Raises:
        ValueError: features of fewer than three channels, or a level that leaves fewer than three patches.
    """
    import numpy as np
    import torch

    flat = torch.cat([torch.from_numpy(np.ascontiguousarray(values)).flatten(0, 1).float() for values in maps])
    if flat.shape[1] < 3:
        raise UserError(f'features of {flat.shape[1]} channels; three components need at least 3')
    inside = torch.ones(len(flat), dtype=torch.bool)
    if foreground is not None:
        first = _scaled(principal_components(flat, 1)[:, 0])
        edge = torch.cat([_edge(*values.shape[:2]).flatten() for values in maps])
        if first[edge].mean() > first[~edge].mean():
            first = 1 - first
        inside = first > foreground
        if inside.sum() < 3:
            raise UserError(f'foreground level {foreground} leaves {int(inside.sum())} patches; expected a lower one')
    colours = torch.zeros(len(flat), 3)
    colours[inside] = torch.stack([_scaled(part) for part in principal_components(flat[inside], 3).unbind(1)], dim=1)
    sizes = [values.shape[0] * values.shape[1] for values in maps]
    return [
        part.T.unflatten(1, values.shape[:2]).contiguous()
        for part, values in zip(colours.split(sizes), maps, strict=True)
    ]


def principal_components(rows: Tensor, number: int) -> Tensor:
    """Coordinates (N, number) of rows (N, C) along the directions of largest variance, each skewed to the right."""
    import torch

    centred = (rows - rows.mean(dim=0)).double()
    _, directions = torch.linalg.eigh(centred.T @ centred)  # rising order
    parts = centred @ directions.flip(1)[:, :number]
    return (parts * parts.pow(3).sum(dim=0).sign().where(parts.pow(3).sum(dim=0) != 0, 1)).float()


def _scaled(values: Tensor) -> Tensor:
    """Values (N,) to [0, 1], the outermost hundredths cut off."""
    import numpy as np

    low, high = (np.quantile(values.numpy(), part) for part in (SPREAD, 1 - SPREAD))
    return ((values - low) / max(high - low, 1e-12)).clamp(0, 1)


def _edge(height: int, width: int) -> Tensor:
    """bool (height, width), True within BORDER patches of the edge."""
    import torch

    edge = torch.ones(height, width, dtype=torch.bool)
    edge[BORDER : height - BORDER, BORDER : width - BORDER] = False
    return edge


def draw_pca(
    paths: Sequence[str], images: Sequence[Tensor], maps: Sequence[np.ndarray], foreground: float | None = None
) -> Figure:
    """Each image (3, H, W) in [0, 1] beside the colours of its patches; `maps` and `foreground` as `pca_colours`."""
    from beit_mm.pictures import sheet

    pairs = [
        [(Path(path).name, image), ('components', part)]
        for path, image, part in zip(paths, images, pca_colours(maps, foreground), strict=True)
    ]
    rows = -(-len(pairs) // (2 if len(pairs) > 4 else 1))  # many images stand in two columns
    return sheet([[tile for pair in pairs[row::rows] for tile in pair] for row in range(rows)])


def draw_neighbours(queries: dict, bank: dict, number: int = NEIGHBOURS) -> Figure:
    """A contact sheet: on the left each query, then the images nearest to it with the cosine of the features.

    Args:
        queries, bank: dict(features=(N, C), paths=list of files), as `embed` returns them. A query that is in the
            bank is no neighbour of itself.
        number: of neighbours.
    """
    import torch

    from beit_mm.features.evaluation import neighbours
    from beit_mm.pictures import sheet

    known = torch.from_numpy(bank['features'])
    files = [Path(path).resolve() for path in bank['paths']]
    rows = []
    for path, feature in zip(queries['paths'], queries['features'], strict=True):
        others = torch.tensor([row for row, file in enumerate(files) if file != Path(path).resolve()], dtype=torch.long)
        tiles: list[tuple[str, Tensor | None]] = [(f'{Path(path).parent.name}/{Path(path).name}', _read(path))]
        if len(others):
            ((cosines, nearest),) = neighbours(torch.from_numpy(feature)[None], known[others], number)
            for cosine, row in zip(cosines[0].tolist(), others[nearest[0]].tolist(), strict=True):
                tiles.append((f'{files[row].parent.name} {cosine:.3f}', _read(bank['paths'][row])))
        rows.append(tiles)
    return sheet(rows)


def _read(path: str) -> Tensor:
    """An image file as float (3, H, W) in [0, 1]."""
    import torch

    from beit_mm.datasets.reading import read_image

    return torch.from_numpy(read_image(path)).permute(2, 0, 1).float() / 255


def draw_points(points: np.ndarray, labels: Sequence[str]) -> Figure:
    """Points in a plane (N, 2), coloured by their labels; save it by `savefig`."""
    import numpy as np
    from matplotlib.figure import Figure

    from beit_mm.datasets.segmentation_folder import distinct_colours

    names = sorted(set(labels))
    colours = np.array(distinct_colours(len(names))) / 255
    figure = Figure(figsize=(9, 7), layout='constrained')
    axes = figure.add_subplot()
    for name, colour in zip(names, colours, strict=True):
        of_name = np.array([label == name for label in labels])
        axes.scatter(*points[of_name].T, s=12, color=colour, label=name)
    axes.set(xticks=[], yticks=[])
    if len(names) <= 20:  # more fill the picture
        axes.legend(loc='center left', bbox_to_anchor=(1, 0.5), frameon=False)
    return figure


if __name__ == '__main__':
    run(main)

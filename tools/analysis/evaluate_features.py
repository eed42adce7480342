"""What the frozen features of a checkpoint are worth, in one table: k-NN and linear, on labelled images and on patches.

    python tools/analysis/evaluate_features.py knn CKPT data/caltech101/train data/caltech101/val --random
    python tools/analysis/evaluate_features.py linear CKPT data/caltech101/train data/caltech101/val --random
    python tools/analysis/evaluate_features.py dense-knn CKPT data/camvid --size 160 --random
    python tools/analysis/evaluate_features.py dense-linear CKPT data/camvid --size 160 --random

knn, linear: top-1 in %; TRAIN and VAL are folders of class folders. dense-knn, dense-linear: mIoU in % of pixels; ROOT
holds images/{training,validation} and annotations/{training,validation}, as ADE20K. docs/features.md has the protocol.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from beit_mm.terminal import run


def main() -> None:
    args = parse()
    from beit_mm.terminal import quiet

    with quiet():
        from beit_mm.features.evaluation import evaluate_images, evaluate_patches
        from beit_mm.features.extractor import FeatureExtractor

        dense = args.method.startswith('dense-')
        extractor = FeatureExtractor(args.checkpoint, args.device, args.size, whole=dense)
        models = {args.checkpoint: extractor}
        if args.random:
            models['random weights'] = extractor.with_random_weights(args.seed)
        report = {}
        for name, model in models.items():
            method = args.method.removeprefix('dense-')
            if dense:
                folder = dict(data_root=args.root, classes=args.classes, reduce_zero_label=not args.keep_zero_label)
                train, val = (
                    dict(folder, data_prefix=dict(img_path=images, seg_map_path=annotations))
                    for images, annotations in (args.train, args.val)
                )
                report[name] = evaluate_patches(
                    model,
                    train,
                    val,
                    method,
                    args.layer,
                    args.workers,
                    k=args.k,
                    max_patches=args.max_patches,
                    seed=args.seed,
                )
            else:
                report[name] = evaluate_images(
                    model, args.train, args.val, method, args.layer, args.kind, args.k, workers=args.workers
                )
            report[name]['layer'] = model.layer(args.layer)
        print_table(report, 'miou' if dense else 'top1')
        if args.json:
            args.json.parent.mkdir(parents=True, exist_ok=True)
            args.json.write_text(
                json.dumps(dict(method=args.method, results=report), indent=2) + '\n', encoding='utf-8'
            )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    methods = parser.add_subparsers(dest='method', required=True, metavar='knn | linear | dense-knn | dense-linear')
    for method in ('knn', 'linear', 'dense-knn', 'dense-linear'):
        sub = methods.add_parser(method)
        sub.add_argument('checkpoint', help='path or URL of any BEiT')
        if method.startswith('dense-'):
            sub.add_argument('root', help='folder of images/ and annotations/')
            sub.add_argument('--classes', default='classes.txt', help='file of their names, below ROOT or not')
            sub.add_argument('--keep-zero-label', action='store_true', help='0 is a class (default: unlabelled)')
            for name, split in (('--train', 'training'), ('--val', 'validation')):
                folders = f'images/{split}', f'annotations/{split}'
                metavar = ('IMAGES', 'ANNOTATIONS')
                sub.add_argument(name, nargs=2, metavar=metavar, default=folders, help='other folders below ROOT')
            sub.add_argument('--max-patches', type=int, default=50_000, help='training patches (default: 50000)')
        else:
            sub.add_argument('train', help='folder of class folders')
            sub.add_argument('val', help='folder of the same class folders')
            sub.add_argument('--kind', choices=['mean', 'class_token'], default='mean', help='default: mean of patches')
        neighbours = 30 if method.startswith('dense-') else 20
        sub.add_argument('--k', type=positive, default=neighbours, help=f'neighbours (default: {neighbours})')
        sub.add_argument('--layer', type=int, help='block, 0-based, negative from the end (default: at two thirds)')
        sub.add_argument('--size', type=positive, help="side, or short side, in pixels (default: the checkpoint's)")
        sub.add_argument('--random', action='store_true', help='also the same architecture with random weights')
        sub.add_argument('--seed', type=int, default=0, help='of random weights and of the choice of patches')
        sub.add_argument('--workers', type=int, default=0, help='processes that read images (default: none)')
        sub.add_argument('--device', help='such as cpu or cuda:1 (default: what there is)')
        sub.add_argument('--json', type=Path, metavar='FILE', help='also write all figures')
    return parser.parse_args()


def positive(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f'{number} is below 1')
    return number


def print_table(report: dict[str, dict], figure: str) -> None:
    """One row for each set of weights."""
    first = next(iter(report.values()))
    classes = first['classes'] if isinstance(first['classes'], int) else len(first['classes'])
    train, val = first['images']
    patches = f', {first["patches"]:,} training patches' if 'patches' in first else ''
    print(f'{train:,} training images, {val:,} validation images, {classes} classes{patches}, block {first["layer"]}')
    width = max(map(len, report))
    title = dict(miou='mIoU %', top1='top-1 %')[figure]
    print(f'{"":{width}}{title:>9}')
    for name, row in report.items():
        chosen = f'   penalty {row["penalty"]:g}' if 'penalty' in row else f'   k {row["k"]}'
        print(f'{name:{width}}{row[figure]:9.1f}{chosen}')


if __name__ == '__main__':
    run(main)

"""Evaluates the frozen features of a checkpoint in one table: k-NN, linear, attentive, on labelled images or patches.

    python tools/analysis/evaluate_features.py linear CKPT data/caltech101/train data/caltech101/val --random
    python tools/analysis/evaluate_features.py dense-linear CKPT data/camvid --size 160 --random

knn, linear, attentive: top-1 in %; TRAIN and VAL are folders of class folders. dense-*: mIoU in %; ROOT holds
images/{training,validation} and annotations/{training,validation}, as ADE20K. docs/features.md has the protocol.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from beit_mm.apis.commands import add_mean_std
from beit_mm.terminal import Parser, quiet, run

ATTENTIVE, IMAGES, DENSE = ('attentive',), ('knn', 'linear', 'attentive'), ('dense-knn', 'dense-linear')
METHODS = dict(k=('knn', 'dense-knn'), kind=IMAGES[:2], queries=ATTENTIVE)  # that use an option
METHODS |= dict(classes=DENSE, keep_zero_label=DENSE, max_patches=DENSE)


def main() -> None:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('method', choices=[*IMAGES, *DENSE])
    parser.add_argument('checkpoint', help='any BEiT or plain ViT, by file, run folder, name or URL')
    parser.add_argument('folders', nargs='+', help='TRAIN and VAL, folders of the same class folders; dense: ROOT')
    parser.add_argument('--k', type=int, help='knn: neighbours (default: 20; dense: 30)')
    parser.add_argument('--layer', type=int, help='block, 0-based, negative from the end (default: at two thirds)')
    parser.add_argument('--size', type=int, help="side, or short side, in pixels (default: the checkpoint's)")
    parser.add_argument('--kind', choices=['mean', 'class_token'], default='mean', help='default: the mean of patches')
    parser.add_argument('--queries', type=int, default=1, help='attentive: a divisor of the width (default: 1)')
    parser.add_argument('--classes', default='classes.txt', help='dense: file of class names, in ROOT or elsewhere')
    parser.add_argument('--keep-zero-label', action='store_true', help='dense: 0 is a class (default: unlabelled)')
    parser.add_argument('--max-patches', type=int, default=50_000, help='dense: patches to learn from (default: 50000)')
    parser.add_argument('--random', action='store_true', help='also evaluate random weights of the same architecture')
    parser.add_argument('--seed', type=int, default=0, help='for random weights, patches, the attentive probe')
    parser.add_argument('--workers', type=int, default=0, help='processes that read images (default: none)')
    parser.add_argument('--device', help='such as cpu or cuda:1 (default: a GPU if there is one)')
    parser.add_argument('--json', type=Path, metavar='FILE', help='also write all numbers into this file')
    add_mean_std(parser)
    args = parser.parse_args()
    for name, methods in METHODS.items():
        if args.method not in methods and getattr(args, name) != parser.get_default(name):
            option = '--' + name.replace('_', '-')
            parser.error(f'{option} has no effect on {args.method}; use it with {" or ".join(methods)}')
    dense = args.method.startswith('dense-')
    if args.seed and not (dense or args.random or args.method in ATTENTIVE):
        parser.error('--seed has no effect here; add --random')
    args.k = (30 if dense else 20) if args.k is None else args.k
    if len(args.folders) != 2 - dense or min(args.k, args.queries, args.max_patches, args.workers + 1) < 1:
        numbers = '--k, --queries and --max-patches from 1, --workers from 0'
        parser.error(f'expected TRAIN and VAL, for dense methods only ROOT; {numbers}')
    with quiet():
        from beit_mm.features.extractor import FeatureExtractor

        mean_std = dict(mean=args.mean, std=args.std)
        extractor = FeatureExtractor(args.checkpoint, args.device, args.size, whole=dense, **mean_std)
        models = {args.checkpoint: extractor}
        if args.random:
            models['random weights'] = extractor.with_random_weights(args.seed)
        report = {name: evaluate(model, dense, args) for name, model in models.items()}
    print_table(report)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(dict(method=args.method, results=report), indent=2) + '\n')


def evaluate(model: Any, dense: bool, args: argparse.Namespace) -> dict[str, Any]:
    """Evaluates one set of weights."""
    from beit_mm.features.evaluation import evaluate_images, evaluate_patches

    options: dict[str, Any] = {name: getattr(args, name) for name in ('layer', 'k', 'workers')}
    options['method'] = args.method.removeprefix('dense-')
    if dense:
        folder = dict(data_root=args.folders[0], classes=args.classes, reduce_zero_label=not args.keep_zero_label)
        splits = ('training', 'validation')
        prefixes = (dict(img_path=f'images/{split}', seg_map_path=f'annotations/{split}') for split in splits)
        data = (dict(folder, data_prefix=prefix) for prefix in prefixes)
        found = evaluate_patches(model, *data, **options, max_patches=args.max_patches, seed=args.seed)
    else:
        options |= dict(kind=args.kind, queries=args.queries, seed=args.seed)
        found = evaluate_images(model, *args.folders, **options)
    return dict(found, layer=model.layer(args.layer))


def print_table(report: dict[str, dict]) -> None:
    """Prints a row for each set of weights; of images with standard errors, that of a difference by pairs."""
    from torch import tensor

    from beit_mm.features.evaluation import mean_and_error

    first, width = next(iter(report.values())), max(map(len, report))
    metric, title = ('miou', 'mIoU') if 'miou' in first else ('top1', 'top-1')
    train, val = first['images']
    print(f'{title} in % on {val:,} images, learned from {train:,}, features of block {first["layer"]}')
    for name, row in report.items():
        line = f'{name:{width}}{row[metric]:9.1f}'
        if 'right' in row:
            line += f' +- {mean_and_error(tensor(row["right"]))[1]:.1f}'
        line += ''.join(f'   {key} {row[key]:g}' for key in ('k', 'penalty', 'queries', 'rate', 'epochs') if key in row)
        if 'right' in row and row is not first:
            gain, error = mean_and_error(tensor(first['right']) - tensor(row['right']))
            line += f'   less than the first by {gain:.1f} +- {error:.1f}'
        print(line)


if __name__ == '__main__':
    run(main)

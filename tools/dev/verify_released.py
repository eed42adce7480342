"""Tests released weights and compares their figures with the reported ones.

    python tools/dev/verify_released.py beit_base_patch16_224_pt22k_ft22kto1k data/imagenet
    python tools/dev/verify_released.py '*ade20k*' data/ade20k --limit 0.5
    python tools/dev/verify_released.py 'dino*' data/imagenet          by 20 nearest neighbours of the class token

NAMES are a pattern of beit_mm.list_models(); files come from $BEIT_MM_WEIGHTS, torch hub's cache or the web. DATA is
laid out as docs/data.md says. Classifiers and segmentors are tested by tools/test.py, with --tta where a figure is of
all scales; pretrained BEiTs have no figure and are left out. Of a plain ViT the k-NN figure is tested, on DATA/train
and DATA/val. A dated record, <date>-verified.md, is written to --out, a row as soon as it is known; a row that agrees
is not tested again.
"""

import argparse
import json
import math
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import config_facts as facts

from beit_mm.checkpoint.find import list_models, plain_vits
from beit_mm.errors import UserError
from beit_mm.terminal import Parser, quiet, run

ROOT = Path(__file__).resolve().parents[2]
METRICS = {'top-1': 'accuracy/top1', 'top-5': 'accuracy/top5', 'mIoU': 'mIoU'}  # by a word of the task
HEAD = '| name | figure | reported | here | images | difference | verdict |\n|' + ' --- |' * 7
KNN, DIFFERS = 'k-NN top-1', 'DIFFERS'


class Figure(NamedTuple):
    name: str
    task: str
    reported: float
    config: str  # below configs/; '' of a plain ViT

    @property
    def tta(self) -> bool:
        return 'all scales' in self.task


def published(name: str) -> Iterator[Figure]:
    """What the source of a released file reports of it."""
    if name in plain_vits():
        for text in plain_vits()[name].get('figures', '').split(', '):
            if text.startswith('k-NN '):
                yield Figure(name, KNN, float(text.removeprefix('k-NN ')), '')
        return
    for config in facts.list_configs():
        for weights in facts.released_weights(config):
            if Path(weights['URL']).stem == name:
                for task, value in facts.reported(config, weights):
                    yield Figure(name, task, float(value), config)


def tested(figure: Figure, args: argparse.Namespace) -> tuple[float, int]:
    """The figure here, in %, and on how many images."""
    if not figure.config:
        return nearest_neighbours(figure.name, args)
    stem = figure.name + '-tta' * figure.tta
    out = args.out / f'{stem}.json'
    if stem not in args.finished:  # top-1 and top-5 are of one test
        words = [f'configs/{figure.config}', figure.name, '--out', out]
        words += ['--work-dir', args.out / stem, *['--tta'] * figure.tta]
        segments = 'mIoU' in figure.task
        root = args.data if segments else args.data / 'val'
        options = [f'{loader}_dataloader.dataset.data_root={root}' for loader in ('val', 'test')]
        options += ['model.test_cfg.precision=float32'] * segments
        command = [sys.executable, 'tools/test.py', *words, '--cfg-options', *options, *args.cfg_options]
        with (args.out / f'{stem}.log').open('w') as log:
            finished = subprocess.run([*map(str, command)], cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
        if finished.returncode:
            raise UserError(f'{figure.name} cannot be tested: {args.out / stem}.log says why')
        args.finished.add(stem)
    report = json.loads(out.read_text())
    word = next(word for word in METRICS if word in figure.task)
    images = report.get('predictions') or [*args.data.glob('images/validation/*.jpg')]
    return report[METRICS[word]], len(images)


def nearest_neighbours(name: str, args: argparse.Namespace) -> tuple[float, int]:
    """By the authors' protocol: the class token after the last norm, of 224 pixels, 20 neighbours."""
    from beit_mm.features.evaluation import evaluate_images
    from beit_mm.features.extractor import FeatureExtractor

    class Normed(FeatureExtractor):
        def features(self, images: Any, layers: Any) -> Any:
            return {kind: self.backbone.norm(x) for kind, x in super().features(images, layers).items()}

    how: dict[str, Any] = dict(layer=-1, kind='class_token', workers=args.workers)
    found = evaluate_images(Normed(name, size=224), args.data / 'train', args.data / 'val', **how)
    return found['top1'], found['images'][1]


def row_of(figure: Figure, args: argparse.Namespace) -> str:
    here, images = tested(figure, args)
    if not images:
        raise UserError(f'{args.data} has no validation images; docs/data.md says how it is laid out')
    if 'mIoU' in figure.task:
        limit = args.limit
    else:  # a share of images has a binomial error
        limit = 2 * math.sqrt(figure.reported * (100 - figure.reported) / images)
    verdict = 'agrees' if abs(here - figure.reported) <= limit else DIFFERS
    cells = [figure.name, figure.task, f'{figure.reported:g}', f'{here:.2f}', f'{images:,}']
    return f'| {" | ".join(cells)} | {here - figure.reported:+.2f} (limit {limit:.2f}) | {verdict} |'


def main() -> None:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('names', help='name or pattern of released weights')
    parser.add_argument('data', type=Path, help='ImageNet-1K or ADE20K')
    parser.add_argument('--out', type=Path, default=Path('work_dirs/verified'))
    limit = 'difference of mIoU, in points, up to which figures agree (default: 0.3)'
    parser.add_argument('--limit', type=float, default=0.3, help=limit)
    parser.add_argument('--workers', type=int, default=8, help='processes that read images for plain ViTs')
    parser.add_argument('--cfg-options', nargs='+', default=[], metavar='KEY=VALUE', help='of tests by config')
    args = parser.parse_args()
    args.data, args.out, args.finished = args.data.resolve(), args.out.resolve(), set()
    if not any((args.data / part).is_dir() for part in ('val', 'annotations')):
        raise UserError(f'{args.data} holds neither val/ (ImageNet-1K) nor annotations/ (ADE20K), see docs/data.md')
    segments = (args.data / 'annotations').is_dir()
    figures = [figure for name in list_models(args.names) for figure in published(name)]
    figures = [figure for figure in figures if ('mIoU' in figure.task) == segments]
    if not figures:
        kind = 'segmentors' if segments else 'classifiers or plain ViTs'
        raise UserError(f'{args.names} names no {kind} with a reported figure; see docs/released.md')
    args.out.mkdir(parents=True, exist_ok=True)
    record = args.out / f'{time.strftime("%Y-%m-%d")}-verified.md'
    lines = record.read_text().splitlines() if record.exists() else HEAD.splitlines()
    differs = False
    for figure in figures:
        start = f'| {figure.name} | {figure.task} | {figure.reported:g} |'
        row = next((line for line in lines if line.startswith(start) and DIFFERS not in line), '')
        if not row:
            with quiet():
                row = row_of(figure, args)
            lines = [line for line in lines if not line.startswith(start)] + [row]
            record.write_text('\n'.join(lines) + '\n')
        differs |= DIFFERS in row
        print(row, flush=True)
    print(record)
    if differs:
        sys.exit(1)


if __name__ == '__main__':
    run(main)

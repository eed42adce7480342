"""From images to a tokenizer, a pretraining on its tokens, a classifier and a segmentor, in minutes on two CPU cores.

    tools/run_demo.sh                 pictures that it draws itself, with classes and label maps
    tools/run_demo.sh --data DIR      your own images: any folder; where it has one folder a class, a classifier is
                                      trained too

It runs configs/demo/{dvae,pretrain,finetune_folder,segment_setr_pup}.py as their headers say, each in
work_dirs/<name of the config>, and prints each command. Finished runs are left as they are and an interrupted one goes
on, so the same command resumes the demo. Its pictures and summary.json are in work_dirs/demo.
"""

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DRAWN, LINKED = Path('data/demo'), Path('data/own_images')
RUNS, RESULTS = Path('work_dirs'), Path('work_dirs/demo')
HELD_OUT = 0.1  # share of the user's images
MIN_IMAGES = 100
MIN_PER_CLASS = 10  # fewer leave a class without held-out images
NUM_PICTURES = 6
SCRATCH = ['model.backbone.init_cfg=None', 'optim_wrapper.paramwise_cfg.layer_decay_rate=1.0']


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--data', type=Path, metavar='DIR', help='folder of images, searched to any depth')
    parser.add_argument('--check', action='store_true', help='check the arguments and do nothing')
    args = parser.parse_args()
    images = find_images(args.data) if args.data else []
    if args.data and len(images) < MIN_IMAGES:
        sys.exit(f'error: {len(images)} images in {args.data}; at least {MIN_IMAGES} are needed to learn from')
    if args.check:
        return

    claim_runs(args.data)
    if args.data:
        classes, data = link_images(args.data, images), [f'data_root={LINKED}']
    else:
        execute('tools/demo/draw_images.py')
        classes, data = True, []
    train('dvae', data)
    train('pretrain', data)
    if classes:
        labelled = data + numbers_of_classes(LINKED) if args.data else data
        train('finetune_folder', labelled)
        train('finetune_folder', labelled + SCRATCH, 'finetune_folder_scratch')
    if not args.data:
        train('segment_setr_pup', data)
    report(data, classes, segmented=not args.data)


def find_images(folder: Path) -> list[Path]:
    """All images below a folder, relative to it, sorted."""
    if not folder.is_dir():
        sys.exit(f'error: no folder {folder}')
    from beit_mm.datasets.image_folder import list_images

    return [Path(name) for name in list_images(str(folder))]


def claim_runs(folder: Path | None) -> None:
    """Ends the demo where the runs to go on with are of other images."""
    images = str(folder.resolve()) if folder else 'drawn'
    record = RESULTS / 'images.txt'
    if record.exists() and record.read_text() != images:
        sys.exit(
            f'error: the runs in {RUNS} are of other images ({record.read_text()}); move or delete '
            f'{", ".join(str(RUNS / name) for name in ("demo", "dvae", "pretrain", "finetune_folder*"))}'
        )
    RESULTS.mkdir(parents=True, exist_ok=True)
    record.write_text(images)


def link_images(folder: Path, images: list[Path]) -> bool:
    """Makes data/own_images/{train,val} of links to the user's images, in class folders where there are classes.

    Links rather than the folder itself, because some images are held out.

    Returns:
        Whether there are classes: every image lies in a folder, there are two or more, and each has enough images.
    """
    by_class: dict[str, list[Path]] = {}
    for path in images:
        by_class.setdefault(path.parent.name, []).append(path)
    has_classes = '' not in by_class and len(by_class) > 1 and min(map(len, by_class.values())) >= MIN_PER_CLASS
    shutil.rmtree(LINKED, ignore_errors=True)
    for name, paths in by_class.items() if has_classes else [('', images)]:
        random.Random(0).shuffle(paths)
        num_val = round(HELD_OUT * len(paths))
        for split, part in (('val', paths[:num_val]), ('train', paths[num_val:])):
            (LINKED / split / name).mkdir(parents=True)
            for path in part:
                (LINKED / split / name / '-'.join(path.parts)).symlink_to((folder / path).resolve())
    print(
        f'{len(images):,} images of {folder}, {HELD_OUT:.0%} held out; '
        + (f'{len(by_class)} classes, the names of the folders' if has_classes else 'no classes, so no classifier')
    )
    return has_classes


def numbers_of_classes(images: Path) -> list[str]:
    """Options that build a classifier for the class folders of images/train."""
    number = sum(path.is_dir() for path in (images / 'train').iterdir())
    return [f'model.{part}.num_classes={number}' for part in ('head', 'data_preprocessor')]


def train(name: str, options: list[str], run: str | None = None) -> None:
    """Trains configs/demo/NAME.py in work_dirs/RUN, or goes on where that was interrupted."""
    work_dir = RUNS / (run or name)
    if checkpoint(name, run).exists():
        print(f'\n== {work_dir} is finished', flush=True)
        return
    execute(
        'tools/train.py',
        f'configs/demo/{name}.py',
        '--resume',
        *(['--work-dir', str(work_dir)] if run else []),
        *(['--cfg-options', *options] if options else []),
    )


def test(name: str, options: list[str], run: str | None = None) -> dict:
    """Metrics of a finished run on the held-out images."""
    out = RESULTS / f'{run or name}.json'
    execute(
        'tools/test.py',
        f'configs/demo/{name}.py',
        str(checkpoint(name, run)),
        '--out',
        str(out),
        *(['--work-dir', str(RUNS / run)] if run else []),
        *(['--cfg-options', *options] if options else []),
    )
    return json.loads(out.read_text())


def checkpoint(name: str, run: str | None = None) -> Path:
    """The last checkpoint of a run of configs/demo/NAME.py, which is there when the run is finished."""
    from mmengine.config import Config

    loop = Config.fromfile(ROOT / f'configs/demo/{name}.py').train_cfg
    last = f'epoch_{loop.max_epochs}.pth' if 'max_epochs' in loop else f'iter_{loop.max_iters}.pth'
    return RUNS / (run or name) / last


def execute(script: str, *arguments: str) -> None:
    """Runs a script of the repository as the user would, and prints how."""
    print('\n== python', script, *arguments, flush=True)
    status = subprocess.call(
        [
            sys.executable,
            str(ROOT / script),
            *(str(ROOT / word) if word.startswith('configs/') else word for word in arguments),
        ]
    )
    if status:
        sys.exit(f'error: {script} ended with {status}; the same demo command goes on from here')


def report(data: list[str], classes: bool, segmented: bool) -> None:
    """Evaluates the runs on the held-out images and writes the summary."""
    dvae, pretrained = test('dvae', data), test('pretrain', data)
    numbers = dict(
        recon_mae_01=dvae['tokenizer/recon_mae_01'],
        codes_used=dvae['tokenizer/codes_used'],
        val_mim_loss=pretrained['mim_loss'],
        token_entropy=pretrained['token_entropy'],
        position_entropy=pretrained['position_entropy'],
        val_mim_acc=pretrained['mim_acc'],
        images_per_second=images_per_second(),
    )
    if classes:
        labelled = data if segmented else data + numbers_of_classes(LINKED)
        numbers['finetune_accuracy'] = test('finetune_folder', labelled)['accuracy/top1']
        scratch = test('finetune_folder', labelled + SCRATCH, 'finetune_folder_scratch')
        numbers['scratch_accuracy'] = scratch['accuracy/top1']
    if segmented:
        numbers['segment_miou'] = test('segment_setr_pup', data)['mIoU']
    draw_overview(DRAWN if segmented else LINKED, segmented)
    (RESULTS / 'summary.json').write_text(json.dumps(numbers, indent=2) + '\n')
    print(f'\n{json.dumps(numbers, indent=2)}')
    gain = 1 - numbers['val_mim_loss'] / numbers['token_entropy']
    print(f'\nMasked patches are predicted {gain:.0%} better than by how frequent each visual token is.')
    if classes:
        print(
            f'Of the held-out images {numbers["finetune_accuracy"]:.1f} % are classified right after pretraining, '
            f'{numbers["scratch_accuracy"]:.1f} % without.'
        )
    pictures = [RESULTS / 'overview.png', *RUNS.glob('dvae/**/test*.png')]
    print('Look at\n  ' + '\n  '.join(map(str, [*pictures, RESULTS / 'summary.json'])))
    print(f'Curves: tensorboard --logdir {RUNS}')


def images_per_second() -> float:
    """Median over the pretraining."""
    from beit_mm.pictures import read_scalars

    training, _ = read_scalars(RUNS / 'pretrain')
    return statistics.median(row['images_per_second'] for row in training.values() if 'images_per_second' in row)


def draw_overview(folder: Path, segmented: bool) -> None:
    """A picture of held-out images: what the model sees and predicts of them, images like them, their segmentation."""
    import numpy as np
    import torch
    from PIL import Image
    from torchvision.transforms.functional import center_crop, resize, to_tensor

    from beit_mm.apis.inference import overlay, reconstructions
    from beit_mm.apis.inferencers import SegmentationInferencer
    from beit_mm.features.evaluation import neighbours
    from beit_mm.features.extractor import FeatureExtractor, embed
    from beit_mm.pictures import sheet_of_columns

    held_out = [folder / 'val' / path for path in find_images(folder / 'val')]  # sorted by class
    pretrained = checkpoint('pretrain')
    paths, columns = reconstructions(pretrained, held_out[:: max(1, len(held_out) // NUM_PICTURES)][:NUM_PICTURES])
    extract = FeatureExtractor(pretrained)
    bank = embed(pretrained, folder / 'train', progress=False, on_error='skip')
    queries = torch.from_numpy(embed(pretrained, paths, progress=False)['features'])
    _, nearest = next(neighbours(queries, torch.from_numpy(bank['features']), 2))  # B, 2
    for title, rows in zip(('most alike in training', 'second'), nearest.T.tolist(), strict=True):
        columns[title] = torch.stack([extract.prepared(bank['paths'][row]) for row in rows]) / 255
    if segmented:
        segmentor = SegmentationInferencer(checkpoint('segment_setr_pup'))
        cells: dict[str, list] = dict(segmentation=[], annotation=[])
        for path, result in zip(paths, segmentor(paths), strict=True):
            file = (DRAWN / 'annotations/val' / Path(path).relative_to(folder / 'val')).with_suffix('.png')
            annotation = np.array(Image.open(file)).astype(int) - 1
            for name, labels in (('segmentation', result['labels']), ('annotation', annotation)):
                drawn = overlay(np.array(Image.open(path).convert('RGB')), labels, segmentor.palette)
                cells[name].append(resize(center_crop(to_tensor(drawn), [min(drawn.size)] * 2), [160, 160]))
        columns |= {name: torch.stack(pictures) for name, pictures in cells.items()}
    sheet_of_columns(columns).savefig(RESULTS / 'overview.png')


if __name__ == '__main__':
    os.environ['PYTHONPATH'] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get('PYTHONPATH'))))
    try:
        main()
    except KeyboardInterrupt:
        sys.exit('stopped; the same command goes on from here')

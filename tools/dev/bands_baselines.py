"""What simple methods reach on the images of configs/demo/bands_*.py, for comparison with docs/data.md.

    python tools/dev/bands_baselines.py [DATA_ROOT]

The tokenizer's reconstructions are compared with the best constant of each band and with each image's own mean colour;
the classifier with linear ones on mean and standard deviation of the bands, which see no shapes. They learn from the
images in meta/few_labels.txt.
"""

import argparse
from pathlib import Path

CONFIG = Path(__file__).resolve().parents[2] / 'configs/demo/bands_finetune.py'
RIDGE = 1e-3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('data_root', nargs='?', type=Path, default=Path('data/bands'), help='default: %(default)s')
    args = parser.parse_args()
    import numpy as np
    from mmengine.config import Config

    from beit_mm.datasets import LoadBands

    cfg = Config.fromfile(CONFIG)
    load = LoadBands(low=cfg.low, high=cfg.high)
    train = [args.data_root / 'train' / line for line in (args.data_root / 'meta/few_labels.txt').read_text().split()]
    val = sorted((args.data_root / 'val').rglob('*.tif'))
    images = [[load(dict(img_path=str(path)))['img'] / 255 for path in paths] for paths in (train, val)]
    constant = np.median(np.concatenate([image.reshape(-1, image.shape[2]) for image in images[0]]), axis=0)
    best = np.mean([abs(x - constant).mean() for x in images[1]])
    print(f'best constant of each band: mean absolute error {best:.4f}')
    own = np.mean([abs(x - x.mean(axis=(0, 1))).mean() for x in images[1]])
    print(f'mean colour of each image: mean absolute error {own:.4f}')
    classes = sorted({path.parent.name for path in train})
    labels = [np.array([classes.index(path.parent.name) for path in paths]) for paths in (train, val)]
    for name, statistics in (('mean', [np.mean]), ('mean and standard deviation', [np.mean, np.std])):
        features = [
            np.array([np.concatenate([f(x, axis=(0, 1)) for f in statistics]) for x in part]) for part in images
        ]
        scale = features[0].mean(axis=0), features[0].std(axis=0)
        x, held_out = (np.c_[(part - scale[0]) / scale[1], np.ones(len(part))] for part in features)
        weights = np.linalg.solve(x.T @ x + RIDGE * np.eye(x.shape[1]), x.T @ np.eye(len(classes))[labels[0]])
        right = ((held_out @ weights).argmax(axis=1) == labels[1]).mean()
        print(f'linear classifier on {name} of the bands: {100 * right:.1f} %, chance {100 / len(classes):.1f} %')


if __name__ == '__main__':
    main()

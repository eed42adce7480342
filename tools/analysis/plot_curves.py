"""Draws accuracy on held-out images and training loss of several runs in one picture, from the runs' own logs.

    python tools/analysis/plot_curves.py work_dirs/finetune=pretrained work_dirs/scratch='from scratch' --out curves.png

Both are drawn over the steps, so the runs should have batches of one size.
"""
import argparse
import sys
from pathlib import Path

from beit_mm.visualization.curves import draw_comparison, read_curves


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('runs', nargs='+', metavar='FOLDER[=LABEL]',
                        help="work directories of trainings, and what to call them (default: the folder's name)")
    parser.add_argument('--metric', default='accuracy/top1', help='as the logs name it (default: %(default)s)')
    parser.add_argument('--out', type=Path, default=Path('curves.png'), metavar='FILE',
                        help='picture to write (default: %(default)s)')
    args = parser.parse_args()
    curves = {}
    try:
        for folder, label in map(split_label, args.runs):
            if label in curves:
                raise ValueError(f'two runs are called {label}; give {folder} a name: {folder}=NAME')
            curves[label] = read_curves(folder, args.metric)
        draw_comparison(curves, args.metric, args.out)
    except (OSError, ValueError) as error:
        sys.exit(f'error: {error}')
    for label, (validation, _) in curves.items():
        step, number = validation[-1]
        print(f'{label}: {args.metric} {number:.4g} at step {step}')
    print(args.out)


def split_label(argument: str) -> tuple[Path, str]:
    """Folder and label of FOLDER[=LABEL]; both may contain `=`, the longest beginning that is a folder counts."""
    folder, label = argument, ''
    while not Path(folder).is_dir() and '=' in folder:
        folder, _, rest = folder.rpartition('=')
        label = f'{rest}={label}' if label else rest
    return Path(folder), label or Path(folder).resolve().name


if __name__ == '__main__':
    main()

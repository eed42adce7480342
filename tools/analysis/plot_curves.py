"""Draws accuracy on held-out images and training loss of several runs in one picture, from the runs' own logs.

    python tools/analysis/plot_curves.py work_dirs/finetune=pretrained work_dirs/scratch='from scratch' --out curves.png

Both are drawn over the steps, so the runs should have batches of one size. Everything else that a run logs is in
TensorBoard: `tensorboard --logdir work_dirs`.
"""
import argparse
import json
import sys
from pathlib import Path

TIMES = {'step', 'time', 'data_time'}  # logged at a validation, but no metrics


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
        draw(curves, args.metric, args.out)
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


def read_curves(work_dir: Path, metric: str) -> tuple[list[tuple], list[tuple]]:
    """(step, number) of a metric at each validation, and of the training loss.

    A resumed run goes on where an earlier one was, and a run started anew replaces it: of each log only the steps
    before the next log's first count.

    Raises:
        FileNotFoundError: no logs.
        ValueError: no such metric in them.
    """
    rows = []
    for path in sorted(work_dir.glob('*/vis_data/scalars.json')):
        if later := read_rows(path):
            rows = [row for row in rows if row['step'] < later[0]['step']] + later
    if not rows:
        raise FileNotFoundError(f'{work_dir} has no logs, <time>/vis_data/scalars.json with numbers in it; name the '
                                'work directory of a training')
    validations = [row for row in rows if 'lr' not in row]
    points = [(row['step'], row[metric]) for row in validations if metric in row]
    if not points:
        metrics = ', '.join(sorted({name for row in validations for name in row} - TIMES)) or 'no validation yet'
        raise ValueError(f'{work_dir} has no metric {metric!r}; its logs have {metrics}')
    return points, [(row['step'], row['loss']) for row in rows if 'lr' in row and 'loss' in row]


def read_rows(path: Path) -> list[dict]:
    """Rows of a log with a step, without lines that a full disk or a kill cut off."""
    rows = []
    for line in path.read_text(encoding='utf-8', errors='replace').splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and 'step' in row:
            rows.append(row)
    return rows


def draw(curves: dict[str, tuple[list[tuple], list[tuple]]], metric: str, picture: Path) -> None:
    """Draws the metric and, beside it, the loss; a line for each run."""
    from matplotlib.figure import Figure  # half a second, which mistakes and --help need not wait for

    figure = Figure(figsize=(10, 4), layout='constrained')
    axes = figure.subplots(1, 2, sharex=True)
    for label, (validation, training) in curves.items():
        axes[0].plot(*zip(*validation, strict=True), 'o-', label=label, markersize=3)
        axes[1].plot([step for step, _ in training], [loss for _, loss in training], label=label)
    for axis, title in zip(axes, (f'{metric}, held-out', 'loss, training'), strict=True):
        axis.set(title=title, xlabel='step')
        axis.grid(alpha=0.3)
        axis.legend(fontsize='small')
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=100)


if __name__ == '__main__':
    main()

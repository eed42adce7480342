"""Curves from the numbers that runs log, of one run or of several, and the hook that keeps a run's drawn."""
import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from matplotlib.figure import Figure
from mmengine.dist import master_only
from mmengine.hooks import Hook
from mmengine.runner import Runner

from beit_mm.registry import HOOKS

# Panels of the picture: title -> logged numbers, of training and of validation.
PANELS = {
    'loss': ('loss', 'mim_loss', 'token_entropy', 'position_entropy'),
    'accuracy': ('mim_acc', ),
    'accuracy, %': ('top1', 'top5', 'best'),
    'mIoU, %': ('mIoU', ),
    'k-NN accuracy': ('knn_accuracy', ),
    'reconstruction': ('loss_recon', 'recon_mae_01'),
    'codes in use': ('codes_used', 'perplexity'),
    'learning rate': ('lr', ),
    'images per second': ('images_per_second', ),
}
TIMES = {'step', 'time', 'data_time'}  # of a row of validation, what does not measure the model
Points = list[tuple[int, float]]  # (step, number)


def read_scalars(work_dir: Path, prefixes: bool = False) -> tuple[list[dict], list[dict]]:
    """What the runs of a work directory logged: rows of training and rows of validation, each with its `step`.

    A resumed run goes on where an earlier one was, and a run started anew replaces it: of each file
    (`<time>/vis_data/scalars.json`) only the steps before the next file's first count.

    Args:
        work_dir: of the runs.
        prefixes: keep those of metrics, as in `accuracy/top1`.
    """
    rows: list[dict] = []
    for path in sorted(work_dir.glob('*/vis_data/scalars.json')):
        later = [{key if prefixes else key.split('/')[-1]: value for key, value in row.items()}
                 for row in _rows(path) if 'step' in row]
        if later:
            rows = [row for row in rows if row['step'] < later[0]['step']] + later
    return [r for r in rows if 'lr' in r], [r for r in rows if 'lr' not in r]


def _rows(path: Path) -> Iterator[dict]:
    """Rows of a log without those that a full disk or a kill has torn: half a row is no measurement."""
    for line in path.read_text(encoding='utf-8', errors='replace').splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict):
            yield row


def draw_curves(work_dir: Path, picture: Path) -> None:
    """Draws what the runs of a work directory logged over their steps.

    Args:
        work_dir: of a run.
        picture: PNG file to write.
    """
    train, val = read_scalars(work_dir)
    panels = {title: [key for key in keys if any(key in r for r in train + val)]
              for title, keys in PANELS.items()}
    panels = {title: keys for title, keys in panels.items() if keys}
    if not panels:
        return
    columns = min(len(panels), 3)
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(5 * columns, 3.5 * rows), layout='constrained')
    axes = figure.subplots(rows, columns, squeeze=False).flatten()
    for axis, (title, keys) in zip(axes, panels.items(), strict=False):
        for key in keys:
            _plot(axis, train, key, f'{key}, training', '-')
            _plot(axis, val, key, f'{key}, held-out', 'o--')
        axis.set_title(title)
        axis.set_xlabel('step')
        axis.grid(alpha=0.3)
        axis.legend(fontsize='small')
    for axis in axes[len(panels):]:
        axis.set_axis_off()
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=100)


def read_curves(work_dir: Path, metric: str) -> tuple[Points, Points]:
    """A metric on held-out images and the training loss of the runs of a work directory.

    Args:
        work_dir: of the runs.
        metric: as logged, for example 'accuracy/top1'.

    Returns:
        Their points, (step, number) each.

    Raises:
        FileNotFoundError: no logs.
        ValueError: no such metric in them.
    """
    train, val = read_scalars(work_dir, prefixes=True)
    if not train + val:
        raise FileNotFoundError(f'{work_dir} has no logs, <time>/vis_data/scalars.json with numbers in it; name the '
                                'work directory of a training')
    points = _points(val, metric)
    if not points:
        found = ', '.join(sorted({key for row in val for key in row} - TIMES)) or 'no validation yet'
        raise ValueError(f'{work_dir} has no metric {metric!r}; its logs have {found}')
    return points, _points(train, 'loss')


def draw_comparison(curves: Mapping[str, tuple[Points, Points]], metric: str, picture: Path) -> None:
    """Draws several runs into one picture: a metric on held-out images, and the training loss beside it.

    Args:
        curves: label of a run -> what `read_curves` returned.
        metric: its name.
        picture: PNG file to write.
    """
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


def _points(rows: list[dict], key: str) -> Points:
    return [(row['step'], row[key]) for row in rows if key in row]


def _plot(axis, rows: list[dict], key: str, label: str, style: str) -> None:
    points = _points(rows, key)
    if points:
        axis.plot(*zip(*points, strict=True), style, label=label, markersize=3)


@HOOKS.register_module()
class CurveHook(Hook):
    """Redraws `curves.png` of the work directory after every epoch and every validation."""

    priority = 'VERY_LOW'  # after the numbers are written

    def after_train_epoch(self, runner: Runner) -> None:
        """Draws what has been logged so far."""
        self._draw(runner)

    def after_val_epoch(self, runner: Runner, metrics: dict | None = None) -> None:
        """Draws what has been logged so far."""
        self._draw(runner)

    @master_only
    def _draw(self, runner: Runner) -> None:
        draw_curves(Path(runner.work_dir), Path(runner.work_dir) / 'curves.png')

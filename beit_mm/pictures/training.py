"""Pictures of a training: what a model makes of held-out images, and the curves of runs."""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import torch
from matplotlib.figure import Figure
from mmengine.dist import master_only
from mmengine.hooks import Hook
from mmengine.logging import print_log
from mmengine.runner import Runner

from beit_mm.engine.steps import unwrap, written_if_possible
from beit_mm.models.beit import BEiTPretrainer
from beit_mm.models.tokenizers.discrete_vae import DiscreteVAE
from beit_mm.pictures.sheet import pixels_of, sheet_of_columns
from beit_mm.registry import HOOKS
from beit_mm.terminal import UserError

Scalars = dict[int, dict[str, float]]  # step -> name -> number


@HOOKS.register_module()
class ReconstructionHook(Hook):
    """Shows what a pretraining or a tokenizer makes of eight held-out images, at each validation and test.

    Of a pretraining: image, masked image, and its decoded visual tokens, the right ones and the predicted ones; of a
    DiscreteVAE: image and decoded tokens. They go to the run's visualizer, hence to TensorBoard and others, and as
    `iter_<step>.png` and `test.png` to `pictures/` in the work directory.

    Args:
        channels: of images with many bands, the three that are drawn as red, green and blue, counted from 0; of images
            with one or two the first is drawn in gray.
    """

    def __init__(self, channels: Sequence[int] = (0, 1, 2)):
        if len(channels) != 3:
            raise UserError(f'channels is {channels}; expected three, for red, green and blue')
        self.channels = list(channels)

    @master_only
    def _after_iter(
        self, runner: Runner, batch_idx: int, data_batch: dict, outputs: list | None = None, mode: str = 'train'
    ) -> None:
        model = unwrap(runner)
        if mode == 'train' or batch_idx > 0 or not isinstance(model, (BEiTPretrainer, DiscreteVAE)):
            return
        loader = runner.test_dataloader if mode == 'test' else runner.val_dataloader
        number = min(8, len(loader.dataset))  # spread evenly: where class follows class, each is of another one
        samples = [loader.dataset[i * len(loader.dataset) // number] for i in range(number)]
        with torch.no_grad():
            columns = model.pictures(model.data_preprocessor(loader.collate_fn(samples))['inputs'])
        figure = sheet_of_columns(columns, self.channels)
        path = Path(runner.work_dir, 'pictures', 'test.png' if mode == 'test' else f'iter_{runner.iter}.png')
        with written_if_possible(runner):
            runner.visualizer.add_image(f'{mode}_reconstruction', pixels_of(figure), step=runner.iter)
            path.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(path)
            print_log(f'Pictures: {path}', logger='current')


def read_scalars(work_dir: str | Path) -> tuple[Scalars, Scalars]:
    """What a run has logged in training and in validations, in all its starts, by step in rising order.

    Where two starts have a step, the later one counts.
    """
    training: Scalars = {}
    validation: Scalars = {}
    for path in sorted(Path(work_dir).glob('*/vis_data/scalars.json')):
        for line in path.read_text().splitlines():
            with suppress(json.JSONDecodeError):  # a run that was killed may leave half a line
                row = json.loads(line)
                (training if 'iter' in row else validation)[row['step']] = row
    training = dict(sorted(training.items()))
    # a run that counts epochs logs its validations by them
    ends = {row['epoch']: step for step, row in training.items() if 'epoch' in row}
    return training, {ends.get(step, step): row for step, row in sorted(validation.items())}


def draw_runs(runs: Mapping[str, tuple[Scalars, Scalars]], keys: Sequence[str]) -> Figure:
    """A panel for each key, with a curve of each run: in training a line, in validations one with dots.

    Args:
        runs: name -> what `read_scalars` returns.
    """
    rows, columns = (len(keys) + 1) // 2, min(len(keys), 2)
    figure = Figure(figsize=(6 * columns, 3.5 * rows), layout='constrained')
    panels = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes, key in zip(panels, keys, strict=False):
        for number, (name, parts) in enumerate(runs.items()):
            for part, style, suffix in zip(parts, ('-', 'o--'), ('', ', validation'), strict=True):
                points = {step: row[key] for step, row in part.items() if key in row}
                if points:
                    label = name + suffix
                    axes.plot(*zip(*points.items(), strict=True), style, color=f'C{number}', label=label, markersize=4)
        axes.set(xlabel='step', ylabel=key)
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend(fontsize=7)
    for axes in panels[len(keys) :]:
        axes.remove()
    return figure

"""What runs have logged: read back over several starts and drawn."""

import json
from pathlib import Path

from matplotlib.figure import Figure

from beit_mm.own_images.report import draw_curves
from beit_mm.pictures import draw_runs, read_scalars


def write_start(folder: Path, start: str, rows: list[dict]) -> None:
    """What mmengine leaves of one start of a run."""
    data = folder / start / 'vis_data'
    data.mkdir(parents=True)
    (data / 'scalars.json').write_text(''.join(json.dumps(row) + '\n' for row in rows))


def trained(step: int, loss: float, **more: float) -> dict:
    return dict(loss=loss, time=0.5, images_per_second=float(step), iter=step, step=step, **more)


def test_each_run_has_a_curve_in_each_panel_and_of_a_step_the_later_start_counts(tmp_path):
    """Of a run that was killed at step 30, in the middle of a line, and went on from 20; and of another one."""
    first, second = tmp_path / 'first', tmp_path / 'second'
    validated = [dict(mim_loss=loss, other=1.0, step=step) for step, loss in ((20, 4.0), (40, 3.0), (60, 3.5))]
    write_start(first, '20260101_000000', [trained(10, 9.0), trained(20, 8.0), validated[0], trained(30, 7.0)])
    with (first / '20260101_000000/vis_data/scalars.json').open('a') as file:
        file.write('{"loss": 6.')
    write_start(first, '20260102_000000', [trained(30, 7.5), trained(40, 6.0), *validated[1:], trained(60, 5.0)])
    write_start(second, '20260101_000000', [trained(10, 9.5), dict(mim_loss=8.0, step=10)])
    runs = {folder.name: read_scalars(folder) for folder in (first, second)}
    figure = draw_runs(runs, ['loss', 'mim_loss', 'other'])
    curves = [[(line.get_label(), line.get_xydata().tolist()) for line in axes.lines] for axes in figure.axes]
    losses = [[10, 9], [20, 8], [30, 7.5], [40, 6], [60, 5]]
    assert curves[0] == [('first', losses), ('second', [[10, 9.5]])]
    held_out = [[20, 4], [40, 3], [60, 3.5]]
    assert curves[1] == [('first, validation', held_out), ('second, validation', [[10, 8]])]
    assert len(curves) == 3 and [name for name, _ in curves[2]] == ['first, validation']
    # validations of a run that counts epochs stand at their steps
    rows = [trained(50, 9.0, epoch=1), trained(100, 8.0, epoch=1), dict(top1=10.0, step=1)]
    write_start(tmp_path, '20260101_000000', [*rows, trained(200, 7.0, epoch=2), dict(top1=30.0, step=2)])
    assert [(step, row['top1']) for step, row in read_scalars(tmp_path)[1].items()] == [(100, 10.0), (200, 30.0)]
    # also where they are logged by step, as configs/ have it, and the number of a step is an epoch's too
    rows = [trained(2 * epoch, 9.0, epoch=epoch) for epoch in range(1, 5)]
    write_start(tmp_path / 'steps', '20260101_000000', [*rows, *(dict(top1=step, step=step) for step in (2, 4, 6, 8))])
    assert list(read_scalars(tmp_path / 'steps')[1]) == [2, 4, 6, 8]


def test_guessing_is_drawn_beside_the_loss_of_a_pretraining(tmp_path, monkeypatch):
    guesses = dict(token_entropy=5.5, position_entropy=5.25)
    write_start(tmp_path / 'pretrain', '20260101_000000', [trained(1, 6.0), dict(step=2, mim_loss=5.0, **guesses)])
    drawn: list = []
    monkeypatch.setattr(Figure, 'savefig', lambda figure, *args, **kwargs: drawn.append(figure))
    draw_curves(tmp_path / 'pretrain')
    lines = [[*map(float, line.get_ydata())] for line in drawn[0].axes[0].lines]
    assert lines == [[6.0], [5.0], [5.5, 5.5], [5.25, 5.25]]


def test_a_result_is_drawn_once_it_makes_a_curve(tmp_path, monkeypatch):
    drawn: list = []
    monkeypatch.setattr(Figure, 'savefig', lambda figure, *args, **kwargs: drawn.append(figure))
    rows = [trained(1, 6.0), {'accuracy/top1': 40.0, 'step': 1}, trained(2, 5.0)]
    write_start(tmp_path / 'run', '20260101_000000', rows)
    draw_curves(tmp_path / 'run')
    write_start(tmp_path / 'run', '20260102_000000', [{'accuracy/top1': 50.0, 'step': 2}])
    draw_curves(tmp_path / 'run')
    write_start(tmp_path / 'fit', '20260101_000000', [trained(0, 6.0), {'accuracy/top1': 40.0, 'step': 0}])
    assert draw_curves(tmp_path / 'fit') == ''  # of a head that was fitted: one point
    (loss,), (_, accuracy) = (figure.axes for figure in drawn)
    assert len(loss.lines) == 1 and [*accuracy.lines[0].get_ydata()] == [40, 50]
    assert loss.get_position().width > 0.5 and accuracy.get_position().y0 < drawn[1].axes[0].get_position().y0

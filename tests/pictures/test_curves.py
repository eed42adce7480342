"""What runs have logged: read back over several starts, compared and drawn."""

import json
from pathlib import Path

import pytest
from helpers import run_tool
from PIL import Image

from beit_mm.pictures import draw_runs, read_scalars

COMPARE = 'analysis/compare_runs.py'


def write_start(folder: Path, start: str, rows: list[dict], config: str = '') -> None:
    """What mmengine leaves of one start of a run."""
    data = folder / start / 'vis_data'
    data.mkdir(parents=True)
    (data / 'scalars.json').write_text(''.join(json.dumps(row) + '\n' for row in rows))
    (data / 'config.py').write_text(config)


def trained(step: int, loss: float, **more: float) -> dict:
    return dict(loss=loss, time=0.5, images_per_second=float(step), iter=step, step=step, **more)


@pytest.fixture
def runs(tmp_path) -> list[Path]:
    """A run that was killed at step 30, in the middle of a line, and went on from 20; and another one."""
    first, second = tmp_path / 'first', tmp_path / 'second'
    validated = [
        dict(mim_loss=loss, other=1.0, time=0.1, step=step) for step, loss in ((20, 4.0), (40, 3.0), (60, 3.5))
    ]
    before = [trained(10, 9.0), trained(20, 8.0), validated[0], trained(30, 7.0)]
    config = 'optimizer = dict(lr={}, betas=[0.9, 0.95])\npipeline = [dict(type="A"), dict(type="B", size={})]\n'
    write_start(first, '20260101_000000', before, config.format(1e-3, 32) + 'extra = 1')
    with (first / '20260101_000000/vis_data/scalars.json').open('a') as file:
        file.write('{"loss": 6.')
    after = [trained(30, 7.5), trained(40, 6.0), *validated[1:], trained(60, 5.0)]
    write_start(first, '20260102_000000', after, config.format(1e-3, 64) + 'work_dir = "a"')
    write_start(second, '20260101_000000', [trained(10, 9.5), dict(mim_loss=8.0, step=10)], config.format(1e-3, 32))
    (second / 'pretrain.py').write_text('unread = 1')
    return [first, second]


def test_of_a_step_the_later_start_counts(runs):
    training, validation = read_scalars(runs[0])
    assert {step: row['loss'] for step, row in training.items()} == {10: 9.0, 20: 8.0, 30: 7.5, 40: 6.0, 60: 5.0}
    assert {step: row['mim_loss'] for step, row in validation.items()} == {20: 4.0, 40: 3.0, 60: 3.5}
    assert read_scalars(runs[0] / 'nowhere') == ({}, {})


def test_validations_of_a_run_that_counts_epochs_stand_at_their_steps(tmp_path):
    rows = [trained(50, 9.0, epoch=1), trained(100, 8.0, epoch=1), dict(top1=10.0, step=1)]
    rows += [trained(200, 7.0, epoch=2), dict(top1=30.0, step=2)]
    write_start(tmp_path, '20260101_000000', rows)
    assert [(step, row['top1']) for step, row in read_scalars(tmp_path)[1].items()] == [(100, 10.0), (200, 30.0)]


def test_each_run_has_a_curve_in_each_panel(runs):
    figure = draw_runs({folder.name: read_scalars(folder) for folder in runs}, ['loss', 'mim_loss', 'other'])
    curves = [[(line.get_label(), line.get_xydata().tolist()) for line in axes.lines] for axes in figure.axes]
    first = ('first', [[10, 9], [20, 8], [30, 7.5], [40, 6], [60, 5]])
    assert curves[0] == [first, ('second', [[10, 9.5]])]
    validated = [[20, 4], [40, 3], [60, 3.5]]
    assert curves[1] == [('first, validation', validated), ('second, validation', [[10, 8]])]
    assert len(curves) == 3 and [name for name, _ in curves[2]] == ['first, validation']


def test_runs_are_compared_in_a_table(runs, tmp_path, capsys):
    run_tool(COMPARE, *runs, '--keys', 'loss,mim_loss', '--out', tmp_path / 'deep/curves.png')
    out = capsys.readouterr().out.splitlines()
    assert out[0].split() == ['run', 'step', 'minutes', 'images/s', 'mim_loss']  # 'other' is the first run's alone
    assert out[1].split(maxsplit=1) == [str(runs[0]), '60      0.5      30.0  3.5 (3 at 40)']
    assert out[2].split()[1:] == ['10', '0.1', '10.0', '8', '(8', 'at', '10)']
    differing = [line.split() for line in out[out.index('Configs differ in') + 2 : -1]]
    assert differing == [['pipeline.1.size', '64', '32']]  # of the last start; 1e-3 is the same
    assert Image.open(tmp_path / 'deep/curves.png').size == (1440, 420)


def test_a_config_in_a_run_is_not_executed_and_cannot_steer_a_terminal(runs, capsys):
    for number, folder in enumerate(runs):
        config = (
            f'model = dict(a=print("{{{{$RAN:RAN}}}}"), **{{"a": 1}}, b="\x1b[2J{number}")\nraise SystemExit("RAN")\n'
        )
        write_start(folder, '20260103_000000', [], config)
    run_tool(COMPARE, *runs)
    out = capsys.readouterr().out
    assert 'model.b' in out and 'RAN' not in out and '\x1b' not in out and r'\x1b[2J1' in out


def test_mistakes_are_one_line(runs, tmp_path):
    for words, message in (
        (
            [runs[0], tmp_path / 'none'],
            'none has no */vis_data/scalars.json; expected the work directory of a training',
        ),
        ([runs[0], '--keys', 'loss,los'], "--keys: no run has logged 'los'; choose of images_per_second, iter, loss"),
    ):
        with pytest.raises(SystemExit) as end:
            run_tool(COMPARE, *words)
        assert str(end.value.code).startswith('error: ') and message in end.value.code

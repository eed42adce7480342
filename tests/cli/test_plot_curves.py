"""tools/analysis/plot_curves.py: the numbers are the logs', and what is missing is named in one line."""

import json
import runpy
import sys
from pathlib import Path

import pytest
from helpers import ROOT
from PIL import Image

ACCURACY = {'fine=tuned': [(10, 40.0), (20, 62.5)], 'scratch': [(10, 5.0), (20, 12.5), (30, 21.0)]}
LOSS = {'fine=tuned': [(5, 4.0), (15, 2.0)], 'scratch': [(5, 4.6), (15, 4.1), (25, 3.5)]}


def write_log(work_dir: Path, time: str, rows: list[dict]) -> Path:
    file = work_dir / time / 'vis_data/scalars.json'
    file.parent.mkdir(parents=True)
    file.write_text(''.join(f'{json.dumps(row)}\n' for row in rows))
    return file


@pytest.fixture
def runs(tmp_path: Path, monkeypatch) -> Path:
    """The folder of two runs with logs as mmengine writes them; the current folder."""
    for name, accuracy in ACCURACY.items():
        rows = [{'lr': 1e-3, 'loss': loss, 'time': 0.1, 'step': step} for step, loss in LOSS[name]]
        rows += [
            {'accuracy/top1': number, 'loss': 9.0, 'data_time': 0.1, 'time': 0.1, 'step': step}
            for step, number in accuracy
        ]
        write_log(tmp_path / name, '20261120_120000', sorted(rows, key=lambda row: row['step']))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def plot(monkeypatch):
    """The tool as a function of its arguments."""

    def run(*arguments: str) -> dict:
        monkeypatch.setattr(sys, 'argv', ['plot_curves.py', *arguments])
        return runpy.run_path(str(ROOT / 'tools/analysis/plot_curves.py'), run_name='__main__')

    return run


def test_what_is_drawn_are_the_numbers_of_the_logs(runs, plot, monkeypatch):
    drawn = {}
    monkeypatch.setattr(
        'matplotlib.figure.Figure.savefig',
        lambda figure, *_, **__: drawn.update(
            {
                (axis.get_title(), line.get_label()): list(zip(*line.get_data(), strict=True))
                for axis in figure.axes
                for line in axis.lines
            }
        ),
    )
    plot(*ACCURACY)
    assert drawn == {
        (title, name): numbers[name]
        for name in ACCURACY
        for title, numbers in (('accuracy/top1, held-out', ACCURACY), ('loss, training', LOSS))
    }


def test_a_picture_and_the_last_numbers(runs, plot, capsys):
    plot('fine=tuned=pre = trained', 'scratch/', '--out', 'new/curves.png')
    assert capsys.readouterr().out.splitlines() == [
        'pre = trained: accuracy/top1 62.5 at step 20',
        'scratch: accuracy/top1 21 at step 30',
        'new/curves.png',
    ]
    with Image.open('new/curves.png') as picture:
        assert picture.size == (1000, 400)


@pytest.mark.parametrize(
    'arguments, message',
    [
        (
            ['gone=pretrained'],
            'gone has no logs, <time>/vis_data/scalars.json with numbers in it; name the work directory of a training',
        ),
        (['scratch', '--metric', 'top1'], "scratch has no metric 'top1'; its logs have accuracy/top1, loss"),
        (['scratch', './scratch'], 'two runs are called scratch; give scratch a name: scratch=NAME'),
    ],
)
def test_mistakes_are_one_line(runs, plot, arguments, message):
    with pytest.raises(SystemExit) as error:
        plot(*arguments)
    assert str(error.value) == f'error: {message}' and not Path('curves.png').exists()


@pytest.mark.parametrize(
    'torn', ['{"accuracy/top1": 99.0, "lo', '{"lr": 1e-3, "loss": 9.0, "st\n{"lr": 0.001, "lo', '\0\0\0', '\xe9\n7\n']
)
def test_a_torn_line_is_no_measurement(runs, plot, torn):
    log = next(Path('scratch').glob('*/vis_data/scalars.json'))
    log.write_bytes(log.read_bytes() + torn.encode('latin-1'))
    read_curves = plot('scratch')['read_curves']
    assert read_curves(Path('scratch'), 'accuracy/top1') == (ACCURACY['scratch'], LOSS['scratch'])


def test_a_resumed_run_goes_on_and_a_new_one_replaces(runs, plot):
    read_curves = plot('scratch')['read_curves']
    write_log(Path('scratch'), '20261121_120000', [dict(lr=1.0, loss=3.0, step=step) for step in (21, 22)])
    points, losses = read_curves(Path('scratch'), 'accuracy/top1')
    assert points == ACCURACY['scratch'][:2] and losses == [*LOSS['scratch'][:2], (21, 3.0), (22, 3.0)]
    write_log(Path('scratch'), '20261122_120000', [dict(lr=1.0, loss=5.0, step=1)])
    with pytest.raises(ValueError, match='its logs have no validation yet'):
        read_curves(Path('scratch'), 'accuracy/top1')

"""Several runs in one picture: the numbers are the logs', and what is missing is named in one line."""
import json
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import ROOT, make_runner
from PIL import Image

from beit_mm.visualization.curves import draw_comparison, read_curves, read_scalars

ACCURACY = {'fine=tuned': [(10, 40.0), (20, 62.5)], 'scratch': [(10, 5.0), (20, 12.5), (30, 21.0)]}
LOSS = {'fine=tuned': [(5, 4.0), (15, 2.0)], 'scratch': [(5, 4.6), (15, 4.1), (25, 3.5)]}


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Logs of two runs, as mmengine writes them."""
    for name, accuracy in ACCURACY.items():
        rows = [{'lr': 1e-3, 'loss': loss, 'time': 0.1, 'step': step} for step, loss in LOSS[name]]
        rows += [{'accuracy/top1': number, 'loss': 9.0, 'data_time': 0.1, 'time': 0.1, 'step': step}
                 for step, number in accuracy]
        folder = tmp_path / name / '20261120_120000/vis_data'
        folder.mkdir(parents=True)
        (folder / 'scalars.json').write_text(''.join(f'{json.dumps(row)}\n' for row in sorted(
            rows, key=lambda row: row['step'])))
    return tmp_path


def plot(folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, ROOT / 'tools/analysis/plot_curves.py', *arguments], cwd=folder, text=True,
                          capture_output=True, check=False)


@pytest.mark.parametrize('name', ACCURACY)
def test_the_numbers_are_those_of_the_logs(runs, name):
    assert read_curves(runs / name, 'accuracy/top1') == (ACCURACY[name], LOSS[name])


def test_what_is_drawn_are_these_numbers(runs, monkeypatch, tmp_path):
    drawn = {}
    monkeypatch.setattr('matplotlib.figure.Figure.savefig', lambda figure, *_, **__: drawn.update({
        (axis.get_title(), line.get_label()): list(zip(*line.get_data(), strict=True))
        for axis in figure.axes for line in axis.lines}))
    draw_comparison({name: (ACCURACY[name], LOSS[name]) for name in ACCURACY}, 'accuracy/top1', tmp_path / 'x.png')
    assert drawn == {(title, name): numbers[name] for name in ACCURACY for title, numbers in (
        ('accuracy/top1, held-out', ACCURACY), ('loss, training', LOSS))}


def test_a_picture_from_the_command_line(runs):
    done = plot(runs, 'fine=tuned=pre = trained', 'scratch/', '--out', 'new/curves.png')
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ['pre = trained: accuracy/top1 62.5 at step 20',
                                        'scratch: accuracy/top1 21 at step 30', 'new/curves.png']
    with Image.open(runs / 'new/curves.png') as picture:
        assert picture.size == (1000, 400)
        colours = {colour for _, colour in picture.convert('RGB').getcolors(1000 * 400)}
        assert {(31, 119, 180), (255, 127, 14)} <= colours  # one for each run


@pytest.mark.parametrize('arguments, message', [
    (['gone=pretrained'], 'gone has no logs, <time>/vis_data/scalars.json with numbers in it; name the work directory '
     'of a training'),
    (['scratch', '--metric', 'top1'], "scratch has no metric 'top1'; its logs have accuracy/top1, loss"),
    (['scratch', './scratch'], 'two runs are called scratch; give scratch a name: scratch=NAME')])
def test_mistakes_are_one_line(runs, arguments, message):
    done = plot(runs, *arguments)
    assert done.returncode == 1 and done.stdout == ''
    assert done.stderr == f'error: {message}\n'
    assert not (runs / 'curves.png').exists()


def test_a_run_without_validation_says_so(runs):
    log = next((runs / 'scratch').glob('*/vis_data/scalars.json'))
    log.write_text('{"lr": 1.0, "loss": 2.0, "step": 1}\n')
    with pytest.raises(ValueError, match='its logs have no validation yet'):
        read_curves(runs / 'scratch', 'accuracy/top1')


TORN = ['{"accuracy/top1": 99.0, "lo', '{"lr": 1e-3, "loss": 9.0, "st\n{"lr": 0.001, "lo', '\0\0\0', '\xe9\n7\n']


@pytest.mark.parametrize('torn', TORN)
def test_a_torn_line_is_no_measurement(runs, torn):
    log = next((runs / 'scratch').glob('*/vis_data/scalars.json'))
    log.write_bytes(log.read_bytes() + torn.encode('latin-1'))
    done = plot(runs, 'scratch', '--out', 'curves.png')
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == 'scratch: accuracy/top1 21 at step 30'
    assert read_curves(runs / 'scratch', 'accuracy/top1') == (ACCURACY['scratch'], LOSS['scratch'])


def test_a_run_resumes_after_a_log_was_torn(pretrain_config):
    pretrain_config.train_cfg.max_epochs = 1
    make_runner(pretrain_config).train()
    work = Path(pretrain_config.work_dir)
    log = next(work.glob('*/vis_data/scalars.json'))
    log.parents[1].rename(work / '20200101_000000')  # earlier than the run to come, which may begin in the same second
    log = work / '20200101_000000/vis_data/scalars.json'
    log.write_bytes(log.read_bytes()[:-20])  # of the validation's row
    (work / 'curves.png').unlink()
    pretrain_config.resume = True
    pretrain_config.train_cfg.max_epochs = 2
    make_runner(pretrain_config).train()
    train, val = read_scalars(work)
    assert [row['step'] for row in train] == list(range(1, 7)) and [row['step'] for row in val] == [6]
    assert (work / 'curves.png').exists()

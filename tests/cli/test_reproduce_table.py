"""tools/reproduce_table.py: a table is run once, goes on after a stop, and holds the figures of its runs."""

import json
import os
import re
import shlex
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from helpers import NO_WORKERS, ROOT, draw_caltech101, header_of, run_tool
from PIL import Image

from tools._cli import parse_options

TOY_IMAGES = ['--num-train', '70', '--num-val', '10', '--size', '64']
TWO_ROWS = ['ablation', '--scale', 'demo', '--rows', '1', '4', '--columns', 'finetune', '--seeds', '0', '1']
SHORT = ['--shorten', '1000', '--output', 'page/results.md', '--cfg-options', *NO_WORKERS]
RUNS = 'work_dirs/tables/demo_1000'
MARK = '<!-- ablation at demo scale by tools/reproduce_table.py -->'


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def root(folder) -> Path:
    """A folder with drawn images where the demo has Caltech-101."""
    draw_caltech101(folder / 'data/caltech101')
    return folder


class InProcess:
    """Takes the place of a process: the command runs here at once; `commands` lists them."""

    commands: list[list[str]] = []
    stop_after = 1000

    def __init__(self, command: list[str], **_: object):
        words = [word.removeprefix(f'{ROOT}/') for word in command[1:]]
        self.commands.append(words)
        run_tool(
            words[0].removeprefix('tools/'), *[str(ROOT / w) if w.startswith('configs/') else w for w in words[1:]]
        )
        if len(self.commands) == self.stop_after:
            os.kill(os.getpid(), signal.SIGTERM)
        self.returncode = 0

    def poll(self) -> int:
        return self.returncode

    def wait(self) -> int:
        return self.returncode

    def send_signal(self, number: int) -> None:
        raise AssertionError('it has ended')


@pytest.fixture
def commands(monkeypatch) -> list[list[str]]:
    popen = subprocess.Popen

    def start(command: object, *arguments: object, **options: object) -> object:
        ours = isinstance(command, list) and str(command[1]).startswith(f'{ROOT}/tools')
        return (InProcess if ours else popen)(command, *arguments, **options)

    monkeypatch.setattr(InProcess, 'commands', [])
    monkeypatch.setattr(subprocess, 'Popen', start)
    return InProcess.commands


def reproduce(*arguments: str) -> None:
    run_tool('reproduce_table.py', *arguments)


def test_a_table_goes_on_after_a_stop_and_holds_the_figures(root, commands, monkeypatch, capsys):
    monkeypatch.setattr(InProcess, 'stop_after', 4)
    with pytest.raises(SystemExit, match='the same command goes on from here'):
        reproduce(*TWO_ROWS, *SHORT)
    assert len(commands) == 4
    assert '–' in (root / 'page/results.md').read_text()

    reproduce(*TWO_ROWS, *SHORT)
    kinds = [(words[0], words[words.index('--work-dir') + 1].removeprefix(f'{RUNS}/')) for words in commands]
    tuned = [f'{recipe}/finetune_seed{seed}' for recipe in ('baseline', 'pixels_random_mask') for seed in (0, 1)]
    assert sorted(kinds) == sorted(  # each once
        [
            ('tools/train.py', name)
            for name in ['baseline/tokenizer', 'baseline/pretrain', 'pixels_random_mask/pretrain']
        ]
        + [(f'tools/{tool}.py', name) for tool in ('train', 'test') for name in tuned]
    )
    lists = [(root / RUNS / f'labels_20_seed{seed}.txt').read_text().split() for seed in (0, 1)]
    assert len(lists[0]) == len(set(lists[0])) == 70 + 87 and lists[0] != lists[1]  # fewer than 20 a class are all

    page = (root / 'page/results.md').read_text()
    assert page.startswith(MARK) and page.endswith('<!-- end of ablation at demo scale -->\n')
    rows = [line.split(' | ') for line in page.splitlines() if line.startswith('| ')][2:]
    for number, recipe in ((0, 'baseline'), (3, 'pixels_random_mask')):
        files = [root / RUNS / recipe / f'finetune_seed{seed}/metrics.json' for seed in (0, 1)]
        values = [json.loads(file.read_text())['accuracy/top1'] for file in files]
        mean, spread = statistics.mean(values), statistics.stdev(values)
        assert rows[number][-1] == f'**{mean:.1f}** ± {spread:.1f} ({values[0]:.1f}, {values[1]:.1f}) |'
    assert rows[1][-1] == '– |' and len(rows) == 7
    assert rows[3][1].startswith('[80.50](') and rows[3][1].endswith('finetune_pixels_random_mask_in1k_100e.py)')
    assert (root / 'page' / rows[3][1].split('(')[1].rstrip(')')).resolve().is_file()
    printed = capsys.readouterr().out
    assert '[11/11] finished' in printed and rows[0][-1] in printed

    # All is there: nothing runs again, and the text around the marks stays.
    (root / 'page/results.md').write_text(f'Before.\n{page}After.\n')
    reproduce(*TWO_ROWS, *SHORT)
    assert len(commands) == 11
    assert (root / 'page/results.md').read_text() == f'Before.\n{page}After.\n'

    with pytest.raises(SystemExit, match=r'holds a run with other options \(model.backbone.drop_path_rate=0.2\)'):
        reproduce(*TWO_ROWS, *SHORT, 'model.backbone.drop_path_rate=0.2')
    (root / RUNS / 'baseline/pretrain/run_id').write_text('another')
    with pytest.raises(SystemExit, match='finetune_seed0 started from another .*pretrain/iter_4.pth; move it away'):
        reproduce(*TWO_ROWS, *SHORT)


def test_the_curves_of_convergence_are_drawn(root, commands):
    reproduce('convergence', '--scale', 'demo', '--seeds', '0', *SHORT)
    assert '![Convergence' in (root / 'page/results.md').read_text()
    with Image.open(root / 'page/images/convergence.png') as picture:
        assert picture.width > 600 and len(set(picture.convert('L').tobytes())) > 10


@pytest.mark.slow
def test_a_killed_table_goes_on(root):
    """With processes of its own, stopped while two of them train."""
    command = [sys.executable, str(ROOT / 'tools/reproduce_table.py'), *TWO_ROWS, '--jobs', '2', *SHORT]
    environment = dict(os.environ, PYTHONPATH=str(ROOT))
    tool = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    for line in tool.stdout:
        if 'finished' in line and 'pretrain' in line:
            time.sleep(2)
            tool.send_signal(signal.SIGINT)
            break
    assert 'Ablation studies (demo scale)' in tool.stdout.read()  # with what is there
    assert tool.wait(60) == 1
    before = {path: path.stat().st_mtime for path in root.glob(f'{RUNS}/*/*/*.pth')}
    assert before
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
    assert '[11/11] finished' in done
    final = [path for path in before if path.name in ('iter_2.pth', 'iter_4.pth', 'epoch_2.pth')]
    assert final and all(path.stat().st_mtime == before[path] for path in final)


def test_commands_of_the_full_scale_are_those_of_the_headers(folder, capsys):
    reproduce('supervised_seg', '--scale', 'full', '--rows', '3', '--dry-run')
    commands = [line.strip() for line in capsys.readouterr().out.splitlines() if line.startswith('    ')]
    header = header_of('beit_plus/upernet_640_ade20k_160k.py')
    wanted = [line.strip() for line in re.search(r'Command: (.*?)\n +The last', header, re.S)[1].splitlines()]
    assert [command.replace(' --resume', '') for command in commands[:3]] == wanted
    tests = [shlex.split(command) for command in commands[3:]]
    assert [(words[0], words[3], '--tta' in words) for words in tests] == [
        ('tools/dist_test.sh', '8', False),
        ('tools/dist_test.sh', '8', True),
    ]
    assert not (folder / 'work_dirs').exists()


def test_weights_of_others_are_tested_and_not_trained(folder, capsys):
    reproduce('tokenizer', '--scale', 'full', '--rows', '1', '--columns', 'error', '--dry-run')
    (command,) = (line.strip() for line in capsys.readouterr().out.splitlines() if line.startswith('    '))
    header = ' '.join(header_of('dvae/dalle_8k_in1k.py').split())
    assert f'tools/test.py configs/dvae/dalle_8k_in1k.py {command[command.index("--cfg") :]}' in header


def test_other_gpus_keep_the_batch_and_a_seed_has_its_folder(folder, capsys):
    reproduce('cls', '--scale', 'full', '--rows', '12', '--seeds', '0', '3', '--gpus', '4', '--dry-run')
    commands = [line.strip() for line in capsys.readouterr().out.splitlines() if line.startswith('    ')]
    assert commands[0].endswith('pretrain_800e.py 4 --resume --cfg-options train_dataloader.batch_size=512')
    assert commands[1].endswith('finetune_in1k_100e.py 4 --resume --cfg-options train_dataloader.batch_size=256')
    assert commands[3].endswith(
        'finetune_in1k_100e.py 4 --resume --work-dir work_dirs/finetune_in1k_100e_seed3 '
        '--cfg-options randomness.seed=3 train_dataloader.batch_size=256'
    )
    assert 'work_dirs/finetune_in1k_100e_seed3/epoch_100.pth 4' in commands[4]
    with pytest.raises(SystemExit, match='--gpus 3: the batch of configs/.*, 1024 images, cannot be'):
        reproduce('cls', '--scale', 'full', '--rows', '12', '--gpus', '3', '--dry-run')


@pytest.mark.parametrize('table', yaml.safe_load((ROOT / 'configs/paper_tables.yml').read_text())['tables'])
def test_every_table_has_a_plan(folder, capsys, table):
    """At demo scale, where it has one, nothing is trained twice: a folder is one run's."""
    data = yaml.safe_load((ROOT / 'configs/paper_tables.yml').read_text())['tables'][table]
    if 'demo' not in data:
        with pytest.raises(SystemExit):
            reproduce(table, '--scale', 'demo', '--dry-run')
        return
    reproduce(table, '--scale', 'demo', '--dry-run')
    trained = [line for line in capsys.readouterr().out.splitlines() if 'tools/train.py' in line]
    folders = [re.search(r'--work-dir (\S+)', line)[1] for line in trained]
    assert len(folders) == len(set(folders)) > 0


def test_a_pipeline_is_an_option():
    (value,) = parse_options(
        ['pipeline=[{"type": "LoadImage"}, {"type": "Crop", "size": [4, 5], "pad": null}]']
    ).values()
    assert value == [dict(type='LoadImage'), dict(type='Crop', size=[4, 5], pad=None)]
    assert value[0].type == 'LoadImage'  # as in any config
    with pytest.raises(ValueError, match='--cfg-options: pipeline begins as a list of dicts and is no JSON'):
        parse_options(["pipeline=[{'type': 'LoadImage'}]"])


@pytest.mark.parametrize(
    'arguments, message',
    [
        (['cifar100', '--scale', 'demo'], 'has no demo scale'),
        (['cls', '--scale', 'demo', '--rows', '16'], 'rows 1 to 15'),
        (['cls', '--scale', 'full', '--shorten', '2'], '--shorten is for the demo scale'),
        (
            ['cls', '--scale', 'demo', '--columns', 'pretrain'],
            '--columns: no pretrain in cls; choose from tokenizer, finetune',
        ),
        (['seg', '--scale', 'demo', '--shorten', '9', '--columns', 'finetune'], 'no folder data/caltech101/train'),
    ],
)
def test_a_users_mistake_is_named(folder, capsys, arguments, message):
    with pytest.raises(SystemExit) as end:
        reproduce(*arguments)
    assert message in f'{end.value.code} {capsys.readouterr().err}'

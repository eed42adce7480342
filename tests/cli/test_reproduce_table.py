"""tools/reproduce_table.py: a table is run once, goes on after a stop, and holds the figures of its runs."""

import json
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml
from helpers import ROOT, header_of, model_on_meta, run_tool, with_options

TABLES = yaml.safe_load((ROOT / 'configs/paper_tables.yml').read_text())['tables']


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def planned(capsys, *words: str) -> list[str]:
    """Commands that --dry-run prints."""
    run_tool('reproduce_table.py', *words, '--dry-run')
    return [line.strip() for line in capsys.readouterr().out.splitlines() if line.startswith('    ')]


class Process:
    """Takes the place of a training or a test, and leaves what that would leave; one in the list fails."""

    returncode, commands, failing = 1, [], None

    def __init__(self, words: list[str]):
        self.commands.append(words[1:])
        if self.failing and self.failing in ' '.join(words):
            return
        folder = Path(words[words.index('--work-dir') + 1]) if '--work-dir' in words else None
        if '--out' in words:
            figure = 20.0 if 'randomness.seed=1' in words else 17.25
            Path(words[words.index('--out') + 1]).write_text(json.dumps({'accuracy/top1': figure}) + '\n')
        elif folder:
            (folder / f'iter_{words[words.index("--steps") + 1]}.pth').touch()
        else:
            Path(words[-3]).touch()  # the list of labels

    def wait(self) -> int:
        return self.returncode


def test_a_table_goes_on_after_a_failure_and_holds_the_figures(folder, monkeypatch, capsys):
    monkeypatch.setattr(subprocess, 'Popen', Process)
    monkeypatch.setattr(Process, 'commands', [])
    monkeypatch.setattr(Process, 'failing', 'randomness.seed=1')
    words = 'ablation --scale demo --rows 4 --columns finetune --seeds 0 1 --steps 2'.split()
    with pytest.raises(SystemExit, match='error: 2 of 7 steps are not finished'):
        run_tool('reproduce_table.py', *words)
    assert '| 80.50 | 37.09 | 17.2 |' in capsys.readouterr().out
    monkeypatch.setattr(Process, 'failing', None)
    for _ in range(2):  # the second time nothing is left to do
        run_tool('reproduce_table.py', *words)
    assert len(Process.commands) == 6 + 2  # the failed one twice, its test once
    (row,) = (folder / 'work_dirs/tables/ablation_demo.md').read_text().splitlines()[2:]
    name = '- visual tokens - blockwise masking'
    assert row == f'| {name} | 80.50 | 37.09 | **18.6** ± 1.9 (17.2, 20.0) |'  # sqrt(2) * 1.375 = 1.94


def test_commands_of_the_full_scale_are_those_of_the_headers(capsys):
    *trainings, single, multi = planned(capsys, 'supervised_seg', '--scale', 'full', '--rows', '3')
    header = ' '.join(header_of('beit_plus/upernet_640_ade20k_160k_after_in22k.py').split())
    assert len(trainings) == 3 and all(command.replace(' --resume', '') in header for command in trainings)
    assert single.startswith(f'tools/dist_test.sh {trainings[2].split()[1]} work_dirs/') and '--tta' not in single
    assert '--tta' in multi.split()


def test_other_gpus_keep_the_batch_and_what_changes_a_run_has_its_folder(capsys):
    words = ['cls', '--scale', 'full', '--rows', '12', '--gpus', '4', '--seeds', '0', '3', '--steps', '9']
    commands = [command.split() for command in planned(capsys, *words)]
    assert all(f'train_dataloader.batch_size={n}' in command for n, command in zip((512, 256), commands, strict=False))
    folders = [command[command.index('--work-dir') + 1] for command in commands]
    assert len(set(folders)) == 3 and f'model.backbone.init_cfg.checkpoint={folders[0]}/iter_9.pth' in commands[1]
    assert 'randomness.seed=3' in commands[3] and 'randomness.seed=3' not in commands[0]
    with pytest.raises(SystemExit, match='cannot be divided'):
        planned(capsys, *words[:6], '3')
    with pytest.raises(SystemExit):
        planned(capsys, 'cifar100', '--scale', 'demo')
    assert 'cifar100 has no demo scale' in capsys.readouterr().err


@pytest.mark.parametrize('table', [name for name, table in TABLES.items() if 'demo' in table])
def test_every_training_of_the_demo_scale_is_made_once_and_builds(capsys, table):
    commands = [shlex.split(line) for line in planned(capsys, table, '--scale', 'demo') if 'tools/train.py' in line]
    folders = [command[command.index('--work-dir') + 1] for command in commands]
    assert len(folders) == len(set(folders)) > 0
    for command in commands:
        model_on_meta(with_options(command[2].removeprefix('configs/'), command[command.index('--cfg-options') + 1 :]))

"""tools/reproduce_table.py: runs are made once, after what they need, and the figures are those of their tests."""

import shlex
import subprocess
from pathlib import Path

import pytest
import yaml
from helpers import ROOT, header_of, model_on_meta, run_tool, with_options

TABLES = yaml.safe_load((ROOT / 'configs/paper_tables.yml').read_text())['tables']


@pytest.fixture
def plan(tmp_path, monkeypatch, capsys):
    """The commands, in words, that --dry-run prints; the test's folder is the current one."""

    def planned(*words: str) -> list[list[str]]:
        run_tool('reproduce_table.py', *words, '--dry-run')
        return [shlex.split(line) for line in capsys.readouterr().out.splitlines() if line.startswith('    ')]

    monkeypatch.chdir(tmp_path)
    return planned


class Process:
    """Takes the place of a command, and leaves what that would leave."""

    returncode, commands, failing = 1, [], None

    def __init__(self, words: list[str]):
        self.commands.append(words)
        at = dict(zip(words, map(Path, words[1:]), strict=False))
        if self.failing in words:
            pass
        elif '--out' in at:
            at['--out'].write_text(f'{{"accuracy/top1": {20.0 if "randomness.seed=1" in words else 17.25}}}\n')
        elif '--steps' in at:
            (at['--work-dir'] / f'iter_{at["--steps"]}.pth').touch()
        else:
            at['20'].touch()  # the list of 20 labels a class

    def wait(self) -> None:
        pass


def test_a_table_goes_on_after_a_failure_and_holds_the_figures(plan, monkeypatch, capsys):
    monkeypatch.setattr(subprocess, 'Popen', Process)
    monkeypatch.setattr(Process, 'commands', [])
    Path('data/caltech101').mkdir(parents=True)
    words = 'ablation --scale demo --rows 4 --columns finetune --seeds 0 1 --steps 2'.split()
    with monkeypatch.context() as patch, pytest.raises(SystemExit, match='error: 2 of 7 steps .* same command'):
        patch.setattr(Process, 'failing', 'randomness.seed=1')
        run_tool('reproduce_table.py', *words)
    assert '| 80.50 | 37.09 | 17.2 |' in capsys.readouterr().out
    for _ in range(2):  # the second time nothing is left to do
        run_tool('reproduce_table.py', *words)
    assert len(Process.commands) == 6 + 2  # the one that failed and its test
    row = '| - visual tokens - blockwise masking | 80.50 | 37.09 | **18.6** ± 1.9 (17.2, 20.0) |'  # 2.75 / sqrt(2)
    assert Path('work_dirs/tables/ablation_demo.md').read_text().splitlines()[2:] == [row]


def test_commands_of_the_full_scale_are_those_of_the_headers(plan):
    *trainings, single, multi = plan('supervised_seg', '--scale', 'full', '--rows', '3')
    header = ' '.join(header_of('beit_plus/upernet_640_ade20k_160k_after_in22k.py').split())
    assert len(trainings) == 3 and all(' '.join(words).replace(' --resume', '') in header for words in trainings)
    assert single[0] == 'tools/dist_test.sh' and '--tta' in multi and '--tta' not in single


def test_weights_of_others_are_tested_with_the_options_given_each_time(plan):
    words = ('tokenizer', '--scale', 'full', '--rows', '1', '--columns', 'error')
    tests = [plan(*words, '--cfg-options', f'model.checkpoint={name}.pkl')[0] for name in 'ab']
    given, folders = zip(*((test[-1], test[test.index('--out') + 1]) for test in tests), strict=True)
    assert given == ('model.checkpoint=a.pkl', 'model.checkpoint=b.pkl') and folders[0] != folders[1]


@pytest.mark.parametrize('table', [name for name, table in TABLES.items() if 'demo' in table])
def test_every_training_of_the_demo_scale_is_made_once_and_builds(plan, table):
    commands = [words for words in plan(table, '--scale', 'demo') if words[1] == 'tools/train.py']
    folders = [words[words.index('--work-dir') + 1] for words in commands]
    assert len(folders) == len(set(folders)) > 0
    for words in commands:
        model_on_meta(with_options(words[2].removeprefix('configs/'), words[words.index('--cfg-options') + 1 :]))


@pytest.mark.parametrize(
    ('words', 'said'),
    [
        ('--rows 2 99', 'no 99 in ablation; choose from 1, 2, 3'),
        ('--cfg-options train_cfg.max_epochs=2', 'train_cfg.max_epochs=2: a training is expected to have the length'),
    ],
)
def test_what_is_not_there_is_said(words, said, capsys):
    with pytest.raises(SystemExit):
        run_tool('reproduce_table.py', 'ablation', '--scale', 'demo', *words.split())
    assert said in capsys.readouterr().err

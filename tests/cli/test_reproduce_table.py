"""tools/reproduce_table.py: a table is run once, goes on after a stop, and holds the figures of its runs."""

import json
import shlex
import statistics
import subprocess

import pytest
import yaml
from helpers import NO_WORKERS, ROOT, draw_caltech101, header_of, model_on_meta, run_tool, with_options

TABLES = yaml.safe_load((ROOT / 'configs/paper_tables.yml').read_text())['tables']


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def planned(capsys, *words: str) -> list[str]:
    """Commands that --dry-run prints."""
    run_tool('reproduce_table.py', *words, '--dry-run')
    return [line.strip() for line in capsys.readouterr().out.splitlines() if line.startswith('    ')]


def test_a_table_goes_on_after_a_stop_and_holds_the_figures(folder, monkeypatch, capsys):
    draw_caltech101(folder / 'data/caltech101')
    done, stop_after = [], [3]

    class InProcess:
        returncode = 1

        def __init__(self, words: list[str]):
            if len(done) < stop_after[0]:
                done.append(words[1:])
                run_tool(words[1].removeprefix(f'{ROOT}/tools/'), *words[2:])

        def wait(self) -> int:
            return self.returncode

    popen = subprocess.Popen
    monkeypatch.setattr(
        subprocess, 'Popen', lambda words, **other: (InProcess if 'tools/' in str(words) else popen)(words, **other)
    )
    words = 'ablation --scale demo --rows 4 --columns finetune --seeds 0 1 --steps 2 --cfg-options'.split() + NO_WORKERS
    with pytest.raises(SystemExit, match='4 of 7 steps are not finished'):
        run_tool('reproduce_table.py', *words)
    stop_after[0] = 100
    for _ in range(2):  # the second time nothing is left to do
        run_tool('reproduce_table.py', *words)
    assert len(done) == 7 == len(set(map(tuple, done)))
    lists = [(folder / f'data/caltech101/labels_20_seed{seed}.txt').read_text().split() for seed in (0, 1)]
    assert len(lists[0]) == len(set(lists[0])) == 70 + 87 and lists[0] != lists[1]  # fewer than 20 a class are all
    rows = (folder / 'work_dirs/tables/ablation_demo.md').read_text().splitlines()[2:]
    tests = [words[words.index('--out') + 1] for words in done if '--out' in words]
    values = [json.loads((folder / path).read_text())['accuracy/top1'] for path in tests[-2:]]
    cell = f'**{statistics.mean(values):.1f}** ± {statistics.stdev(values):.1f} ({values[0]:.1f}, {values[1]:.1f})'
    assert rows == [f'| - visual tokens - blockwise masking | 80.50 | 37.09 | {cell} |']


def test_commands_of_the_full_scale_are_those_of_the_headers(capsys):
    *trainings, single, multi = planned(capsys, 'supervised_seg', '--scale', 'full', '--rows', '3')
    header = ' '.join(header_of('beit_plus/upernet_640_ade20k_160k_after_in22k.py').split())
    assert len(trainings) == 3 and all(command.replace(' --resume', '') in header for command in trainings)
    assert single.startswith(f'tools/dist_test.sh {trainings[2].split()[1]} work_dirs/') and '--tta' not in single
    assert '--tta' in multi.split()


def test_other_gpus_keep_the_batch_and_what_changes_a_run_has_its_folder(capsys):
    words = ['cls', '--scale', 'full', '--rows', '12', '--gpus', '4', '--seeds', '0', '3', '--steps', '9']
    commands = [command.split() for command in planned(capsys, *words)]
    assert [command[-1] for command in commands[:2]] == [f'train_dataloader.batch_size={n}' for n in (512, 256)]
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

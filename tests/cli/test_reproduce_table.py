"""tools/reproduce_table.py: a table is run once, goes on after a stop, and holds the figures of its runs."""

import importlib.util
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from helpers import NO_WORKERS, ROOT, draw_caltech101, header_of, load_config, model_on_meta, run_tool, with_options
from mmengine.config import Config
from PIL import Image

TWO_ROWS = ['ablation', '--scale', 'demo', '--rows', '1', '4', '--columns', 'finetune', '--seeds', '0', '1']
SHORT = ['--shorten', '1000', '--output', 'page/results.md', '--cfg-options', *NO_WORKERS]
RUNS = 'work_dirs/tables/demo_1000'
TABLES = yaml.safe_load((ROOT / 'configs/paper_tables.yml').read_text())
DEMO = TABLES['demo']
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
    seeded = [words for words in commands if 'finetune_seed1' in str(words) and 'train.py' in words[0]]
    assert len(seeded) == 2 and all('randomness.seed=1' in words for words in seeded)
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


def planned(capsys: pytest.CaptureFixture, *arguments: str) -> list[str]:
    """Commands that --dry-run prints."""
    reproduce(*arguments, '--dry-run')
    return [line.strip() for line in capsys.readouterr().out.splitlines() if line.startswith('    ')]


def test_commands_of_the_full_scale_are_those_of_the_headers(folder, capsys):
    commands = planned(capsys, 'supervised_seg', '--scale', 'full', '--rows', '3')
    header = header_of('beit_plus/upernet_640_ade20k_160k.py')
    wanted = [line.strip() for line in re.search(r'Command: (.*?)\n +The last', header, re.S)[1].splitlines()]
    assert [command.replace(' --resume', '') for command in commands[:3]] == wanted
    tests = [command.split() for command in commands[3:]]
    assert [(words[0], words[3], '--tta' in words) for words in tests] == [
        ('tools/dist_test.sh', '8', False),
        ('tools/dist_test.sh', '8', True),
    ]
    # weights of others are tested and not trained
    (command,) = planned(capsys, 'tokenizer', '--scale', 'full', '--rows', '1', '--columns', 'error')
    header = ' '.join(header_of('dvae/dalle_8k_in1k.py').split())
    assert f'tools/test.py configs/dvae/dalle_8k_in1k.py {command[command.index("--cfg") :]}' in header
    assert not (folder / 'work_dirs').exists()


def test_other_gpus_keep_the_batch_and_a_seed_has_its_folder(folder, capsys):
    commands = planned(capsys, 'cls', '--scale', 'full', '--rows', '12', '--seeds', '0', '3', '--gpus', '4')
    assert commands[0].endswith('pretrain_800e.py 4 --resume --cfg-options train_dataloader.batch_size=512')
    assert commands[1].endswith('finetune_in1k_100e.py 4 --resume --cfg-options train_dataloader.batch_size=256')
    assert commands[3].endswith(
        'finetune_in1k_100e.py 4 --resume --work-dir work_dirs/finetune_in1k_100e_seed3 '
        '--cfg-options randomness.seed=3 train_dataloader.batch_size=256'
    )
    assert 'work_dirs/finetune_in1k_100e_seed3/epoch_100.pth 4' in commands[4]


@pytest.mark.parametrize('table', [name for name, table in TABLES['tables'].items() if 'demo' in table])
def test_every_table_has_a_plan_in_which_nothing_is_trained_twice(folder, capsys, table):
    folders = [
        line.split('--work-dir ')[1].split()[0]
        for line in planned(capsys, table, '--scale', 'demo')
        if 'tools/train.py' in line
    ]
    assert len(folders) == len(set(folders)) > 0


@pytest.mark.parametrize(
    'arguments, message',
    [
        (['cifar100', '--scale', 'demo'], 'has no demo scale'),
        (['cls', '--scale', 'demo', '--rows', '16'], 'rows 1 to 15'),
        (['cls', '--scale', 'full', '--rows', '12', '--gpus', '3'], ', 1024 images, cannot be'),
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


@pytest.fixture(scope='module')
def tool() -> ModuleType:
    """tools/reproduce_table.py, with its folder on the path as when it is run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / 'tools')
        spec = importlib.util.spec_from_file_location('reproduce_table', ROOT / 'tools/reproduce_table.py')
        module = importlib.util.module_from_spec(spec)
        patch.setitem(sys.modules, 'reproduce_table', module)  # where dataclasses look
        spec.loader.exec_module(module)
        yield module


def config_of(tool: ModuleType, recipe: str, stage: str) -> Config:
    """The config of a stage with the options of its command, which it takes."""
    plan = tool.DemoPlan(DEMO, tool.Path('runs'), 1, [])
    plan.config = load_config
    command = plan.train(recipe, stage, 0).command
    return with_options(plan.settings(recipe, stage)['config'], command[command.index('--cfg-options') + 1 :])


def test_recipes_are_used_and_known(tool):
    assert tuple(TABLES['tables']) == tool.TABLES
    stages, recipes = DEMO['stages'], DEMO['recipes']
    used = {row['demo'] for table in TABLES['tables'].values() for row in table['rows'] if 'demo' in row}
    assert used | {recipe.get('base', 'baseline') for recipe in recipes.values()} == set(recipes)
    assert all(set(recipe) <= {*stages, 'base'} for recipe in recipes.values())
    known = set('config work_dir length from options changes labels seeds validate metric title seconds'.split())
    for settings in [*stages.values(), *(change for recipe in recipes.values() for change in recipe.values())]:
        assert not isinstance(settings, dict) or set(settings) <= known
    assert all('metric' in stages[stage] for table in TABLES['tables'].values() for stage in table.get('demo', ()))


@pytest.mark.parametrize('recipe', DEMO['recipes'])
def test_every_stage_of_a_recipe_builds_with_schedules_that_end_with_the_training(tool, recipe):
    for stage in DEMO['stages'] if recipe == 'baseline' else set(DEMO['recipes'][recipe]) - {'base'}:
        cfg = config_of(tool, recipe, stage)
        length, last = cfg.train_cfg.get('max_epochs') or cfg.train_cfg.max_iters, cfg.param_scheduler[-1]
        assert last.end == length + (last.type == 'PolyLR')  # which arrives one step before its end
        for scheduler in cfg.param_scheduler:
            assert scheduler.type != 'LinearLR' or last.type == 'PolyLR' or scheduler.end == last.begin
            assert 'T_max' not in scheduler or scheduler.begin + scheduler.T_max == scheduler.end == length
        model_on_meta(cfg)


def traits(cfg: Config) -> list:
    """What tells the rows of the ablations apart."""
    model, pipeline = cfg.model, cfg.train_dataloader.dataset.pipeline
    views = next(transform for transform in pipeline if transform['type'] == 'beit_mm.TwoViewRandomResizedCrop')
    backbone = [model.backbone.get(key) for key in ('layer_scale_init', 'abs_pos_embed', 'rel_pos_bias')]
    head = [
        model.head.type,
        model.get('recover', 'masked'),
        model.target_generator is None,
        model.backbone.masked_input,
    ]
    return [[transform['type'] for transform in pipeline], views['second_size'] is None, *head, *backbone]


@pytest.mark.parametrize(
    'recipe, full',
    [
        ('baseline', 'beit/pretrain_300e.py'),
        ('longer', 'beit/pretrain_800e.py'),
        ('layer_scale_rel_pos', 'beit_plus/pretrain_300e.py'),
        *(
            (name, f'ablation/pretrain_{name}_300e.py')
            for name in 'layer_scale random_mask pixels pixels_random_mask recover_all no_mask_recover_all'.split()
        ),
    ],
)
def test_a_recipe_differs_from_the_baseline_as_the_full_config_does(tool, recipe, full):
    demo, baseline, cfg = (
        config_of(tool, recipe, 'pretrain'),
        config_of(tool, 'baseline', 'pretrain'),
        load_config(full),
    )
    assert traits(demo) == traits(cfg)
    masks = [[t for t in c.train_dataloader.dataset.pipeline if t['type'].endswith('Mask')] for c in (demo, baseline)]
    sizes = [[(*mask['grid'], mask['num_masked']) for mask in of_one] for of_one in masks]
    assert sizes[0] in ([], sizes[1])
    steps = demo.train_cfg.max_iters / baseline.train_cfg.max_iters
    assert steps == pytest.approx(cfg.train_cfg.max_epochs / 300, rel=0.01)

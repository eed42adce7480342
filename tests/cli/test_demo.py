"""configs/demo from the command line: each "Command:" of a header as it stands there, after its predecessors alone; and
the demo, on top of the same runs.

A run takes its last two steps only, or its last epoch; model, batch and names of files are the config's.
"""

import ast
import json
import re
import shlex
import subprocess
from pathlib import Path

import numpy as np
import pytest
from helpers import NO_WORKERS, ROOT, draw_caltech101, last_steps, run_tool
from mmengine.config import Config
from PIL import Image

FOLDER = ['dvae', 'pretrain', 'finetune_folder', 'linear_probe_folder', 'segment_setr_pup', 'segment_upernet']
PUBLIC = [
    'caltech101_pretrain',
    'caltech101_finetune',
    'caltech101_dino',
    'caltech101_beit_dino',
    'camvid_pretrain',
    'camvid_setr_pup',
    'camvid_upernet',
]
BANDS = ['bands_dvae', 'bands_pretrain', 'bands_finetune']
TOY_IMAGES = ['--num-train', '70', '--num-val', '10', '--size', '64']


@pytest.fixture(scope='module', autouse=True)
def _short_runs():
    with last_steps():
        yield


def header(name: str) -> tuple[list[str], list[list[str]]]:
    """Predecessors and commands that a config's header names."""
    text = ast.get_docstring(ast.parse((ROOT / f'configs/demo/{name}.py').read_text()))
    sections = dict(re.findall(r'^(\w+): +(.*(?:\n .*)*)', text, flags=re.MULTILINE))
    commands = [shlex.split(line) for line in map(str.strip, sections['Command'].split('\n')) if 'python ' in line]
    return re.findall(r'configs/demo/(\w+)\.py', sections.get('After', '')), commands


def run_command(words: list[str]) -> None:
    """A command as one types it, in this process."""
    python, script, *arguments = words
    assert python == 'python'
    if script.endswith(('draw_images.py', 'draw_bands.py')):
        arguments += TOY_IMAGES
    if script.endswith(('train.py', 'test.py')):
        config = Config.fromfile(arguments[0])  # DINO alone has no validation
        arguments += ['--cfg-options', *(option for option in NO_WORKERS if config.get(option.partition('.')[0]))]
    run_tool(script.removeprefix('tools/'), *arguments)


def new_root(folder: Path, data: Path) -> Path:
    """A folder that looks like the repository's root, without runs."""
    (folder / 'work_dirs').mkdir(parents=True)
    for name, target in (('configs', ROOT / 'configs'), ('tools', ROOT / 'tools'), ('data', data)):
        (folder / name).symlink_to(target)
    return folder


def run_headers(names: list[str], folder: Path, comparisons: bool = True) -> None:
    """Runs the commands of some configs, each where only the runs of its predecessors are.

    `comparisons=False` leaves out those that write into a work directory of another name.
    """
    (folder / 'data').mkdir(exist_ok=True)
    for name in names:
        predecessors, commands = header(name)
        root = new_root(folder / name, folder / 'data')
        while predecessors:
            predecessor = predecessors.pop()
            predecessors += header(predecessor)[0]
            for run in (folder / predecessor / 'work_dirs').iterdir():
                if not (root / 'work_dirs' / run.name).exists():
                    (root / 'work_dirs' / run.name).symlink_to(run)
        assert any(f'configs/demo/{name}.py' in words for words in commands)
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(root)
            for words in commands:
                if comparisons or '--work-dir' not in words:
                    run_command(words)
        assert (root / f'work_dirs/{name}/last_checkpoint').exists()


@pytest.fixture(scope='module')
def runs(tmp_path_factory) -> Path:
    """Runs on drawn images."""
    folder = tmp_path_factory.mktemp('demo')
    run_headers(['dvae', 'pretrain', 'finetune_folder', 'linear_probe_folder'], folder, comparisons=False)
    return folder


@pytest.fixture
def in_process(monkeypatch) -> list[list[str]]:
    """The demo's commands run in this process; they are listed."""
    commands = []

    def call(command: list[str]) -> int:
        words = [word.removeprefix(f'{ROOT}/') for word in command[1:]]
        commands.append(words)
        run_command(
            ['python', words[0], *(str(ROOT / word) if word.startswith('configs/') else word for word in words[1:])]
        )
        return 0

    monkeypatch.setattr(subprocess, 'call', call)
    return commands


def test_every_config_is_run():
    assert sorted(FOLDER + PUBLIC + BANDS) == sorted(path.stem for path in (ROOT / 'configs/demo').glob('*.py'))


@pytest.mark.slow
def test_the_demo_goes_on_with_the_same_runs(runs, in_process, tmp_path, monkeypatch):
    root = new_root(tmp_path / 'root', runs / 'data')
    for name in ('dvae', 'pretrain', 'finetune_folder'):
        (root / 'work_dirs' / name).symlink_to(runs / name / 'work_dirs' / name)
    monkeypatch.chdir(root)
    run_tool('demo/run_demo.py')
    trained = [['python', *words] for words in in_process if words[0] == 'tools/train.py']  # the others are finished
    assert all('--resume' in words for words in trained)
    assert [[word for word in words if word != '--resume'] for words in trained] == [
        header('finetune_folder')[1][1],
        header('segment_setr_pup')[1][0],
    ]
    summary = json.loads((root / 'work_dirs/demo/summary.json').read_text())
    assert 0 < summary['recon_mae_01'] < 1 and summary['token_entropy'] > 0 and summary['images_per_second'] > 0
    assert {'finetune_accuracy', 'scratch_accuracy', 'segment_miou'} < set(summary)
    with Image.open(root / 'work_dirs/demo/overview.png') as picture:  # eight columns
        assert picture.width == 8 * 164 + 4 and len(picture.getcolors(1 << 20)) > 1000
    run_tool(
        'test.py',
        'configs/demo/segment_setr_pup.py',
        'work_dirs/segment_setr_pup/iter_300.pth',
        '--show-dir',
        'drawn',
        '--cfg-options',
        'test_dataloader.dataset.indices=2',
        *NO_WORKERS,
    )
    assert len([*root.glob('drawn/**/*.png')]) == 2
    with pytest.raises(SystemExit, match='the runs in work_dirs are of other images'):
        run_tool('demo/run_demo.py', '--data', runs / 'data/demo')


@pytest.mark.parametrize('classes', [True, False])
def test_own_images_are_split_and_linked(runs, tmp_path, monkeypatch, classes):
    own = tmp_path / 'my, own images'  # a path that --cfg-options cannot hold
    own.mkdir()
    images = sorted((runs / 'data/demo/train').rglob('*.jpg'))
    for number, path in enumerate(images * 2):
        folder = own / f'{("deep/a", "deep/b")[number % 2] if classes else ""}'
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f'{number}.jpg').write_bytes(path.read_bytes())
    root = new_root(tmp_path / 'root', tmp_path / 'data')
    (tmp_path / 'data').mkdir()
    monkeypatch.chdir(root)
    commands = []
    monkeypatch.setattr(subprocess, 'call', lambda command: commands.append(command) or len(commands) == 3)
    with pytest.raises(SystemExit, match='the same demo command goes on from here'):
        run_tool('demo/run_demo.py', '--data', own)
    assert (
        [Path(command[2]).stem for command in commands] == ['dvae', 'pretrain', 'finetune_folder']
        if classes
        else ['dvae', 'pretrain', 'dvae']
    )
    options = [command[command.index('--cfg-options') + 1 :] for command in commands]
    assert all(words[0] == 'data_root=data/own_images' for words in options)
    numbers = ['model.head.num_classes=2', 'model.data_preprocessor.num_classes=2']
    assert [words[1:] for words in options] == [[], [], numbers if classes else []]
    linked = {split: sorted((root / 'data/own_images' / split).rglob('*.jpg')) for split in ('train', 'val')}
    assert len(linked['val']) == 14 and len(linked['train']) == 126
    assert {path.resolve() for paths in linked.values() for path in paths} == set(own.rglob('*.jpg'))
    assert sorted(path.name for path in (root / 'data/own_images/val').iterdir() if path.is_dir()) == (
        ['a', 'b'] if classes else []
    )


@pytest.mark.slow
def test_every_command_on_drawn_images(tmp_path):
    run_headers(FOLDER + BANDS, tmp_path)


@pytest.mark.slow
def test_every_command_on_public_images(tmp_path):
    data = tmp_path / 'data'
    draw_caltech101(data / 'caltech101')
    for split, drawn in (('training', 'train'), ('validation', 'val')):
        for index, path in enumerate(sorted((data / 'caltech101' / drawn).rglob('*.jpg'))[:12]):
            labels = (data / 'caltech101/annotations' / path.relative_to(data / 'caltech101')).with_suffix('.png')
            for kind, image in (
                ('images', Image.open(path)),
                ('annotations', Image.fromarray(np.asarray(Image.open(labels)) % 12)),
            ):
                (data / 'camvid' / kind / split).mkdir(parents=True, exist_ok=True)
                image.save(data / 'camvid' / kind / split / f'{index}.{"jpg" if kind == "images" else "png"}')
    (data / 'camvid/classes.txt').write_text(''.join(['Idx\tName\n', *(f'{i}\tclass {i}\n' for i in range(1, 12))]))
    listing = re.search(r'Made in data/ with\n((?: .*\n)+)', (ROOT / 'configs/demo/camvid_pretrain.py').read_text())[1]
    subprocess.run(['bash', '-c', listing], check=True, cwd=data)
    assert len((data / 'camvid_pretrain.txt').read_text().splitlines()) == 70 + 87 + 6 * 12
    run_headers(PUBLIC, tmp_path)

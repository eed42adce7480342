"""configs/demo from the command line, each "Command:" of a header as it stands there, and the demo."""

import json
import re
import shlex
import sys
from dataclasses import astuple
from pathlib import Path

import demo_report
import numpy as np
import pytest
import run_demo
from helpers import NO_WORKERS, ROOT, draw_caltech101, header_of, last_steps, run_tool
from mmengine.config import Config
from PIL import Image

import beit_mm
from beit_mm.engine import progress
from beit_mm.own_images import run as runs
from beit_mm.own_images.record import Length, Record
from beit_mm.own_images.report import Metric

# In the order in which they need each other; camvid_* are segment_* on other images.
CONFIGS = 'dvae pretrain finetune_folder linear_probe_folder segment_setr_pup segment_upernet caltech101_dino'
CONFIGS += ' caltech101_beit_dino bands_dvae bands_pretrain bands_finetune vqkd pretrain_vqkd segment_masks'
CONFIGS += ' pretrain_features bands_pretrain_features'
SMALL = '--num-train 70 --num-val 10 --size 64'.split()
TINY = run_demo.Lengths(0.01, 0.01, 0.02)


def run_command(words: list[str]) -> None:
    """A command as one types it, in this process."""
    _, script, *arguments = words
    if script.endswith(('draw_images.py', 'draw_bands.py')):
        arguments += SMALL
    if script.endswith(('train.py', 'test.py')):
        config = Config.fromfile(arguments[0])  # DINO alone has no validation
        arguments += ['--cfg-options', *(option for option in NO_WORKERS if config.get(option.partition('.')[0]))]
    run_tool(script.removeprefix('tools/'), *arguments)


@pytest.mark.slow
def test_every_command_of_the_headers(tmp_path, monkeypatch):
    """On small data in the places that the configs name."""
    draw_caltech101(tmp_path / 'data/caltech101')
    for part in ('configs', 'tools'):
        (tmp_path / part).symlink_to(ROOT / part)
    monkeypatch.chdir(tmp_path)
    found = {path.stem for path in (ROOT / 'configs/demo').glob('*.py') if not path.stem.startswith('camvid')}
    assert {*CONFIGS.split()} == found
    for name in CONFIGS.split():
        lines = re.search(r'^Command: +(.*(?:\n .*)*)', header_of(f'demo/{name}.py'), flags=re.M)[1]
        with last_steps():
            for line in re.findall('python .*', lines):
                run_command(shlex.split(line))
        assert Path(f'work_dirs/{name}/last_checkpoint').exists()


@pytest.fixture(scope='module')
def drawn(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp('drawn') / 'data/demo'
    run_tool('demo/draw_images.py', folder, '--num-train', '120', '--num-val', '30', '--size', '64')
    return folder


def demo(*words: object) -> None:
    """The demo in the current folder, with trainings of a few steps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, 'argv', ['run_demo.py', *map(str, words)])
        for module in (runs, progress):
            patch.setattr(module, 'MIN_STEPS', 3)
        patch.setenv('CUDA_VISIBLE_DEVICES', '')
        run_demo.main(TINY)


@pytest.mark.slow
def test_the_demo_goes_on_where_it_was_stopped(drawn, monkeypatch, capsys):
    monkeypatch.chdir(drawn.parents[1])
    execute, out = run_demo.execute, Path('work_dirs/demo')

    def stop(*words: object, **kwargs: object) -> None:
        if out / 'finetune_random' in words:
            raise KeyboardInterrupt
        execute(*words, **kwargs)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(run_demo, 'execute', stop)
        demo()
    said = capsys.readouterr().out
    assert '== 3 of 7: frozen patches' in said and 'Run the same demo command again' in said
    before = {path: path.stat().st_mtime_ns for path in [*out.glob('*/*.pth'), *out.glob('*.png')]}
    assert {path.name for path in before} == {'packaged_reconstruct.png', 'frozen_scenes.png', 'finetuned.pth'}
    demo()
    assert all(path.stat().st_mtime_ns == written for path, written in before.items())

    report, text = ((out / f'report.{ending}').read_text() for ending in ('html', 'md'))
    pictures = re.findall(r'!\[.*\]\((.+)\)', text)
    names = 'packaged_reconstruct bars frozen_scenes answers pretrain/loss pretrain/before_and_after'
    assert pictures == [f'{name}.png' for name in names.split()] and all(
        Image.open(out / name).width > 100 for name in pictures
    )
    assert report.count('src="data:image/png;base64,') == len(pictures)
    answers = beit_mm.classify(out / 'finetune_packaged', drawn / 'val')
    right = 100 * np.mean([answer['name'] == Path(answer['path']).parent.name for answer in answers])
    limits = text[text.index('before_and_after.png') :]
    assert f'{right:.1f} +-' in report and 'has not left chance' in limits  # from random weights, in three steps
    assert 'better predicted than by' in report  # what three steps of pretraining have not reached


def test_the_users_images_are_held_out_alike(drawn, tmp_path, monkeypatch):
    """A tenth of the user's images is seen by no training; without classes there is no classifier."""
    monkeypatch.chdir(tmp_path)
    for number, path in enumerate(sorted((drawn / 'train').rglob('*.jpg'))):
        for name in (f'my, images/{"ab"[number % 2]}/{number}.jpg', f'flat/{number}.jpg'):
            Path(name).parent.mkdir(parents=True, exist_ok=True)
            Path(name).symlink_to(path)
    commands: list[list[str]] = []
    monkeypatch.setattr(run_demo, 'execute', lambda *words, **kwargs: commands.append([*map(str, words)]))
    monkeypatch.setattr(run_demo.Demo, 'report', lambda self: None)
    demo('--data', 'my, images', '--full')
    out = 'work_dirs/demo_full'
    *finetunings, pretraining = (words[2:] for words in commands if '--minutes' in words)
    assert ' '.join(pretraining) == f'my, images --out {out}/pretrain --init none --tokenizer new --minutes 0.01'
    assert [words[words.index('--init') + 1] for words in finetunings] == ['demo', 'none']
    assert [words[-1] for words in finetunings] == ['0.01', '0.02']  # random weights get more time
    few, held_out = ({*map(Path.resolve, Path(out, 'few_labels', part).rglob('*.jpg'))} for part in ('train', 'val'))
    assert len(few) == 100 and len(held_out) == 12 and not few & held_out
    commands.clear()
    demo('--data', 'flat')
    assert [words[1] for words in commands] == ['reconstruct', 'pretrain']


@pytest.mark.parametrize('last', [2.3, 1.0])
def test_no_comparison_with_a_training_that_learned_nothing(tmp_path, last):
    for run, right in dict(finetune_packaged=42, finetune_random=40).items():
        shares = {'accuracy/top1': right, 'thumbnails': 30, 'most_frequent': 10}
        metrics = {name: astuple(Metric.share(percent, 600)) for name, percent in shares.items()}
        (tmp_path / run / 'finetune/1/vis_data').mkdir(parents=True)
        record = Record('finetune', '.', {}, Length(1, 'minutes'), seconds=60.0, metrics=metrics)
        record.write(tmp_path / run / 'plan.json')
        rows = [json.dumps(dict(iter=step, step=step, loss=2.4 if step < 40 else last)) for step in range(50)]
        (tmp_path / run / 'finetune/1/vis_data/scalars.json').write_text('\n'.join(rows))
    found, said = demo_report.compare(tmp_path, 10)
    assert ('random weights' in found) == ('has not left chance' not in said) == (last < 2)
    assert {name: each.value for name, each in found.items() if name != 'random weights'} == {
        'packaged weights': pytest.approx(42),
        'thumbnails': pytest.approx(30),
    }


@pytest.mark.parametrize('packaged, won', [(42, False), (46, True)])
def test_a_gain_within_two_standard_errors_is_not_a_win(packaged, won):
    """40 % of 600 images has a standard error of 2.0, a difference one of 2.8."""
    shares = {'packaged weights': packaged, 'random weights': 40, 'thumbnails': 20}
    found = {name: Metric.share(share, 600) for name, share in shares.items()}
    better, clause = demo_report.judge('right', found)
    assert better is won and all(f'{share:.1f}' in clause for share in shares.values())

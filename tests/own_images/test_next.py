"""What comes after a run: changed images, more minutes, small folders, a full disk; and what is advised."""

import errno
import json
import shlex
import shutil
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from calls import call_of, described, task_of
from helpers import tree
from labelled import make_images
from mmpretrain.models import ImageClassifier

import beit_mm
from beit_mm import __main__ as command
from beit_mm.engine import checkpoints, fit_head
from beit_mm.errors import UserError
from beit_mm.own_images import classification, segmentation
from beit_mm.own_images import images as finding
from beit_mm.own_images import run as runs
from beit_mm.own_images.report import Metric
from beit_mm.own_images.run import Run

pytestmark = pytest.mark.long


@pytest.fixture(scope='module', autouse=True)
def few_images():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(finding, 'MIN_IMAGES', 10)
        yield


@pytest.fixture
def folder(tmp_path) -> Path:
    return make_images(tmp_path / 'images', 12) / 'train'


def finetune(images: Path, out: Path, init: str, **options: object) -> Path:
    return beit_mm.finetune(images, out, init, batch=4, workers=0, **dict(dict(epochs=1), **options))


@pytest.fixture
def finished(folder, base, tmp_path, monkeypatch) -> Path:
    """A run, as if it had its report."""
    monkeypatch.setattr(Run, 'write_report', lambda run: (run.folder / 'report.md').write_text('Verdict'))
    return finetune(folder, tmp_path / 'run', base, balance=True).parent


def test_new_images_and_classes_of_a_finished_run_are_named_with_a_command_that_learns_them(folder, finished, capsys):
    before = tree(finished)
    shutil.copytree(folder / 'red', folder / 'crow')
    shutil.copytree(folder / 'red', folder.parent / 'val/crow')
    (folder / 'blue/3.png').unlink()
    capsys.readouterr()
    command.main(['finetune', str(folder), '--out', str(finished)])
    said = capsys.readouterr().out
    assert 'new images: 24 (crow/' in said and 'new classes: 1 (crow)' in said
    assert 'missing images: 1 (blue/3.png)' in said and tree(finished) == before
    words = shlex.split(said.partition('beit-mm ')[2])
    assert '--balance' in words and words[words.index('--init') + 1] == str(finished)
    command.main([*words, '--workers', '0'])
    classes = Path(words[words.index('--out') + 1], 'lists/classes.txt').read_text()
    assert classes.split() == ['blue', 'crow', 'green', 'red'] and tree(finished) == before


def test_more_of_a_finished_run_is_another_run_from_its_weights(folder, finished):
    (finished.parent / 'run_2').mkdir()
    with pytest.raises(UserError, match=f'--init {finished} --out {finished}_3 .*--epochs 2'):
        beit_mm.finetune(folder, finished, epochs=2)
    shutil.rmtree(folder)
    assert beit_mm.finetune(folder, finished) == finished / 'finetuned.pth'


def test_an_unfinished_run_of_changed_images_goes_on_from_its_last_checkpoint(folder, base, tmp_path, monkeypatch):
    monkeypatch.setattr(Run, 'write_weights', Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(SystemExit):
        finetune(folder, tmp_path / 'run', base)
    shutil.copy(folder.parent / 'val/red/0.png', folder.parent / 'val/red/new.png')
    with pytest.raises(UserError, match=r'new images: 1 \(red/new.png\).*--init \S+/run/finetune/iter_9.pth'):
        beit_mm.finetune(folder, tmp_path / 'run')


def test_a_small_folder_gets_a_head_and_holds_out_one_image_of_each_class(tmp_path, base, monkeypatch):
    monkeypatch.setattr(finding, 'MIN_IMAGES', 100)
    images = make_images(tmp_path / 'images', 5) / 'train'
    shutil.rmtree(images.parent / 'val')
    with pytest.raises(UserError, match=f'12 images.* finetune {images} --freeze all .*--labelled {images}'):
        finetune(images, tmp_path / 'run', base)
    finetune(images, tmp_path / 'run', base, freeze='all', epochs=None, minutes=1)
    lists = {name: (tmp_path / f'run/lists/{name}.txt').read_text().split() for name in ('train', 'held_out')}
    assert sorted(lists['held_out'][1::2]) == ['0', '1', '2'] and len(lists['train'][1::2]) == 12
    assert (tmp_path / 'run/report.md').is_file()
    for number in range(4):
        (images / f'red/{number}.png').unlink()
    with pytest.raises(UserError, match='2 of each class'):
        finetune(images, tmp_path / 'again', base, freeze='all')


def test_a_head_in_little_time_is_fitted_to_some_images_of_each_class(tmp_path, base, monkeypatch, capsys):
    """By a clock that a second passes on with each batch of 4; no time for the fit. Truth: the shares of the images."""
    images = make_images(tmp_path / 'images', 24) / 'train'
    monkeypatch.setattr(fit_head, 'MIN_FEATURES', 5)
    clock, fitted = SimpleNamespace(now=0.0, monotonic=lambda: clock.now), []
    features, fit = ImageClassifier.extract_feat, fit_head.choose_penalty

    def a_second(*args: object, **kwargs: object) -> object:
        clock.now += 1
        return features(*args, **kwargs)

    monkeypatch.setattr(ImageClassifier, 'extract_feat', a_second)
    monkeypatch.setattr(
        fit_head, 'choose_penalty', lambda x, y, *args, **kw: fitted.append(y) or fit(x, y, *args, **kw)
    )
    monkeypatch.setattr(Run, 'write_report', lambda run: None)
    for module in (fit_head, runs):
        monkeypatch.setattr(module, 'time', clock)
    for minutes, number in ((18 / 54, 32), (1e-3, 8), (1, 72)):  # 18 batches of images, as many held out
        beit_mm.finetune(images, tmp_path / f'{number}', base, minutes, batch=4, workers=0, freeze='all')
        assert len(fitted[-1]) == number
        assert fitted[-1].bincount().max() - fitted[-1].bincount().min() <= 1
        stage = json.loads((tmp_path / f'{number}/plan.json').read_text())['stages']['finetune']
        assert stage['validated'] == number
        assert (f'{number} of 72 images' in capsys.readouterr().out) == (number < 72)


def test_a_disk_that_fills_is_named_and_the_same_call_goes_on(folder, base, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(Run, 'write_report', lambda run: None)
    with monkeypatch.context() as full:
        full.setattr(checkpoints, 'save_torch', Mock(side_effect=OSError(errno.ENOSPC, 'No space left on device')))
        with pytest.raises(UserError, match=r'head/iter_1.pth could not be written.* disk of .*run'):
            finetune(folder, tmp_path / 'run', base)
    assert 'No space left' in capsys.readouterr().err
    assert beit_mm.finetune(folder, tmp_path / 'run').is_file()


def test_a_better_start_on_a_cpu_is_named_where_it_is_not_at_hand(folder):
    (advice,) = described(task_of(finding.find_images(folder), 'finetune', device='cpu'), 'advice')
    assert '--init dinov2_vits14' in advice and '--freeze' not in advice and 'BEIT_MM_WEIGHTS' in advice
    assert not described(task_of(finding.find_images(folder), 'finetune', 'none', device='cpu'), 'advice')


@pytest.mark.parametrize(('maps', 'passes', 'named'), [(50, 3, 'both'), (50, 30, 'maps'), (300, 3, 'time')])
def test_a_segmentor_that_is_not_good_is_told_what_was_short(maps, passes, named):
    _, said = segmentation.judge(dict(other=Metric(1, 5)), Path('run'), maps, passes)
    assert ('more minutes' in said) == (named != 'maps') and ('more label maps' in said) == (named != 'time')
    command = 'beit-mm segment start new_images/ --labelled maps'
    for gain in (-9, 1, 9):
        gains = {segmentation.OTHERS['patches']: Metric(gain, 1)}
        _, said = segmentation.judge(gains, Path('run'), maps, passes, nearest=command)
        assert (command in said) == (gain == -9)


def test_a_released_model_is_advised_where_the_run_began_without_one():
    gains = dict.fromkeys(('images', 'classes'), dict(thumbnails=Metric(0, 5)))
    for toy in (True, False):
        assert ('--init' in classification.judge(gains, Path('run'), False, toy)[1]) == toy


def test_what_a_run_learned_from_is_not_held_out_from_a_run_that_begins_with_its_weights(tmp_path, base, monkeypatch):
    monkeypatch.setattr(Run, 'write_report', lambda run: None)
    images = make_images(tmp_path / 'images', 24) / 'train'
    shutil.rmtree(images.parent / 'val')
    weights = finetune(images, tmp_path / 'run', base)
    shutil.copytree(images / 'red', images / 'aaa')
    drawn = {*finding.find_images(images).held_out.names}
    finetune(images, tmp_path / 'again', str(weights))
    names = {run: finding.read_names(tmp_path / run / 'lists', 'train') for run in ('run', 'again')}
    held_out = {run: finding.read_names(tmp_path / run / 'lists', 'held_out') for run in names}
    assert drawn & {*names['run']}  # so it matters
    assert {*held_out['run']} <= {*held_out['again']} and not {*held_out['again']} & {*names['run']}
    assert any(path.startswith('aaa/') for path in held_out['again'])
    assert sorted(names['again'] + held_out['again']) == sorted(finding.list_folder(images).names)


@pytest.mark.parametrize(
    'options',
    [
        dict(reduce_zero_label=False, bands=[0, 3], freeze=0, head='masks'),
        dict(reduce_zero_label=True, bands='all', lora=8, head='linear', minutes=0.5),
        dict(freeze='all', balance=True, epochs=3),
    ],
)
def test_the_command_of_another_run_has_the_same_options(options, tmp_path):
    """Truth: what the parser makes of it."""
    record = call_of('finetune', tmp_path / 'my images', seed=3, batch=2, **options)
    words = shlex.split(record.command('RUN', tmp_path / 'run', record.length))
    given = vars(command.parser().parse_args(words[1:]))
    expected = options | dict(verb='finetune', images=str(tmp_path / 'my images'), init='RUN')
    expected |= dict(out=str(tmp_path / 'run_2'))
    assert {name: value for name, value in given.items() if value not in (None, False) or name in options} == expected

"""The verbs: a run from images to a report, what is done with its weights, and one line for each mistake."""

import ast
import codecs
import csv
import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from calls import call_of
from helpers import interrupt_after, tree
from labelled import CLASSES, make_images, save_backbone
from mmengine.config import Config
from mmengine.registry import DefaultScope
from PIL import Image

import beit_mm
from beit_mm import __main__ as command
from beit_mm import terminal
from beit_mm.apis import configs, inference, rebuild
from beit_mm.checkpoint.checkpoint import Checkpoint
from beit_mm.datasets.segmentation_folder import named_classes
from beit_mm.engine import progress
from beit_mm.engine.loops import IterLoop
from beit_mm.errors import UserError
from beit_mm.files import quoted
from beit_mm.own_images import images as finding
from beit_mm.own_images import pretraining
from beit_mm.own_images import run as runs
from beit_mm.own_images.record import Length
from beit_mm.own_images.task import Task
from beit_mm.pictures import ReconstructionHook
from beit_mm.registry import MODELS

pytestmark = pytest.mark.long


@pytest.fixture(scope='module')
def images(tmp_path_factory) -> Path:
    """Three classes of 12 images, told apart by colour; as many held out, in `val` beside it."""
    return make_images(tmp_path_factory.mktemp('data'), 12) / 'train'


@pytest.fixture(scope='module', autouse=True)
def narrow():
    """Plans of a narrow model, which need few images and few steps; without weights to begin with, as on a GPU."""

    def plan(task: Task) -> None:
        call = task.call
        if task.record.verb == 'pretrain' and not call.init and not torch.cuda.is_available():
            call.tokenizer = call.tokenizer or 'new'
        call.init, call.workers = call.init or 'none', call.workers or 0
        make_plan(task)
        task.plan.backbone |= dict(arch=dict(embed_dims=32, num_layers=3, num_heads=4), img_size=32, drop_path_rate=0.0)
        task.plan.batch = 4

    make_plan = Task.make_plan
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Task, 'make_plan', plan)
        for module in (runs, progress):
            patch.setattr(module, 'MIN_STEPS', 3)
        patch.setattr(finding, 'MIN_IMAGES', 10)
        patch.setattr(ReconstructionHook, '_after_iter', lambda *_, **__: None)  # takes longer than all the steps
        yield


@pytest.fixture(scope='module')
def run(images, tmp_path_factory) -> Path:
    """A finished pretraining of three steps."""
    folder = tmp_path_factory.mktemp('runs') / 'run'
    assert beit_mm.pretrain(images, folder, steps=3) == folder / 'pretrained.pth'
    return folder


def call(*words: object) -> None:
    """The command line, in this process."""
    terminal.run(lambda: command.main([*map(str, words)]))


def mistake(message: str, *words: object) -> None:
    """The command ends with one line that holds the message."""
    with pytest.raises(SystemExit) as end:
        call(*words)
    line = str(end.value.code)
    assert line.startswith('error: ') and '\n' not in line and message in line, line


def record_of(folder: Path) -> dict:
    return json.loads((folder / 'plan.json').read_text())


def change_record(folder: Path, **changes: object) -> None:
    (folder / 'plan.json').write_text(json.dumps(record_of(folder) | changes))


def test_a_run_leaves_weights_pictures_and_a_report_and_says_when_it_is_finished(run, images, tmp_path, capsys):
    report, page = (run / 'report.md').read_text(), (run / 'report.html').read_text()
    for text in ('Verdict: ', 'mim_loss', 'position_entropy', '| random weights |', '| thumbnails |'):
        assert text in report
    assert runs.AT_LEAST not in report  # three steps were asked for, not minutes
    for name in ('reconstruction', 'neighbours', 'loss'):
        assert f'({name}.png)' in report and Image.open(run / f'{name}.png').width > 100
    assert page.count('src="data:image/png;base64,') == page.count('<img ') == report.count('.png)')
    train, held_out = ({*(run / f'lists/{name}.txt').read_text().splitlines()} for name in ('train', 'held_out'))
    assert len(train) == 36 and len(held_out) == 36 and 'red/0.png 2' in train
    loaders = [Config.fromfile(run / name).train_dataloader for name in ('config.py', 'tokenizer_config.py')]
    assert [loader.dataset.ann_file for loader in loaders] == [str(run / 'lists/train.txt')] * 2
    assert torch.load(run / 'pretrained.pth', weights_only=True)['meta']['iter'] == 3
    call('pretrain', images, '--out', run, '--steps', 3)
    assert 'is finished' in capsys.readouterr().out and (run / 'report.md').read_text() == report
    # killed in its last validation it has its figures too
    (shutil.copytree(run, tmp_path / 'run') / 'report.md').unlink()
    change_record(tmp_path / 'run', stages=record_of(run)['stages'] | dict(pretrain=dict(steps=3)))
    beit_mm.pretrain(images, tmp_path / 'run')
    assert '(mim_loss)' in (tmp_path / 'run/report.md').read_text()


def test_an_interrupted_run_goes_on_where_it_is_now(images, tmp_path, monkeypatch, capsys):
    """Ctrl-C in the second stage; the rest is trained, nothing twice, in spite of broken images."""
    trained = interrupt_after(monkeypatch, 'pretrain', 1)
    images = shutil.copytree(images.parent, tmp_path / 'images') / 'train'
    for folder in (images, images.parent / 'val'):
        (folder / 'red/0.png').write_bytes(b'nothing')
    first, second = (tmp_path / name for name in ('first', 'second'))
    with pytest.raises(SystemExit, match='130'):
        beit_mm.pretrain(images, first, steps=4)
    assert 'Resume with: the same call' in capsys.readouterr().out and not (first / 'report.md').exists()
    shutil.copytree(first, second)
    before = {path: path.stat().st_mtime_ns for path in first.rglob('*')}
    mistake('began with batch=4, this call says batch=8', 'pretrain', images, '--out', second, '--batch', 8)
    (images / 'red/3.png').rename(images / 'red/another.png')  # as many
    mistake('new images: 1 (red/another.png), missing images: 1 (red/3.png)', 'pretrain', images, '--out', second)
    (images / 'red/another.png').rename(images / 'red/3.png')
    beit_mm.pretrain(images, second)
    assert trained == [(stage, step) for stage in ('tokenizer', 'pretrain') for step in range(4)]
    assert {path: path.stat().st_mtime_ns for path in first.rglob('*')} == before
    assert Config.fromfile(second / 'config.py').work_dir == str(second / 'pretrain')
    assert (second / 'report.md').is_file() and 'Resuming' in capsys.readouterr().out


def test_a_pretraining_goes_on_with_the_tokens_it_knows(run, images, tmp_path, capsys):
    """With its tokenizer and its head."""
    out = tmp_path / 'more'
    beit_mm.pretrain(images, out, init=run, steps=3)
    assert 'tokenizer  that of' in capsys.readouterr().out and not (out / 'tokenizer').exists()
    cfg = Config.fromfile(out / 'config.py')
    assert Path(cfg.model.target_generator.checkpoint) == run / 'tokenizer/iter_3.pth'
    model = MODELS.build(cfg.model)
    model.init_weights()
    weights = torch.load(run / 'pretrained.pth', weights_only=True)['state_dict']
    for name in ('head.lm_head.weight', 'backbone.blocks.0.mlp.fc1.weight', 'backbone.mask_token'):
        assert torch.equal(model.state_dict()[name], weights[name]), name
    first, second = (record_of(folder)['stages']['pretrain'] for folder in (run, out))
    assert second['mim_loss_start'] == pytest.approx(first['mim_loss']) and 'mim_loss_start' not in first
    first, second = (record_of(folder)['metrics'] for folder in (run, out))  # value, standard error and number of each
    for method in ('knn', 'linear'):
        assert second[f'{method}_accuracy_start'] == pytest.approx(first[f'{method}_accuracy'])
    report = (out / 'report.md').read_text()
    assert 'that of the initial weights' in report and 'Next: ' in report


@pytest.mark.parametrize('teacher', ['ema', 'file'])
def test_a_pretraining_on_features_needs_no_tokenizer(teacher, images, tmp_path, monkeypatch, capsys):
    """Interrupted after its second step; the same call makes the rest."""
    trained, out = interrupt_after(monkeypatch, 'pretrain', 1), tmp_path / 'run'
    if teacher == 'file':
        teacher = save_backbone(tmp_path / 'teacher.pth')
    options = dict(targets='features', teacher=teacher, steps=4)
    with pytest.raises(SystemExit, match='130'):
        beit_mm.pretrain(images, out, **options)
    (planned,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith('targets ')]
    assert planned.endswith('moving average' if teacher == 'ema' else teacher)
    mistake('this call says targets=tokens', 'pretrain', images, '--out', out, '--targets', 'tokens')
    other = 'pretrain', images, '--out', out, '--targets', 'features', '--teacher', 'demo'
    mistake(f'began with teacher={teacher}, this call says teacher=demo', *other)
    beit_mm.pretrain(images, out, **options)
    assert trained == [('pretrain', step) for step in range(4)] and not (out / 'tokenizer').exists()
    assert 'explained' in capsys.readouterr().out
    report, stage = (out / 'report.md').read_text(), record_of(out)['stages']['pretrain']
    for name in ('explained', 'explained_at_position'):
        assert f'({name}) | {stage[name]:.4g} |' in report.replace('\\', '')
    assert 'features of ' in report and 'Did it help?' in report and 'Verdict: ' in report
    assert 'mim_acc' not in report and 'entropy' not in report
    assert Image.open(out / 'reconstruction.png').width > 3 * 160

    call('reconstruct', out, images / 'red/1.png', '--out', tmp_path / 'a.png')
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 2 and 'have no picture' in said[0] and said[1].endswith('a.png')
    weights = torch.load(out / 'pretrained.pth', weights_only=True)['state_dict']
    rebuilt = rebuild.rebuild_pretrainer(Checkpoint.open(out)).state_dict()
    assert {*rebuilt} == {*weights} and all(torch.equal(rebuilt[name], weights[name]) for name in weights)
    assert any('.ema.' in name for name in weights) == (teacher == 'ema')
    if teacher == 'ema':  # weights beside the model's own do not hinder a fine-tuning
        assert beit_mm.finetune(images, tmp_path / 'tuned', init=out, epochs=0.1).is_file()


def test_a_wide_start_is_not_trained_before_its_head(run, images, tmp_path, monkeypatch):
    monkeypatch.setattr(pretraining, 'NARROW', 16)
    monkeypatch.setattr(runs.Run, 'write_report', lambda *_: None)
    begun, start = {}, Checkpoint.open(run).state_dict
    run_iter = IterLoop.run_iter

    def watch(loop, batch):
        if loop.runner.iter == 0:  # the weights before the first step of each stage
            begun[Path(loop.runner.work_dir).name] = (
                {name: tensor.clone() for name, tensor in loop.runner.model.state_dict().items()},
                loop.runner.optim_wrapper.optimizer.param_groups[0]['initial_lr'],
            )
        return run_iter(loop, batch)

    monkeypatch.setattr(IterLoop, 'run_iter', watch)
    out = tmp_path / 'run'
    beit_mm.pretrain(images, out, init=run, targets='features', steps=4)
    assert [*begun] == [*record_of(out)['stages']] == ['head', 'pretrain']
    trained = torch.load(out / 'head/iter_4.pth', weights_only=False)['state_dict']
    (_, first_rate), (going_on, rate) = begun.values()
    for name, tensor in going_on.items():
        assert torch.equal(tensor, trained[name])
        is_trained = name.startswith(('head.', 'backbone.norm.'))
        assert torch.equal(tensor, begun['head'][0][name]) != is_trained
        assert name.startswith('head.') or is_trained or torch.equal(tensor, start[name])
    assert rate < first_rate / 10
    end = Checkpoint.open(out).state_dict
    assert not torch.equal(end['backbone.blocks.0.mlp.fc1.weight'], start['backbone.blocks.0.mlp.fc1.weight'])


def test_the_teacher_of_features_is_found_again_or_said(images, tmp_path, monkeypatch):
    monkeypatch.setattr(runs.Run, 'write_report', lambda *_: None)
    teacher, out = save_backbone(tmp_path / 'teacher.pth'), tmp_path / 'run'
    beit_mm.pretrain(images, out, targets='features', teacher=teacher, steps=3)
    words = 'reconstruct', out, images / 'red/1.png', '--out', tmp_path / 'a.png'
    shutil.move(teacher, out / 'teacher.pth')
    call(*words)  # beside the weights
    save_backbone(out / 'teacher.pth')
    mistake('SHA-256', *words)
    (out / 'teacher.pth').unlink()
    mistake('the teacher of', *words)
    content = torch.load(out / 'pretrained.pth', weights_only=True)
    stored = content['meta']['config_dict']['model']['target_generator']
    for changed, message in (
        (dict(teacher=dict(type='beit_mm.CLIPTeacher', name='x')), 'not a single file'),
        (dict(type='subprocess.Popen'), "type='subprocess.Popen'"),
        (dict(teacher='/proc/kmsg'), 'is gone'),
        (dict(layers=dict(type='x')), "type='x'"),
    ):
        content['meta']['config_dict']['model']['target_generator'] = stored | changed
        torch.save(content, out / 'changed.pth')
        mistake(message, 'reconstruct', out / 'changed.pth', images, '--out', tmp_path / 'a.png')
    content['meta'].pop('config_dict')
    torch.save(content, out / 'changed.pth')
    mistake('which teacher', 'reconstruct', out / 'changed.pth', images, '--out', tmp_path / 'a.png')


def test_a_damaged_record_is_refused_and_the_weights_serve(run, images, tmp_path):
    """Cut short, no JSON, no record, of commit 315cb029, without one of its entries, or with one of another type."""
    folder = shutil.copytree(run, tmp_path / 'run')
    text, record = (folder / 'plan.json').read_text(), record_of(folder)
    earlier = json.dumps(dict(verb='pretrain', images=str(images), init='none', length=[5, 'steps'], batch=4))
    texts = ['', text[:-9], 'nothing', '[]', '5', 'null', '[' * 100_000, '\udcff', earlier]
    texts += [json.dumps({key: record[key] for key in record if key != name}) for name in record]
    wrong = dict(verb=3, images=None, options=[], device=1, digest=None, seconds='3', stages=[], metrics=[])
    changes = [dict(length=length) for length in (None, 5, '5m', [5], [5, 'parsecs'], ['5', 'steps'], [0, 'steps'])]
    changes += [{name: value} for name, value in wrong.items()]
    for text in texts + [json.dumps(record | change) for change in changes]:
        (folder / 'plan.json').write_text(text, errors='surrogateescape')
        with pytest.raises(ValueError, match=f'^{folder}/plan.json is damaged, or of another version.*--init$'):
            runs.Run(call_of('pretrain', images), folder)
    before = tree(folder)
    mistake(f'{folder}/plan.json is damaged, or of another version', 'pretrain', images, '--out', folder)
    assert tree(folder) == before
    call('embed', folder, images / 'red/1.png', '--out', tmp_path / 'features.npz')


def test_what_a_run_began_with_holds(images, tmp_path):
    run = planned(images, tmp_path / 'run', steps=5, seed=7)
    again = planned(images, tmp_path / 'run')
    assert (again.record.options['seed'], again.record.length, again.task.plan.batch) == (7, Length(5, 'steps'), 4)
    assert again.seconds() > run.record.seconds > 0 and again.record.digest == run.record.digest
    longer = 'pretrain', images, '--out', tmp_path / 'run', '--steps', 6
    mistake('length=5 steps, this call says length=6 steps', *longer)


def planned(images: Path, folder: Path, **options: object) -> runs.Run:
    run = runs.Run(call_of('pretrain', images, **options), folder)
    run.task = runs.find_task(run.record)
    run.plan_or_resume()
    return run


def test_a_run_goes_on_with_the_tokens_that_it_began_with(images, tmp_path, monkeypatch):
    monkeypatch.setenv('BEIT_MM_WEIGHTS', str(tmp_path))
    monkeypatch.setattr('torch.hub.get_dir', lambda: str(tmp_path / 'nothing'))
    monkeypatch.setattr('torch.cuda.is_available', lambda: True)
    monkeypatch.setattr('torch.cuda.mem_get_info', lambda: (2**34, 2**34))
    (encoder := tmp_path / 'encoder.pkl').touch()
    for _ in range(2):
        assert planned(images, tmp_path / 'run').task.plan.targets['checkpoint'] == str(encoder)
    encoder.unlink()
    with pytest.raises(ValueError, match='began with beit_mm.DALLETokenizer of .*encoder.pkl.*put'):
        planned(images, tmp_path / 'run')


def test_configs_of_the_current_folder_are_not_ours(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path(rebuild.TOKENIZER).parent.mkdir()
    Path(rebuild.TOKENIZER).write_text('raise SystemExit("RAN")')
    configs.bundled_config.cache_clear()
    configs.write_config(tmp_path / 'config.py', 'Text.', rebuild.TOKENIZER, dict(work_dir='x'))
    assert configs.run_config(rebuild.TOKENIZER, dict(work_dir='x')).model == Config.fromfile('config.py').model


def test_names_of_folders_are_never_code(images, tmp_path):
    """Configs are Python with templates, which are executed; they hold folders' names as data."""
    folder = tmp_path / 'a"""; print("RAN"); """\\x \udcff {{$GONE:or+}} {{ fileDirname }} {{_base_.model}} {{{{'
    shutil.copytree(images, folder)
    run = planned(folder, tmp_path / 'run """', seed=3)
    base, settings = run.settings('tokenizer', 9)
    written, dumped = run.folder / 'tokenizer_config.py', tmp_path / 'dumped.py'
    configs.write_config(written, 'Text.', base, settings)
    assert all(isinstance(node, ast.Assign) for node in ast.parse(written.read_text()).body[1:])
    cfg = configs.run_config(base, settings, written)
    cfg.dump(dumped)  # as mmengine does in the work directory; checkpoints hold the same text
    assert Config.fromfile(written).to_dict() == Config.fromfile(dumped).to_dict() == cfg.to_dict()
    assert cfg.train_dataloader.dataset.data_root == str(folder) and cfg.randomness.seed == 3


def test_minutes_are_shared_by_the_stages_and_the_report(images, tmp_path, monkeypatch):
    run = planned(images, tmp_path / 'run', minutes=2)
    monkeypatch.setattr(run, 'seconds', lambda: 10.0)
    # of 120 s a tenth is left for the report, and 10 s are gone
    for stage, seconds in (('tokenizer', 98 / 3), ('pretrain', 98)):
        run.choose_steps(stage)
        assert run.record.stages[stage]['seconds'] == pytest.approx(seconds)


def test_fine_tuning_and_classifying(run, images, tmp_path, capsys):
    out, table = tmp_path / 'classifier', tmp_path / 'classes.csv'
    call('finetune', images, '--init', run, '--out', out, '--epochs', 2)
    assert 'classified correctly, %' in capsys.readouterr().out
    cfg = Config.fromfile(out / 'config.py')
    assert cfg.train_cfg.max_iters == 2 * (36 // 4) and cfg.model.backbone.init_cfg.checkpoint.startswith(str(run))
    weights = torch.load(out / 'finetuned.pth', weights_only=True)['state_dict']
    for config in (cfg, Config.fromfile(out / 'finetune/config.py')):  # ours, and the one that mmengine leaves
        with DefaultScope.overwrite_default_scope(config.default_scope):
            MODELS.build(config.model).load_state_dict(weights)  # strictly
    (tmp_path / 'gone.png').symlink_to('nowhere')
    capsys.readouterr()
    (out / 'plan.json').write_text('{')  # only the run itself reads it
    call('classify', out, *[tmp_path / 'gone.png'] * 30, images, '--out', table)
    shown = capsys.readouterr().out
    assert '16 more' in shown and 'read: 30' in shown and shown.count('gone.png') < 30
    call('classify', out, tmp_path / 'gone.png', images, '--out', table)
    assert table.read_bytes().startswith(codecs.BOM_UTF8)
    gone, *rows = csv.DictReader(table.open(encoding='utf-8-sig'))
    assert gone.pop('path') in gone.pop('error') and not any(gone.values())
    for verb in (beit_mm.classify, beit_mm.segment):
        with pytest.raises(UserError, match='--json .* a folder'):
            verb(out, images, json=tmp_path)
    found = beit_mm.classify(out, images, out=tmp_path / 'y.json', json=tmp_path / 'x.json')
    assert (tmp_path / 'y.json').read_bytes() == (tmp_path / 'x.json').read_bytes()
    for row, result in zip(rows, json.loads((tmp_path / 'x.json').read_text()), strict=True):
        assert [row.pop('path'), row.pop('error')] == [result['path'], '']
        best = [text for label, share in result['scores'][:3] for text in (CLASSES[label], f'{share:.3f}')]
        assert [*row.values()] == best and best[0] == result['name']
    assert len(rows) == len(found) == 36


def test_the_normalisation_of_weights_that_do_not_say_it(run, images, tmp_path, capsys):
    """Assumed: a line in the report. Given: what is planned with, and what a resumed run keeps."""
    state = torch.load(run / 'pretrained.pth', weights_only=True)['state_dict']
    torch.save(dict(state_dict=state, meta=dict(architecture=dict(num_heads=4))), init := tmp_path / 'weights.pth')
    call('finetune', images, '--init', init, '--out', tmp_path / 'assumed', '--epochs', 1)
    (line,) = [line for line in (tmp_path / 'assumed/report.md').read_text().splitlines() if '--mean' in line]
    assert str(init) in line and 'ImageNet' in line
    for options, std in (({}, [58.395, 57.12, 57.375]), (dict(std=50), [50.0] * 3), ({}, [50.0] * 3)):
        folder = tmp_path / ('new' if std[0] == 50 else 'other')
        assert planned(images, folder, **options).task.plan.preprocessing['std'] == std
    mistake('91', 'pretrain', images, '--out', tmp_path / 'new', '--mean', 91)


def test_a_balanced_classifier_and_its_report(run, images, tmp_path, capsys):
    folder, out = shutil.copytree(images.parent, tmp_path / 'images'), tmp_path / 'run'
    for index in range(2, 12):
        (folder / f'train/red/{index}.png').unlink()
    for index in range(3):  # mistakes
        shutil.copy(folder / f'val/red/{index}.png', folder / 'val/green')
    call('finetune', folder, '--init', run, '--out', out, '--epochs', 1, '--balance')
    assert '2 images of red' in capsys.readouterr().out
    dataset = Config.fromfile(out / 'config.py').train_dataloader.dataset
    assert dataset.type == 'ClassBalancedDataset' and dataset.dataset.ann_file == str(out / 'lists/train.txt')
    assert dataset.oversample_thr == 12 / 26  # images of the largest classes are shown once
    (out / 'report.md').unlink()
    call('finetune', folder, '--init', run, '--out', out)  # it stays balanced
    assert Config.fromfile(out / 'config.py').train_dataloader.dataset.type == 'ClassBalancedDataset'
    report = (out / 'report.md').read_text()
    right = [answer['name'] == Path(answer['path']).parent.name for answer in beit_mm.classify(out, folder / 'val')]
    assert report.count(f'| {100 * np.mean(right):.1f} +-') >= 2  # of all images, and averaged over classes of as many
    assert 'At most 30 classes, worst first, on 36 held-out images' in report
    assert '--balance' in report and 'Next: ' in report.split('(loss.png)')[1]
    assert '(mistakes.png)' in report and Image.open(out / 'mistakes.png').width > 200
    assert record_of(out)['options']['balance'] is True


def test_few_epochs_are_as_few_steps(run, images, tmp_path, monkeypatch, capsys):
    """Of nine batches in an epoch."""
    monkeypatch.setattr(runs.Run, 'write_report', lambda *_: None)
    weights = beit_mm.finetune(images, tmp_path / 'run', run, epochs=0.2)
    assert torch.load(weights, weights_only=True)['meta']['iter'] == 2
    assert '0.2 epochs are 2 steps' in capsys.readouterr().out
    mistake('balance', 'finetune', images, '--out', tmp_path / 'run', '--balance')


def test_names_of_any_bytes_and_formulas_in_results(tmp_path):
    odd, signs = os.fsdecode(b'ee\xe9\n'), [*'=+-@', *'\uff1d\uff0b\uff0d\uff20', '\t', '\r']
    rows = [dict(path=odd, name=odd), *(dict(path=f'{sign}1.png', name=f'{sign}1+1') for sign in signs)]
    rows = [dict(row, scores=[[0, 0.5]]) for row in rows]
    for path in (tmp_path / f'{odd}.csv', tmp_path / 'x.json'):
        inference.write_results(path, rows, ['=a', 'b'])
    assert json.loads(path.read_text()) == rows
    with (tmp_path / f'{odd}.csv').open(errors='surrogateescape', newline='') as file:
        found = [row[:2] for row in csv.reader(file)][1:]
    assert found == [[odd, odd], *([f'./{sign}1.png', f"'{sign}1+1"] for sign in signs)]


def test_arrays_and_pil_images_are_taken_as_files_are(run, images, tmp_path):
    """They have no path to write or to link; an image that is given twice has two results."""
    image = Image.open(images / 'red/0.png')
    sources = [np.asarray(image), image, images / 'red/0.png', images / 'red/0.png']
    found = beit_mm.classify(run, sources, labelled=images, out=tmp_path / 'x.csv')
    assert [result.pop('path') for result in found] == [None, None, *[str(images / 'red/0.png')] * 2]
    assert all(result == found[0] for result in found) and found[0]['name'] == 'red'
    with (tmp_path / 'x.csv').open(encoding='utf-8-sig') as file:
        assert [row['path'] for row in csv.DictReader(file)] == ['', '', *[str(images / 'red/0.png')] * 2]
    for name, source in dict(a=sources[0], b=image, c=sources[2]).items():
        beit_mm.reconstruct(run, (each for each in [source]), tmp_path / f'{name}.png')
    assert len({(tmp_path / f'{name}.png').read_bytes() for name in 'abc'}) == 1


def test_images_whose_class_is_sure_become_a_folder_to_learn_from(run, images, tmp_path, capsys):
    """A mixture of red and green is near to both and left out; the rest is what `finetune` reads."""
    source, out = tmp_path / 'new', tmp_path / 'out'
    for index in range(2):
        shutil.copytree(images, source / str(index))  # of the same names
    red, green = (np.asarray(Image.open(images / f'{name}/0.png')) for name in ('red', 'green'))
    Image.fromarray(np.vstack([red[:18], green[18:]])).save(source / 'mixed.png')
    (source / 'gone.png').symlink_to('nowhere')
    found = {result['path']: result for result in beit_mm.classify(run, source, labelled=images)}
    mixed, gone = found.pop(str(source / 'mixed.png')), found.pop(str(source / 'gone.png'))
    least = min(result['scores'][0][1] for result in found.values())
    assert 0.3 < mixed['scores'][0][1] < least and sum(share for _, share in mixed['scores']) == pytest.approx(1)
    words = ['classify', run, source, '--labelled', images, '--out', out, '--min-confidence']
    mistake('--min-confidence', *words, 90)
    mistake('--min-confidence', *words[:-2], tmp_path / 'x.csv', words[-1], 0.5)
    call(*words[:2], source / 'mixed.png', *words[3:], least)  # nothing is so sure
    assert '0 of 1 images' in capsys.readouterr().out
    call(*words, least)
    assert '72 of 74 images' in capsys.readouterr().out
    links = {file.resolve(): file.parent.name for file in out.glob('*/*')}
    assert links == {Path(path).resolve(): result['name'] for path, result in found.items()}
    with (out / 'classes.csv').open(encoding='utf-8-sig') as file:
        rows = {row['path']: row for row in csv.DictReader(file)}
    assert rows[mixed['path']]['probability'] == f'{mixed["scores"][0][1]:.3f}' and len(rows) == 74
    assert rows[gone['path']]['class'] == '' and rows[gone['path']]['error'] == gone['error']
    learned = finding.find_images(out)
    assert learned.classes == [*CLASSES] and learned.learned.total() + len(learned.held_out.names) == 72
    mistake(str(out), *words, 0.1)  # what it holds would be learned from too


def test_classes_of_any_names_become_folders(tmp_path):
    """Two may have one name, as ImageNet's cranes; none leads out of the folder; a quoted one is what it was."""
    odd = ' b\n"'
    for index in range(4):
        Image.new('RGB', (9, 9)).save(tmp_path / f'{index}.png')
    names = [(134, 'crane'), (517, 'crane'), (2, 'a, b'), (3, quoted(odd))]
    results = [
        dict(path=str(tmp_path / f'{index}.png'), label=label, name=name, scores=[[label, 0.5]])
        for index, (label, name) in enumerate(names)
    ]
    (tmp_path / 'out').mkdir()
    inference.link_images(tmp_path / 'out', results, 0.5)
    links = [f'{file.parent.name}/{file.name}' for file in sorted((tmp_path / 'out').glob('*/*'))]
    assert links == [f'{odd}/3.png', 'a, b/2.png', 'crane 134/0.png', 'crane 517/1.png']
    for name in ('../up', '/etc', '..', '.hidden', '"\\u002fetc"'):
        with pytest.raises(ValueError, match='cannot be the name of a folder'):
            inference.link_images(tmp_path / 'out', [dict(results[0], name=name)], 0.5)
    assert not (tmp_path / 'up').exists()
    for least in (None, 0.5):
        inference.write_maps([], SimpleNamespace(classes=[quoted(odd), 'c']), tmp_path, least)
        assert named_classes(str(tmp_path / 'classes.txt')) == ((odd, 'c'), None)
    folder = make_images(tmp_path / 'data', 1) / 'train'
    (folder / 'red').rename(folder / odd)
    (found,) = beit_mm.classify(save_backbone(tmp_path / 'x.pth'), folder / odd, labelled=folder)
    assert found['name'] == quoted(odd)  # as of a classifier


def test_points_of_attention_come_in_a_text_or_in_a_list(run, images, tmp_path):
    call('attention', run, images / 'red/1.png', '--points', '10,10; 0.9,0.1', '--out', tmp_path / 'deep/a.png')
    beit_mm.attention(run, images / 'red/1.png', ['10,10', ' 0.9,0.1'], tmp_path / 'list.png')
    assert (tmp_path / 'list.png').read_bytes() == (tmp_path / 'deep/a.png').read_bytes()


def test_what_cannot_be_read_costs_no_other_results(run, images, tmp_path, monkeypatch, capsys):
    """A link to nothing between images that are told apart by any features; one is named like a home folder."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(images / 'red/0.png', 'a.png')
    Path('gone.png').symlink_to('nowhere')
    shutil.copy(images / 'blue/0.png', '~nobody.png')
    for sources in ('.', ['a.png', 'gone.png', '~nobody.png']):
        found = beit_mm.classify(run, sources, labelled=images)
        assert [result.get('name') for result in found] == ['red', None, 'blue'] and 'gone.png' in found[1]['error']
    for sources, on_error in (('.', 'raise'), ('gone.png', 'skip')):
        with pytest.raises(OSError, match='gone.png'):
            beit_mm.embed(run, sources, on_error=on_error)
    call('embed', run, '.', '--out', 'x.npz')
    assert np.load('x.npz')['paths'].tolist() == ['a.png', '~nobody.png']
    unreadable, number, written = capsys.readouterr().out.splitlines()
    assert unreadable.startswith('unreadable: gone.png') and number.endswith(': 1') and written.endswith('npz: 2 x 32')
    monkeypatch.setattr(inference, 'MAX_ROWS', 2)
    call('reconstruct', run, '.', '--out', 'x.png')  # two of three files
    limit, unreadable, _ = capsys.readouterr().out.splitlines()
    assert ' 2 ' in limit and unreadable.startswith('unreadable: gone.png')


def test_a_run_can_be_moved(run, images, tmp_path):
    """The tokenizer is found beside the weights, and another one in its place is refused."""
    content = torch.load(run / 'pretrained.pth', weights_only=True)
    content['meta']['config_dict']['model']['target_generator']['checkpoint'] = '/gone/iter_3.pth'
    torch.save(content, tmp_path / 'pretrained.pth')
    words = 'reconstruct', tmp_path, images / 'red/1.png', '--out', tmp_path / 'a.png'
    mistake('is gone: looked for /gone/iter_3.pth and ', *words)
    shutil.copytree(run / 'tokenizer', tmp_path / 'tokenizer')
    call(*words)
    other = torch.load(run / 'tokenizer/iter_3.pth', weights_only=True)
    torch.save(other | dict(note='another file'), tmp_path / 'tokenizer/iter_3.pth')
    mistake('has SHA-256 ', *words)


@pytest.mark.parametrize(
    ('stored', 'message'),
    [
        (dict(type='subprocess.Popen'), "type='subprocess.Popen'"),
        (dict(type='beit_mm.DALLETokenizer', random_weights=[False]), 'random_weights=[False]'),  # of any size
        (dict(checkpoint=None), 'does not name the file of its tokenizer'),
        (dict(checkpoint='/proc/kmsg'), 'is gone: looked for /proc/kmsg'),  # reading it waits
        # sizes that no memory holds
        (dict(hidden=10**7), 'iter_3.pth does not hold the weights of this ConvEncoder'),
        (dict(bottleneck_blocks=10**8), 'bottleneck_blocks=100000000'),
        (dict(embed_dims=-1), 'negative'),
    ],
)
def test_a_stored_tokenizer_is_data(run, images, tmp_path, stored, message):
    content = torch.load(run / 'pretrained.pth', weights_only=True)
    content['meta']['config_dict']['model']['target_generator'] |= stored
    torch.save(content, path := run / 'changed.pth')
    mistake(message, 'reconstruct', path, images, '--out', tmp_path / 'a.png')


def test_only_what_can_be_dalles_tokens_is_taken_for_them(tmp_path, monkeypatch):
    monkeypatch.setattr(rebuild, 'find_dalle', lambda: dict(type='beit_mm.DALLETokenizer', checkpoint='encoder.pkl'))
    backbone = {'backbone.cls_token': torch.zeros(1, 1, 4), 'backbone.blocks.0.attn.qkv.weight': torch.zeros(12, 4)}
    head = backbone | {'head.lm_head.weight': torch.zeros(8192, 4)}
    assert rebuild.targets_config(Checkpoint(head, tmp_path / 'x.pth'))['type'] == 'beit_mm.DALLETokenizer'
    for other in ({'patch_aggregation.0.x': torch.zeros(1)}, {'head.lm_head.weight': torch.zeros(512, 4)}):
        with pytest.raises(ValueError, match='does not say which tokenizer'):
            rebuild.targets_config(Checkpoint(head | other, tmp_path / 'x.pth'))


def test_a_mistake_is_one_line(run, images, tmp_path):
    out, image, broken = tmp_path / 'out', images / 'red/1.png', tmp_path / 'broken.png'
    broken.write_text('nothing')
    for message, *words in (
        ('lies in the folder of the images', 'pretrain', images, '--out', images / 'run'),
        ('holds other files', 'pretrain', images, '--out', tmp_path),
        ('began with verb=pretrain, this call says verb=finetune', 'finetune', images, '--init', run, '--out', run),
        ('give --targets features too', 'pretrain', images, '--out', out, '--teacher', 'demo'),
        ('leave --tokenizer out', 'pretrain', images, '--out', out, '--targets', 'features', '--tokenizer', 'new'),
        ('does not exist', 'pretrain', images, '--out', out, '--targets', 'features', '--teacher', 'nothing.pth'),
        ('has class folders: none', 'finetune', images / 'red', '--init', run, '--out', out),
        ('--labelled FOLDER', 'classify', run, image),
        (f'type --out {tmp_path}/new.csv', 'classify', 'demo', image, tmp_path / 'new.csv'),
        (f'type --out {tmp_path}/maps', 'segment', 'demo', image, tmp_path / 'maps'),
        ('broken.png', 'reconstruct', run, broken, '--out', tmp_path / 'picture.png'),
    ):
        mistake(message, *words)
    assert not out.exists() or not any(out.iterdir())


def test_configs_are_printed_and_trained_by_name(capsys, monkeypatch):
    call('config', 'demo/pretrain')
    assert Config.fromstring(capsys.readouterr().out, '.py').train_cfg.max_iters == 7000
    seen = []
    monkeypatch.setattr(command.commands, 'train', seen.append)
    call('train', 'demo/pretrain', '--work-dir', 'x')
    assert seen == [['demo/pretrain', '--work-dir', 'x']]

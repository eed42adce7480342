"""tools/test.py with a classifier: the same numbers as mim's and the inferencer's, predictions, mirror images."""
import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import ROOT, make_runner
from labelled import BACKBONE, CLASSES, classifier_config, make_photos
from mmengine.registry import init_default_scope
from PIL import Image

from beit_mm.apis.classify import Classifier
from beit_mm.registry import MODELS

LARGER = ['--cfg-options', 'model.backbone.img_size=48', 'test_dataloader.dataset.pipeline.1.scale=54',
          'test_dataloader.dataset.pipeline.2.crop_size=48']


@pytest.fixture(scope='module')
def work(tmp_path_factory) -> Path:
    """A trained classifier: config.py, its checkpoint epoch_2.pth, and photos it was not trained on."""
    folder = tmp_path_factory.mktemp('classification')
    cfg = classifier_config(make_photos(folder / 'photos', per_class=7), folder / 'run')
    cfg.optim_wrapper.optimizer.lr = 1e-5  # not all right, not all wrong
    cfg.dump(folder / 'config.py')
    make_runner(cfg).train()
    (folder / 'run/epoch_2.pth').rename(folder / 'epoch_2.pth')
    return folder


def run(*command: object, cwd: Path, **environment: str) -> subprocess.CompletedProcess:
    tools = Path(sys.executable).parent
    return subprocess.run(
        [str(word) for word in command], cwd=cwd, capture_output=True, text=True, timeout=240,
        env=dict(os.environ, OMP_NUM_THREADS='1', PYTHONPATH=str(ROOT), PATH=f'{tools}:{os.environ["PATH"]}',
                 **environment))


def evaluate(work: Path, name: str, *options: str) -> dict:
    done = run(sys.executable, ROOT / 'tools/test.py', 'config.py', 'epoch_2.pth', '--work-dir', name, '--out',
               f'{name}.json', *options, cwd=work)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads((work / f'{name}.json').read_text())


@pytest.mark.parametrize('options', [[], LARGER], ids=['as trained', 'larger'])
def test_mim_gives_the_same_accuracy_to_the_last_digit(work, options):
    ours = evaluate(work, 'ours', *options)
    done = run('mim', 'test', 'mmpretrain', 'config.py', '--checkpoint', 'epoch_2.pth', '--gpus', '0', '--launcher',
               'none', '--work-dir', 'mim', '--out', 'mim.json', '--out-item', 'metrics', *options, cwd=work)
    assert done.returncode == 0, done.stderr[-2000:]
    assert ours['accuracy/top1'] == json.loads((work / 'mim.json').read_text())['accuracy/top1']
    right = [p['path'].split('/')[-2] == p['name'] for p in ours['predictions']]
    assert len(right) == 21 and ours['accuracy/top1'] == pytest.approx(100 * sum(right) / 21)


def test_predictions_by_class_and_mirrored(work):
    report = evaluate(work, 'plain')
    assert report['classes'] == list(CLASSES)
    for prediction in report['predictions']:
        labels, scores = zip(*prediction['scores'], strict=True)
        assert sorted(labels) == [0, 1, 2] and list(scores) == sorted(scores, reverse=True)
        assert sum(scores) == pytest.approx(1, abs=1e-5) and labels[0] == prediction['label']
    rows = list(csv.DictReader((work / 'plain/per_class_accuracy.csv').open()))
    assert [row['class'] for row in rows] == list(CLASSES) and {row['photos'] for row in rows} == {'7'}
    mean = np.mean([float(row['accuracy']) for row in rows])
    assert mean == pytest.approx(report['accuracy/top1'], abs=1e-4)  # classes of one size
    with Image.open(work / 'plain/confusion.png') as picture:
        assert min(picture.size) > 300

    mirrored = evaluate(work, 'mirrored', '--tta')
    classifier = Classifier(work / 'epoch_2.pth', device='cpu')
    path = mirrored['predictions'][5]['path']
    pixels = np.asarray(Image.open(path))
    both = [dict(map(tuple, classifier(view)[0]['scores'])) for view in (pixels, np.ascontiguousarray(pixels[:, ::-1]))]
    for label, score in mirrored['predictions'][5]['scores']:
        assert score == pytest.approx((both[0][label] + both[1][label]) / 2, abs=1e-5)


def test_two_processes_predict_each_photo_once(work):
    alone = evaluate(work, 'alone')
    done = run('bash', ROOT / 'tools/dist_test.sh', 'config.py', 'epoch_2.pth', '2', '--work-dir', 'both', '--out',
               'both.json', cwd=work, PYTHON=sys.executable, CUDA_VISIBLE_DEVICES='', PORT='29618')
    assert done.returncode == 0, done.stderr[-2000:]
    both = json.loads((work / 'both.json').read_text())
    assert both['accuracy/top1'] == alone['accuracy/top1']
    paths, labels = ([[p[key] for p in report['predictions']] for report in (both, alone)] for key in ('path', 'label'))
    assert paths[0] == paths[1] and labels[0] == labels[1]
    tables = [(work / name / 'per_class_accuracy.csv').read_text() for name in ('both', 'alone')]
    assert tables[0] == tables[1]


def test_the_inferencer_needs_the_checkpoint_alone_and_agrees(work, tmp_path):
    report = evaluate(work, 'for_inferencer')
    classifier = Classifier(work / 'epoch_2.pth', device='cpu')
    assert classifier.classes == CLASSES
    folder = work / 'photos/val'
    found = classifier(folder, batch_size=4)
    for ours, theirs in zip(found, report['predictions'], strict=True):
        assert (ours['path'], ours['label'], ours['name']) == (theirs['path'], theirs['label'], theirs['name'])
        np.testing.assert_allclose(ours['scores'], theirs['scores'], atol=1e-5)
    file = folder / 'red/3.png'
    one, array = classifier([file, np.asarray(Image.open(file))], top=2)
    assert array == dict(one, path=None) and len(one['scores']) == 2
    assert one['path'] == str(file)
    with pytest.raises(FileNotFoundError, match='gone.jpg'):
        classifier('gone.jpg')
    with pytest.raises(ValueError, match=r'float64 .*expected uint8'):
        classifier(np.zeros((8, 8, 3)))


def test_a_checkpoint_without_config_or_with_a_program_is_refused(work, tmp_path):
    content = torch.load(work / 'epoch_2.pth', weights_only=True)
    path = tmp_path / 'changed.pth'
    text = content['meta']['cfg']
    for cfg, message in (
            (None, r'holds no config; give the one that it was trained with: Classifier\(checkpoint, config=...\)'),
            (text + f"\nx = open('{tmp_path}/ran', 'w')\n", 'refused, nothing in it was run: line'),
            (text.replace("type='CenterCrop'", "type='os.system'"), "asks for 'os.system'"),
            ('a = 1\n', 'has no model and test pipeline')):
        content['meta'] = dict(content['meta'], cfg=cfg)
        torch.save(content, path)
        with pytest.raises(ValueError, match=message) as error:
            Classifier(path, device='cpu')
        assert '\n' not in str(error.value)
    assert not (tmp_path / 'ran').exists()
    assert Classifier(path, device='cpu', config=work / 'config.py')(work / 'photos/val/red')[0]['name'] in CLASSES


def test_a_probe_of_all_layers_has_an_accuracy_for_each_and_no_predictions(work):
    preprocessor = dict(type='ClsDataPreprocessor', mean=[127.5] * 3, std=[127.5] * 3)
    probe = dict(type='beit_mm.LinearProbe', data_preprocessor=preprocessor, backbone=BACKBONE, num_classes=3)
    (work / 'probe.py').write_text(f"_base_ = './config.py'\nmodel = dict(_delete_=True, **{probe})\n"
                                   "test_evaluator = dict(_delete_=True, type='beit_mm.LayerAccuracy')\n")
    init_default_scope('mmpretrain')
    torch.save(MODELS.build(probe).state_dict(), work / 'probe.pth')
    command = (sys.executable, ROOT / 'tools/test.py', 'probe.py', 'probe.pth', '--out', 'new/folder/probe.json')
    done = run(*command, cwd=work)
    assert done.returncode == 0, done.stderr[-2000:]
    report = json.loads((work / 'new/folder/probe.json').read_text())
    assert {f'accuracy/layer_{layer}' for layer in range(3)} < set(report) and 'predictions' not in report
    done = run(*command, '--tta', cwd=work)
    assert done.returncode != 0 and 'set model.layers=...' in done.stderr.strip().splitlines()[-1]


@pytest.mark.parametrize(('options', 'message'), [
    (['model.head.num_classes=5'], 'photos/train has 3 classes (blue to red), the model is built for 5'),
    (['train_dataloader.dataset.data_prefix=nowhere'], "photos/nowhere'; expected a folder with one folder a class"),
])
def test_mistakes_end_with_one_line(work, options, message):
    done = run(sys.executable, ROOT / 'tools/train.py', 'config.py', '--work-dir', 'mistake', '--cfg-options', *options,
               cwd=work)
    assert done.returncode != 0
    assert message in done.stderr.strip().splitlines()[-1]


def test_mirror_images_of_a_pretraining_are_refused(work):
    done = run(sys.executable, ROOT / 'tools/test.py', ROOT / 'configs/demo/pretrain.py', 'epoch_2.pth', '--tta',
               cwd=work)
    assert done.returncode != 0 and 'this test pipeline ends with beit_mm.PackViews' in done.stderr

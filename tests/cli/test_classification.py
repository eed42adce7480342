"""tools/test.py with a classifier: the numbers of mmpretrain's tool and the inferencer, predictions, mirror images."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import ROOT, library_tools, list_configs, load_config, make_runner, run_tool, set_num_classes
from labelled import BACKBONE, CLASSES, classifier_config, make_images
from mmengine.config import Config
from mmengine.registry import DefaultScope, init_default_scope
from PIL import Image

from beit_mm.apis.inferencers import ClassificationInferencer
from beit_mm.checkpoint.read import CheckpointError
from beit_mm.engine.checkpoints import plain_values
from beit_mm.features.extractor import usual_preparation
from beit_mm.registry import MODELS

LARGER = [
    '--cfg-options',
    'model.backbone.img_size=48',
    'test_dataloader.dataset.pipeline.1.scale=54',
    'test_dataloader.dataset.pipeline.2.crop_size=48',
]


@pytest.fixture(scope='module')
def work(tmp_path_factory) -> Path:
    """A trained classifier: config.py, its checkpoint epoch_2.pth, and images it was not trained on."""
    folder = tmp_path_factory.mktemp('classification')
    cfg = classifier_config(make_images(folder / 'images', per_class=7), folder / 'run')
    cfg.optim_wrapper.optimizer.lr = 1e-5  # not all right, not all wrong
    cfg.dump(folder / 'config.py')
    make_runner(cfg).train()
    (folder / 'run/epoch_2.pth').rename(folder / 'epoch_2.pth')
    return folder


@pytest.fixture(autouse=True)
def _inside(work, monkeypatch):
    monkeypatch.chdir(work)


def evaluate(name: str, *options: str) -> dict:
    run_tool('test.py', 'config.py', 'epoch_2.pth', '--work-dir', name, '--out', f'{name}.json', *options)
    return json.loads(Path(f'{name}.json').read_text())


@pytest.mark.parametrize('options', [[], LARGER], ids=['as trained', 'larger'])
def test_mmpretrains_tool_gives_the_same_accuracy_to_the_last_digit(options):
    ours = evaluate('ours', *options)
    words = 'test.py config.py epoch_2.pth --work-dir theirs --out theirs.json --out-item metrics'.split()
    run_tool(*words, *options, folder=library_tools('mmpretrain'))
    assert ours['accuracy/top1'] == json.loads(Path('theirs.json').read_text())['accuracy/top1']
    right = [p['path'].split('/')[-2] == p['name'] for p in ours['predictions']]
    assert len(right) == 21 and ours['accuracy/top1'] == pytest.approx(100 * sum(right) / 21)


def test_predictions_drawn_and_mirrored():
    report = evaluate('plain', '--show-dir', 'drawn')
    assert report['classes'] == list(CLASSES)
    for prediction in report['predictions']:
        labels, scores = zip(*prediction['scores'], strict=True)
        assert sorted(labels) == [0, 1, 2] and list(scores) == sorted(scores, reverse=True)
        assert sum(scores) == pytest.approx(1, abs=1e-5) and labels[0] == prediction['label']
    assert len(list(Path('drawn').glob('*.png'))) == 7  # named as their files, which are alike in each class

    mirrored = evaluate('mirrored', '--tta')
    classifier = ClassificationInferencer('epoch_2.pth', device='cpu')
    path = mirrored['predictions'][5]['path']
    pixels = np.asarray(Image.open(path))
    both = [dict(map(tuple, classifier(view)[0]['scores'])) for view in (pixels, np.ascontiguousarray(pixels[:, ::-1]))]
    for label, score in mirrored['predictions'][5]['scores']:
        assert score == pytest.approx((both[0][label] + both[1][label]) / 2, abs=1e-5)


@pytest.mark.slow
def test_two_processes_predict_each_image_once(work):
    alone = evaluate('alone')
    words = 'config.py epoch_2.pth 2 --work-dir both --out both.json'.split()
    settings = dict(OMP_NUM_THREADS='1', PYTHONPATH=str(ROOT), PYTHON=sys.executable, CUDA_VISIBLE_DEVICES='')
    environment = os.environ | settings | dict(PORT='29618')
    subprocess.run(['bash', ROOT / 'tools/dist_test.sh', *words], check=True, env=environment)
    both = json.loads(Path('both.json').read_text())
    assert both['accuracy/top1'] == alone['accuracy/top1']
    found = [[(p['path'], p['label']) for p in report['predictions']] for report in (both, alone)]
    assert found[0] == found[1]


def test_the_inferencer_needs_the_checkpoint_alone_and_agrees(work, tmp_path):
    report = evaluate('for_inferencer')
    classifier = ClassificationInferencer(work / 'epoch_2.pth', device='cpu')
    assert classifier.classes == CLASSES
    folder = work / 'images/val'
    found = classifier(folder, batch_size=4)
    for ours, theirs in zip(found, report['predictions'], strict=True):
        assert (ours['path'], ours['label'], ours['name']) == (theirs['path'], theirs['label'], theirs['name'])
        np.testing.assert_allclose(ours['scores'], theirs['scores'], atol=1e-5)
    file = folder / 'red/3.png'
    one, array = classifier([file, np.asarray(Image.open(file))], top=2)
    assert (array['path'], array['label'], array['name']) == (None, one['label'], one['name'])
    np.testing.assert_allclose(array['scores'], one['scores'], atol=1e-6)
    assert one['path'] == str(file) and len(one['scores']) == 2
    assert len(classifier(path for path in [file, file])) == 2  # a generator


def test_a_config_in_a_checkpoint_that_is_a_program_is_refused_or_not_looked_at(work, tmp_path):
    content = torch.load(work / 'epoch_2.pth', weights_only=True)
    path = tmp_path / 'changed.pth'
    config = content['meta']['config_dict']
    transforms = config['test_dataloader']['dataset']['pipeline']
    foreign = [dict(step, type='os.system') if step['type'] == 'CenterCrop' else step for step in transforms]
    for changed_config, message in (
        (dict(config, test_dataloader=dict(dataset=dict(pipeline=foreign))), "asks for 'os.system'"),
        (dict(a=1), 'has no model and test pipeline'),
    ):
        content['meta'] = dict(content['meta'], config_dict=changed_config)
        torch.save(content, path)
        with pytest.raises(ValueError, match=message) as error:
            ClassificationInferencer(path, device='cpu')
        assert '\n' not in str(error.value)
    content['meta'] = dict(content['meta'], config_dict=f"open('{tmp_path}/ran', 'w')")
    torch.save(content, path)
    for config in (work / 'config.py', None):  # given; or known from the tensors
        classifier = ClassificationInferencer(path, device='cpu', config=config)
        assert classifier(work / 'images/val/red')[0]['name'] in CLASSES
    assert not (tmp_path / 'ran').exists()


def test_a_probe_of_all_layers_has_an_accuracy_for_each_and_no_predictions(work):
    preprocessor = dict(type='ClsDataPreprocessor', mean=[127.5] * 3, std=[127.5] * 3)
    probe = dict(type='beit_mm.LinearProbe', data_preprocessor=preprocessor, backbone=BACKBONE, num_classes=3)
    (work / 'probe.py').write_text(
        f"_base_ = './config.py'\nmodel = dict(_delete_=True, **{probe})\n"
        "test_evaluator = dict(_delete_=True, type='beit_mm.LayerAccuracy')\n"
    )
    init_default_scope('mmpretrain')
    torch.save(MODELS.build(probe).state_dict(), work / 'probe.pth')
    run_tool('test.py', 'probe.py', 'probe.pth', '--out', 'new/folder/probe.json')
    report = json.loads((work / 'new/folder/probe.json').read_text())
    assert {f'accuracy/layer_{layer}' for layer in range(3)} < set(report) and 'predictions' not in report


@pytest.mark.parametrize(
    ('images', 'options', 'error', 'message'),
    [
        ('gone.jpg', {}, FileNotFoundError, "no file or folder 'gone.jpg'"),
        (np.zeros((8, 8, 3)), {}, ValueError, r'float64 .*expected uint8'),
        (np.zeros((0, 20, 3), np.uint8), {}, ValueError, r'\(0, 20, 3\); expected .* not empty'),
        (7, {}, ValueError, r'type int; expected a file or folder \(str or Path\), an array, a PIL image, or a list'),
        ([b'image.jpg'], {}, ValueError, 'type bytes; expected a file'),
        ('.', dict(batch_size=0), ValueError, 'batch_size is 0; expected 1 or more'),
    ],
)
def test_what_is_no_image_is_one_line(work, images, options, error, message):
    with pytest.raises(error, match=message) as caught:
        ClassificationInferencer(work / 'epoch_2.pth', device='cpu')(images, **options)
    assert '\n' not in str(caught.value)


@pytest.mark.parametrize('mode', ['RGB', 'L', 'RGBA', 'P', 'I;16'])
def test_an_image_gives_what_its_file_does(work, tmp_path, mode):
    image = Image.open(work / 'images/val/green/1.png')
    deep = Image.fromarray(np.arange(36 * 40, dtype=np.uint16).reshape(36, 40) * 45)
    image = deep if mode == 'I;16' else image.convert(mode)
    assert image.mode == mode
    if mode == 'RGBA':
        image.putalpha(90)
    (exif := Image.Exif())[0x0112] = 6  # lies on its side
    image.save(tmp_path / 'image.png', exif=exif)
    classifier = ClassificationInferencer(work / 'epoch_2.pth', device='cpu')
    file, opened = classifier([tmp_path / 'image.png', Image.open(tmp_path / 'image.png')])
    scores = [[label, pytest.approx(score)] for label, score in file['scores']]  # by how the arrays lie in memory
    assert opened == dict(file, path=None, scores=scores)


def changed(work: Path, path: Path, cfg: Config) -> Path:
    """The checkpoint with another config in it."""
    content = torch.load(work / 'epoch_2.pth', weights_only=True)
    content['meta']['config_dict'] = plain_values(cfg.to_dict())
    torch.save(content, path)
    return path


def test_without_a_test_pipeline_the_usual_one_is_made(work, tmp_path):
    cfg = Config.fromfile(work / 'config.py')
    cfg.model.backbone.img_size = 32
    for split in ('val', 'test'):
        cfg[f'{split}_dataloader'] = cfg[f'{split}_cfg'] = cfg[f'{split}_evaluator'] = None
    cfg.train_dataloader.dataset.pipeline[1:] = [dict(type='RandomResizedCrop', scale=32), dict(type='PackInputs')]
    path = changed(work, tmp_path / 'changed.pth', cfg)
    for config in (None, cfg):
        classifier = ClassificationInferencer(path, device='cpu', config=config)
        resize, crop, _ = classifier.reader.prepare.transforms
        assert (resize.scale, resize.edge, crop.crop_size) == (round(32 / 0.875), 'short', (32, 32))
        assert len(classifier(work / 'images/val')) == 21

    cfg.train_dataloader = None
    for config in (None, cfg, ROOT / 'configs/_base_/default_runtime.py'):
        with pytest.raises(ValueError, match='has no model and test pipeline of a classifier; give another') as error:
            ClassificationInferencer(changed(work, tmp_path / 'changed.pth', cfg), device='cpu', config=config)
        assert '\n' not in str(error.value)


@pytest.mark.parametrize(
    'name, size',
    [
        ('beit/finetune_in1k_100e', 224),
        ('beit/finetune_384_in1k_10e', 384),
        ('beit_plus/finetune_large_512_in1k_30e_after_in22k', 512),
    ],
)
def test_the_usual_pipeline_is_the_one_of_the_configs(name, size):
    resize, crop, pack = map(dict, usual_preparation((size, size), 'pillow'))
    pipeline = load_config(f'{name}.py').test_dataloader.dataset.pipeline
    assert crop['crop_size'] == (size, size)
    assert [resize, dict(crop, crop_size=size), pack] == [dict(step) for step in pipeline[1:]]


def test_a_given_config_that_does_not_fit_is_refused(tmp_path):
    path = ROOT / 'configs/demo/finetune_folder.py'
    cfg = Config.fromfile(path)
    set_num_classes(cfg.model, 3)
    with DefaultScope.overwrite_default_scope('mmpretrain'):
        model = MODELS.build(cfg.model)
    torch.save(dict(state_dict=model.state_dict(), meta=dict(dataset_meta=dict(classes=CLASSES))), tmp_path / 'x.pth')
    with pytest.raises(CheckpointError, match='does not fit its config: .*size mismatch for head.fc.weight'):
        ClassificationInferencer(tmp_path / 'x.pth', device='cpu', config=path)
    with pytest.raises(ValueError, match='^The config has no model and test pipeline'):
        ClassificationInferencer(tmp_path / 'x.pth', device='cpu', config=Config())


def test_a_checkpoints_word_builds_every_classifier_and_no_pretraining(work, tmp_path):
    path = changed(work, tmp_path / 'changed.pth', load_config('demo/pretrain.py'))
    with pytest.raises(CheckpointError, match="asks for 'beit_mm.BEiTPretrainer', which is no part of a classifier"):
        ClassificationInferencer(path, device='cpu')
    classifiers = [name for name in list_configs('finetune', 'linear_probe', 'bands_finetune', demo=True)]
    assert len(classifiers) > 20
    for name in classifiers:
        inferencer = ClassificationInferencer.__new__(ClassificationInferencer)
        inferencer.meta, inferencer.dataset_meta = dict(config_dict=plain_values(load_config(name).to_dict())), {}
        inferencer._stored_config(Path(name))


@pytest.mark.parametrize(
    ('option', 'message'),
    [
        ('model.head.num_classes=5', 'images/train has 3 classes (blue to red), the model is built for 5'),
        ('train_dataloader.dataset.data_prefix=nowhere', "images/nowhere'; expected a folder with one folder a class"),
    ],
)
def test_a_mistake_ends_with_one_line(option, message):
    with pytest.raises(SystemExit) as end:
        run_tool('train.py', 'config.py', '--work-dir', 'mistake', '--cfg-options', option)
    assert end.value.code.startswith('error: ') and message in end.value.code

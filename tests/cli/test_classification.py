"""tools/test.py with a classifier: the numbers of mmpretrain's tool and the inferencer, predictions, mirror images."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import ROOT, library_tools, load_config, make_runner, run_tool
from labelled import BACKBONE, CLASSES, classifier_config, make_images, save_backbone
from mmengine.config import Config
from mmengine.registry import init_default_scope
from mmpretrain.structures import DataSample
from mmpretrain.visualization import UniversalVisualizer
from PIL import Image, ImageOps

from beit_mm.apis.inferencers import ClassificationInferencer
from beit_mm.checkpoint.convert import convert_checkpoint
from beit_mm.checkpoint.read import CheckpointError
from beit_mm.engine.checkpoints import plain_values
from beit_mm.errors import UserError
from beit_mm.features.extractor import usual_preparation
from beit_mm.pictures import DrawingHook
from beit_mm.registry import MODELS

LARGER = ['--cfg-options', 'model.backbone.img_size=48', 'test_dataloader.dataset.pipeline.1.scale=54']
LARGER += ['test_dataloader.dataset.pipeline.2.crop_size=48']


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


def test_mmpretrains_tool_gives_the_same_accuracy_to_the_last_digit_for_timms_file():
    """At another size of the images than the model was trained with."""
    ours = evaluate('ours', *LARGER)
    convert_checkpoint('epoch_2.pth', 'timm.pth', to='timm')
    words = 'test.py config.py timm.pth --work-dir theirs --out theirs.json --out-item metrics'.split()
    run_tool(*words, *LARGER, folder=library_tools('mmpretrain'))
    log = next(Path('theirs').glob('*/*.log')).read_text()
    assert 'timm.pth (timm): 44 matched, 1 resized (4 x 4 -> 6 x 6)' in log
    assert ours['accuracy/top1'] == json.loads(Path('theirs.json').read_text())['accuracy/top1']
    right = [p['path'].split('/')[-2] == p['name'] for p in ours['predictions']]
    assert len(right) == 21 and ours['accuracy/top1'] == pytest.approx(100 * sum(right) / 21)


def test_predictions_are_drawn_mirrored_and_the_inferencers(work):
    """The inferencer needs the checkpoint alone."""
    report, classifier = evaluate('plain', '--show-dir', 'drawn'), ClassificationInferencer('epoch_2.pth', device='cpu')
    assert report['classes'] == list(CLASSES) == list(classifier.classes)
    for theirs, ours in zip(report['predictions'], classifier(work / 'images/val', batch_size=4), strict=True):
        labels, scores = zip(*theirs['scores'], strict=True)
        assert sorted(labels) == [0, 1, 2] and list(scores) == sorted(scores, reverse=True)
        assert sum(scores) == pytest.approx(1, abs=1e-5) and labels[0] == theirs['label']
        assert theirs == dict(ours, scores=[[label, pytest.approx(score, abs=1e-5)] for label, score in ours['scores']])
    assert len(list(Path('drawn').glob('*.png'))) == 21  # numbered: files have the same names in each class

    mirrored = evaluate('mirrored', '--tta')['predictions'][5]
    image = Image.open(mirrored['path'])
    both = [dict(map(tuple, found['scores'])) for found in classifier([image, ImageOps.mirror(image)])]
    for label, score in mirrored['scores']:
        assert score == pytest.approx((both[0][label] + both[1][label]) / 2, abs=1e-5)


@pytest.mark.parametrize('kind', ['EMAHook', 'mmpretrain.EMAHook'])
@pytest.mark.parametrize('views', [[], ['--tta']])
def test_a_moving_average_is_tested_as_the_checkpoint_has_it(kind, views, work):
    """Wherever the config names the hook: it would look for its own copy of the weights, of the model without views."""
    cfg = Config.fromfile('config.py')
    cfg.custom_hooks.append(dict(type=kind))
    cfg.default_hooks.averaging = dict(type=kind)
    cfg.dump('averaging.py')
    run_tool('test.py', 'averaging.py', 'epoch_2.pth', '--work-dir', 'average', '--out', 'average.json', *views)
    assert json.loads(Path('average.json').read_text()) == evaluate('alone', *views)


def test_images_that_are_not_files_are_drawn_too(tmp_path):
    """As those of CIFAR."""
    images = torch.zeros(2, 3, 64, 64, dtype=torch.uint8)
    visualizer = UniversalVisualizer(vis_backends=[dict(type='LocalVisBackend')], save_dir=str(tmp_path))
    runner = SimpleNamespace(test_dataloader=SimpleNamespace(batch_size=2), visualizer=visualizer)
    DrawingHook(str(tmp_path)).after_test_iter(runner, 1, dict(inputs=images), [DataSample(), DataSample()])
    assert {path.name for path in tmp_path.glob('*.png')} == {'image_3.png', 'image_4.png'}


def test_processes_of_which_all_but_one_would_draw_nothing_are_refused(monkeypatch):
    monkeypatch.setattr('mmengine.dist.get_world_size', lambda: 2)
    with pytest.raises(SystemExit, match='--show-dir .* one process'):
        evaluate('two', '--show-dir', 'drawn')


def test_a_probe_of_all_layers_has_an_accuracy_for_each_and_no_predictions(work):
    preprocessor = dict(type='ClsDataPreprocessor', mean=[127.5] * 3, std=[127.5] * 3)
    probe = dict(type='beit_mm.LinearProbe', data_preprocessor=preprocessor, backbone=BACKBONE, num_classes=3)
    evaluator = "test_evaluator = dict(_delete_=True, type='beit_mm.LayerAccuracy')\n"
    (work / 'probe.py').write_text(f"_base_ = './config.py'\nmodel = dict(_delete_=True, **{probe})\n{evaluator}")
    init_default_scope('mmpretrain')
    torch.save(MODELS.build(probe).state_dict(), work / 'probe.pth')
    run_tool('test.py', 'probe.py', 'probe.pth', '--out', 'new/folder/probe.json')
    report = json.loads((work / 'new/folder/probe.json').read_text())
    assert {f'accuracy/layer_{layer}' for layer in range(3)} < set(report) and 'predictions' not in report


@pytest.mark.parametrize('folder', [ROOT / 'tools', library_tools('mmpretrain')], ids=['ours', 'mmpretrain'])
@pytest.mark.parametrize(
    ('option', 'tensor'),
    [
        ('model.head.num_classes=5', 'head.fc.weight'),
        ('model.backbone.out_type=cls_token', 'backbone.norm.weight'),
        ('load_from', 'head.fc.weight'),
    ],
)
def test_a_checkpoint_of_another_model_is_not_tested_in_part(folder, option, tensor, work):
    """mmpretrain's own tool loads what fits, and would give the figures of random weights."""
    checkpoint, options = 'epoch_2.pth', ['--cfg-options', option]
    if option == 'load_from':  # a backbone alone
        checkpoint, options = save_backbone(work / 'backbone.pth'), []
    with pytest.raises((UserError, SystemExit), match=re.escape(tensor)):  # ours ends with the message
        run_tool('test.py', 'config.py', checkpoint, '--work-dir', 'refused', *options, folder=folder)


def test_an_image_gives_what_its_file_does(work, tmp_path):
    classifier, exif = ClassificationInferencer('epoch_2.pth', device='cpu'), Image.Exif()
    exif[0x0112] = 6  # lies on its side
    (clear := Image.open('images/val/green/1.png').convert('RGBA')).putalpha(90)
    for image in (clear, Image.fromarray(np.arange(36 * 40, dtype=np.uint16).reshape(36, 40) * 45)):
        image.save(path := tmp_path / 'image.png', exif=exif)
        file, opened = classifier((path, Image.open(path)), top=2)
        scores = [[label, pytest.approx(score)] for label, score in file['scores']]  # by how the arrays lie in memory
        assert opened == dict(file, path=None, scores=scores) and len(scores) == 2


def test_without_a_test_pipeline_the_usual_one_is_made_and_other_configs_are_refused(work, tmp_path):
    cfg = Config.fromfile(work / 'config.py')
    cfg.model.backbone.img_size = 32
    cfg.val_dataloader = cfg.test_dataloader = None
    cfg.train_dataloader.dataset.pipeline[1:] = [dict(type='RandomResizedCrop', scale=32), dict(type='PackInputs')]
    content = torch.load('epoch_2.pth', weights_only=True)

    def inferencer(stored: Config, config: object = None) -> ClassificationInferencer:
        content['meta']['config_dict'] = plain_values(stored.to_dict())
        torch.save(content, tmp_path / 'changed.pth')
        return ClassificationInferencer(tmp_path / 'changed.pth', device='cpu', config=config)

    for config in (None, cfg):
        resize, crop, _ = inferencer(cfg, config).reader.prepare.transforms
        assert (resize.scale, resize.edge, crop.crop_size) == (round(32 / 0.875), 'short', (32, 32))
    cfg.train_dataloader = None
    for config in (None, cfg, ROOT / 'configs/_base_/default_runtime.py'):
        with pytest.raises(ValueError, match='pipeline for a classifier.*config='):
            inferencer(cfg, config)
    with pytest.raises(CheckpointError, match='head.fc.weight'):
        (wrong := Config.fromfile(work / 'config.py')).model.head.num_classes = 5
        inferencer(cfg, wrong)


@pytest.mark.parametrize(('name', 'size'), [('finetune_in1k_100e', 224), ('finetune_384_in1k_10e', 384)])
def test_the_usual_pipeline_is_that_of_the_configs(name, size):
    resize, crop, pack = map(dict, usual_preparation((size, size), 'pillow'))
    pipeline = load_config(f'beit/{name}.py').test_dataloader.dataset.pipeline
    assert [resize, dict(crop, crop_size=crop['crop_size'][0]), pack] == [dict(step) for step in pipeline[1:]]

"""A linear head on frozen features of patches, and when frozen features are the start on a CPU."""

import contextlib
import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from calls import described, task_of
from label_maps import make_label_maps
from labelled import make_images
from mmengine.config import Config
from mmpretrain.models import ImageClassifier
from peers import dinov2_layout
from PIL import Image

import beit_mm
from beit_mm.apis.inferencers import SegmentationInferencer
from beit_mm.engine import fit_head
from beit_mm.features import evaluation
from beit_mm.own_images import images as finding
from beit_mm.own_images import run as runs
from beit_mm.own_images.images import find_images
from beit_mm.own_images.label_maps import find_label_maps
from beit_mm.own_images.run import Run
from beit_mm.own_images.task import FineTuning
from beit_mm.segmentation import SlidingSegmentor, segmentor

pytestmark = pytest.mark.long

SMALL = 'dinov2_vits14_reg4_pretrain'


@pytest.fixture(scope='module', autouse=True)
def small():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(finding, 'MIN_IMAGES', 10)
        patch.setattr(evaluation, 'PENALTIES', (1e-2,))  # several would be as good on so simple images
        yield


@pytest.fixture(scope='module')
def folders(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp('data')
    return dict(classes=make_images(root / 'images', 12) / 'train', maps=make_label_maps(root / 'maps', 12))


@pytest.fixture(scope='module')
def fitted(folders, base, tmp_path_factory) -> Path:
    """A segmentor of images that are seen at 117 x 164 pixels, which are no whole patches, in windows of 128."""
    run = tmp_path_factory.mktemp('fitted') / 'run'
    beit_mm.finetune(folders['maps'], run, base, epochs=1, freeze='all', short_side=117, batch=4, workers=0)
    return run


@pytest.fixture
def weights(tmp_path, monkeypatch) -> str:
    """A narrow stand-in for the released model, at hand."""
    monkeypatch.setenv('BEIT_MM_WEIGHTS', str(tmp_path))
    return dinov2_layout(tmp_path / f'{SMALL}.pth', width=256)


def test_a_head_on_patches_is_the_linear_fit_to_shares_of_their_classes(fitted, folders):
    """Truth: `choose_penalty` on features of both windows, with shares that are counted patch by patch."""
    inferencer = SegmentationInferencer(fitted / 'finetuned.pth', device='cpu')
    model, patch = inferencer.model, inferencer.model.divisor
    features, targets, indices = [], [], []
    for index, path in enumerate(finding.read_names(fitted / 'lists', 'train')):
        image = np.asarray(Image.open(folders['maps'] / 'images/training' / path))
        stored = np.asarray(Image.open(folders['maps'] / 'annotations/training' / path)).astype(int) - 1
        pixels = inferencer.reader.prepare(dict(img=image, ori_shape=image.shape[:2]))['inputs']
        assert pixels.shape == (3, 117, 164)
        labels = np.array(Image.fromarray(stored.astype(np.int32)).resize((164, 117), Image.Resampling.NEAREST))
        for left in (0, 36):
            window = model.data_preprocessor(dict(inputs=[pixels[:, :, left : left + 128]]))['inputs']
            with torch.no_grad():
                maps = model.backbone(torch.nn.functional.pad(window, (0, 0, 0, -117 % patch)))[0][0]
            for row, column in np.ndindex(maps.shape[1:]):
                part = labels[:, left : left + 128][row * patch :, column * patch :][:patch, :patch]
                known = part[part >= 0]
                if 2 * known.size >= patch**2:
                    features.append(maps[:, row, column])
                    targets.append(torch.tensor(np.bincount(known, minlength=3) / known.size).float())
                    indices.append(index)
    bank, shares = torch.stack(features), torch.stack(targets)
    standardise = evaluation.standardiser(bank)
    linear, _ = evaluation.choose_penalty(standardise(bank), shares, 3, torch.tensor(indices), by_class=True)
    found = model.decode_head.conv_seg(bank[:, :, None, None]).flatten(1).softmax(dim=1)
    # other sums, in another order and in half the precision on some CPUs
    assert (found - linear(standardise(bank)).softmax(dim=1)).abs().mean() < 0.01
    assert (found.argmax(dim=1) == shares.argmax(dim=1)).float().mean() > 0.95
    assert model.backbone.out_indices == [1] and model.backbone.frozen_stages == 3  # of three blocks


def test_what_was_fitted_segments_and_reports_without_advice_on_passes(fitted, folders, tmp_path):
    beit_mm.segment(fitted, folders['maps'] / 'images/validation', tmp_path / 'maps')
    right = []
    for path in (tmp_path / 'maps/labels').glob('*.png'):
        truth = np.asarray(Image.open(folders['maps'] / 'annotations/validation' / path.name)).astype(int) - 1
        right.append((np.asarray(Image.open(path)) == truth)[truth >= 0].mean())
    assert len(right) == 12 and np.mean(right) > 0.8
    assert 'more minutes' not in (fitted / 'report.md').read_text()


def test_a_large_image_is_seen_in_some_windows_and_gives_as_many_patches_as_others(fitted, monkeypatch):
    model = SegmentationInferencer(fitted / 'finetuned.pth', device='cpu').model
    seen = Mock(side_effect=model.extract_feat)
    monkeypatch.setattr(model, 'extract_feat', seen)
    monkeypatch.setattr(segmentor, 'MAX_WINDOWS', 3)
    labels = SimpleNamespace(data=torch.zeros(1, 300, 400, dtype=torch.long))
    sample = SimpleNamespace(gt_sem_seg=labels, sample_idx=7)
    batch = dict(inputs=[torch.zeros(3, 600, 800, dtype=torch.uint8)], data_samples=[sample])
    with torch.no_grad():
        features, shares, images = zip(*model.labelled_patches(batch, 30, torch.Generator()), strict=True)
    assert seen.call_count == 3 and [len(part) for part in features] == [10] * 3
    assert torch.cat(shares).argmax(dim=1).unique().tolist() == [0] and torch.cat(images).unique().tolist() == [7]


def test_a_head_in_little_time_is_fitted_to_patches_of_some_images(folders, base, tmp_path, monkeypatch, capsys):
    """By a clock that a second passes on with each image; half as much is for the fit, and as much to validate."""
    clock, extract = SimpleNamespace(now=0.0, monotonic=lambda: clock.now), SlidingSegmentor.extract_feat

    def a_second(*args: object) -> object:
        clock.now += 1
        return extract(*args)

    monkeypatch.setattr(SlidingSegmentor, 'extract_feat', a_second)
    monkeypatch.setattr(fit_head, 'MIN_MAPS', 2)
    monkeypatch.setattr(FineTuning, 'seconds_of_features', lambda *_: 1.0)
    monkeypatch.setattr(Run, 'write_report', lambda run: None)
    for module in (fit_head, runs):
        monkeypatch.setattr(module, 'time', clock)
    for minutes, number in ((20 / 54, 8), (1e-3, 2), (1, 12)):
        run = tmp_path / str(number)
        beit_mm.finetune(folders['maps'], run, base, minutes, batch=2, workers=0, freeze='all', short_side=90)
        assert json.loads((run / 'plan.json').read_text())['stages']['finetune']['validated'] == number
        assert (f'{number} of 12 images' in capsys.readouterr().out) == (number < 12)


def test_the_short_side_follows_from_the_minutes(weights, folders, monkeypatch):
    """Truth: features of an image with twice the side take 4.6 times as long."""
    for needed, side in ((1e9, 224), (0.6 * 15 * 60 / 2**2.2, 448), (1e-9, 504)):
        monkeypatch.setattr(FineTuning, 'seconds_of_features', lambda *_, needed=needed: needed)
        task = task_of(find_label_maps(folders['maps']), 'finetune', weights, device='cpu', freeze='all')
        assert abs(task.plan.scale.short_side - side) <= 14 and task.plan.scale.short_side % 14 == 0
        assert task.plan.head == 'linear' and task.fits_head
    task = task_of(find_label_maps(folders['maps']), 'finetune', weights, device='cpu', freeze='all', head='upernet')
    assert task.plan.head == 'upernet' and not task.fits_head


@pytest.mark.parametrize('find', [find_images, find_label_maps])
def test_frozen_features_are_the_start_on_a_cpu_where_they_fit_the_minutes(find, weights, folders, monkeypatch):
    folder = folders['maps' if find is find_label_maps else 'classes']
    if find is find_images:  # else all is trained after the fit, see below
        monkeypatch.setattr(FineTuning, 'seconds_of_features', lambda *_: 400.0)
    task = task_of(find(folder), 'finetune', device='cpu')  # label maps: timed
    assert task.plan.init == weights and task.fits_head and task.record.options['freeze'] == 'all'
    assert SMALL in described(task, 'advice')[0]
    monkeypatch.setattr(FineTuning, 'seconds_of_features', lambda *_: 601.0)
    task = task_of(find(folder), 'finetune', device='cpu')
    assert task.plan.init == 'demo' and not task.fits_head
    (advice,) = described(task, 'advice')
    assert f'--init {SMALL} --freeze all' in advice and '--minutes 17' in advice


def test_a_head_is_fitted_first_and_then_all_is_trained(weights, folders, tmp_path):
    """By the default on a CPU where the features take little of the time, and with weights that the call names."""
    named = dict(init=weights, epochs=1)
    for number, given in enumerate((dict(minutes=15), named, dict(named, lora=2))):
        run = tmp_path / str(number)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Run, 'train_in_time', Mock(side_effect=SystemExit))
            patch.setattr(Run, 'write_report', lambda run: None)
            with contextlib.suppress(SystemExit):
                beit_mm.finetune(folders['classes'], run, batch=4, workers=0, **given)
        stages = json.loads((run / 'plan.json').read_text())['stages']
        assert [*stages] == ['head', 'finetune'] and stages['head']['accuracy/top1'] > 50
        fitted = torch.load(run / 'head/iter_1.pth', weights_only=False)['state_dict']
        model = ImageClassifier(**{k: v for k, v in Config.fromfile(run / 'config.py').model.items() if k != 'type'})
        model.init_weights()
        assert fitted['head.fc.weight'].abs().max() > 0
        for name, tensor in model.head.state_dict().items():
            assert torch.equal(tensor, fitted[f'head.{name}']), name


@pytest.mark.parametrize('given', [dict(freeze='all'), dict(init='none')])
def test_no_head_is_fitted_first_where_it_is_all_or_there_are_no_weights(given, weights, folders):
    task = task_of(find_images(folders['classes']), 'finetune', **(dict(init=weights, device='cpu') | given))
    assert task.stages == ['finetune']


@pytest.mark.parametrize('given', [dict(lora=2), dict(freeze=1), dict(head='upernet'), dict(epochs=1)])
def test_what_the_call_gives_wins_over_frozen_features(given, weights, folders):
    task = task_of(find_label_maps(folders['maps']), 'finetune', device='cpu', **given)
    assert task.plan.init == 'demo' and not task.fits_head


def test_a_run_that_chose_frozen_features_is_resumed_with_them(weights, folders, tmp_path, monkeypatch):
    call = folders['maps'], tmp_path / 'run'
    with monkeypatch.context() as patch:
        patch.setattr(runs, 'fit_head_of_run', Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(SystemExit):
            beit_mm.finetune(*call, minutes=5, workers=0)
    monkeypatch.delenv('BEIT_MM_WEIGHTS')
    monkeypatch.setattr(FineTuning, 'seconds_of_features', Mock(side_effect=AssertionError))
    monkeypatch.setattr(Run, 'write_report', lambda run: None)
    beit_mm.finetune(*call)
    assert torch.load(tmp_path / 'run/finetuned.pth')['state_dict']['backbone.register_tokens'].shape == (1, 4, 256)


def test_a_training_image_whose_end_is_missing_costs_no_report(folders, base, tmp_path, capfd):
    """Its header can be read, so it is found only where its pixels are."""
    shutil.copytree(folders['maps'], tmp_path / 'maps')
    image = sorted((tmp_path / 'maps/images/training').iterdir())[3]
    image.write_bytes(image.read_bytes()[: image.stat().st_size // 2])
    options = dict(epochs=1, freeze='all', short_side=90, batch=4, workers=0)
    beit_mm.finetune(tmp_path / 'maps', tmp_path / 'run', base, **options)
    assert (tmp_path / 'run/report.html').is_file()
    assert re.search('1 of .* images cannot be read; their patches', ''.join(capfd.readouterr()))

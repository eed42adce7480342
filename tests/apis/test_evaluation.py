"""Evaluation of frozen features: colours are told apart, the tool's table and file, and what is refused."""

import json

import numpy as np
import pytest
import torch
from helpers import run_tool
from label_maps import make_label_maps, options
from labelled import BACKBONE, make_images
from mmseg.evaluation import IoUMetric

from beit_mm.features.evaluation import class_ious, confusion, evaluate_images, evaluate_patches
from beit_mm.features.extractor import FeatureExtractor
from beit_mm.registry import MODELS

TOOL = 'analysis/evaluate_features.py'


@pytest.fixture(scope='module')
def checkpoint(tmp_path_factory) -> str:
    """A backbone of three blocks with random weights, images of 32 pixels."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp('weights') / 'ours.pth'
    architecture = dict(num_heads=4)
    torch.save(dict(state_dict=MODELS.build(BACKBONE).state_dict(), meta=dict(architecture=architecture)), path)
    return str(path)


@pytest.fixture(scope='module')
def labelled(tmp_path_factory):
    return make_images(tmp_path_factory.mktemp('labelled'))


@pytest.fixture(scope='module')
def label_maps(tmp_path_factory):
    return make_label_maps(tmp_path_factory.mktemp('maps'))


@pytest.mark.parametrize('method', ['knn', 'linear'])
def test_images_are_told_apart_by_their_colour(method, checkpoint, labelled):
    extractor = FeatureExtractor(checkpoint, 'cpu')
    found = evaluate_images(extractor, labelled / 'train', labelled / 'val', method, k=3)
    assert found['top1'] == 100 and found['images'] == [18, 18] and found['classes'] == 3
    features = [np.stack([row['mean'] for row in extractor(labelled / split)]) for split in ('train', 'val')]
    bank, queries = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in features)
    nearest = (queries @ bank.T).argmax(axis=1) // 6  # the images of one class follow each other
    assert (nearest == np.arange(18) // 6).all()  # as plain nearest neighbours of the extractor's features


@pytest.mark.parametrize('method', ['knn', 'linear'])
def test_pixels_are_told_apart_by_their_colour(method, checkpoint, label_maps):
    extractor = FeatureExtractor(checkpoint, 'cpu', whole=True)
    data = [options(label_maps, split) for split in ('training', 'validation')]
    found = evaluate_patches(extractor, *data, method, k=3, max_patches=50)
    assert found['miou'] > 70 and found['patches'] <= 50 and found['images'] == [4, 4]
    assert found['miou'] == pytest.approx(np.mean(found['iou']), abs=1e-4)
    assert (method == 'linear') == ('penalty' in found)


def test_ious_of_classes_are_mmsegs():
    predicted, labels = torch.randint(0, 3, (9, 9)), torch.randint(0, 3, (9, 9))
    areas = IoUMetric.intersect_and_union(predicted, labels, 4, 255)
    expected = IoUMetric.total_area_to_metrics(*areas)['IoU']
    assert np.isnan(expected[3])
    np.testing.assert_allclose(class_ious(confusion(predicted, labels, 4)), expected, atol=1e-5)


@pytest.mark.parametrize('method', ['knn', 'linear', 'dense-knn', 'dense-linear'])
def test_the_tool_prints_a_table_and_writes_a_file(method, checkpoint, labelled, label_maps, tmp_path, capsys):
    folders = [label_maps] if method.startswith('dense') else [labelled / 'train', labelled / 'val']
    out = tmp_path / 'deep/out.json'
    run_tool(TOOL, method, checkpoint, *folders, '--random', '--device', 'cpu', '--layer', -1, '--json', out)
    report = json.loads(out.read_text())
    figure = 'miou' if method.startswith('dense') else 'top1'
    printed = capsys.readouterr().out
    assert report['method'] == method and list(report['results']) == [checkpoint, 'random weights']
    for name, row in report['results'].items():
        assert row['layer'] == 2 and f'{name:{len(checkpoint)}}{row[figure]:9.1f}' in printed


@pytest.mark.parametrize(
    ('words', 'message'),
    [
        (['knn', '{x}/none', '{x}/train'], "no folder '.*none/'"),
        (['linear', '{x}/train', '{m}/images'], 'training images have 3 classes, .* or their names differ'),
        (['dense-knn', '{x}'], "classes is 'classes.txt'; no such file"),
        (['dense-linear', '{m}', '--classes', 'mmseg.Nothing'], 'no registered dataset'),
        (['dense-knn', '{m}', '--max-patches', '0'], 'max_patches is 0'),
        (['dense-knn', '{m}', '--keep-zero-label'], 'holds label 3'),
        (['knn', '{x}/train', '{x}/val', '--layer', '7'], 'block 7 does not exist in a model of 3 blocks'),
    ],
)
def test_a_mistake_is_one_line(words, message, checkpoint, labelled, label_maps):
    method, *others = (word.format(x=labelled, m=label_maps) for word in words)
    with pytest.raises(SystemExit, match=f'error: .*{message}') as end:
        run_tool(TOOL, method, checkpoint, *others, '--device', 'cpu')
    assert str(end.value.code).isprintable()

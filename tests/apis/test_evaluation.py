"""Evaluation of frozen features: colours are told apart, the tool's table and file, and what is refused."""

import json
from types import SimpleNamespace

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
def data(tmp_path_factory) -> SimpleNamespace:
    """A backbone of three blocks with random weights, images of 32 pixels; labelled images, and label maps."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp('evaluation')
    content = dict(state_dict=MODELS.build(BACKBONE).state_dict(), meta=dict(architecture=dict(num_heads=4)))
    torch.save(content, folder / 'ours.pth')
    images, maps = make_images(folder / 'images'), make_label_maps(folder / 'maps')
    return SimpleNamespace(checkpoint=str(folder / 'ours.pth'), images=images, maps=maps)


@pytest.mark.parametrize('method', ['knn', 'linear'])
def test_images_and_pixels_are_told_apart_by_their_colour(method, data):
    extractor = FeatureExtractor(data.checkpoint, 'cpu')
    found = evaluate_images(extractor, data.images / 'train', data.images / 'val', method, k=3)
    assert found['top1'] == 100 and found['images'] == [18, 18] and found['classes'] == 3
    extractor = FeatureExtractor(data.checkpoint, 'cpu', whole=True)
    folders = [options(data.maps, split) for split in ('training', 'validation')]
    found = evaluate_patches(extractor, *folders, method, k=3, max_patches=50)
    assert found['miou'] > 70 and found['patches'] <= 50 and found['images'] == [4, 4]
    assert found['miou'] == pytest.approx(np.mean(found['iou']), abs=1e-4)
    assert (method == 'linear') == ('penalty' in found)


def test_ious_of_classes_are_mmsegs():
    predicted, labels = torch.randint(0, 3, (9, 9)), torch.randint(0, 3, (9, 9))
    areas = IoUMetric.intersect_and_union(predicted, labels, 4, 255)
    expected = IoUMetric.total_area_to_metrics(*areas)['IoU']
    assert np.isnan(expected[3])
    np.testing.assert_allclose(class_ious(confusion(predicted, labels, 4)), expected, atol=1e-5)


@pytest.mark.parametrize(
    ('method', 'figure', 'folders'), [('knn', 'top1', '{x}/train {x}/val'), ('dense-linear', 'miou', '{m}')]
)
def test_the_tool_prints_a_table_and_writes_a_file(method, figure, folders, data, tmp_path, capsys):
    words = folders.format(x=data.images, m=data.maps).split()
    out = tmp_path / 'deep/out.json'
    run_tool(TOOL, method, data.checkpoint, *words, '--random', '--device', 'cpu', '--layer', -1, '--json', out)
    report, printed = json.loads(out.read_text()), capsys.readouterr().out
    assert report['method'] == method and list(report['results']) == [data.checkpoint, 'random weights']
    for name, row in report['results'].items():
        assert row['layer'] == 2 and f'{name:{len(data.checkpoint)}}{row[figure]:9.1f}' in printed


@pytest.mark.parametrize(
    ('words', 'message'),
    [
        ('knn {x}/none {x}/train', "no folder '.*none/'"),
        ('linear {x}/train {m}/images', 'training images have 3 classes, .* or their names differ'),
        ('dense-knn {x}', "classes is 'classes.txt'; no such file"),
        ('dense-linear {m} --classes mmseg.Nothing', 'no registered dataset'),
        ('dense-knn {m} --max-patches 0', 'max_patches is 0'),
        ('dense-knn {m} --keep-zero-label', 'holds label 3'),
        ('knn {x}/train {x}/val --layer 7', 'block 7 does not exist in a model of 3 blocks'),
    ],
)
def test_a_mistake_is_one_line(words, message, data):
    method, *others = words.format(x=data.images, m=data.maps).split()
    with pytest.raises(SystemExit, match=f'error: .*{message}') as end:
        run_tool(TOOL, method, data.checkpoint, *others, '--device', 'cpu')
    assert str(end.value.code).isprintable()

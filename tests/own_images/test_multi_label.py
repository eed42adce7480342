"""Classifiers of images with several labels each: from a table to report, answers and an ONNX file."""

import csv
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import ROOT
from PIL import Image

import beit_mm
from beit_mm.checkpoint.checkpoint import Checkpoint
from beit_mm.errors import UserError
from beit_mm.features import evaluation
from beit_mm.own_images import classification
from beit_mm.own_images import images as finding
from beit_mm.own_images.report import Metric
from beit_mm.own_images.run import Run

pytestmark = pytest.mark.long

NUMBER = 48


@pytest.fixture(scope='module', autouse=True)
def few_images():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(finding, 'MIN_IMAGES', 10)
        yield


@pytest.fixture(scope='module')
def folder(tmp_path_factory) -> Path:
    """Pictures whose halves are red and green or dark, and a table of the colours."""
    root = tmp_path_factory.mktemp('colours')
    rows = ['image,red,green,=1+1']
    for index in range(NUMBER):
        pixels = np.random.default_rng(index).integers(0, 80, (40, 40, 3), dtype=np.uint8)
        red, green = index % 2, index // 2 % 2
        pixels[:20, :, 0] += np.uint8(150 * red)
        pixels[20:, :, 1] += np.uint8(150 * green)
        Image.fromarray(pixels).save(root / f'{index}.png')
        rows.append(f'{index},{red},{green},{int(index < 8)}')
    (root / '5.png').write_bytes(b'broken')
    (root / 'table.csv').write_text('\n'.join(rows))
    return root


@pytest.fixture(scope='module')
def weights(folder, base, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp('run') / 'out'
    return beit_mm.finetune(folder, out, base, batch=8, workers=0, epochs=10, balance=True)


def test_the_report_compares_average_precisions_with_frequencies(weights):
    text = (weights.parent / 'report.md').read_text()
    assert 'mAP on held-out images' in text and 'class frequencies alone' in text
    rows = [line.split(' | ') for line in text.splitlines() if line.startswith(('| red', '| green', '| =1'))]
    assert len(rows) == 3 and all(len(row) == 5 for row in rows)
    assert Checkpoint.open(weights).meta['config_dict']['model']['head']['type'] == 'MultiLabelLinearClsHead'


def test_answers_have_a_probability_of_each_class_and_all_likely_names(weights, folder, tmp_path):
    images = [folder / f'{index}.png' for index in (0, 1, 5)]
    first, second, broken = beit_mm.classify(weights, images, out=tmp_path / 'a.csv')
    assert [*first['probabilities']] == ['=1+1', 'green', 'red'] and 'error' in broken
    for answer in (first, second):
        assert answer['names'] == [name for name, share in answer['probabilities'].items() if share >= 0.5]
    assert second['probabilities']['red'] > first['probabilities']['red']  # only the second has it
    with open(tmp_path / 'a.csv', encoding='utf-8-sig') as file:
        head, *rows = csv.reader(file)
    assert head == ['path', 'classes', "'=1+1", 'green', 'red', 'error'] and rows[2][5] == broken['error']
    for row, answer in zip(rows, (first, second), strict=False):
        assert row[1].lstrip("'") == '; '.join(answer['names'])
        assert [*map(float, row[2:5])] == pytest.approx([*answer['probabilities'].values()], abs=6e-4)
    with pytest.raises(UserError, match='leave out --min-confidence'):
        beit_mm.classify(weights, images, out=tmp_path / 'sorted', min_confidence=0.5)


def test_the_program_without_torch_names_the_same_classes(weights, folder, tmp_path):
    for package in ('onnx', 'onnxruntime', 'onnxscript'):
        pytest.importorskip(package)
    path, images = beit_mm.export(weights, tmp_path / 'model.onnx'), [folder / '0.png', folder / '3.png']
    words = [sys.executable, ROOT / 'tools/onnx_predict.py', path, *images]
    lines = subprocess.run(words, capture_output=True, text=True, timeout=100, check=True).stdout.splitlines()
    for line, answer in zip(lines, beit_mm.classify(weights, images), strict=True):
        shown = ', '.join(f'{name} {answer["probabilities"][name]:.3f}' for name in answer['names'])
        assert line.endswith(f': {shown or "none"}')


@pytest.mark.parametrize('options', [dict(freeze='all'), dict(merge='x=red,green')])
def test_options_for_one_label_are_refused(folder, base, tmp_path, options):
    with pytest.raises(UserError, match='several labels; leave out --merge and --freeze all'):
        beit_mm.finetune(folder, tmp_path / 'run', base, **options)


def test_an_interrupted_run_goes_on(folder, base, tmp_path, monkeypatch):
    monkeypatch.setattr(Run, 'write_report', lambda run: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises((SystemExit, KeyboardInterrupt)):
        beit_mm.finetune(folder, tmp_path / 'run', base, batch=8, workers=0, epochs=1)
    monkeypatch.undo()
    assert beit_mm.finetune(folder, tmp_path / 'run').is_file() and (tmp_path / 'run/report.md').is_file()


def test_average_precision_by_its_definition_and_gains_with_errors():
    generator = np.random.default_rng(0)
    truth = generator.random((60, 3)) < [0.5, 0.3, 0]
    scores = 0.7 * truth + generator.random((60, 3))
    found = evaluation.average_precisions(torch.tensor(scores), torch.tensor(truth).int())
    for label in (0, 1):
        ranked = truth[np.argsort(-scores[:, label]), label]
        shares = ranked.cumsum() / np.arange(1, 61)
        assert found[0, label] == pytest.approx(100 * shares[ranked].mean(), abs=1e-3)
        orders = [generator.permutation(truth[:, label]) for _ in range(4000)]
        chances = [(order.cumsum() / np.arange(1, 61))[order].mean() for order in orders]
        assert found[1, label] == pytest.approx(100 * np.mean(chances), abs=0.5)
    assert found[:, 2].isnan().all()  # no image has it
    measured, gain = classification.compare_precisions(torch.tensor(scores), torch.tensor(truth).int())
    assert measured['mAP'].value == pytest.approx(float(found[0, :2].mean())) and gain.sign == 'better than'
    guesses = [torch.tensor(generator.random((60, 3))) for _ in range(20)]
    gains = [classification.compare_precisions(guess, torch.tensor(truth).int())[1] for guess in guesses]
    assert [gain.sign for gain in gains].count('too close to tell from') > 15 and 1 < gains[0].error < 20


@pytest.mark.parametrize(('number', 'with_label'), [(11, 2), (30, 4), (2, 1), (1, 1), (3, 0)])
def test_few_labels_have_an_error_and_decide_nothing_alone(number, with_label):
    """A bootstrap sample of few images may have none with a label."""
    truth = torch.zeros(number, 1, dtype=torch.int)
    truth[:with_label] = 1
    measured, gain = classification.compare_precisions(torch.rand(number, 1), truth)
    assert gain.error > 0 and measured['mAP'].error >= 0  # not nan
    for value in (1.0, -1.0, float('nan')):
        assert Metric(value, float('nan')).sign == Metric(value, float('inf')).sign == 'too close to tell from'

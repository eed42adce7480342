"""Evaluation of frozen features: colours are told apart, the tool's table and file, and what is refused."""

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import run_tool
from label_maps import make_label_maps
from labelled import make_images, save_backbone
from mmseg.evaluation import IoUMetric

from beit_mm.features import evaluation
from beit_mm.features.evaluation import (
    RIDGE_PENALTIES,
    choose_attentive,
    class_ious,
    confusion,
    fit_attentive,
    hits_and_unions,
    hold_patches,
    linear_predict,
    ridge,
)
from beit_mm.models.probe import attentive_classifier

TOOL = 'analysis/evaluate_features.py'


@pytest.fixture(scope='module')
def data(tmp_path_factory) -> SimpleNamespace:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp('evaluation')
    images, maps = make_images(folder / 'images'), make_label_maps(folder / 'maps')
    return SimpleNamespace(checkpoint=save_backbone(folder / 'ours.pth'), images=images, maps=maps)


@pytest.mark.parametrize('method', ['knn', 'linear', 'attentive', 'dense-knn', 'dense-linear'])
def test_images_and_pixels_are_told_apart_by_their_colour(method, data, tmp_path, capsys):
    """Of random weights too: in the table and in the file."""
    dense, out = method.startswith('dense'), tmp_path / 'deep/out.json'
    folders = [data.maps] if dense else [data.images / 'train', data.images / 'val']
    words = '--layer', -2, '--random', '--device', 'cpu', '--json', out
    words += (('--max-patches', 50) if dense else ()) + (('--k', 3) if method.endswith('knn') else ())
    words += ('--queries', 4) if method == 'attentive' else ()
    run_tool(TOOL, method, data.checkpoint, *folders, *words)
    report, printed = json.loads(out.read_text()), capsys.readouterr().out
    assert report['method'] == method and list(report['results']) == [data.checkpoint, 'random weights']
    for name, row in report['results'].items():
        figure, least = (row['miou'], 70) if dense else (row['top1'], 100)
        assert f'{name:{len(data.checkpoint)}}{figure:9.1f}' in printed and figure >= least
        assert row['layer'] == 1 and row['images'] == ([4, 4] if dense else [18, 18])
        assert ('penalty' in row) == method.endswith('linear') and (row.get('queries') == 4) == (method == 'attentive')
        assert dense or len(row['right']) == 18 and 100 * np.mean(row['right']) == pytest.approx(figure)
        assert not dense or row['patches'] <= 50 and figure == pytest.approx(np.mean(row['iou']), abs=1e-4)


@pytest.mark.parametrize(
    ('method', 'words'),
    [
        ('linear', '--k 3'),
        ('dense-knn', '--kind class_token'),
        ('knn', '--classes names.txt'),
        ('knn', '--seed 3'),
        ('linear', '--queries 3'),
        ('attentive', '--kind class_token'),
        ('dense-knn', '--max-patches 0'),
    ],
)
def test_options_without_effect_or_sense_are_refused(method, words, capsys):
    with pytest.raises(SystemExit, match='2'):
        run_tool(TOOL, method, 'gone.pth', *['folder'] * (1 if 'dense' in method else 2), *words.split())
    assert words.split()[0] in capsys.readouterr().err.splitlines()[-1]


def needles(number: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Features (N, 49, 16) of noise with one patch that shows the class (N,), of three, and that it is the one."""
    patches, labels = torch.randn(number, 49, 16, generator=generator), torch.arange(number) % 3
    places = torch.randint(49, (number,), generator=generator)
    patches[torch.arange(number), places, 15] += 12
    patches[torch.arange(number), places, labels] += 4
    return patches, labels


def test_an_attentive_probe_finds_the_patch_that_the_mean_hides():
    generator = torch.Generator().manual_seed(0)
    (patches, labels), (asked, truth) = needles(240, generator), needles(120, generator)
    of_means, _ = linear_predict(asked.mean(dim=1), patches.mean(dim=1), labels, 3)
    shares = []
    for _ in range(2):
        classify, found = choose_attentive((patches.clone(), labels), 3, seed=0)
        shares.append((classify(asked) == truth).double().mean())
        assert len(found['held_out']) == 6
        assert found['held_out'][f'rate {found["rate"]:g}, {found["epochs"]} epochs'] == max(found['held_out'].values())
    assert shares[0] == shares[1] and min(shares) > 0.85 and (of_means == truth).double().mean() < 0.65


def test_an_attentive_probe_learns_by_adamw_and_half_a_cosine():
    patches, labels = needles(32, torch.Generator().manual_seed(0))
    (probe,) = fit_attentive((patches, labels), torch.arange(32), 3, 1, [1e-2], epochs=2, seed=5)
    with torch.random.fork_rng():
        torch.manual_seed(5)
        expected = attentive_classifier(16, 1, 3)
    optimizer, generator = torch.optim.AdamW(expected.parameters(), lr=1e-2), torch.Generator().manual_seed(5)
    orders = [torch.randperm(32, generator=generator).split(16) for _ in range(2)]
    for step, rows in enumerate([*orders[0], *orders[1]]):
        optimizer.param_groups[0]['lr'] = 1e-2 * (1 + math.cos(math.pi * step / 4)) / 2
        expected.zero_grad()
        F.cross_entropy(expected(patches[rows]), labels[rows]).backward()
        optimizer.step()
    for name, tensor in expected.state_dict().items():
        torch.testing.assert_close(probe.state_dict()[name], tensor, atol=1e-5, rtol=1e-4)


def test_patches_that_do_not_fit_are_left_out_evenly_and_said(monkeypatch, warnings):
    patches, labels = torch.randn(100, 4, 8), torch.arange(100)
    batches = [*zip(patches.split(7), labels.split(7), strict=True)]
    whole, known = hold_patches(batches, 100)
    assert whole.dtype == torch.float32 and torch.equal(whole, patches) and torch.equal(known, labels)
    monkeypatch.setattr(evaluation, 'HALF_FROM', 0)
    monkeypatch.setattr(evaluation, 'MOST_HELD', 25 * patches[0].nbytes // 2 + 1)
    some, known = hold_patches(batches, 100)
    assert known.tolist() == [*range(3, 100, 4)] and torch.equal(some, patches[known].half())
    (said,) = warnings()
    assert '25' in said and '100' in said


def test_ious_of_classes_are_mmsegs():
    predicted, labels = torch.randint(0, 3, (9, 9)), torch.randint(0, 3, (9, 9))
    areas = IoUMetric.intersect_and_union(predicted, labels, 4, 255)
    expected = IoUMetric.total_area_to_metrics(*areas)['IoU']
    assert np.isnan(expected[3])
    np.testing.assert_allclose(class_ious(*hits_and_unions(confusion(predicted, labels, 4))), expected, atol=1e-5)


def test_ridge_is_least_squares_with_the_penalty_of_leave_one_out():
    generator = np.random.default_rng(0)
    labels = generator.integers(0, 3, 40)
    x = generator.normal(size=(40, 12)) + np.eye(12)[labels]
    held_out, ones = generator.normal(size=(50, 12)), np.ones((50, 1))

    def predict(rows: np.ndarray, queries: np.ndarray, penalty: float) -> np.ndarray:
        """By the normal equations: an intercept is a column of ones without a penalty."""
        design = np.hstack([x[rows], ones[: len(rows)]])
        matrix = design.T @ design + penalty * np.diag([1.0] * 12 + [0.0])
        weights = np.linalg.solve(matrix, design.T @ np.eye(3)[labels[rows]])
        return (np.hstack([queries, ones[: len(queries)]]) @ weights).argmax(axis=1)

    def left_out(penalty: float) -> int:
        rows = np.arange(40)
        return sum(predict(rows[rows != row], x[[row]], penalty)[0] == labels[row] for row in rows)

    expected = predict(np.arange(40), held_out, max(RIDGE_PENALTIES, key=left_out))
    assert ridge(*map(torch.from_numpy, (x, labels, held_out))).tolist() == expected.tolist()

"""Lists of few labels, and what is reached without a network, on images whose answer is known."""

import json
import random
import runpy
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import ROOT, run_tool
from labelled import CLASSES, make_images
from PIL import Image

from beit_mm.features.evaluation import RIDGE_PENALTIES, ridge

BASELINES = 'analysis/trivial_baselines.py'


def test_a_list_holds_what_the_rule_says(tmp_path):
    make_images(tmp_path, per_class=6)
    arguments = (tmp_path / 'train', 4, tmp_path / 'lists/labels.txt', '--seed', 3)
    run_tool('datasets/sample_labels.py', *arguments)
    generator, expected = random.Random(3), []
    for name in CLASSES:
        images = [f'{name}/{index}.png' for index in range(6)]
        generator.shuffle(images)
        expected += images[:4]
    assert arguments[2].read_text().splitlines() == expected
    run_tool('datasets/sample_labels.py', tmp_path / 'train', 100, tmp_path / 'all.txt')
    assert len((tmp_path / 'all.txt').read_text().splitlines()) == 18
    for folder, number, message in ((tmp_path / 'none', 4, 'no folder'), (tmp_path / 'train', 0, 'per_class is 0')):
        with pytest.raises(SystemExit, match=f'error: {message}'):
            run_tool('datasets/sample_labels.py', folder, number, tmp_path / 'x.txt')


def test_colours_are_told_apart_by_thumbnails(tmp_path):
    make_images(tmp_path, per_class=6)
    (tmp_path / 'labels.txt').write_text('blue/1.png\nblue/2.png\ngreen/1.png\nred/0.png\n')
    options = [f'data_root={tmp_path}', f'train_dataloader.dataset.ann_file={tmp_path}/labels.txt']
    config = ROOT / 'configs/demo/finetune_folder.py'
    run_tool(BASELINES, config, '--out', tmp_path / 'out.json', '--cfg-options', *options)
    figures = json.loads((tmp_path / 'out.json').read_text())
    assert figures == dict(most_frequent=pytest.approx(100 / 3), nearest=100, ridge=100)


def test_ridge_is_least_squares_with_the_penalty_of_leave_one_out():
    generator = np.random.default_rng(0)
    labels = generator.integers(0, 3, 40)
    x = generator.normal(size=(40, 12)) + np.eye(12)[labels]
    held_out = generator.normal(size=(50, 12))
    targets = np.eye(3)[labels]

    def fit(rows: np.ndarray, penalty: float) -> tuple[np.ndarray, np.ndarray]:
        """Weights and intercept: an intercept is a column of ones without a penalty."""
        design = np.hstack([x[rows], np.ones((len(rows), 1))])
        inverse = np.linalg.inv(design.T @ design + penalty * np.diag([1.0] * 12 + [0.0]))
        weights = inverse @ design.T @ targets[rows]
        return weights[:12], weights[12]

    def left_out(penalty: float) -> float:
        hits = 0
        for row in range(40):
            weights, level = fit(np.delete(np.arange(40), row), penalty)
            hits += (x[row] @ weights + level).argmax() == labels[row]
        return hits / 40

    weights, level = fit(np.arange(40), max(RIDGE_PENALTIES, key=left_out))
    found = ridge(torch.from_numpy(x), torch.from_numpy(labels), torch.from_numpy(held_out))
    assert found.tolist() == (held_out @ weights + level).argmax(axis=1).tolist()


@pytest.fixture
def scenes(tmp_path) -> Path:
    """Left half class 1, right half class 2, where a red disc is class 3; a row without a label."""
    for split, number in (('training', 6), ('validation', 3)):
        for kind in ('images', 'annotations'):
            (tmp_path / kind / split).mkdir(parents=True)
        for index in range(number):
            labels = np.repeat([[1] * 40 + [2] * 40], 60, axis=0).astype(np.uint8)
            rows, columns = np.indices(labels.shape)
            top, left = np.random.default_rng([number, index]).integers(15, 45, 2)
            labels[(rows - top) ** 2 + (columns - left) ** 2 < 100] = 3
            labels[0] = 0
            pixels = np.array([[0, 0, 0], [90, 90, 90], [90, 90, 90], [250, 0, 0]], dtype=np.uint8)[labels]
            Image.fromarray(pixels).save(tmp_path / 'images' / split / f'{index}.png')
            Image.fromarray(labels).save(tmp_path / 'annotations' / split / f'{index}.png')
    (tmp_path / 'classes.txt').write_text('left\nright\nball\n')
    return tmp_path


def test_positions_and_colours(scenes, tmp_path):
    pytest.importorskip('mmseg')
    options = [f'{split}_dataloader.dataset.data_root={scenes}' for split in ('train', 'val')]
    config = ROOT / 'configs/demo/camvid_setr_pup.py'
    run_tool(BASELINES, config, '--out', tmp_path / 'out.json', '--cfg-options', *options)
    figures = json.loads((tmp_path / 'out.json').read_text())
    # right is half of what is labelled, and nothing else is predicted
    assert figures['most_frequent'] == pytest.approx(100 / 3 / 2, abs=1)
    assert 40 < figures['position'] < 70  # the two halves, with holes, and no ball
    assert figures['position_colour'] > 90


def test_labels_are_enlarged_by_the_nearest():
    nearest = runpy.run_path(str(ROOT / 'tools' / BASELINES))['nearest']
    labels = np.arange(6).reshape(2, 3)
    assert np.array_equal(nearest(labels, (4, 6)), labels.repeat(2, axis=0).repeat(2, axis=1))
    assert np.array_equal(nearest(labels.repeat(3, axis=0).repeat(3, axis=1), (2, 3)), labels)

"""Lists of few labels, ridge regression, and what label maps give away without a network."""

import json
import random

import numpy as np
import pytest
import torch
from helpers import refused, run_tool
from labelled import CLASSES, make_images
from PIL import Image

from beit_mm.features.evaluation import RIDGE_PENALTIES, ridge


def test_a_list_holds_what_the_rule_says(tmp_path):
    make_images(tmp_path, per_class=6)
    run_tool('datasets/sample_labels.py', tmp_path / 'train', 4, tmp_path / 'lists/labels.txt', '--seed', 3)
    generator, expected = random.Random(3), []
    for name in CLASSES:
        images = [f'{name}/{index}.png' for index in range(6)]
        generator.shuffle(images)
        expected += images[:4]
    assert (tmp_path / 'lists/labels.txt').read_text().splitlines() == expected
    refused('per_class is 0', 'sample_labels', tmp_path / 'train', 0, tmp_path / 'x.txt')


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


def test_positions_and_colours(tmp_path):
    """Left half class 1, right half class 2, where a blue disc is class 3; a row without a label."""
    pytest.importorskip('mmseg')
    (rows, columns), colours = np.indices((60, 80)), np.array([[0] * 3, [90] * 3, [90] * 3, [90, 90, 250]], np.uint8)
    for name in [f'training/{index}.png' for index in range(6)] + [f'validation/{index}.png' for index in range(3)]:
        top, left = np.random.default_rng([*name.encode()]).integers(15, 45, 2)
        labels = np.where((rows - top) ** 2 + (columns - left) ** 2 < 100, 3, 1 + columns // 40).astype(np.uint8)
        labels[0] = 0
        for kind, pixels in dict(images=colours[labels], annotations=labels).items():
            (tmp_path / kind / name).parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(tmp_path / kind / name)
    (tmp_path / 'classes.txt').write_text('left\nright\nball\n')
    words = '--out', tmp_path / 'out.json', '--cfg-options', f'data_root={tmp_path}'
    run_tool('analysis/trivial_baselines.py', 'demo/camvid_setr_pup', *words)
    figures = json.loads((tmp_path / 'out.json').read_text())
    # right is half of what is labelled, and nothing else is predicted
    assert figures['most_frequent'] == pytest.approx(100 / 3 / 2, abs=1)
    assert 40 < figures['position'] < 70  # the two halves, with holes, and no ball
    assert figures['position_colour'] > 90

"""Boxes of random erasing against timm's own."""

import random

import numpy as np
import pytest
import torch
from mmengine.registry import TRANSFORMS
from timm.data.random_erasing import RandomErasing as TimmRandomErasing

from beit_mm.datasets import RandomErasing
from beit_mm.datasets.samplers import SampleKey, seed_generators

SIZE = (60, 100)


def box_of(erase: RandomErasing) -> tuple | None:
    return erase(dict(img=np.zeros((*SIZE, 3), np.uint8))).get('erase_box')


def timm_box(erase: TimmRandomErasing) -> tuple | None:
    image = erase(torch.full((1, *SIZE), 100.0))[0]
    if not (image != 100).any():
        return None
    rows, columns = torch.where(image != 100)
    top, left = rows.min().item(), columns.min().item()
    return top, left, rows.max().item() - top + 1, columns.max().item() - left + 1


@pytest.mark.parametrize(
    'settings, timm_settings',
    [
        (dict(), dict(probability=0.25)),
        (dict(prob=1.0, area=(0.1, 0.9)), dict(probability=1.0, min_area=0.1, max_area=0.9)),
    ],
)
def test_boxes_are_timms(settings, timm_settings):
    ours, theirs = RandomErasing(**settings), TimmRandomErasing(mode='pixel', device='cpu', **timm_settings)
    found = 0
    for seed in range(400):
        random.seed(seed)
        expected = timm_box(theirs)
        random.seed(seed)
        assert box_of(ours) == expected
        found += expected is not None
    share = found / 400
    assert abs(share - ours.prob) < 0.09  # 4 deviations of 400 coins; in a long shape not every box fits


def test_box_depends_on_the_sample_only():
    boxes = []
    for index in (3, 5, 3):
        seed_generators(SampleKey(1, 2, index))
        boxes.append(box_of(RandomErasing(prob=1.0)))
    assert boxes[0] == boxes[2] != boxes[1]


def test_old_box_does_not_survive():
    assert 'erase_box' not in RandomErasing(prob=0.0)(dict(img=np.zeros((8, 8, 3)), erase_box=(0, 0, 2, 2)))


@pytest.mark.parametrize('wrong', [dict(prob=1.5), dict(area=(0.3, 0.1)), dict(area=(0, 0.1))])
def test_wrong_numbers(wrong):
    with pytest.raises(ValueError, match='expected 0 to 1 each'):
        TRANSFORMS.build(dict(type='beit_mm.RandomErasing', **wrong))

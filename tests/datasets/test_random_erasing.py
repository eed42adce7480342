"""Boxes of random erasing against timm's own."""

import random

import numpy as np
import torch
from timm.data.random_erasing import RandomErasing as TimmRandomErasing

from beit_mm.datasets import RandomErasing

SIZE = (60, 100)


def timm_box(erase: TimmRandomErasing) -> tuple | None:
    image = erase(torch.full((1, *SIZE), 100.0))[0]
    if not (image != 100).any():
        return None
    rows, columns = torch.where(image != 100)
    top, left = rows.min().item(), columns.min().item()
    return top, left, rows.max().item() - top + 1, columns.max().item() - left + 1


def test_boxes_are_timms_and_old_ones_do_not_survive():
    for settings in (dict(probability=0.25), dict(probability=1.0, min_area=0.1, max_area=0.9)):
        area = settings.get('min_area', 0.02), settings.get('max_area', 1 / 3)
        ours, theirs = (
            RandomErasing(settings['probability'], area),
            TimmRandomErasing(mode='pixel', device='cpu', **settings),
        )
        for seed in range(300):
            random.seed(seed)
            expected = timm_box(theirs)
            random.seed(seed)
            assert ours(dict(img=np.zeros((*SIZE, 3), np.uint8), erase_box=(0, 0, 2, 2))).get('erase_box') == expected
    assert (RandomErasing().prob, RandomErasing().area) == (0.25, (0.02, 1 / 3))

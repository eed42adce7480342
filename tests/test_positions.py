"""Bias tables: the index against its definition, resizing against SciPy's FITPACK spline."""

import numpy as np
import pytest
import torch
from scipy.interpolate import RectBivariateSpline

from beit_mm.positions import (
    bias_from_table,
    geometric_offsets,
    num_relative_positions,
    relative_position_index,
    resize_bias_table,
)


def test_index_names_the_offset_of_every_pair():
    height, width = grid = (3, 5)
    index = relative_position_index(grid)
    for query in range(height * width):
        for key in range(height * width):
            down = query // width - key // width + height - 1
            right = query % width - key % width + width - 1
            assert index[1 + query, 1 + key] == down * (2 * width - 1) + right
    total = num_relative_positions(grid)
    assert [num_relative_positions((side, side)) for side in (7, 14, 24)] == [172, 732, 2212]  # as published
    assert set(index[0, 1:].tolist()) == {total - 3}  # cls -> patch
    assert set(index[1:, 0].tolist()) == {total - 2}  # patch -> cls
    assert index[0, 0] == total - 1


@pytest.mark.parametrize(('target', 'ratio'), [(24, 1.090307), (30, 1.125056), (32, 1.134918), (40, 1.168504)])
def test_ratio_of_the_geometric_sequence(target, ratio):
    offsets = geometric_offsets(14, target)
    assert offsets[13] == 0 and np.diff(offsets[13:])[:2] == pytest.approx([1, ratio], abs=2e-6)


SHAPES = [((14, 14), (side, side)) for side in (24, 32, 40, 15, 8)]
SHAPES += [((40, 40), (32, 48)), ((14, 14), (14, 30)), ((12, 16), (40, 25))]


@pytest.mark.parametrize(('source', 'target'), SHAPES)
def test_resizing_equals_fitpack(source, target):
    table = torch.randn(num_relative_positions(source), 3)
    x, y = (
        np.arange(1.0 - side, side) if side == wanted else geometric_offsets(side, wanted)
        for side, wanted in zip(source, target, strict=True)
    )
    x_new, y_new = (np.arange(1.0 - wanted, wanted) for wanted in target)
    resized = resize_bias_table(table, source, target)
    for head in range(3):
        values = table[:-3, head].view(2 * source[0] - 1, 2 * source[1] - 1).numpy()
        expected = RectBivariateSpline(x, y, values, kx=3, ky=3, s=0)(x_new, y_new)
        np.testing.assert_allclose(resized[:-3, head].view(expected.shape), expected, atol=1e-5)
    assert torch.equal(resized[-3:], table[-3:])


def test_autocast_does_not_coarsen_the_spline():
    table = torch.randn(num_relative_positions((14, 14)), 2)
    with torch.autocast('cpu', torch.bfloat16):
        inside = resize_bias_table(table, (14, 14), (24, 24))
    assert torch.equal(inside, resize_bias_table(table, (14, 14), (24, 24)))
    assert resize_bias_table(table, (14, 14), (14, 14)) is table


@pytest.mark.parametrize('target', [(1, 1), (1, 6), (2, 3)])
def test_tiny_grids(target):
    table = torch.randn(num_relative_positions((3, 3)), 2, requires_grad=True)
    bias = bias_from_table(table, (3, 3), target, torch.float32, num_prefix=1)
    tokens = 1 + target[0] * target[1]
    assert bias.shape == (1, 2, tokens, 8)
    bias[..., :tokens].sum().backward()
    assert torch.isfinite(table.grad).all()
    of_one = torch.randn(num_relative_positions((1, 1)), 2)
    assert bias_from_table(of_one, (1, 1), (3, 2), torch.float32, num_prefix=1).shape == (1, 2, 7, 8)


def test_remembered_index_of_inference_mode_serves_training():
    grid = (4, 7)  # a grid that no other test asks for first
    table = torch.randn(num_relative_positions((3, 3)), 2, requires_grad=True)
    with torch.inference_mode():
        bias_from_table(table, (3, 3), grid, torch.float32, 1)
    bias_from_table(table, (3, 3), grid, torch.float32, 1).sum().backward()
    assert table.grad.abs().sum() > 0

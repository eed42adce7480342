"""Bilinear weights against torch's interpolation."""
import pytest
import torch
import torch.nn.functional as F

from beit_mm.functional.bilinear import bilinear_matrix, bilinear_taps


@pytest.mark.parametrize('align_corners', [False, True])
@pytest.mark.parametrize('source, target', [(1, 1), (1, 9), (7, 1), (20, 160), (160, 640), (1494, 683), (47, 33),
                                            (64, 64), (12800, 2000)])
def test_matrix_and_taps_are_torchs_interpolation(source, target, align_corners):
    signal = torch.randn(3, source)
    expected = F.interpolate(signal[None, :, None], (1, target), mode='bilinear', align_corners=align_corners)[0, :, 0]
    low, high, share = bilinear_taps(source, target, align_corners)
    torch.testing.assert_close(signal[:, low] * (1 - share) + signal[:, high] * share, expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(signal @ bilinear_matrix(source, target, align_corners).T, expected, atol=1e-5, rtol=0)

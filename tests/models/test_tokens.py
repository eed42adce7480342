"""Picking tokens and patches, against loops."""

import torch

from beit_mm.models.beit import patchify
from beit_mm.positions import take_tokens


def test_take_tokens():
    x, index = torch.randn(2, 6, 4), torch.tensor([[5, 0], [3, 3]])
    assert torch.equal(take_tokens(x, index), torch.stack([x[0, [5, 0]], x[1, [3, 3]]]))
    assert torch.equal(take_tokens(x[..., 0], index), take_tokens(x, index)[..., 0])


def test_patchify_matches_a_convolution_weight():
    images, weight = torch.randn(2, 3, 8, 12), torch.randn(5, 3, 4, 4)
    patches = patchify(images, 4)
    assert torch.equal(patches[1, 4].view(3, 4, 4), images[1, :, 4:8, 4:8])
    expected = torch.nn.functional.conv2d(images, weight, stride=4).flatten(2).transpose(1, 2)
    torch.testing.assert_close(patches @ weight.flatten(1).T, expected, atol=1e-5, rtol=1e-5)

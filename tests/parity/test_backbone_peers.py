"""Gradients of the backbone are those of timm's and transformers' BEiT with the same random weights.

Their outputs: test_checkpoint_formats.py.
"""

import pytest
import torch
from peers import VARIANTS, hf_peer, images_and_mask, ours, read, timm_peer

from beit_mm.checkpoint.names import convert_state_dict


def gradients(output: torch.Tensor, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    weight = torch.linspace(-1, 1, output.numel()).view_as(output)
    return torch.autograd.grad((output * weight).sum(), inputs)


def assert_gradients_equal(found: tuple, expected: tuple) -> None:
    for mine, other in zip(found, expected, strict=True):
        assert mine.shape == other.shape
        assert (mine - other).norm() < 1e-3 * other.norm().clamp(min=1e-12)


@pytest.mark.parametrize('variant', VARIANTS)
def test_gradients_of_all_parameters_are_timms(variant):
    model, peer = ours('features', variant)['backbone'], timm_peer('features', variant)
    peer.load_state_dict(model.state_dict(), strict=True)
    parameters, others = dict(model.named_parameters()), dict(peer.named_parameters())
    assert set(parameters) == set(others)
    images, _ = images_and_mask()
    found = gradients(model(images)[0], *parameters.values())
    expected = gradients(peer.forward_features(images), *(others[name] for name in parameters))
    assert_gradients_equal(found, expected)


@pytest.mark.parametrize('variant', VARIANTS)
def test_gradients_of_a_masked_image_are_transformers(variant, tmp_path):
    peer, model = hf_peer('pretraining', variant), ours('pretraining', variant)
    peer.save_pretrained(tmp_path)
    model.load_state_dict(convert_state_dict(read(tmp_path / 'model.safetensors')).state_dict, strict=True)
    images, mask = images_and_mask()
    images.requires_grad_()
    found = gradients(model.backbone(images, mask)[0], images, model.backbone.mask_token)
    expected = peer.layernorm(peer.beit(images, bool_masked_pos=mask.flatten(1)).last_hidden_state)
    assert_gradients_equal(found, gradients(expected, images, peer.beit.embeddings.mask_token))

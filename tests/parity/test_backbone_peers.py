"""Gradients and attention of the backbone are those of timm's and transformers' BEiT with the same random weights.

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


@pytest.fixture
def ours_and_theirs(tmp_path, request):
    peer = hf_peer('pretraining', request.param)
    peer.save_pretrained(tmp_path)
    model = ours('pretraining', request.param)
    model.load_state_dict(convert_state_dict(read(tmp_path / 'model.safetensors')).state_dict, strict=True)
    return model.backbone, peer


@pytest.mark.parametrize('ours_and_theirs', VARIANTS, indirect=True)
def test_gradients_of_a_masked_image_are_transformers(ours_and_theirs):
    model, peer = ours_and_theirs
    images, mask = images_and_mask()
    images.requires_grad_()
    found = gradients(model(images, mask)[0], images, model.mask_token)
    expected = peer.layernorm(peer.beit(images, bool_masked_pos=mask.flatten(1)).last_hidden_state)
    assert_gradients_equal(found, gradients(expected, images, peer.beit.embeddings.mask_token))


@torch.no_grad()
@pytest.mark.parametrize('ours_and_theirs', ['per_layer'], indirect=True)
def test_attention_maps_are_transformers(ours_and_theirs):
    model, peer = ours_and_theirs
    peer.set_attn_implementation('eager')
    images, _ = images_and_mask()
    for layer, expected in enumerate(peer.beit(images, output_attentions=True).attentions):
        found, grid = model.attention_maps(images, layer)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
        assert grid == (6, 6)

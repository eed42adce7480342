"""DALL-E's networks: sizes, and the two ways into the decoder; the small networks' sizes."""

import pytest
import torch
import torch.nn.functional as F

from beit_mm.models.tokenizers.dalle import DALLEDecoder, DALLEEncoder
from beit_mm.models.tokenizers.discrete_vae import ConvDecoder, ConvEncoder


@pytest.mark.parametrize(
    ('network', 'arguments', 'published'),
    [
        (DALLEEncoder, (), 53_786_240),
        (DALLEDecoder, (), 43_829_766),
        (ConvEncoder, (256, 8192, 3, None), 7_953_408),
        (ConvDecoder, (256, 8192, 512, 3, None, 3), 12_128_003),
        (ConvEncoder, (256, 8192, 3, 2), 6_707_456),
        (ConvDecoder, (256, 8192, 512, 3, 2, 3), 9_964_803),
    ],
)
def test_parameter_counts_are_the_published_ones(network, arguments, published):
    with torch.device('meta'):
        model = network(*arguments)
    assert sum(p.numel() for p in model.parameters()) == published


@pytest.mark.parametrize(
    ('encoder', 'decoder'),
    [
        (DALLEEncoder(8, 20), DALLEDecoder(8, 20, 16)),
        (ConvEncoder(8, 20, 3, None), ConvDecoder(8, 20, 16, 3, None, 3)),
        (ConvEncoder(8, 20, 3, 1), ConvDecoder(8, 20, 16, 3, 1, 3)),
    ],
)
def test_shapes_and_lookup_equals_one_hot(encoder, decoder):
    images = torch.rand(2, 3, 24, 32)
    logits = encoder(images)
    assert logits.shape == (2, 20, 3, 4)
    assert torch.equal(encoder.output(encoder.features(images)), logits)
    tokens = logits.argmax(dim=1)
    one_hot = F.one_hot(tokens, 20).permute(0, 3, 1, 2).float()
    assert decoder(one_hot).shape[-2:] == images.shape[-2:]
    torch.testing.assert_close(decoder.from_tokens(tokens), decoder(one_hot))


def test_small_networks_compute_and_start_as_the_released_class():
    """microsoft/unilm `beit/modeling_discrete_vae.py`, written out from its layers; torch's own initialisation."""
    torch.manual_seed(0)
    encoder, decoder = ConvEncoder(24, 40, 3, None), ConvDecoder(24, 40, 48, 3, None, 3)

    def residual(weights: dict, x: torch.Tensor) -> torch.Tensor:
        y = F.conv2d(x, weights['net.0.weight'], weights['net.0.bias'], padding=1).relu()
        y = F.conv2d(y, weights['net.2.weight'], weights['net.2.bias'], padding=1).relu()
        return F.conv2d(y, weights['net.4.weight'], weights['net.4.bias']) + x

    images = torch.rand(2, 3, 24, 32)
    x = images
    for level in range(3):
        x = F.conv2d(x, *encoder.levels[2 * level][0].parameters(), stride=2, padding=1).relu()
        x = residual(encoder.levels[2 * level + 1].state_dict(), x)
    logits = F.conv2d(x, *encoder.output.parameters())
    torch.testing.assert_close(encoder(images), logits)

    soft = logits.softmax(dim=1)
    x = torch.stack([(image.flatten(1).t() @ decoder.codebook.weight).t().unflatten(1, (3, 4)) for image in soft])
    for level in range(3):
        x = F.conv_transpose2d(x, *decoder.levels[2 * level][0].parameters(), stride=2, padding=1).relu()
        x = residual(decoder.levels[2 * level + 1].state_dict(), x)
    torch.testing.assert_close(decoder(soft), F.conv2d(x, *decoder.output.parameters()))

    for name, weight in encoder.named_parameters():  # uniform up to 1 / sqrt(fan in)
        bound = 1 / encoder.state_dict()[name.replace('bias', 'weight')][0].numel() ** 0.5
        assert weight.abs().max() <= bound and weight.std() > 0.4 * bound
    assert decoder.codebook.weight.std().item() == pytest.approx(1, abs=0.05)

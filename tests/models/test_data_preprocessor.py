"""From uint8 batches to the pretrainer's inputs."""

import numpy as np
import pytest
import torch
from PIL import Image

from beit_mm.models import TwoViewDataPreprocessor

MEAN, STD = [123.675, 116.28, 103.53], [58.395, 57.12, 57.375]


def make_batch() -> dict:
    return dict(
        images=torch.randint(0, 256, (2, 16, 24, 3), dtype=torch.uint8),
        tokenizer_images=torch.randint(0, 256, (2, 8, 12, 3), dtype=torch.uint8),
        mask=torch.tensor([[[True, False, True]], [[False, False, True]]]),
    )


def test_each_view_is_scaled_for_its_network():
    batch = make_batch()
    inputs = TwoViewDataPreprocessor(MEAN, STD)(dict(inputs=batch))['inputs']
    for channel in range(3):
        pixels = batch['images'][..., channel].float()
        torch.testing.assert_close(inputs['images'][:, channel], (pixels - MEAN[channel]) / STD[channel])
        torch.testing.assert_close(
            inputs['tokenizer_images'][:, channel], batch['tokenizer_images'][..., channel] / 255
        )
    assert torch.equal(inputs['mask'], batch['mask'])
    assert inputs['positions'].tolist() == [[0, 2], [2, -1]]
    positions = torch.tensor([[0, 2, -1], [2, -1, -1]])  # as BlockwiseMask gives them
    given = TwoViewDataPreprocessor(MEAN, STD)(dict(inputs=dict(batch, positions=positions)))['inputs']
    assert torch.equal(given['positions'], positions)
    alone = TwoViewDataPreprocessor(MEAN, STD)(dict(inputs=dict(images=batch['images'])))['inputs']
    assert alone['tokenizer_images'] is alone['mask'] is alone['positions'] is None


def test_positions_list_each_masked_patch_in_order():
    mask = torch.rand(5, 3, 7) < torch.tensor([0.1, 0.5, 0.9, 0.0, 1.0]).view(5, 1, 1)
    images = torch.zeros(5, 6, 14, 3, dtype=torch.uint8)
    positions = TwoViewDataPreprocessor(MEAN, STD)(dict(inputs=dict(images=images, mask=mask)))['inputs']['positions']
    assert positions.shape == (5, 21)
    for row, image in zip(positions, mask, strict=True):
        expected = image.flatten().nonzero().flatten().tolist()
        assert row.tolist() == expected + [-1] * (21 - len(expected))
    nothing = dict(images=images, mask=torch.zeros_like(mask))  # keeps one slot
    assert TwoViewDataPreprocessor(MEAN, STD)(dict(inputs=nothing))['inputs']['positions'].tolist() == [[-1]] * 5


def test_the_tokenizers_view_is_made_on_the_device_as_pillow_would():
    rng = np.random.default_rng(0)
    small = Image.fromarray(rng.integers(0, 256, (6, 9, 3), dtype=np.uint8))
    image = small.resize((72, 48), Image.Resampling.BICUBIC)
    pixels = torch.from_numpy(np.array(image))
    inputs = TwoViewDataPreprocessor(MEAN, STD, tokenizer_scale=0.5)(dict(inputs=dict(images=pixels[None])))['inputs']
    expected = np.asarray(image.resize((36, 24), Image.Resampling.BICUBIC)) / 255
    found = inputs['tokenizer_images'][0].permute(1, 2, 0).numpy()
    np.testing.assert_allclose(found, expected, atol=1.01 / 255)
    given = dict(images=pixels[None], tokenizer_images=pixels[None, :8, :12])  # the pipeline's goes first
    inputs = TwoViewDataPreprocessor(MEAN, STD, tokenizer_scale=0.5)(dict(inputs=given))['inputs']
    assert inputs['tokenizer_images'].shape == (1, 3, 8, 12)


@pytest.mark.parametrize('scale', [0, -1, 1.5])
def test_no_view_is_larger_than_the_first(scale):
    with pytest.raises(ValueError, match='expected a fraction, above 0'):
        TwoViewDataPreprocessor(MEAN, STD, tokenizer_scale=scale)


def test_denormalize_is_the_way_back():
    batch, preprocessor = make_batch(), TwoViewDataPreprocessor(MEAN, STD)
    images = preprocessor.denormalize(preprocessor(dict(inputs=batch))['inputs']['images'])
    torch.testing.assert_close(images, batch['images'].permute(0, 3, 1, 2) / 255, atol=1e-6, rtol=1e-5)


def test_brightness_left_to_the_device_changes_both_views_alike():
    batch = make_batch()
    # brightness 0.5, contrast and saturation 1 (no change), in the order 0, 1, 2
    batch['jitter'] = torch.tensor([0.5, 1, 1, 100, 0, 1, 2]).repeat(2, 1)
    inputs = TwoViewDataPreprocessor([0, 0, 0], [255, 255, 255])(dict(inputs=batch))['inputs']
    for view in ('images', 'tokenizer_images'):
        expected = batch[view].permute(0, 3, 1, 2) * 0.5 / 255
        torch.testing.assert_close(inputs[view], expected, atol=1.01 / 255, rtol=0)

"""Weights made to fit another task, image size, or number of channels: what the model computes stays what it was."""

import pytest
import torch
import torch.nn.functional as F
from mmengine.runner import load_checkpoint

from beit_mm.checkpoint.read import CheckpointError
from beit_mm.models import BEiTBackbone
from beit_mm.positions import num_relative_positions, resize_bias_table

ARCH = dict(embed_dims=32, num_layers=2, num_heads=4)
PLUS = dict(abs_pos_embed=False, rel_pos_bias='per_layer', layer_scale_init=0.1)


def build(img_size=32, **options) -> BEiTBackbone:
    model = BEiTBackbone(ARCH, img_size=img_size, patch_size=8, **options)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-0.5, 0.5)
    return model.eval()


@torch.no_grad()
def test_an_expanded_table_computes_the_same():
    source, target = build(**dict(PLUS, rel_pos_bias='shared')), build(**PLUS)
    target.load_state_dict(source.state_dict())
    images = torch.rand(2, 3, 32, 32)
    torch.testing.assert_close(target(images)[0], source(images)[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize('channels', [1, 4, 6, 13])
@torch.no_grad()
def test_other_channels_take_the_filters_in_turn(channels):
    """A gray image gives what its RGB copy gave; an image repeated along the channels is seen as it was."""
    source, target = build(), build(in_channels=channels)
    target.load_state_dict(source.state_dict())
    assert target.load_report.adapted == ['patch_embed.proj.weight']
    before, after, images = source.patch_embed.proj.weight, target.patch_embed.proj.weight, torch.rand(2, 3, 32, 32)
    for channel in range(channels) if channels > 1 else ():
        torch.testing.assert_close(after[:, channel], before[:, channel % 3] * 3 / channels)
    if channels in (1, 6):
        repeated = images.repeat(1, 2, 1, 1) if channels == 6 else images[:, :1]
        images = images if channels == 6 else images[:, :1].expand(-1, 3, -1, -1)
        torch.testing.assert_close(target(repeated)[0], source(images)[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize('mode', ['bicubic', 'bilinear'])
@torch.no_grad()
def test_position_embeddings_are_torchs_interpolation(mode):
    source, target = build(), build((64, 96), interpolate_mode=mode)
    target.load_state_dict(source.state_dict())
    patches = source.pos_embed[:, 1:].reshape(1, 4, 4, 32).permute(0, 3, 1, 2)
    expected = F.interpolate(patches, (8, 12), mode=mode).permute(0, 2, 3, 1).reshape(1, 96, 32)
    torch.testing.assert_close(target.pos_embed[:, 1:], expected)
    assert torch.equal(target.pos_embed[:, :1], source.pos_embed[:, :1])
    # and so is what the model does with an image of a size that it is not built for
    images = torch.rand(1, 3, 64, 96)
    other = build(interpolate_mode=mode)
    other.load_state_dict(source.state_dict())
    torch.testing.assert_close(other(images)[0], target(images)[0], atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_a_rectangle_is_known_by_the_size_in_the_file(tmp_path):
    """32 x 48 and 48 x 32 pixels have tables of the same length."""
    source, target = build((32, 48), **PLUS), build((48, 32), **PLUS)
    table = source.state_dict()['blocks.0.attn.relative_position_bias_table']
    assert len(table) == num_relative_positions(target.grid)
    path = tmp_path / 'rectangle.pth'
    torch.save(dict(state_dict=source.state_dict(), meta=dict(preprocessing=dict(size=[32, 48]))), path)
    load_checkpoint(target, str(path))
    expected = resize_bias_table(table, (4, 6), (6, 4))
    assert torch.equal(target.blocks[0].attn.relative_position_bias_table, expected)


@pytest.mark.parametrize('options', [PLUS, {}], ids=['table', 'embedding'])
def test_a_rectangle_of_unknown_sides_is_an_error(options):
    with pytest.raises(CheckpointError, match='the file does not say to which rectangle'):
        build((64, 64), **options).load_state_dict(build((32, 48), **options).state_dict())

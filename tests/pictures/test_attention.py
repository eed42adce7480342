"""Attention maps are transformers' and those of the forward pass; the mask's rule; pictures."""

import re

import numpy as np
import peers
import pytest
import torch
from numpy.testing import assert_allclose
from PIL import Image

from beit_mm import __main__ as command
from beit_mm import pictures
from beit_mm.errors import UserError
from beit_mm.features.extractor import FeatureExtractor
from beit_mm.models.vit import BEiTBackbone
from beit_mm.pictures import ATTENTION_LEGEND, attention_of_image, largest_mass_mask, patch_at, shortened

HEADS = 3


def random_backbone(variant: str, img_size: tuple[int, int] = (32, 32)) -> BEiTBackbone:
    arch = dict(embed_dims=24, num_layers=3, num_heads=HEADS)
    model = BEiTBackbone(arch, img_size=img_size, patch_size=8, **peers.VARIANTS[variant])
    return peers.randomise(model)


@pytest.mark.parametrize('variant', peers.VARIANTS)
def test_every_layer_is_that_of_transformers(variant, tmp_path):
    """All heads, all queries and chosen patches."""
    peer = peers.hf_peer('features', variant, attn_implementation='eager')
    peer.save_pretrained(tmp_path)
    model = BEiTBackbone.from_checkpoint(str(tmp_path / 'model.safetensors'))
    image = torch.randn(1, 3, peers.SIZE, peers.SIZE)
    with torch.no_grad():
        expected = peer(image, output_attentions=True).attentions
    for layer, attention in enumerate(expected):
        maps, grid = model.attention_maps(image, layer)
        assert grid == (6, 6)
        assert_allclose(maps.detach(), attention, atol=1e-5)
        some, _ = model.attention_maps(image, layer - len(expected), torch.tensor([[1, 11]]))
        assert_allclose(some.detach(), attention[:, :, [1, 11]], atol=1e-5)
    assert_allclose(model.attention_maps(image)[0].detach(), expected[-1], atol=1e-5)  # by default the last one


def test_maps_belong_to_the_forward_pass_at_any_size():
    """At another size than the trained one: attention times values, added up, is what the block computes."""
    model, images, seen = random_backbone('per_layer'), torch.randn(2, 3, 44, 56), {}  # padded to 6 x 7 patches
    attn = model.blocks[1].attn
    attn.register_forward_hook(lambda module, inputs, output: seen.update(x=inputs[0], output=output))
    with torch.no_grad():
        model(images)
        maps, grid = model.attention_maps(images, 1)
        v = attn._qkv(seen['x'], grid, None)[2]
        output = attn.proj((maps @ v).transpose(1, 2).flatten(2))
    assert grid == (6, 7)
    torch.testing.assert_close(output, seen['output'], atol=1e-5, rtol=1e-4)


def test_points_lie_in_their_patches():
    points = {'0,0': (0, 0), '99,0': (0, 3), '0,0.999': (2, 0), '50,20': (1, 2), '0.499,19': (0, 1)}
    assert {point: patch_at(point, (60, 100), (3, 4)) for point in points} == points
    for wrong in ('99.9,0', '100,5', '5,x', '5', '1,2,3', 'nan,1', (10, 20), 10):
        with pytest.raises(UserError, match=f'--points: {re.escape(repr(wrong))}.*100 x 60 pixels'):
            patch_at(wrong, (60, 100), (3, 4))


def test_the_mask_is_the_smallest_set_of_the_share_by_trying_all_sets():
    generator = torch.Generator().manual_seed(0)
    for attention in (*torch.rand(5, 2, 4, generator=generator) ** 3, torch.tensor([[0, 0, 0, 0], [0, 0, 9.0, 0]])):
        flat = attention.flatten().double().numpy()
        sets = [[bit for bit in range(8) if number >> bit & 1] for number in range(256)]
        enough = [chosen for chosen in sets if flat[chosen].sum() >= 0.6 * flat.sum()]
        smallest = min(enough, key=lambda chosen: (len(chosen), -flat[chosen].sum()))
        assert largest_mass_mask(attention, 0.6).flatten().nonzero().flatten().tolist() == smallest
    heads = torch.tensor([[[8.0, 4.0]], [[0.0, 9.0]]])  # each has a mask of its own
    assert largest_mass_mask(heads, 0.5).tolist() == [[[True, False]], [[False, True]]]


def test_a_sheet_shows_points_heads_and_contours(monkeypatch):
    """Also where the image is no multiple of the grid."""
    image, maps = torch.full((3, 35, 70), 0.5), torch.rand(2, 3, 2, 4) * 0.01
    maps[0, :, 1, 2] = 0.9
    assert all(shortened(name, 40) == name for name, _ in ATTENTION_LEGEND)  # longer ones are cut
    rows = []
    monkeypatch.setattr(pictures, 'sheet', lambda found, side: rows.extend(found))
    found = pictures.ImageAttention(image, [(1, 2), (0, 1)], maps)
    pictures.draw_attention(found, found._replace(maps=maps.flip(-1) / 2))
    tiles = [tile for row in rows for tile in row]
    titles = ['image', 'mean of heads', 'random weights, same scale', 'head 0', 'head 1', 'head 2']
    assert [title for title, _ in tiles] == 2 * titles
    levels = [picture.permute(1, 2, 0).numpy() for _, picture in tiles]  # 120 x 240 pixels, of a patch 60 x 60
    for picture, (top, left) in ((levels[0], (60, 120)), (levels[6], (0, 60))):
        marked = np.zeros((120, 240), bool)
        marked[top : top + 60, left : left + 60] = True
        marked[top + 2 : top + 58, left + 2 : left + 58] = False
        assert_allclose(picture, np.where(marked[..., None], [1, 0, 0], 0.5), atol=1e-6)
    contour = [np.argwhere((picture == [0, 1, 1]).all(axis=-1)) for picture in levels]
    corners = [found.tolist() for found in (contour[4].min(axis=0), contour[4].max(axis=0))]
    assert corners == [[60, 120], [119, 179]]  # of the patch with nearly all the attention of head 1
    assert_allclose(levels[4][90, 150], 0.35 * 0.5 + 0.65)  # the most attention is white
    # random weights, mirrored and half as high: what they attend to most is half of the scale of the mean
    half = 0.35 * 0.5 + 0.65 * np.array([1, 0.359, 0])
    assert_allclose(levels[2][90, 90], half, atol=1e-3)


def test_a_checkpoint_alone_is_enough(tmp_path, monkeypatch):
    """Weights without any config: the backbone is built as their shapes say."""
    image = tmp_path / 'image.png'
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (60, 90, 3), np.uint8)).save(image)
    model = random_backbone('vit')
    meta = dict(architecture=dict(num_heads=HEADS), preprocessing=dict(mean=[127.5] * 3, std=[64.0] * 3, size=[32, 32]))
    torch.save(dict(state_dict=model.state_dict(), meta=meta), tmp_path / 'model.pth')
    extractor = FeatureExtractor(tmp_path / 'model.pth', 'cpu', 48, whole=True)
    found = attention_of_image(extractor, image, ['80,10', '0.1,0.9'], 0)
    assert found.patches == [(1, 8), (5, 0)]
    pixels = torch.from_numpy(np.asarray(Image.open(image).resize((72, 48), Image.BICUBIC)).copy()).permute(2, 0, 1)
    maps, _ = model.attention_maps((pixels[None] - 127.5) / 64, 0)
    expected = maps[0, :, [1 + 1 * 9 + 8, 1 + 5 * 9 + 0], 1:].transpose(0, 1).unflatten(2, (6, 9))
    assert_allclose(found.maps, expected.detach(), atol=2e-3)
    grids = []
    monkeypatch.setattr(
        pictures, 'attention_of_image', lambda *args: grids.append(attention_of_image(*args)) or grids[-1]
    )
    words = ['attention', tmp_path / 'model.pth', image, '--short-side', 48, '--out', tmp_path / 'attention.png']
    command.main([*map(str, words)])
    assert [grid.maps.shape[2:] for grid in grids] == [(6, 9)] * 2
    with pytest.raises(UserError, match='--points: .*90 x 60 pixels'):
        attention_of_image(extractor, image, ['90,5'])
    torch.save(model.state_dict(), tmp_path / 'model.pth')
    with pytest.raises(UserError, match='attention heads .*does not say how many'):  # 24 channels are no heads of 64
        FeatureExtractor(tmp_path / 'model.pth', 'cpu')

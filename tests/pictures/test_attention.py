"""Attention maps equal softmax(q k / sqrt(d) + bias) computed by hand; the mask's rule; pictures; the tool."""

import numpy as np
import pytest
import torch
from helpers import run_tool
from numpy.testing import assert_allclose
from PIL import Image

from beit_mm.checkpoint.read import CheckpointError
from beit_mm.models.vit import BEiTBackbone
from beit_mm.pictures import attention_of_patches, draw_attention, largest_mass_mask, patches_at, pixels_of

DIMS, HEADS, LAYERS, PATCH = 24, 3, 3, 8
VARIANTS = {
    'vit': dict(abs_pos_embed=True),
    'shared': dict(abs_pos_embed=False, rel_pos_bias='shared', layer_scale_init=0.1),
    'per_layer': dict(abs_pos_embed=False, rel_pos_bias='per_layer', layer_scale_init=0.1),
}


def random_backbone(variant: str, img_size: tuple[int, int] = (32, 40)) -> BEiTBackbone:
    arch = dict(embed_dims=DIMS, num_layers=LAYERS, num_heads=HEADS)
    model = BEiTBackbone(arch, img_size=img_size, patch_size=PATCH, **VARIANTS[variant])
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.4, generator=generator)
    return model.eval()


def attention_by_hand(model: BEiTBackbone, image: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    """Scores and attention (heads, N, N) of every layer, from the weights alone, in numpy and loops."""
    weights = {name: tensor.double().numpy() for name, tensor in model.state_dict().items()}

    def linear(x: np.ndarray, name: str) -> np.ndarray:
        return x @ weights[f'{name}.weight'].T + weights[f'{name}.bias']

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        centred = x - x.mean(-1, keepdims=True)
        return centred / np.sqrt(x.var(-1, keepdims=True) + 1e-6) * weights[f'{name}.weight'] + weights[f'{name}.bias']

    def gelu(x: np.ndarray) -> np.ndarray:
        return torch.nn.functional.gelu(torch.from_numpy(x)).numpy()

    height, width = image.shape[1] // PATCH, image.shape[2] // PATCH
    kernel = weights['patch_embed.proj.weight'].reshape(DIMS, -1)
    tokens = [weights['cls_token'][0, 0]]
    for row in range(height):
        for column in range(width):
            pixels = image[:, row * PATCH : (row + 1) * PATCH, column * PATCH : (column + 1) * PATCH]
            tokens.append(kernel @ pixels.reshape(-1) + weights['patch_embed.proj.bias'])
    x = np.stack(tokens)
    if 'pos_embed' in weights:
        x = x + weights['pos_embed'][0]

    def row_of_table(query: int, key: int) -> int:
        last = (2 * height - 1) * (2 * width - 1) + 2
        if query == 0 or key == 0:
            return last if query == key else last - 2 if query == 0 else last - 1
        (y, x), (y2, x2) = divmod(query - 1, width), divmod(key - 1, width)
        return (y - y2 + height - 1) * (2 * width - 1) + x - x2 + width - 1

    result = []
    for block in (f'blocks.{i}.' for i in range(LAYERS)):
        q, k, v = np.split(norm(x, f'{block}norm1') @ weights[f'{block}attn.qkv.weight'].T, 3, axis=-1)
        q, v = q + weights[f'{block}attn.q_bias'], v + weights[f'{block}attn.v_bias']
        table = weights.get(
            f'{block}attn.relative_position_bias_table', weights.get('rel_pos_bias.relative_position_bias_table')
        )
        scores, outputs = np.empty((HEADS, len(x), len(x))), []
        for head in range(HEADS):
            part = slice(head * DIMS // HEADS, (head + 1) * DIMS // HEADS)
            for query in range(len(x)):
                for key in range(len(x)):
                    bias = 0 if table is None else table[row_of_table(query, key), head]
                    scores[head, query, key] = q[query, part] @ k[key, part] / np.sqrt(DIMS / HEADS) + bias
        exponents = np.exp(scores)
        attention = exponents / exponents.sum(-1, keepdims=True)
        outputs = [attention[head] @ v[:, head * DIMS // HEADS : (head + 1) * DIMS // HEADS] for head in range(HEADS)]
        x = x + linear(np.concatenate(outputs, -1), f'{block}attn.proj') * weights.get(f'{block}gamma_1', 1)
        hidden = gelu(linear(norm(x, f'{block}norm2'), f'{block}mlp.fc1'))
        x = x + linear(hidden, f'{block}mlp.fc2') * weights.get(f'{block}gamma_2', 1)
        result.append((scores, attention))
    return result


@pytest.mark.parametrize('variant', VARIANTS)
def test_every_layer_equals_a_plain_computation(variant):
    """A rectangle of 4 x 5 patches; all heads, before and after the softmax, all queries and chosen patches."""
    model = random_backbone(variant)
    image = torch.randn(3, 32, 40, generator=torch.Generator().manual_seed(1))
    patches = [(0, 0), (1, 4), (3, 2)]
    queries = [1 + row * 5 + column for row, column in patches]
    for layer, (scores, attention) in enumerate(attention_by_hand(model, image.double().numpy())):
        maps, grid = model.attention_maps(image[None], layer)
        assert grid == (4, 5)
        assert_allclose(maps[0].detach(), attention, atol=1e-5)
        assert_allclose(model.attention_maps(image[None], layer, softmax=False)[0][0].detach(), scores, atol=1e-4)
        for softmax, expected in ((True, attention), (False, scores)):
            found = attention_of_patches(model, image, patches, layer - LAYERS, softmax)
            expected = expected[:, queries, 1:].transpose(1, 0, 2).reshape(3, HEADS, 4, 5)
            assert_allclose(found, expected, atol=1e-4)


@pytest.mark.parametrize('variant', VARIANTS)
def test_maps_belong_to_the_forward_pass_at_any_size(variant):
    """At another size than the trained one: attention times values, added up, is what the block computes."""
    model = random_backbone(variant)
    images = torch.randn(2, 3, 44, 56)  # no multiple of a patch: padded to 6 x 7
    seen = {}
    attn = model.blocks[1].attn
    attn.register_forward_hook(lambda module, inputs, output: seen.update(x=inputs[0], output=output))
    with torch.no_grad():
        model(images)
        maps, grid = model.attention_maps(images, 1)
        v = attn._qkv(seen['x'], None)[2]
        output = attn.proj((maps @ v).transpose(1, 2).flatten(2))
    assert grid == (6, 7)
    torch.testing.assert_close(output, seen['output'], atol=1e-5, rtol=1e-4)
    maps = attention_of_patches(model, images[0], [(5, 6)], 1)
    assert maps.shape == (1, HEADS, 6, 7) and (maps.sum(dim=(-1, -2)) < 1).all()


# --- points and masks -----------------------------------------------------------------------------


def test_points_lie_in_their_patches():
    points = [(0, 0), (99.9, 0), (0, 59.9), (50, 20), (49.9, 19.9)]
    assert patches_at(points, (60, 100), (3, 4)) == [(0, 0), (0, 3), (2, 0), (1, 2), (0, 1)]
    with pytest.raises(ValueError, match=r'point 100,5 lies outside of the image of 100 x 60 pixels'):
        patches_at([(100, 5)], (60, 100), (3, 4))


def test_the_mask_is_the_smallest_set_of_the_share():
    attention = torch.tensor([[[8.0, 4.0], [3.0, 1.0]], [[0.0, 0.0], [9.0, 0.0]]])  # two heads
    assert largest_mass_mask(attention, 0.6).sum(dim=(1, 2)).tolist() == [2, 1]
    assert largest_mass_mask(attention, 0.5)[0].tolist() == [[True, False], [False, False]]
    assert largest_mass_mask(attention, 0.76)[0].tolist() == [[True, True], [True, False]]
    assert largest_mass_mask(attention, 1.0)[1].tolist() == [[False, False], [True, False]]


def test_the_mask_by_trying_all_sets():
    generator = torch.Generator().manual_seed(0)
    for attention in torch.rand(5, 2, 4, generator=generator) ** 3:
        flat = attention.flatten().double().numpy()
        sets = [[bit for bit in range(8) if number >> bit & 1] for number in range(256)]
        enough = [chosen for chosen in sets if flat[chosen].sum() >= 0.6 * flat.sum()]
        smallest = min(enough, key=lambda chosen: (len(chosen), -flat[chosen].sum()))
        assert largest_mass_mask(attention, 0.6).flatten().nonzero().flatten().tolist() == smallest


# --- pictures -------------------------------------------------------------------------------------


def test_a_sheet_shows_points_heads_and_contours(tmp_path):
    maps = torch.full((2, 3, 2, 4), 0.01)
    maps[0, :, 1, 3] = 0.9
    figure = draw_attention(torch.full((3, 30, 60), 0.5), [(0, 1), (1, 0)], maps)
    heads = ['head 0', 'head 1', 'head 2']
    assert [axes.get_title('left') for axes in figure.axes] == 2 * ['image', 'mean of heads', *heads]
    for first, corner in ((0, (14.5, -0.5)), (5, (-0.5, 14.5))):
        (mark,) = figure.axes[first].patches
        assert mark.get_xy() == corner and (mark.get_width(), mark.get_height()) == (15, 15)
    mean = figure.axes[1]
    image, colours = mean.images
    assert list(colours.get_extent()) == list(image.get_extent()) == [-0.5, 59.5, 29.5, -0.5]
    np.testing.assert_allclose(colours.get_array(), maps[0].mean(dim=0))
    ends = np.concatenate([path.vertices for path in mean.collections[0].get_paths()])
    np.testing.assert_allclose([ends.min(axis=0), ends.max(axis=0)], [[44.5, 14.5], [59.5, 29.5]], atol=1)
    beside = draw_attention(torch.full((3, 30, 60), 0.5), [(0, 1), (1, 0)], maps, control=maps.flip(-1))
    assert [axes.get_title('left') for axes in beside.axes] == 2 * ['image', 'mean of heads', 'random weights', *heads]
    np.testing.assert_allclose(beside.axes[2].images[1].get_array(), maps[0].flip(-1).mean(dim=0))
    odd = draw_attention(torch.full((3, 35, 70), 0.5), [(1, 2)], torch.eye(8)[6].view(1, 1, 2, 4))
    (mark,) = odd.axes[0].patches  # where the image is no multiple of the grid, as on the map
    assert (*mark.get_xy(), mark.get_width(), mark.get_height()) == (34.5, 17, 17.5, 17.5)
    ends = np.concatenate([path.vertices for path in odd.axes[1].collections[0].get_paths()])
    np.testing.assert_allclose([ends.min(axis=0), ends.max(axis=0)], [[34.5, 17], [52, 34.5]], atol=1)
    pixels = pixels_of(figure)
    for colour in ([0, 255, 255], [255, 0, 0]):  # lines have soft edges
        assert (np.abs(pixels.astype(int) - colour).max(axis=2) < 100).any()
    scores = draw_attention(torch.full((3, 30, 60), 0.5), [(0, 1)], maps[:1] - 0.5, mass=None)
    assert not any(axes.collections for axes in scores.axes)


# --- the tool -------------------------------------------------------------------------------------


@pytest.fixture
def image(tmp_path):
    path = tmp_path / 'image.png'
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (60, 90, 3), np.uint8)).save(path)
    return path


@pytest.mark.parametrize('variant', VARIANTS)
def test_a_checkpoint_alone_is_enough(variant, image, tmp_path, capsys):
    """Weights without any config: the backbone is built as their shapes say."""
    model = random_backbone(variant, (32, 32))
    meta = dict(architecture=dict(num_heads=HEADS), preprocessing=dict(mean=[127.5] * 3, std=[64.0] * 3, size=[32, 32]))
    state = {f'backbone.{name}': tensor for name, tensor in model.state_dict().items()}
    torch.save(dict(state_dict=state, meta=meta), tmp_path / 'model.pth')
    out = tmp_path / 'out'
    options = ['--points', '80,10', '0.1,0.9', '--layer', '0', '--short-side', '48', '--npz', '--out', out]
    run_tool('visualization/attention_maps.py', tmp_path / 'model.pth', image, *options)
    names = {path.name for path in out.iterdir()}
    assert names == {'image_layer0_80_10.png', 'image_layer0_9_54.png', 'image_layer0.npz'}
    numbers = np.load(out / 'image_layer0.npz')
    assert numbers['points'].tolist() == [[80, 10], [9, 54]] and numbers['patches'].tolist() == [[1, 8], [5, 0]]
    assert numbers['maps'].shape == numbers['masks'].shape == (2, HEADS, 6, 9)
    pixels = torch.from_numpy(np.asarray(Image.open(image).resize((72, 48), Image.BICUBIC)).copy()).permute(2, 0, 1)
    expected = attention_of_patches(model, (pixels - 127.5) / 64, [(1, 8), (5, 0)], 0)
    assert_allclose(numbers['maps'], expected, atol=2e-3)
    assert_allclose(numbers['masks'], largest_mass_mask(torch.from_numpy(numbers['maps'])))
    assert '6 x 9 patches, mean [127.5, 127.5, 127.5], std [64.0, 64.0, 64.0]' in capsys.readouterr().out


def test_scores_and_long_side(image, tmp_path):
    torch.save(random_backbone('vit', (32, 32)).state_dict(), tmp_path / 'model.pth')
    # 24 channels are no heads of 64: the file has to say how many
    with pytest.raises(SystemExit, match='does not say how many attention heads'):
        run_tool('visualization/attention_maps.py', tmp_path / 'model.pth', image)
    meta = dict(architecture=dict(num_heads=HEADS))
    content = dict(state_dict=random_backbone('vit', (32, 32)).state_dict(), meta=meta)
    torch.save(content, tmp_path / 'model.pth')
    options = ['--scores', '--long-side', '40', '--npz', '--out', tmp_path / 'out']
    run_tool('visualization/attention_maps.py', tmp_path / 'model.pth', image, *options)
    numbers = np.load(tmp_path / 'out/image_layer2_scores.npz')
    assert numbers['maps'].shape == (1, HEADS, 3, 5) and numbers['maps'].min() < 0 and 'masks' not in numbers


@pytest.mark.parametrize('point', ['5', '5,x', '1,2,3', '90,5', '1.5,0.5'])
def test_a_point_that_is_none_is_one_line(point, image, tmp_path):
    torch.save(random_backbone('shared', (32, 32)).state_dict(), tmp_path / 'model.pth')
    with pytest.raises(SystemExit, match=r'^error: (--points: .* is no point|point .* lies outside)'):
        run_tool('visualization/attention_maps.py', tmp_path / 'model.pth', image, '--points', point)


@pytest.mark.parametrize('option', ['--short-side', '--long-side'])
@pytest.mark.parametrize('side', ['0', '-5'])
def test_a_side_that_is_none_is_one_line(option, side, image, capsys):
    with pytest.raises(SystemExit):
        run_tool('visualization/attention_maps.py', 'model.pth', image, option, side)
    assert 'error: --short-side and --long-side are numbers of pixels' in capsys.readouterr().err


def test_a_model_of_other_than_rgb_images_is_one_line(image, tmp_path):
    state = random_backbone('shared', (32, 32)).state_dict()
    state['patch_embed.proj.weight'] = state['patch_embed.proj.weight'].repeat(1, 2, 1, 1)
    torch.save(dict(state_dict=state, meta=dict(architecture=dict(num_heads=HEADS))), tmp_path / 'model.pth')
    with pytest.raises(SystemExit, match=r'^error: .*model.pth takes images of 6 channels; mean has 3, std 3'):
        run_tool('visualization/attention_maps.py', tmp_path / 'model.pth', image)


def test_a_rectangle_that_nobody_names_is_one_line(tmp_path):
    torch.save(random_backbone('shared').state_dict(), tmp_path / 'model.pth')
    with pytest.raises(CheckpointError, match='of 66 rows belongs to no square patch grid, and the file does not say'):
        BEiTBackbone.from_checkpoint(str(tmp_path / 'model.pth'))

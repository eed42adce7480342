"""Features of images: the peers' own hidden states, the preparation, the files, and what is refused."""

import weakref

import numpy as np
import peers
import pytest
import torch
from helpers import run_tool
from PIL import Image

from beit_mm import FeatureExtractor, embed
from beit_mm.errors import UserError
from beit_mm.features.extractor import gathered
from beit_mm.models import BEiTBackbone
from beit_mm.precision import usable_dtype

SIZE = 48  # of the peers: 6 x 6 patches of 8 pixels
LEVELS = dict(mean=[100, 110, 120], std=[50, 60, 70])


@pytest.fixture(scope='module')
def checkpoint(tmp_path_factory) -> str:
    """A BEiT of two blocks with random weights, under timm's names."""
    path = tmp_path_factory.mktemp('weights') / 'timm.pth'
    torch.save(peers.timm_peer('features', 'per_layer').state_dict() | dict(), path)
    return str(path)


@torch.no_grad()
def states_of(peer: torch.nn.Module, images: torch.Tensor) -> list[torch.Tensor]:
    """The outputs of the blocks, (B, N, C) each, as the peer itself gives them."""
    if not hasattr(peer, 'forward_intermediates'):
        return list(getattr(peer, 'beit', peer)(images, output_hidden_states=True).hidden_states[1:])
    options = dict(output_fmt='NLC', norm=False, intermediates_only=True, return_prefix_tokens=True)
    return [torch.cat([prefix, rows], dim=1) for rows, prefix in peer.forward_intermediates(images, **options)]


@pytest.mark.parametrize(
    ('library', 'task', 'variant'),
    [
        ('timm', 'features', 'vit'),
        ('timm', 'features', 'shared'),
        *(('hf', task, 'per_layer') for task in ('features', 'pretraining', 'classification', 'segmentation')),
    ],
)
def test_features_are_the_peers_hidden_states(library, task, variant, images, tmp_path):
    wide = dict(embed_dim=64, num_heads=1) if variant == 'vit' else {}  # the file says no number of heads
    peer, path = peers.PEERS[library](task, variant, **wide), tmp_path / 'model.safetensors'
    if library == 'hf':
        peer.save_pretrained(tmp_path)
    else:
        torch.save(peer.state_dict(), path := tmp_path / 'timm.pth')
    extractor = FeatureExtractor(path, 'cpu', **LEVELS)
    files = sorted(map(str, images.glob('*.jpg')))[:3]
    seen = torch.stack([extractor.prepared(file).float() for file in files])
    for file, pixels in zip(files, seen, strict=True):  # 64 x 48 pixels: short side to 48 / 0.875, the middle of it
        image = Image.open(file).resize((73, 55), Image.Resampling.BICUBIC).crop((12, 4, 12 + SIZE, 4 + SIZE))
        assert np.abs(pixels.permute(1, 2, 0).numpy() - np.asarray(image)).max() <= 1
    mean, std = (torch.tensor(LEVELS[name]).view(3, 1, 1) for name in ('mean', 'std'))
    states = states_of(peer, (seen - mean) / std)
    states = torch.stack([states[0], states[-1]], dim=1).numpy()  # images, layers, N, C
    results = extractor(files, layers=np.array([0, -1]), batch_size=2)
    for file, found, tokens in zip(files, results, states, strict=True):
        patches = tokens[:, 1:].reshape(found['patches'].shape)
        expected = dict(class_token=tokens[:, 0], mean=patches.mean(axis=(1, 2)), patches=patches)
        assert found.pop('path') == file and found.keys() == expected.keys()
        for kind, values in expected.items():
            np.testing.assert_allclose(found[kind], values, atol=1e-4, rtol=1e-4)


def test_images_of_many_bands_are_taken_by_their_models(tmp_path):
    backbone = peers.ours('features', 'vit', in_channels=5)['backbone']
    meta = dict(architecture=dict(num_heads=2), preprocessing=dict(mean=[100.0] * 5, std=[50.0] * 5, size=[48, 48]))
    torch.save(dict(state_dict=backbone.state_dict(), meta=meta), tmp_path / 'bands.pth')
    image = np.random.default_rng(0).integers(0, 256, (48, 56, 5), dtype=np.uint8)
    np.save(tmp_path / 'image.npy', image)
    with torch.no_grad():
        x, grid, bias = backbone.embed((torch.from_numpy(image).permute(2, 0, 1)[None] - 100.0) / 50, None)
        expected = backbone.blocks[0](x, grid, bias)[0, 1:].unflatten(0, (6, 7))
    for found in FeatureExtractor(tmp_path / 'bands.pth', 'cpu', whole=True)([image, tmp_path]):
        np.testing.assert_allclose(found['patches'], expected, atol=1e-4, rtol=1e-4)


def test_one_image_is_the_same_as_path_array_and_pil_alone_or_in_a_batch(checkpoint, images):
    file = min(images.glob('*.jpg'))
    sources = [str(file), file, np.asarray(Image.open(file)), Image.open(file), images]
    extractor = FeatureExtractor(checkpoint, 'cpu')
    first, *alike, other, _ = [*extractor(sources[:4]), *extractor(sources[4:], batch_size=5)][:7]
    assert [row['path'] for row in (first, *alike)] == [str(file)] * 2 + [None] * 2 + [str(file)]
    for row in alike:
        np.testing.assert_allclose(row['mean'], first['mean'], atol=1e-5)
    assert not np.allclose(other['mean'], first['mean'], atol=1e-2)


def test_a_pil_image_that_cannot_be_decoded_costs_no_other_image(checkpoint, images, tmp_path):
    content = min(images.glob('*.jpg')).read_bytes()
    (tmp_path / 'cut.jpg').write_bytes(content[:-50])
    sources = [Image.open(tmp_path / 'cut.jpg'), Image.new('RGB', (SIZE, SIZE))]
    found = embed(checkpoint, sources, on_error='skip', progress=False)
    assert len(found['features']) == 1 and str(tmp_path / 'cut.jpg') in found['skipped'][0]['error']
    with pytest.raises(FileNotFoundError, match='none of 1 images could be read: .*cut.jpg'):
        embed(checkpoint, tmp_path, on_error='skip', progress=False)
    with pytest.raises(FileNotFoundError, match='none of 0 images .* list is empty'):
        embed(checkpoint, [*tmp_path.glob('*.jpeg')])


def test_kept_features_let_the_memory_of_their_batches_go():
    batches = []

    def row(number: int) -> np.ndarray:
        batch = np.full((100, 4), number, np.float32)
        batches.append(weakref.ref(batch))
        return batch[number]

    others, features = gathered((dict(path=str(number), mean=row(number)) for number in range(3)), 'mean', 5)
    assert features.tolist() == [[number] * 4 for number in range(3)] and others[2] == dict(path='2')
    assert [batch() for batch in batches] == [None] * 3


def test_means_are_float32_even_of_no_image(checkpoint, tmp_path):
    (tmp_path / 'a.png').write_bytes(b'')
    features, samples = FeatureExtractor(checkpoint, mean=127.5, std=127.5).means([tmp_path / 'a.png'])
    assert features.dtype == torch.float32 and features.shape[0] == 0 and 'error' in samples[0]


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16, torch.float64])
def test_a_backbone_of_another_type_gives_float32(dtype, checkpoint, images):
    backbone = BEiTBackbone.from_checkpoint(checkpoint)
    networks = checkpoint, backbone.to(dtype)
    expected, found = (next(FeatureExtractor(network, **LEVELS)(images)) for network in networks)
    assert found['mean'].dtype == np.float32
    assert np.linalg.norm(found['mean'] - expected['mean']) < 0.05 * np.linalg.norm(expected['mean'])


def test_the_type_of_the_callers_autocast_is_taken(checkpoint):
    extractor, pixels = FeatureExtractor(checkpoint, 'cpu', **LEVELS), torch.full((1, 3, SIZE, SIZE), 90.0)
    exact = extractor.features(pixels, [-1])['mean']
    with torch.autocast('cpu', torch.bfloat16):
        rounded = extractor.features(pixels, [-1])['mean']
    computed = usable_dtype('bfloat16', 'cpu') == 'bfloat16'  # cores without it stay with float32
    assert rounded.dtype == torch.float32 and (rounded != exact).any() == computed
    assert (rounded - exact).norm() < 0.05 * exact.norm()


def test_whole_images_keep_their_shape_in_whole_patches(checkpoint):
    for size, sides, seen in (
        (30, (48, 64), (32, 40)),  # 30 / 8 is 3.75, 30 * 64 / 48 / 8 is 5
        (48, (48, 192), (48, 192)),  # 4 times as long is whole
        (48, (48, 384), (24, 192)),  # attention takes memory with the square of the patches
    ):
        (row,) = FeatureExtractor(checkpoint, 'cpu', size=size, whole=True)(np.zeros((*sides, 3), np.uint8))
        assert row['patches'].shape == (seen[0] // 8, seen[1] // 8, 32)
    for size in (7, -5):
        with pytest.raises(UserError, match='one patch, 8 pixels'):
            FeatureExtractor(checkpoint, 'cpu', size=size, whole=True)


def test_random_weights_are_of_the_same_architecture_and_repeat(checkpoint, images):
    extractor, state = FeatureExtractor(checkpoint, 'cpu'), torch.random.get_rng_state()
    models = extractor, *map(extractor.with_random_weights, (0, 0, 1))
    trained, first, again, other = (next(model(images / '00.jpg'))['mean'] for model in models)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert np.array_equal(first, again) and not np.allclose(first, other) and not np.allclose(trained, first)


def test_a_network_in_training_gives_the_features_of_evaluation_and_stays_in_training(checkpoint, images):
    backbone = BEiTBackbone.from_checkpoint(checkpoint)
    for block in backbone.blocks:
        block.drop_path.p = 0.5
    networks = checkpoint, backbone.train()
    expected, found = (next(FeatureExtractor(network, **LEVELS)(images))['mean'] for network in networks)
    np.testing.assert_allclose(found, expected, atol=1e-6)
    assert backbone.training and backbone.blocks[0].training


@pytest.mark.parametrize('kind', ['mean', 'class_token', 'patches'])
def test_files_are_read_back(kind, checkpoint, images, tmp_path):
    out, options = tmp_path / 'deep/features.npz', dict(device='cpu', size=40, whole=True)
    sources = [images, Image.new('RGB', (50, 9))]  # of another shape
    found = embed(checkpoint, sources, out, kind, layer=np.int64(0), progress=False, **options)
    rows, read = list(FeatureExtractor(checkpoint, **options)(sources, [kind], layers=0)), dict(np.load(out))
    if kind == 'patches':
        ends = np.cumsum(read['grids'].prod(axis=1))[:-1]
        parts = zip(np.split(read['features'], ends), read['grids'], strict=True)
        read['features'] = [part.reshape(*grid, -1) for part, grid in parts]
    for features in (found['features'], read['features']):
        assert isinstance(features, list if kind == 'patches' else np.ndarray)
        for mine, row in zip(features, rows, strict=True):
            assert mine.dtype == np.float32
            np.testing.assert_allclose(mine, row[kind], atol=1e-6)
    assert read['paths'].tolist() == found['paths'] == [*sorted(map(str, images.glob('*.jpg'))), '']
    assert (read['checkpoint'], read['kind'], read['layer']) == (checkpoint, kind, 0)


def test_the_tool_draws_components_and_neighbours(checkpoint, images, tmp_path):
    words = 'visualization/features.py', checkpoint, images / '00.jpg', images / '01.jpg', '--device', 'cpu', '--among'
    run_tool(*words, images, '--out', tmp_path / 'out')
    assert Image.open(tmp_path / 'out/pca.png').size == (4 + 2 * 164, 4 + 2 * (120 + 16 + 4))
    assert Image.open(tmp_path / 'out/neighbours.png').size == (4 + 6 * 164, 4 + 2 * (160 + 16 + 4))
    with pytest.raises(SystemExit, match='2'):
        run_tool(*words[:-3], '--kind', 'class_token')

"""VQ-KD's tokenizer: the released file key by key, and which token is which."""

import pytest
import torch
from helpers import RELEASED_BLOCK, WEIGHT_AND_BIAS
from mmengine.logging import MMLogger
from peers import assert_equal

from beit_mm.models import VQKDTokenizer
from beit_mm.positions import take_tokens

SHAPE = dict(arch=dict(embed_dims=32, num_layers=2, num_heads=4), img_size=64, code_dims=8, vocab_size=64)


def vision_transformer(depth: int) -> list[str]:
    """Names of the released code's VisionTransformer without a classifier."""
    stem = [f'{layer}.{part}' for layer in ('patch_embed.proj', 'fc_norm') for part in WEIGHT_AND_BIAS]
    blocks = [f'blocks.{i}.{name}' for i in range(depth) for name in RELEASED_BLOCK]
    return ['cls_token', 'pos_embed', *stem, *blocks]


def task_layer(name: str) -> list[str]:
    return [f'{name}_task_layer.{layer}.{part}' for layer in (0, 2) for part in WEIGHT_AND_BIAS]


NEEDED = [f'encoder.{name}' for name in vision_transformer(depth=2)] + task_layer('encode')
NEEDED += ['quantize.embedding.weight']
LEFT_OVER = [f'decoder.{name}' for name in vision_transformer(depth=1)] + task_layer('decode')
# statistics of the training, which encoding does not need
LEFT_OVER += [f'quantize.{name}' for name in ('cluster_size', 'embedding.cluster_size', 'embedding.embed_avg')]
LEFT_OVER += ['quantize.embedding.initted']
LEFT_OVER += ['teacher_model.visual.proj', 'scaling_layer.shift', 'scaling_layer.scale']


def our_name(name: str) -> str:
    return name.replace('quantize.embedding.weight', 'codebook').replace('fc_norm', 'norm')


def released_file(path, *more: str, without: str = '') -> tuple[str, dict[str, torch.Tensor]]:
    """A file with the released names, and what is in it that is needed."""
    shapes = VQKDTokenizer(random_weights=True, **SHAPE).state_dict()
    weights = {name: torch.randn_like(shapes[our_name(name)]) * 0.3 for name in NEEDED if name != without}
    torch.save(dict(model=weights | {name: torch.ones(3) for name in [*LEFT_OVER, *more]}), path)
    return str(path), weights


def test_every_key_of_a_released_file_is_used_or_named(tmp_path, caplog):
    path, weights = released_file(tmp_path / 'vqkd.pth')
    logger = MMLogger.get_instance('vqkd')
    logger.addHandler(caplog.handler)
    tokenizer = VQKDTokenizer(path, **SHAPE)
    logger.removeHandler(caplog.handler)
    assert f'{len(NEEDED)} tensors used, {len(LEFT_OVER)} not needed' in caplog.text
    parts = caplog.text.partition('not needed (')[2].partition(')')[0].split(', ')
    assert all(name.startswith(tuple(parts)) for name in LEFT_OVER)
    assert_equal(tokenizer.state_dict(), {our_name(name): tensor for name, tensor in weights.items()})
    assert tokenizer.provenance['path'] == path and len(tokenizer.provenance['sha256']) == 64
    assert not any(p.requires_grad for p in tokenizer.parameters())


def test_unknown_and_missing_keys_are_refused(tmp_path):
    path, _ = released_file(tmp_path / 'more.pth', 'encoder.blocks.0.attn.qkv.other')
    with pytest.raises(ValueError, match=r'more.pth does not hold the weights of this VQKDTokenizer.*attn\.qkv\.other'):
        VQKDTokenizer(path, **SHAPE)
    path, _ = released_file(tmp_path / 'less.pth', without='quantize.embedding.weight')
    with pytest.raises(ValueError, match=r'Missing key\(s\).*codebook'):
        VQKDTokenizer(path, **SHAPE)
    path, _ = released_file(tmp_path / 'other.pth')
    with pytest.raises(ValueError, match='size mismatch for codebook'):
        VQKDTokenizer(path, **dict(SHAPE, vocab_size=32))
    with pytest.raises(FileNotFoundError, match='Get https://github.com/addf400'):
        VQKDTokenizer(str(tmp_path / 'none.pth'), **SHAPE)
    with pytest.raises(ValueError, match="precision must be 'fp16'"):
        VQKDTokenizer(precision='half', random_weights=True, **SHAPE)


@pytest.mark.parametrize('length', ['one', 'any'])
def test_a_token_is_the_nearest_vector_of_the_codebook(length):
    """The released ones have length one, where it is that of the largest cosine."""
    tokenizer = VQKDTokenizer(random_weights=True, **SHAPE)
    torch.testing.assert_close(tokenizer.codebook.norm(dim=-1), torch.ones(64))
    if length == 'any':
        torch.nn.init.normal_(tokenizer.codebook, 0, 0.5)
    images = torch.rand(4, 3, 64, 64)
    vectors = tokenizer.encode_task_layer(tokenizer.encoder(2 * images - 1)[0][:, 1:])  # B, N, D
    vectors = vectors / vectors.norm(dim=-1, keepdim=True)
    expected = torch.cdist(vectors.double(), tokenizer.codebook.double()).argmin(dim=-1)
    if length == 'one':
        assert torch.equal(expected, (vectors @ tokenizer.codebook.T).argmax(dim=-1))
    tokens = tokenizer.encode(images)
    assert tokens.shape == (4, 4, 4) and tokens.dtype == torch.int64
    assert torch.equal(tokens.flatten(1), expected)
    assert len(tokens.unique()) > 5


def test_tokens_at_positions_and_under_autocast():
    tokenizer = VQKDTokenizer(random_weights=True, **SHAPE)
    images = torch.rand(2, 3, 64, 64)
    tokens = tokenizer.encode(images)
    positions = torch.tensor([[0, 5, 15], [3, -1, -1]])
    picked = tokenizer.encode_at(images, positions)
    assert picked[1].tolist()[1:] == [-1, -1]
    assert torch.equal(picked[0], take_tokens(tokens.flatten(1), positions[:1])[0])
    with torch.autocast('cpu', torch.bfloat16):
        assert torch.equal(tokenizer.encode(images), tokens)  # fp16 is fp32 on a CPU, as the original


def test_half_precision_changes_few_tokens():
    exact = VQKDTokenizer(random_weights=True, **SHAPE)
    rounded = VQKDTokenizer(random_weights=True, precision='bf16', **SHAPE)
    images = torch.rand(16, 3, 64, 64)
    outputs = []
    for tokenizer in (exact, rounded):
        tokenizer.encoder.register_forward_hook(lambda _module, _inputs, features: outputs.append(features[0]))
    share = (exact.encode(images) != rounded.encode(images)).float().mean()
    assert share < 0.2
    features, of_rounded = (features.float() for features in outputs)
    error = (features - of_rounded).norm() / features.norm()
    assert 1e-4 < error < 0.05  # bfloat16 has 8 bits, float32 24


def test_images_of_other_sizes_and_no_pictures():
    tokenizer = VQKDTokenizer(random_weights=True, **SHAPE)
    assert tokenizer.encode(torch.rand(1, 3, 48, 96)).shape == (1, 3, 6)
    with pytest.raises(ValueError, match='a multiple of 16 pixels a side, got 50 x 64'):
        tokenizer.encode(torch.rand(1, 3, 50, 64))
    assert not tokenizer.can_decode
    with pytest.raises(ValueError, match='has no decoder'):
        tokenizer.decode(torch.zeros(1, 4, 4, dtype=torch.int64))


def test_true_size():
    with torch.device('meta'):
        tokenizer = VQKDTokenizer(random_weights=True)
    # ViT-B/16 with biases for query and value but not for key, 768 x 768 + 768 x 32 with biases, 8192 x 32
    vit = 85_798_656 - 12 * 768
    assert sum(p.numel() for p in tokenizer.parameters()) == vit + 768 * 769 + 32 * 769 + 8192 * 32 == 86_666_784
    assert tokenizer.grid_size(224, 224) == (14, 14)

"""VQ-KD's tokenizer: the released file key by key, and which token is which."""

import pytest
import torch
from mmengine.logging import MMLogger

from beit_mm.models import VQKDTokenizer
from beit_mm.positions import take_tokens

SHAPE = dict(arch=dict(embed_dims=32, num_layers=2, num_heads=4), img_size=64, code_dims=8, vocab_size=64)
TRAINING = {  # of the quantizer: statistics, which encoding does not need
    'quantize.cluster_size': (64,),
    'quantize.embedding.cluster_size': (64,),
    'quantize.embedding.embed_avg': (64, 8),
    'quantize.embedding.initted': (1,),
}


def vision_transformer(prefix: str, depth: int, channels: int, patch: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the released code's VisionTransformer without a classifier."""
    shapes = {
        'cls_token': (1, 1, 32),
        'pos_embed': (1, 17, 32),
        'patch_embed.proj.weight': (32, channels, patch, patch),
        'patch_embed.proj.bias': (32,),
        'fc_norm.weight': (32,),
        'fc_norm.bias': (32,),
    }
    for i in range(depth):
        shapes |= {f'blocks.{i}.norm{n}.{kind}': (32,) for n in (1, 2) for kind in ('weight', 'bias')}
        shapes |= {f'blocks.{i}.attn.{name}': (32,) for name in ('q_bias', 'v_bias', 'proj.bias')}
        shapes |= {
            f'blocks.{i}.attn.qkv.weight': (96, 32),
            f'blocks.{i}.attn.proj.weight': (32, 32),
            f'blocks.{i}.mlp.fc1.weight': (128, 32),
            f'blocks.{i}.mlp.fc1.bias': (128,),
            f'blocks.{i}.mlp.fc2.weight': (32, 128),
            f'blocks.{i}.mlp.fc2.bias': (32,),
        }
    return {prefix + name: shape for name, shape in shapes.items()}


NEEDED = vision_transformer('encoder.', depth=2, channels=3, patch=16) | {
    'encode_task_layer.0.weight': (32, 32),
    'encode_task_layer.0.bias': (32,),
    'encode_task_layer.2.weight': (8, 32),
    'encode_task_layer.2.bias': (8,),
    'quantize.embedding.weight': (64, 8),
}
LEFT_OVER = (
    TRAINING
    | vision_transformer('decoder.', depth=1, channels=8, patch=1)
    | {
        'decode_task_layer.0.weight': (32, 32),
        'decode_task_layer.0.bias': (32,),
        'decode_task_layer.2.weight': (16, 32),
        'decode_task_layer.2.bias': (16,),
        'teacher_model.visual.proj': (8, 8),
        'scaling_layer.shift': (1, 3, 1, 1),
        'scaling_layer.scale': (1, 3, 1, 1),
    }
)


def released_file(path, **changes) -> tuple[str, dict[str, torch.Tensor]]:
    """A file with the released names; changes are names with shapes, or None to leave one out."""
    shapes = {name: shape for name, shape in (NEEDED | LEFT_OVER | changes).items() if shape is not None}
    weights = {name: torch.randn(shape) * 0.3 for name, shape in shapes.items()}
    torch.save(dict(model=weights), path)
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
    own = tokenizer.state_dict()
    renamed = {'quantize.embedding.weight': 'codebook', 'encoder.fc_norm.weight': 'encoder.norm.weight'}
    names = {renamed.get(name, name).replace('fc_norm.bias', 'norm.bias'): name for name in NEEDED}
    assert set(own) == set(names)
    assert all(torch.equal(own[ours], weights[theirs]) for ours, theirs in names.items())
    assert tokenizer.provenance['path'] == path and len(tokenizer.provenance['sha256']) == 64
    assert not any(p.requires_grad for p in tokenizer.parameters())


def test_unknown_and_missing_keys_are_refused(tmp_path):
    path, _ = released_file(tmp_path / 'more.pth', **{'encoder.blocks.0.attn.qkv.other': (96,)})
    with pytest.raises(ValueError, match=r'does not hold the weights of this VQKDTokenizer.*attn\.qkv\.other'):
        VQKDTokenizer(path, **SHAPE)
    path, _ = released_file(tmp_path / 'less.pth', **{'quantize.embedding.weight': None})
    with pytest.raises(ValueError, match=r'Missing key\(s\).*codebook'):
        VQKDTokenizer(path, **SHAPE)
    path, _ = released_file(tmp_path / 'other.pth')
    with pytest.raises(ValueError, match='size mismatch for codebook'):
        VQKDTokenizer(path, **dict(SHAPE, vocab_size=32))
    with pytest.raises(FileNotFoundError, match='Get https://github.com/addf400'):
        VQKDTokenizer(str(tmp_path / 'none.pth'), **SHAPE)
    with pytest.raises(ValueError, match="precision must be 'fp16'"):
        VQKDTokenizer(precision='half', random_weights=True, **SHAPE)


def test_a_token_is_the_nearest_vector_of_the_codebook():
    tokenizer = VQKDTokenizer(random_weights=True, **SHAPE)
    with torch.no_grad():
        tokenizer.codebook.normal_(0, 0.5)  # of different lengths, unlike the released ones
    images = torch.rand(4, 3, 64, 64)
    vectors = tokenizer.encode_task_layer(tokenizer.encoder(2 * images - 1)[0][:, 1:])  # B, N, D
    vectors = vectors / vectors.norm(dim=-1, keepdim=True)
    expected = torch.cdist(vectors.double(), tokenizer.codebook.double()).argmin(dim=-1)
    tokens = tokenizer.encode(images)
    assert tokens.shape == (4, 4, 4) and tokens.dtype == torch.int64
    assert torch.equal(tokens.flatten(1), expected)
    assert len(tokens.unique()) > 5


def test_the_released_codebook_is_searched_by_direction():
    """Its vectors have length one, where the nearest is the one of the largest cosine."""
    tokenizer = VQKDTokenizer(random_weights=True, **SHAPE)
    torch.testing.assert_close(tokenizer.codebook.norm(dim=-1), torch.ones(64))
    images = torch.rand(4, 3, 64, 64)
    vectors = tokenizer.encode_task_layer(tokenizer.encoder(2 * images - 1)[0][:, 1:])
    cosine = torch.nn.functional.cosine_similarity(vectors.unsqueeze(2), tokenizer.codebook, dim=-1)
    assert torch.equal(tokenizer.encode(images).flatten(1), cosine.argmax(dim=-1))


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

"""VQ-KD's tokenizer: the released file key by key, and which token is which; see tests/parity/test_beit_v2_peers.py."""

import pytest
import torch
from helpers import RELEASED_BLOCK, WEIGHT_AND_BIAS
from mmengine.logging import MMLogger
from peers import assert_equal

from beit_mm.models import VQKDTokenizer

SHAPE = dict(arch=dict(embed_dims=32, num_layers=2, num_heads=4), img_size=64, code_dims=8, vocab_size=64)


def network(name: str, task: str, depth: int) -> list[str]:
    """Names of the released code's VisionTransformer without a classifier, and of the layers behind it."""
    stem = [f'{layer}.{part}' for layer in ('patch_embed.proj', 'fc_norm') for part in WEIGHT_AND_BIAS]
    blocks = [f'blocks.{i}.{part}' for i in range(depth) for part in RELEASED_BLOCK]
    behind = [f'{task}_task_layer.{layer}.{part}' for layer in (0, 2) for part in WEIGHT_AND_BIAS]
    return [f'{name}.{part}' for part in ('cls_token', 'pos_embed', *stem, *blocks)] + behind


NEEDED = [*network('encoder', 'encode', depth=2), 'quantize.embedding.weight']
# statistics of the training, which encoding does not need
LEFT_OVER = [f'quantize.{name}' for name in ('cluster_size', 'embedding.cluster_size', 'embedding.embed_avg')]
LEFT_OVER += [*network('decoder', 'decode', depth=1), 'quantize.embedding.initted']
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


def test_unknown_missing_and_other_tensors_are_refused(tmp_path):
    other, codebook = 'encoder.blocks.0.attn.qkv.other', 'quantize.embedding.weight'
    for more, without, vocab_size, message in (
        ([other], '', 64, r'f.pth does not hold .* this VQKDTokenizer.*attn\.qkv\.other'),
        ([], codebook, 64, r'Missing key\(s\).*codebook'),
        ([], '', 32, 'size mismatch for codebook'),
    ):
        path, _ = released_file(tmp_path / 'f.pth', *more, without=without)
        with pytest.raises(ValueError, match=message):
            VQKDTokenizer(path, **dict(SHAPE, vocab_size=vocab_size))


def test_a_token_is_the_nearest_vector_of_the_codebook():
    """Of any length; the released ones have length one, where it is that of the largest cosine."""
    tokenizer = VQKDTokenizer(random_weights=True, **SHAPE)
    torch.testing.assert_close(tokenizer.codebook.norm(dim=-1), torch.ones(64))
    torch.nn.init.normal_(tokenizer.codebook, 0, 0.5)
    images = torch.rand(4, 3, 64, 64)
    vectors = tokenizer.encode_task_layer(tokenizer.encoder(2 * images - 1)[0][:, 1:])  # B, N, D
    vectors = vectors / vectors.norm(dim=-1, keepdim=True)
    expected = torch.cdist(vectors.double(), tokenizer.codebook.double()).argmin(dim=-1).view(4, 4, 4)
    assert torch.equal(tokenizer.encode(images), expected) and len(expected.unique()) > 5
    with torch.autocast('cpu', torch.bfloat16):
        assert torch.equal(tokenizer.encode(images), expected)  # fp16 is fp32 on a CPU, as the original
    assert not tokenizer.can_decode


def test_half_precision_is_that_of_the_encoder():
    outputs, images = [], torch.rand(16, 3, 64, 64)
    for precision in ('fp32', 'bf16'):
        tokenizer = VQKDTokenizer(random_weights=True, precision=precision, **SHAPE)
        tokenizer.encoder.register_forward_hook(lambda _module, _inputs, features: outputs.append(features[0].float()))
        outputs.append(tokenizer.encode(images))
    features, tokens, of_rounded, rounded = outputs
    assert (tokens != rounded).float().mean() < 0.2
    error = (features - of_rounded).norm() / features.norm()
    assert 1e-4 < error < 0.05  # bfloat16 has 8 bits, float32 24
    with pytest.raises(ValueError, match="precision must be 'fp16'"):
        VQKDTokenizer(precision='half', random_weights=True, **SHAPE)

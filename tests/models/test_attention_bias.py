"""The bias reaches attention as CUDA's fused kernels take it without a copy: aligned rows, the queries' type."""

import pytest
import torch
import torch.nn.functional as F

from beit_mm.models import vit
from beit_mm.models.vit import BEiTBackbone

POSITIONS = torch.tensor([[0, 5, 20, -1], [3, 4, 8, 24]])


def make_backbone(rel_pos_bias: str, **options: object) -> BEiTBackbone:
    torch.manual_seed(0)
    sizes = dict(embed_dims=32, num_layers=2, num_heads=4)
    backbone = BEiTBackbone(sizes, 40, 8, abs_pos_embed=False, rel_pos_bias=rel_pos_bias, **options)  # 26 tokens
    for name, parameter in backbone.named_parameters():
        if name.endswith('bias_table'):
            torch.nn.init.normal_(parameter)
    return backbone


@pytest.fixture
def seen(monkeypatch) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Queries and bias of every attention."""
    calls: list[tuple[torch.Tensor, torch.Tensor]] = []
    fused, plain = F.scaled_dot_product_attention, vit._attention_scores

    def watch_fused(q, k, v, attn_mask):
        calls.append((q, attn_mask))
        return fused(q, k, v, attn_mask=attn_mask)

    def watch_plain(q, k, bias):
        calls.append((q, bias))
        return plain(q, k, bias)

    monkeypatch.setattr(vit.F, 'scaled_dot_product_attention', watch_fused)
    monkeypatch.setattr(vit, '_attention_scores', watch_plain)
    return calls


@pytest.mark.parametrize('rel_pos_bias', ['shared', 'per_layer'])
@pytest.mark.parametrize('training', [True, False])
@pytest.mark.parametrize('picked', [False, True])
@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
@pytest.mark.parametrize('size', [40, 56])  # the size that the table was made for, and another
def test_rows_are_aligned_and_of_the_queries_type(rel_pos_bias, training, picked, dtype, size, seen):
    backbone = make_backbone(rel_pos_bias).train(training)
    images = torch.randn(2, 3, size, size)
    with torch.set_grad_enabled(training), torch.autocast('cpu', torch.bfloat16, enabled=dtype is torch.bfloat16):
        backbone(images, positions=POSITIONS if picked else None)
    num_tokens = 1 + (size // 8) ** 2
    rows = [num_tokens, 4 if picked else num_tokens]
    assert [tuple(bias.shape[1:]) for _, bias in seen] == [(4, number, num_tokens) for number in rows]
    for queries, bias in seen:
        assert queries.dtype == bias.dtype == dtype
        assert bias.stride(-1) == 1 and all(stride % 8 == 0 for stride in bias.stride()[:-1])
        assert bias.storage_offset() % 8 == 0


@pytest.mark.parametrize('rel_pos_bias', ['shared', None])
def test_attention_in_bfloat16_is_as_near_to_float32_as_torchs_kernel(rel_pos_bias):
    """On a CPU it is written out, which is quicker."""
    attention = make_backbone(rel_pos_bias).blocks[0].attn
    torch.nn.init.normal_(attention.qkv.weight, std=0.5)
    x, bias = torch.randn(2, 26, 32), torch.randn(1, 4, 26, 32) if rel_pos_bias else None
    exact = attention(x, (5, 5), bias)
    with torch.autocast('cpu', torch.bfloat16):
        written_out = attention(x, (5, 5), bias)
        q, k, v = attention._qkv(x, None)
        rows = None if bias is None else bias[..., :26].to(q.dtype)
        kernel = attention.proj(F.scaled_dot_product_attention(q, k, v, attn_mask=rows).transpose(1, 2).flatten(2))
    errors = [(y.float() - exact).square().mean().sqrt().item() for y in (written_out, kernel)]
    assert 0 < errors[0] < 1.2 * errors[1] + 1e-4, errors


def test_a_shared_bias_is_made_once_a_step(monkeypatch):
    made = []
    read = vit.bias_from_table
    monkeypatch.setattr(vit, 'bias_from_table', lambda *args: made.append(args) or read(*args))
    make_backbone('shared')(torch.randn(2, 3, 40, 40), positions=POSITIONS)
    assert len(made) == 1


@pytest.mark.parametrize('strict', [True, False])
def test_a_backbone_exports_at_a_size_that_was_never_seen(strict):
    side = 72 if strict else 88
    backbone, images = make_backbone('shared').eval(), torch.randn(1, 3, side, side)
    exported = torch.export.export(backbone, (images,), strict=strict).module()
    with torch.no_grad():
        torch.testing.assert_close(exported(images)[0], backbone(images)[0])


@pytest.mark.parametrize('rel_pos_bias', ['shared', 'per_layer'])
def test_features_and_gradients_are_those_of_the_plain_bias(rel_pos_bias, monkeypatch):
    """Against a bias read pair by pair, (1, heads, N, N) without padding."""

    def plain(table, table_grid, grid, dtype):
        assert table_grid == grid == (5, 5)
        rows = torch.tensor([[row_of(query, key) for key in range(26)] for query in range(26)])
        return table[rows].permute(2, 0, 1).unsqueeze(0)

    def row_of(query: int, key: int) -> int:
        if query == 0 or key == 0:
            return {(True, True): 83, (True, False): 81, (False, True): 82}[query == 0, key == 0]
        (down, right), (key_down, key_right) = divmod(query - 1, 5), divmod(key - 1, 5)
        return (down - key_down + 4) * 9 + right - key_right + 4

    images, results = torch.randn(2, 3, 40, 40), []
    for function in (vit.bias_from_table, plain):
        monkeypatch.setattr(vit, 'bias_from_table', function)
        backbone = make_backbone(rel_pos_bias)
        features = backbone(images, positions=POSITIONS)[0]
        features.square().sum().backward()
        tables = [p.grad for name, p in backbone.named_parameters() if name.endswith('bias_table')]
        with torch.no_grad():
            results.append([features.detach(), backbone.eval()(images)[0], *tables])
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)
        assert expected.abs().sum() > 0

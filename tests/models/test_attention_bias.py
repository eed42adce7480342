"""The bias reaches attention as CUDA's fused kernels take it without a copy: aligned rows, the queries' type."""

import pytest
import torch
import torch.nn.functional as F

from beit_mm.models import vit
from beit_mm.models.vit import BEiTBackbone

POSITIONS = torch.tensor([[0, 5, 20, -1], [3, 4, 8, 24]])


def make_backbone(rel_pos_bias: str) -> BEiTBackbone:
    sizes = dict(embed_dims=32, num_layers=2, num_heads=4)
    return BEiTBackbone(sizes, 40, 8, abs_pos_embed=False, rel_pos_bias=rel_pos_bias)  # 26 tokens


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
def test_rows_are_aligned_of_the_queries_type_and_shared_ones_made_once(
    rel_pos_bias, training, picked, dtype, size, seen, monkeypatch
):
    made, read = [], vit.bias_from_table
    monkeypatch.setattr(vit, 'bias_from_table', lambda *args: made.append(args) or read(*args))
    backbone = make_backbone(rel_pos_bias).train(training)
    images = torch.randn(2, 3, size, size)
    with torch.set_grad_enabled(training), torch.autocast('cpu', torch.bfloat16, enabled=dtype is torch.bfloat16):
        backbone(images, positions=POSITIONS if picked else None)
    assert len(made) == (1 if rel_pos_bias == 'shared' else 2)
    num_tokens = 1 + (size // 8) ** 2
    rows = [num_tokens, 4 if picked else num_tokens]
    assert [tuple(bias.shape[1:]) for _, bias in seen] == [(4, number, num_tokens) for number in rows]
    for queries, bias in seen:
        assert queries.dtype == bias.dtype == dtype
        assert bias.stride(-1) == 1 and all(stride % 8 == 0 for stride in bias.stride()[:-1])
        assert bias.storage_offset() % 8 == 0


@pytest.mark.parametrize('strict', [True, False])
def test_a_backbone_exports_at_a_size_that_was_never_seen(strict):
    side = 72 if strict else 88
    backbone, images = make_backbone('shared').eval(), torch.randn(1, 3, side, side)
    torch.nn.init.normal_(backbone.rel_pos_bias.relative_position_bias_table)
    exported = torch.export.export(backbone, (images,), strict=strict).module()
    with torch.no_grad():
        torch.testing.assert_close(exported(images)[0], backbone(images)[0])

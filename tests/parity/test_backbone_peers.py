"""The backbone gives what timm's and transformers' BEiT give with the same random weights."""

import pytest
import torch
from timm.models.beit import Beit
from transformers import BeitConfig, BeitModel

from beit_mm.models import BEiTBackbone
from beit_mm.positions import resize_bias_table, resize_position_embedding

ARCH = dict(embed_dims=48, num_layers=3, num_heads=4)
VARIANTS = {
    'vit': dict(abs_pos_embed=True),
    'vit_layer_scale': dict(abs_pos_embed=True, layer_scale_init=0.1),
    'shared': dict(abs_pos_embed=False, rel_pos_bias='shared', layer_scale_init=0.1),
    'per_layer': dict(abs_pos_embed=False, rel_pos_bias='per_layer', layer_scale_init=0.1),
}


def build(variant: str, **kwargs) -> BEiTBackbone:
    """A small backbone with every parameter random, tables and LayerScale included."""
    model = BEiTBackbone(ARCH, img_size=64, patch_size=8, **VARIANTS[variant], **kwargs)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.2, generator=generator)
    return model.eval()


def timm_peer(variant: str, img_size: int) -> Beit:
    options = VARIANTS[variant]
    kind = options.get('rel_pos_bias')
    return Beit(
        img_size=img_size,
        patch_size=8,
        embed_dim=48,
        depth=3,
        num_heads=4,
        num_classes=0,
        global_pool='',
        use_abs_pos_emb=options['abs_pos_embed'],
        use_rel_pos_bias=kind == 'per_layer',
        use_shared_rel_pos_bias=kind == 'shared',
        init_values=options.get('layer_scale_init'),
    ).eval()


def transformers_peer(variant: str) -> BeitModel:
    options = VARIANTS[variant]
    kind = options.get('rel_pos_bias')
    config = BeitConfig(
        hidden_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=192,
        image_size=64,
        patch_size=8,
        use_mask_token=True,
        layer_norm_eps=1e-6,
        use_mean_pooling=False,
        use_absolute_position_embeddings=options['abs_pos_embed'],
        use_relative_position_bias=kind == 'per_layer',
        use_shared_relative_position_bias=kind == 'shared',
        layer_scale_init_value=options.get('layer_scale_init') or 0.0,
    )
    return BeitModel(config, add_pooling_layer=False).eval()


def to_transformers(weights: dict) -> dict:
    """Our names as transformers 5 has them."""
    renamed = {}
    for name, value in weights.items():
        if name.endswith('attn.qkv.weight'):
            stem = name.replace('blocks', 'layers').replace('attn.qkv.weight', 'attention')
            for part, rows in zip('qkv', value.chunk(3), strict=True):
                renamed[f'{stem}.{part}_proj.weight'] = rows
            continue
        for ours, theirs in [
            ('blocks.', 'layers.'),
            ('attn.q_bias', 'attention.q_proj.bias'),
            ('attn.v_bias', 'attention.v_proj.bias'),
            ('attn.proj', 'attention.o_proj'),
            ('attn.relative', 'relative_position_bias.relative'),
            ('gamma_', 'lambda_'),
            ('norm1', 'layernorm_before'),
            ('norm2', 'layernorm_after'),
            ('patch_embed.proj', 'embeddings.patch_embeddings.projection'),
            ('pos_embed', 'embeddings.position_embeddings'),
            ('cls_token', 'embeddings.cls_token'),
            ('mask_token', 'embeddings.mask_token'),
            ('rel_pos_bias.', 'shared_position_bias.'),
        ]:
            name = name.replace(ours, theirs)
        renamed['layernorm' + name[4:] if name.startswith('norm.') else name] = value
    return renamed


def gradients(output: torch.Tensor, model: torch.nn.Module) -> dict[str, torch.Tensor]:
    weight = torch.linspace(-1, 1, output.numel()).view_as(output)
    model.zero_grad()
    (output * weight).sum().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_gradients_equal(ours: dict, theirs: dict) -> None:
    assert set(ours) == set(theirs)
    for name, gradient in ours.items():
        error = (gradient - theirs[name]).norm() / theirs[name].norm().clamp(min=1e-12)
        assert error < 1e-3, name


@pytest.mark.parametrize('variant', VARIANTS)
def test_timm_same_size(variant):
    ours, peer = build(variant), timm_peer(variant, 64)
    report = peer.load_state_dict(ours.state_dict(), strict=True)
    assert not report.missing_keys and not report.unexpected_keys
    images = torch.randn(2, 3, 64, 64)
    mine, other = ours(images)[0], peer.forward_features(images)
    torch.testing.assert_close(mine, other, atol=1e-4, rtol=1e-4)
    assert_gradients_equal(gradients(mine, ours), gradients(other, peer))


@pytest.mark.parametrize('variant', VARIANTS)
def test_timm_built_at_another_size_with_our_resized_parameters(variant):
    ours, peer = build(variant), timm_peer(variant, 96)
    weights = ours.state_dict()
    for name in weights:
        if name.endswith('relative_position_bias_table'):
            weights[name] = resize_bias_table(weights[name], (8, 8), (12, 12))
        if name == 'pos_embed':
            weights[name] = resize_position_embedding(weights[name], (8, 8), (12, 12))
    peer.load_state_dict(weights, strict=True)
    images = torch.randn(2, 3, 96, 96)
    with torch.no_grad():
        torch.testing.assert_close(ours(images)[0], peer.forward_features(images), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize('variant', VARIANTS)
def test_transformers_with_a_mask(variant):
    ours, peer = build(variant, masked_input=True), transformers_peer(variant)
    peer.load_state_dict(to_transformers(ours.state_dict()), strict=True)
    images, mask = torch.randn(2, 3, 64, 64), torch.rand(2, 8, 8) < 0.4
    mine = ours(images, mask)[0]
    other = peer(images, bool_masked_pos=mask.flatten(1)).last_hidden_state
    torch.testing.assert_close(mine, other, atol=1e-4, rtol=1e-4)
    expected = gradients(other, peer)
    assert_gradients_equal({k: v for k, v in to_transformers(gradients(mine, ours)).items()}, expected)


def test_transformers_attention_map():
    ours, peer = build('per_layer'), transformers_peer('per_layer')
    peer.load_state_dict(to_transformers(ours.state_dict()), strict=False)
    peer.set_attn_implementation('eager')
    images = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        expected = peer(images, output_attentions=True).attentions
        for layer in range(3):
            mine, grid = ours.attention_maps(images, layer)
            torch.testing.assert_close(mine, expected[layer], atol=1e-5, rtol=1e-4)
    assert grid == (8, 8)

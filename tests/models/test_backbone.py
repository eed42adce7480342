"""The backbone: any image, what it computes and what it leaves out. Its sizes: tests/configs."""

import copy

import pytest
import torch
from helpers import positions_of

from beit_mm.errors import UserError
from beit_mm.models import BEiTBackbone, vit
from beit_mm.models.layers import DropPath
from beit_mm.positions import take_tokens

SMALL = dict(arch=dict(embed_dims=32, num_layers=3, num_heads=4), img_size=64, patch_size=8)


def test_padding_is_zeros_at_the_bottom_and_the_right():
    model = BEiTBackbone(**SMALL).eval()
    images = torch.randn(1, 3, 60, 61)
    padded = torch.zeros(1, 3, 64, 64)
    padded[:, :, :60, :61] = images
    torch.testing.assert_close(model(images)[0], model(padded)[0])


def test_patches_are_embedded_alike_on_a_gpu():
    embed, images = BEiTBackbone(**SMALL, in_channels=4).patch_embed.double(), torch.randn(2, 4, 24, 40).double()
    (expected, grid), (found, same) = embed(images), embed.as_product(images)
    torch.testing.assert_close(found, expected)
    assert grid == same == (3, 5)


ROTARY = dict(abs_pos_embed=False, rotary_base=100.0, feedforward='swiglu')


@pytest.mark.parametrize('options', [dict(), dict(rel_pos_bias='shared'), dict(rel_pos_bias='per_layer'), ROTARY])
def test_chosen_positions_equal_the_full_computation(options):
    model = BEiTBackbone(**SMALL, masked_input=True, layer_scale_init=0.1, **options).double()
    for name, parameter in model.named_parameters():
        if 'table' in name:
            torch.nn.init.normal_(parameter)
    mask = torch.rand(3, 8, 8) < torch.tensor([0.2, 0.5, 0.0]).view(3, 1, 1)
    positions = positions_of(mask)
    images = torch.randn(3, 3, 64, 64, dtype=torch.float64)
    full = model(images, mask)[0]
    expected = take_tokens(full, positions + 1)
    weight = (positions >= 0).double().unsqueeze(-1) * torch.randn(expected.shape)
    few = model(images, mask, positions)[0]
    torch.testing.assert_close(few, expected)
    got, wanted = (torch.autograd.grad((x * weight).sum(), list(model.parameters())) for x in (few, expected))
    torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize('options', [dict(rel_pos_bias='shared'), ROTARY])
def test_recomputation_gives_the_same_gradients(options):
    plain = BEiTBackbone(**SMALL, **options).train()
    frugal, runs = copy.deepcopy(plain), []
    frugal.with_cp = True
    frugal.blocks[1].norm1.register_forward_hook(lambda *_: runs.append(torch.is_grad_enabled()))
    images = torch.randn(2, 3, 64, 64)
    for model in (plain, frugal):
        model(images)[0].square().sum().backward()
    torch.testing.assert_close(*([parameter.grad for parameter in model.parameters()] for model in (plain, frugal)))
    assert len(runs) == 2  # once more in the backward pass
    frugal.eval()(images)
    assert len(runs) == 3


def test_frozen_stages_stand_still_and_stay_in_evaluation_mode():
    model = BEiTBackbone(**SMALL, frozen_stages=2, drop_path_rate=0.5, masked_input=True)
    assert model.train() is model and model.eval() is model.train(False)
    model.train()
    assert not model.blocks[1].training and model.blocks[2].training
    trained = {name[:8] for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == {'blocks.2', 'norm.wei', 'norm.bia'}
    shared = BEiTBackbone(**SMALL, frozen_stages=1, rel_pos_bias='shared')
    assert not shared.rel_pos_bias.relative_position_bias_table.requires_grad  # the frozen block reads it


def test_initialisation_follows_the_released_rule():
    model = BEiTBackbone('tiny', masked_input=True, layer_scale_init=0.1)
    for parameter in (model.cls_token, model.mask_token, model.pos_embed, model.patch_embed.proj.weight):
        assert 0.019 < parameter.abs().max() <= 0.02
    # sigma 0.02 cut at one sigma leaves 0.5396 of it
    for depth, block in enumerate(model.blocks, start=1):
        for linear in (block.attn.qkv, block.mlp.fc1):
            assert linear.weight.std().item() == pytest.approx(0.02 * 0.5396, rel=0.02)
        for linear in (block.attn.proj, block.mlp.fc2):
            expected = 0.02 * 0.5396 / (2 * depth) ** 0.5
            assert linear.weight.std().item() == pytest.approx(expected, rel=0.03) and not linear.bias.any()
        assert {block.gamma_1.unique().item(), block.gamma_2.unique().item()} == {block.gamma_1.new_tensor(0.1).item()}
    # as the released code switches it off; blocks that start at zero would never learn
    assert BEiTBackbone(**SMALL, layer_scale_init=0).blocks[0].gamma_1 is None


def test_stochastic_depth_rises_linearly():
    rates = [block.drop_path.p for block in BEiTBackbone('tiny', drop_path_rate=0.11).blocks]
    assert rates == pytest.approx([0.01 * i for i in range(12)])


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
def test_what_stochastic_depth_leaves_is_scaled_exactly(dtype):
    """Each sample as a whole; in bfloat16 by 1 / 0.9 too, of which 1.109375 is the nearest number there."""
    branch = torch.randn(400, 3, 8).to(dtype)
    drop_path = DropPath(0.1)
    assert torch.equal(drop_path.eval()(branch), branch)
    dropped = drop_path.train()(branch)
    kept = dropped.ne(0).any(dim=(1, 2))
    assert 0.8 < kept.float().mean() < 0.97 and dropped.dtype == dtype
    exact = (branch.float() * torch.tensor(1.0 / 0.9)).to(dtype)
    torch.testing.assert_close(dropped[kept], exact[kept], rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        (dict(arch='enormous'), "arch is 'enormous'"),
        (dict(arch=dict(embed_dims=64, num_layers=2, num_heads=4, mlp_ratio=3)), 'mlp_ratio.*feedforward_channels'),
        (dict(out_type='pooled'), 'out_type'),
        (
            dict(pretrained='a.pth', init_cfg=dict(type='Pretrained', checkpoint='b.pth')),
            "'a.pth', but init_cfg is set",
        ),
        (dict(rel_pos_bias=True), 'rel_pos_bias'),
        (dict(out_indices=12), 'block 12; .* 11'),
    ],
)
def test_wrong_settings_are_refused_when_built(options, message):
    with pytest.raises(ValueError, match=message):
        BEiTBackbone(**dict(dict(arch='tiny'), **options))


def test_masks_of_another_grid_are_refused():
    """Also those with as many cells, which would hide other patches."""
    backbone = BEiTBackbone(dict(embed_dims=32, num_layers=1, num_heads=2), (16, 32), 8, masked_input=True)
    images, mask = torch.rand(2, 3, 16, 32), torch.rand(2, 2, 4) < 0.5
    assert backbone(images, mask)[0].equal(backbone(images, mask.flatten(1))[0])
    for wrong in (mask.mT, mask[:, :, :3], mask[0]):
        with pytest.raises(ValueError, match=r'expected \[B, 2, 4\]'):
            backbone(images, wrong)


def test_outputs_come_in_the_order_asked_for_and_the_last_block_alone_is_normalised():
    images = torch.randn(1, 3, 32, 32)
    model = BEiTBackbone(**SMALL, out_indices=(2, 0, -1)).eval()
    last, first, again = model(images)
    assert torch.equal(last, again) and not torch.allclose(first, last)
    unit = [x.std(dim=-1, unbiased=False) - 1 for x in (last, first)]
    assert unit[0].abs().max() < 0.01 < unit[1].abs().min()
    assert BEiTBackbone(**SMALL, out_indices=(0, 1)).norm is None


# --- the bias, as CUDA's fused kernels take it without a copy: aligned rows, the queries' type ---------

POSITIONS = torch.tensor([[0, 5, 20, -1], [3, 4, 8, 24]])


@pytest.mark.parametrize('out_type', ['cls_token', 'avg_featmap', 'featmap'])
def test_positions_of_a_pooled_output_are_refused(out_type):
    with pytest.raises(UserError, match=out_type):
        BEiTBackbone(**SMALL, out_type=out_type)(torch.randn(2, 3, 64, 64), positions=POSITIONS)


def make_backbone(rel_pos_bias: str) -> BEiTBackbone:
    sizes = dict(embed_dims=32, num_layers=2, num_heads=4)
    return BEiTBackbone(sizes, 40, 8, abs_pos_embed=False, rel_pos_bias=rel_pos_bias)  # 26 tokens


@pytest.mark.parametrize('rel_pos_bias', ['shared', 'per_layer'])
@pytest.mark.parametrize('training', [True, False])
@pytest.mark.parametrize('picked', [False, True])
@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
@pytest.mark.parametrize('size', [40, 56])  # the size that the table was made for, and another
def test_rows_are_aligned_of_the_queries_type_and_shared_ones_made_once(
    rel_pos_bias, training, picked, dtype, size, monkeypatch
):
    made, seen, read, attend = [], [], vit.bias_from_table, vit._attend
    monkeypatch.setattr(vit, 'bias_from_table', lambda *args: made.append(args) or read(*args))
    monkeypatch.setattr(vit, '_attend', lambda *args: seen.append(args) or attend(*args))
    backbone = make_backbone(rel_pos_bias).train(training)
    images = torch.randn(2, 3, size, size)
    with torch.set_grad_enabled(training), torch.autocast('cpu', torch.bfloat16, enabled=dtype is torch.bfloat16):
        backbone(images, positions=POSITIONS if picked else None)
    assert len(made) == (1 if rel_pos_bias == 'shared' else 2)
    num_tokens = 1 + (size // 8) ** 2
    rows = [num_tokens, 4 if picked else num_tokens]
    assert [tuple(bias.shape[1:]) for *_, bias in seen] == [(4, number, num_tokens) for number in rows]
    for queries, _, _, bias in seen:
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

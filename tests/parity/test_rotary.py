"""Rotary ViTs (DINOv3, LingBot-Vision) and gated MLPs, in every layout: our backbone computes their features."""

import numpy as np
import pytest
import timm
import torch
import transformers
from parity.test_plain_vits import assert_features, prefixed, timm_vit
from peers import randomise
from timm.layers import SwiGLUPacked
from torch import Tensor

from beit_mm.checkpoint.checkpoint import Checkpoint
from beit_mm.checkpoint.convert import convert_checkpoint
from beit_mm.errors import CheckpointError, UserError
from beit_mm.models.vit import BEiTBackbone
from beit_mm.positions import rotary_table

DEPTH, DIMS, HEADS, SIZE = 6, 128, 2, 96
SHAPES = [(SIZE, SIZE), (160, 160), (64, 128)]
GATED, MLP, BIASED = (
    f'vit_small_{name}patch16_dinov3{ending}' for name, ending in (('plus_', ''), ('', ''), ('', '_qkvb'))
)


def timm_peer(name: str):
    return randomise(timm.create_model(name, depth=DEPTH, embed_dim=DIMS, num_heads=HEADS, dynamic_img_size=True))


@torch.no_grad()
def timm_features(peer, images: dict) -> dict[tuple[int, int], list[Tensor]]:
    return {shape: peer.forward_intermediates(images[shape], intermediates_only=True) for shape in SHAPES}


def in_metas_names(weights: dict) -> dict:
    """timm's weights as in Meta's and LingBot-Vision's files, whose mask takes the bias of the keys away."""
    gated = {'fc1_g': 'w1', 'fc1_x': 'w2', 'fc2': 'w3'} if any('fc1_g' in name for name in weights) else {}
    renamed = {}
    for name, tensor in weights.items():
        for theirs, meta in {
            'reg_token': 'storage_tokens',
            'gamma_1': 'ls1.gamma',
            'gamma_2': 'ls2.gamma',
            **gated,
        }.items():
            name = name.replace(theirs, meta)
        renamed[name] = tensor
    for block in range(DEPTH):
        stem = f'blocks.{block}.attn'
        zeros, ones = torch.zeros(DIMS), torch.ones(DIMS)
        q_bias, v_bias = (renamed.pop(f'{stem}.{part}_bias', zeros) for part in 'qv')
        renamed[f'{stem}.qkv.bias'] = torch.cat([q_bias, ones, v_bias])
        renamed[f'{stem}.qkv.bias_mask'] = torch.cat([ones, zeros, ones])
    quarter = DIMS // HEADS // 4
    renamed['rope_embed.periods'] = 100 ** (2 * torch.arange(quarter) / (2 * quarter))
    return renamed | dict(mask_token=torch.zeros(1, DIMS))


FILES = {
    'timm': (MLP, lambda weights: weights),
    'timm, with biases': (BIASED, lambda weights: weights),
    'timm, gated': (GATED, lambda weights: weights),
    'Meta': (BIASED, in_metas_names),
    'Meta, gated': (GATED, in_metas_names),
    'Meta, in training': (BIASED, lambda weights: dict(teacher=prefixed('backbone.', in_metas_names(weights)))),
    'Meta, all that a training holds': (
        BIASED,
        lambda weights: dict(
            model={
                f'{part}.backbone.{name}': tensor if part in ('teacher', 'model_ema') else torch.full_like(tensor, 9.0)
                for part in ('student', 'teacher', 'model_ema', 'gram_teacher')
                for name, tensor in in_metas_names(weights).items()
            }
        ),
    ),
    'LingBot-Vision': (BIASED, lambda weights: dict(backbone=in_metas_names(weights))),
}


@pytest.fixture(scope='module')
def images() -> dict:
    torch.manual_seed(0)
    return {shape: torch.randn(2, 3, *shape) for shape in SHAPES}


@pytest.mark.parametrize('layout', FILES)
def test_a_layout_of_a_rotary_vit(layout, images, tmp_path):
    name, arrange = FILES[layout]
    peer = timm_peer(name)
    torch.save(arrange(peer.state_dict()), tmp_path / 'vit.pth')
    assert_features(tmp_path / 'vit.pth', timm_features(peer, images), images)
    arguments = Checkpoint.open(tmp_path / 'vit.pth').backbone_arguments()
    assert (arguments['rotary_base'], arguments['arch']['num_heads']) == (100, HEADS)


def hf_peer(is_gated: bool):
    config = transformers.DINOv3ViTConfig(
        hidden_size=DIMS,
        num_hidden_layers=DEPTH,
        num_attention_heads=4,  # of 32 channels, which only config.json says
        intermediate_size=320,
        use_gated_mlp=is_gated,
        hidden_act='silu' if is_gated else 'gelu',
        num_register_tokens=4,
    )
    return randomise(transformers.DINOv3ViTModel(config))


@pytest.mark.parametrize('is_gated', [False, True])
@torch.no_grad()
def test_a_folder_of_transformers_there_and_back(is_gated, images, tmp_path):
    peer = hf_peer(is_gated)
    peer.save_pretrained(tmp_path / 'hub')
    expected = {
        (height, width): [
            x[:, 5:].transpose(1, 2).unflatten(2, (height // 16, width // 16))
            for x in peer(images[height, width], output_hidden_states=True).hidden_states[1:]
        ]
        for height, width in SHAPES
    }
    assert_features(tmp_path / 'hub', expected, images)
    convert_checkpoint(tmp_path / 'hub', tmp_path / 'ours.pth')
    assert_features(tmp_path / 'ours.pth', expected, images)
    convert_checkpoint(tmp_path / 'ours.pth', tmp_path / 'back', 'hf')
    back = transformers.DINOv3ViTModel.from_pretrained(tmp_path / 'back').eval()
    shape = SHAPES[-1]
    found, truth = (model(images[shape]).last_hidden_state for model in (back, peer))
    torch.testing.assert_close(found, truth, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize('name', [MLP, GATED, BIASED])
@torch.no_grad()
def test_there_and_back_in_timm(name, images, tmp_path):
    peer = timm_peer(name)
    torch.save(peer.state_dict(), tmp_path / 'vit.pth')
    convert_checkpoint(tmp_path / 'vit.pth', tmp_path / 'ours.pth')
    convert_checkpoint(tmp_path / 'ours.pth', tmp_path / 'back.pth', 'timm')
    back = torch.load(tmp_path / 'back.pth')
    assert back.keys() == peer.state_dict().keys()
    assert all(torch.equal(tensor, back[key]) for key, tensor in peer.state_dict().items())


@pytest.mark.parametrize('target', ['unilm', 'mmpretrain', 'mmseg'])
def test_other_formats_have_no_place_for_rotary_positions(target, tmp_path):
    torch.save(timm_peer(MLP).state_dict(), tmp_path / 'vit.pth')
    with pytest.raises(CheckpointError, match=f'rotary.*{target}'):
        convert_checkpoint(tmp_path / 'vit.pth', tmp_path / 'other.pth', target)


def test_the_table_is_that_of_the_formula():
    """Complex numbers, of which channel k and k + d/2 are the parts, times exp(i angle), by loops in NumPy."""
    grid, num_prefix, dims, base = (3, 5), 2, 16, 100.0
    x = np.random.default_rng(0).normal(size=(num_prefix + 15, dims))
    expected = x.astype(complex)[:, : dims // 2] + 1j * x[:, dims // 2 :]
    for patch in range(15):
        row, column = divmod(patch, grid[1])
        for channel in range(dims // 2):
            quarter, k = divmod(channel, dims // 4)
            place, side = (column, grid[1]) if quarter else (row, grid[0])
            angle = 2 * np.pi * (2 * (place + 0.5) / side - 1) / base ** (2 * k / (dims / 2))
            expected[num_prefix + patch, channel] *= np.exp(1j * angle)
    cos, sin = rotary_table(grid, num_prefix, dims, base, torch.device('cpu')).double().numpy()
    first, second = np.split(x, 2, axis=1)
    found = x * cos + np.concatenate([-second, first], axis=1) * sin
    np.testing.assert_allclose(found, np.concatenate([expected.real, expected.imag], axis=1), atol=1e-5)


GIANTS = {
    'timm': lambda weights: weights,
    'Meta': lambda weights: {
        name.replace('mlp.fc1', 'mlp.w12').replace('mlp.fc2', 'mlp.w3'): tensor for name, tensor in weights.items()
    },
}


@pytest.mark.parametrize('layout', GIANTS)
@torch.no_grad()
def test_gated_mlps_of_dinov2_giant(layout, tmp_path):
    peer = timm_vit(mlp_layer=SwiGLUPacked, act_layer=torch.nn.SiLU, init_values=0.1)
    torch.save(GIANTS[layout](peer.state_dict()), tmp_path / 'vit.pth')
    images = torch.randn(2, 3, 84, 84)
    expected = {(84, 84): peer.forward_intermediates(images, intermediates_only=True)}
    assert_features(tmp_path / 'vit.pth', expected, {(84, 84): images})


@torch.no_grad()
def test_gated_mlps_of_transformers_dinov2(tmp_path):
    sizes = dict(hidden_size=DIMS, num_hidden_layers=2, num_attention_heads=2, image_size=84, layer_norm_eps=1e-6)
    peer = randomise(transformers.Dinov2Model(transformers.Dinov2Config(**sizes, use_swiglu_ffn=True)))
    peer.save_pretrained(tmp_path / 'hub')
    images = torch.randn(2, 3, 84, 84)
    backbone = BEiTBackbone.from_checkpoint(tmp_path / 'hub')
    torch.testing.assert_close(backbone(images)[0], peer(images).last_hidden_state, atol=1e-5, rtol=1e-5)
    with pytest.raises(CheckpointError, match='gated'):
        convert_checkpoint(tmp_path / 'hub', tmp_path / 'beit', 'hf')


def with_biased_keys(weights: dict) -> dict:
    return {name: tensor for name, tensor in in_metas_names(weights).items() if 'bias_mask' not in name}


def with_other_periods(weights: dict) -> dict:
    return dict(in_metas_names(weights), **{'rope_embed.periods': 10000 ** (torch.arange(16) / 16)})


@pytest.mark.parametrize(('change', 'part'), [(with_biased_keys, 'qkv.bias'), (with_other_periods, 'periods')])
def test_what_would_be_computed_in_another_way_is_refused(change, part, tmp_path):
    torch.save(change(timm_peer(BIASED).state_dict()), tmp_path / 'vit.pth')
    with pytest.raises(CheckpointError, match=part):
        BEiTBackbone.from_checkpoint(tmp_path / 'vit.pth')


def test_trained_positions_of_another_kind_are_not_lost():
    arch = dict(embed_dims=DIMS, num_layers=DEPTH, num_heads=HEADS)
    options = dict(num_registers=4, layer_scale_init=0.1)
    absolute = BEiTBackbone(arch, SIZE, **options)
    rotary = BEiTBackbone(arch, SIZE, **options, abs_pos_embed=False, rotary_base=100.0)
    other = BEiTBackbone(arch, SIZE, **options, abs_pos_embed=False, rotary_base=50.0)
    rows = (absolute, rotary), (rotary, absolute), (other, rotary)
    for model, weights in ((model, source.state_dict()) for model, source in rows):
        with pytest.raises(CheckpointError, match='rotary_base'):
            model.load_state_dict(weights)
    with pytest.raises(UserError, match='abs_pos_embed'):
        BEiTBackbone(arch, SIZE, rotary_base=100.0)


@torch.no_grad()
def test_attention_is_timms_and_queries_have_the_position_of_their_patch(images, tmp_path):
    peer, shape, seen = timm_peer(BIASED), SHAPES[-1], []
    torch.save(peer.state_dict(), tmp_path / 'vit.pth')
    backbone = BEiTBackbone.from_checkpoint(tmp_path / 'vit.pth')
    attention = peer.blocks[2].attn
    attention.fused_attn = False
    attention.attn_drop.register_forward_hook(lambda _, inputs, output: seen.append(output))
    peer(images[shape])
    found, grid = backbone.attention_maps(images[shape], 2)
    assert grid == (4, 8)
    torch.testing.assert_close(found, seen[0], atol=1e-5, rtol=1e-5)
    queries = torch.tensor([[0, 7, 30], [36, 5, 1]])
    few, _ = backbone.attention_maps(images[shape], 2, queries)
    expected = found.take_along_dim(queries[:, None, :, None], dim=2)
    torch.testing.assert_close(few, expected, atol=1e-6, rtol=1e-5)


@torch.no_grad()
def test_biases_of_values_alone_are_kept(images, tmp_path):
    config = transformers.DINOv3ViTConfig(
        hidden_size=DIMS, num_hidden_layers=2, num_attention_heads=2, intermediate_size=320, num_register_tokens=4
    )
    config.query_bias = False
    peer, shape = randomise(transformers.DINOv3ViTModel(config)), SHAPES[0]
    peer.save_pretrained(tmp_path / 'hub')
    backbone = BEiTBackbone.from_checkpoint(tmp_path / 'hub')
    expected = peer(images[shape]).last_hidden_state
    torch.testing.assert_close(backbone(images[shape])[0], expected, atol=1e-5, rtol=1e-5)
    peer.config.layer_norm_eps = 1e-2
    peer.save_pretrained(tmp_path / 'hub')
    with pytest.raises(CheckpointError, match='layer_norm_eps'):
        BEiTBackbone.from_checkpoint(tmp_path / 'hub')


@pytest.mark.parametrize('target', ['timm', 'hf'])
def test_what_could_not_be_read_back_is_not_written(target, tmp_path):
    arch = dict(embed_dims=DIMS, num_layers=1, num_heads=HEADS)
    torch.save(BEiTBackbone(arch, SIZE, abs_pos_embed=False, rotary_base=100.0).state_dict(), tmp_path / 'vit.pth')
    with pytest.raises(CheckpointError, match='registers'):
        convert_checkpoint(tmp_path / 'vit.pth', tmp_path / 'out', target)


def test_a_backbone_that_was_built_without_memory_takes_its_weights():
    """As that of a run does, which `classify` and `segment` build; what lies in fresh memory means nothing."""
    options = dict(arch=dict(embed_dims=DIMS, num_layers=1, num_heads=HEADS), img_size=SIZE, abs_pos_embed=False)
    peer = BEiTBackbone(**options, rotary_base=50.0)
    with torch.device('meta'):
        backbone = BEiTBackbone(**options, rotary_base=50.0)
    backbone.to_empty(device='cpu')
    backbone.rotary_base.fill_(1e-44)
    backbone.load_state_dict(peer.state_dict())
    assert all(map(torch.equal, backbone.state_dict().values(), peer.state_dict().values()))


def test_a_bare_backbone_keeps_its_own_base(tmp_path):
    """Its registers make it look like a DINOv3, whose base no tensor says."""
    arch = dict(embed_dims=DIMS, num_layers=1, num_heads=HEADS)
    options = dict(abs_pos_embed=False, rotary_base=10000.0, num_registers=4, layer_scale_init=0.1)
    torch.save(BEiTBackbone(arch, SIZE, **options).state_dict(), tmp_path / 'vit.pth')
    assert BEiTBackbone.from_checkpoint(tmp_path / 'vit.pth').rotary_base == 10000


@pytest.mark.parametrize('base', [0, 1, -100.0, 1e6])
def test_a_base_that_no_file_could_hold_is_refused(base):
    with pytest.raises(UserError, match='rotary_base'):
        BEiTBackbone('tiny', 32, abs_pos_embed=False, rotary_base=base)

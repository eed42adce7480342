"""BEiT v2 beside mmpretrain's, with the same random weights: visual tokens, both losses, gradients, names. And what is
in the released code alone: how its additional blocks begin, and the names in its files."""

import math

import mmpretrain.models  # noqa: F401  (registers)
import pytest
import torch
import torch.nn.functional as F
from helpers import RELEASED_BLOCK, narrow_model, positions_of
from mmengine.runner.checkpoint import load_checkpoint
from mmpretrain.models import BEiTV2Neck
from mmpretrain.registry import MODELS as MMPRETRAIN
from mmpretrain.structures import DataSample
from peers import assert_equal, randomise

from beit_mm.checkpoint.names import convert_state_dict
from beit_mm.datasets.transforms import TwoViewCenterCrop
from beit_mm.engine.checks import check_views
from beit_mm.models import VQKDTokenizer
from beit_mm.registry import MODELS

DIMS, HEADS, SIZE, VOCAB, CODE_DIMS = 32, 4, 64, 64, 8
ENCODER = dict(embed_dims=DIMS, num_layers=2, num_heads=HEADS)
BACKBONE = dict(embed_dims=DIMS, num_layers=4, num_heads=HEADS)
SHARED = dict(abs_pos_embed=False, rel_pos_bias='shared', layer_scale_init=0.1)
VQKD = dict(arch=ENCODER, img_size=SIZE, code_dims=CODE_DIMS, vocab_size=VOCAB)
PREPROCESSOR = dict(type='beit_mm.TwoViewDataPreprocessor', mean=[127.5] * 3, std=[127.5] * 3, tokenizer_scale=1)


def narrow_v2(backbone: dict | None = None, **changes: object) -> dict:
    """Config of our pretrainer with four blocks, two of them early, and two that aggregate; 4 x 4 patches."""
    network = dict(type='beit_mm.BEiTBackbone', arch=BACKBONE, img_size=SIZE, masked_input=True, **SHARED)
    head = dict(type='beit_mm.BEiTMIMHead', embed_dims=DIMS, vocab_size=VOCAB)
    tokenizer = dict(type='beit_mm.VQKDTokenizer', random_weights=True, **VQKD)
    parts = dict(backbone=network | (backbone or {}), head=head, target_generator=tokenizer)
    options = dict(parts, early_layers=2, data_preprocessor=PREPROCESSOR) | changes
    return narrow_model(type='beit_mm.BEiTV2Pretrainer', **options)


def their_vqkd() -> torch.nn.Module:
    """With a codebook in use: without it, their first call replaces the loaded one by clusters of the batch."""
    positions = dict(use_abs_pos_emb=True, use_rel_pos_bias=False, use_shared_rel_pos_bias=False)
    encoder = dict(positions, arch=dict(ENCODER, feedforward_channels=4 * DIMS), img_size=SIZE, patch_size=16)
    encoder.update(out_type='featmap', final_norm=True, layer_scale_init_value=0.0)
    vqkd = MMPRETRAIN.build(dict(type='VQKD', encoder_config=encoder, num_embed=VOCAB, embed_dims=CODE_DIMS))
    randomise(vqkd)
    for layer in (vqkd.encoder.ln1, vqkd.encode_task_layer[0], vqkd.encode_task_layer[2]):
        layer.bias.data.zero_()  # else most patches have the same token
    codebook = vqkd.quantize.embedding
    codebook.initted.fill_(1)
    codebook.weight.data.div_(codebook.weight.norm(dim=-1, keepdim=True))
    return vqkd


@torch.no_grad()
@pytest.mark.parametrize('size', [64, 96])
def test_tokens_are_theirs(tmp_path, size):
    theirs = their_vqkd()
    torch.save(theirs.state_dict(), tmp_path / 'vqkd_encoder.pth')
    images = F.interpolate(torch.randn(32, 3, 5, 5), size)  # patches of different colours
    ours = VQKDTokenizer(str(tmp_path / 'vqkd_encoder.pth'), **VQKD)
    tokens, normalised = ours.encode(images), 2 * images - 1  # their preprocessor's mean and std are 127.5
    assert torch.equal(tokens.flatten(1), theirs(normalised))
    assert torch.equal(ours(normalised), theirs(normalised))  # in the place of theirs in their algorithm
    assert len(tokens.unique()) > 10


@pytest.fixture
def both(tmp_path, monkeypatch) -> tuple[torch.nn.Module, torch.nn.Module]:
    """mmpretrain's algorithm and ours with its weights."""
    # their neck knows the two large architectures only: a dict has `num_layers`, and it reads `depth`
    monkeypatch.setitem(BEiTV2Neck.arch_zoo, 'narrow', dict(BACKBONE, depth=4, feedforward_channels=4 * DIMS))
    arch = dict(BACKBONE, feedforward_channels=4 * DIMS)
    backbone = dict(type='BEiTPretrainViT', arch=arch, img_size=SIZE, out_indices=[1, 3], final_norm=False)
    neck = dict(type='BEiTV2Neck', num_layers=2, early_layers=2, backbone_arch='narrow')
    head = dict(type='BEiTV2Head', embed_dims=DIMS, num_embed=VOCAB, loss=dict(type='mmpretrain.CrossEntropyLoss'))
    theirs = MMPRETRAIN.build(dict(type='BEiT', backbone=backbone, neck=neck, head=head))
    randomise(theirs)
    theirs.target_generator = their_vqkd()
    torch.save(theirs.target_generator.state_dict(), tmp_path / 'vqkd.pth')
    tokenizer = dict(type='beit_mm.VQKDTokenizer', checkpoint=str(tmp_path / 'vqkd.pth'), **VQKD)
    ours = MODELS.build(narrow_v2(target_generator=tokenizer))
    assert not any(ours.load_state_dict(theirs.state_dict(), strict=True))
    return theirs, ours


def test_losses_and_gradients(both):
    theirs, ours = both
    images, pixels, mask = torch.randn(3, 3, SIZE, SIZE), torch.rand(3, 3, SIZE, SIZE), torch.rand(3, 4, 4) < 0.4
    samples = [DataSample(mask=one) for one in mask]
    wanted = theirs.loss([images, 2 * pixels - 1], samples)
    tokenizer, theirs.target_generator = theirs.target_generator, ours.target_generator  # as docs/mixing.md says
    assert theirs.loss([images, 2 * pixels - 1], samples) == wanted
    theirs.target_generator = tokenizer
    got = ours(dict(images=images, tokenizer_images=pixels, mask=mask, positions=positions_of(mask)), mode='loss')
    assert set(got) == {'loss_mim', 'loss_aggregation', 'mim_acc', 'aggregation_acc'}
    torch.testing.assert_close(got['loss_mim'], wanted['loss_1'])
    torch.testing.assert_close(got['loss_aggregation'], wanted['loss_2'])
    (wanted['loss_1'] + wanted['loss_2']).backward()
    (got['loss_mim'] + got['loss_aggregation']).backward()
    gradients = {name: p.grad for name, p in theirs.named_parameters() if not name.startswith('target_generator.')}
    renamed = convert_state_dict(gradients).state_dict
    trained = {name: p.grad for name, p in ours.named_parameters() if p.requires_grad}
    assert set(renamed) == set(trained)
    for name, gradient in trained.items():
        torch.testing.assert_close(gradient, renamed[name], atol=1e-5, rtol=1e-3, msg=name)


def test_names_there_and_back(both):
    theirs, ours = both
    back = convert_state_dict(ours.state_dict(), target='mmpretrain')
    expected = {k: v for k, v in theirs.state_dict().items() if not k.startswith('target_generator.')}
    assert_equal(back.state_dict, expected)
    assert not back.dropped_keys


def test_additional_blocks_begin_as_in_the_released_code():
    """There they are made after the network was initialised: torch's own numbers, output matrices by their depth."""
    head = dict(type='beit_mm.BEiTMIMHead', embed_dims=256, vocab_size=VOCAB)
    model = MODELS.build(narrow_v2(dict(arch=dict(BACKBONE, embed_dims=256), drop_path_rate=0.3), head=head))
    twins = zip(model.patch_aggregation, model.backbone.blocks[2:], strict=True)
    for depth, (block, twin) in enumerate(twins, start=3):
        assert block.drop_path.p == twin.drop_path.p == pytest.approx(0.3 * (depth - 1) / 3)
        for name, parameter in block.named_parameters():
            own, layer = parameter.detach(), block.get_submodule(name.rpartition('.')[0])
            if not isinstance(layer, torch.nn.Linear):
                assert torch.equal(own, twin.get_parameter(name))
                continue
            bound = 1 / math.sqrt(layer.in_features)
            bound /= math.sqrt(2 * depth) if name in ('attn.proj.weight', 'mlp.fc2.weight') else 1
            assert own.abs().max() <= bound
            assert own.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.02 if own.ndim == 2 else 0.2)


def test_wrong_numbers_of_layers_and_views_are_refused():
    with pytest.raises(ValueError, match='early_layers is 3, aggregation_layers 2; .* 4'):
        MODELS.build(narrow_v2(early_layers=3, aggregation_layers=2))
    model = MODELS.build(narrow_v2())  # one view serves both networks
    check_views(model, [TwoViewCenterCrop(64, None)])
    with pytest.raises(ValueError, match='set one to None'):
        check_views(model, [TwoViewCenterCrop(64, 64)])


NETWORK = ['cls_token', 'mask_token', 'norm.weight', 'norm.bias', 'patch_embed.proj.weight', 'patch_embed.proj.bias']
NETWORK += ['rel_pos_bias.relative_position_bias_table']
BLOCK = [*RELEASED_BLOCK, 'gamma_1', 'gamma_2']
INDEX = 'rel_pos_bias.relative_position_index'  # which is computed
RELEASED = {  # every name of beitv2_base_patch16_224_pt1k.pth, narrow, of 4 + 2 blocks, and ours
    **{name: f'backbone.{name}' for name in NETWORK},
    **{f'lm_head.{part}': f'head.lm_head.{part}' for part in ('weight', 'bias')},
    **{f'blocks.{i}.{name}': f'backbone.blocks.{i}.{name}' for i in range(4) for name in BLOCK},
    **{f'cls_pt_layers.{i}.{name}': f'patch_aggregation.{i}.{name}' for i in range(2) for name in BLOCK},
}


def test_every_tensor_of_a_released_file_has_its_place(tmp_path):
    own, path = MODELS.build(narrow_v2()).state_dict(), str(tmp_path / 'beitv2_base_patch16_224_pt1k.pth')
    weights = {theirs: torch.randn_like(own[ours]) for theirs, ours in RELEASED.items()}
    index = torch.zeros(17, 17, dtype=torch.int64)
    torch.save(dict(model={**weights, INDEX: index}, optimizer={}, epoch=1599), path)
    model = MODELS.build(narrow_v2())
    load_checkpoint(model, path, strict=True)
    state = model.state_dict()
    assert_equal(state, {ours: weights[theirs] for theirs, ours in RELEASED.items()})
    assert model.backbone.load_report.preprocessing['mean'] == [123.675, 116.28, 103.53]
    back = convert_state_dict(state, target='unilm')
    assert set(back.state_dict) == {*weights, INDEX} and not back.dropped_keys

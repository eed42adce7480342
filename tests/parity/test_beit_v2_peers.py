"""BEiT v2 beside mmpretrain's, with the same random weights: visual tokens, both losses, gradients, names."""

import mmpretrain.models  # noqa: F401  (registers)
import pytest
import torch
import torch.nn.functional as F
from helpers import positions_of
from mmpretrain.models import BEiTV2Neck
from mmpretrain.registry import MODELS as MMPRETRAIN
from mmpretrain.structures import DataSample
from peers import assert_equal, randomise

from beit_mm.checkpoint.names import convert_state_dict
from beit_mm.models import VQKDTokenizer
from beit_mm.registry import MODELS

DIMS, HEADS, SIZE, VOCAB, CODE_DIMS = 32, 4, 64, 64, 8
ENCODER = dict(embed_dims=DIMS, num_layers=2, num_heads=HEADS)
BACKBONE = dict(embed_dims=DIMS, num_layers=4, num_heads=HEADS)
SHARED = dict(abs_pos_embed=False, rel_pos_bias='shared', layer_scale_init=0.1)
VQKD = dict(arch=ENCODER, img_size=SIZE, code_dims=CODE_DIMS, vocab_size=VOCAB)


def their_vqkd() -> torch.nn.Module:
    """With a codebook in use: without it, their first call replaces the loaded one by clusters of the batch."""
    encoder = dict(
        arch=dict(ENCODER, feedforward_channels=4 * DIMS),
        img_size=SIZE,
        patch_size=16,
        out_type='featmap',
        final_norm=True,
        use_abs_pos_emb=True,
        use_rel_pos_bias=False,
        use_shared_rel_pos_bias=False,
        layer_scale_init_value=0.0,
    )
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
    ours = dict(
        type='beit_mm.BEiTV2Pretrainer',
        early_layers=2,
        backbone=dict(type='beit_mm.BEiTBackbone', arch=BACKBONE, img_size=SIZE, masked_input=True, **SHARED),
        head=dict(type='beit_mm.BEiTMIMHead', embed_dims=DIMS, vocab_size=VOCAB),
        target_generator=dict(type='beit_mm.VQKDTokenizer', checkpoint=str(tmp_path / 'vqkd.pth'), **VQKD),
    )
    ours = MODELS.build(ours)
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

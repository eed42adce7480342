"""BEiT v2's pretrainer: its blocks and the released file. Its losses: tests/parity/test_beit_v2_peers.py."""

import math
from pathlib import Path

import pytest
import torch
from helpers import RELEASED_BLOCK, narrow_model
from mmengine.runner.checkpoint import load_checkpoint
from peers import assert_equal

from beit_mm.checkpoint.convert import convert_checkpoint
from beit_mm.checkpoint.names import convert_state_dict, describe_source
from beit_mm.datasets.masking import RandomMask
from beit_mm.datasets.transforms import TwoViewCenterCrop
from beit_mm.engine.checks import check_views
from beit_mm.models import BEiTBackbone
from beit_mm.registry import MODELS

ARCH = dict(embed_dims=32, num_layers=4, num_heads=4)
SIZES = dict(img_size=32, patch_size=8)
SHARED = dict(abs_pos_embed=False, rel_pos_bias='shared', layer_scale_init=0.1)
VQKD = dict(type='beit_mm.VQKDTokenizer', random_weights=True, arch=dict(ARCH, num_layers=1), **SIZES)
PREPROCESSOR = dict(type='beit_mm.TwoViewDataPreprocessor', mean=[127.5] * 3, std=[127.5] * 3, tokenizer_scale=1)


def narrow_v2(backbone: dict | None = None, **changes: object) -> dict:
    """Config of a pretrainer with four blocks, two of them early, and two that aggregate."""
    network = dict(type='beit_mm.BEiTBackbone', arch=ARCH, masked_input=True, **SIZES, **SHARED)
    changes = dict(early_layers=2, data_preprocessor=PREPROCESSOR, backbone=network | (backbone or {})) | changes
    tokenizer = dict(VQKD, code_dims=8, vocab_size=32)
    return narrow_model(type='beit_mm.BEiTV2Pretrainer', target_generator=tokenizer, **changes)


def test_additional_blocks_begin_as_in_the_released_code():
    """There they are made after the network was initialised: torch's own numbers, output matrices by their depth."""
    model = MODELS.build(narrow_v2(dict(arch=dict(ARCH, embed_dims=256), drop_path_rate=0.3)))
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
    for early, layers in ((3, 2), (0, 2), (2, 0), (5, 1)):
        with pytest.raises(ValueError, match=f'{early} early, {layers} more layers do not fit 4 blocks'):
            MODELS.build(narrow_v2(early_layers=early, aggregation_layers=layers))
    model = MODELS.build(narrow_v2())  # one view serves both networks
    check_views(model, [TwoViewCenterCrop(32, None), RandomMask((4, 4), 2)])
    with pytest.raises(ValueError, match='set one to None'):
        check_views(model, [TwoViewCenterCrop(32, 32)])
    with pytest.raises(ValueError, match=r'a view of \(36, 36\) pixels .* set second_size to \(40, 40\)'):
        check_views(model, [TwoViewCenterCrop(36, None)])


# --- released files -------------------------------------------------------------------------------

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
    # what other libraries have no place for is said
    conversion = convert_checkpoint(path, tmp_path / 'timm.pth', 'timm')
    assert {name.split('.')[0] for name in conversion.dropped_keys} == {'backbone', 'head', 'patch_aggregation'}
    # and a fine-tuning starts from it
    options = dict(SIZES, **SHARED, out_type='avg_featmap', init_cfg=dict(type='Pretrained', checkpoint=path))
    backbone = BEiTBackbone(ARCH, **dict(options, rel_pos_bias='per_layer'))
    backbone.init_weights()
    report = backbone.load_report
    assert (len(report.expanded), report.missing_keys) == (4, ['fc_norm.weight', 'fc_norm.bias'])
    assert sorted(report.unexpected_keys) == ['mask_token', 'norm.bias', 'norm.weight']


@pytest.mark.parametrize(('name', 'size'), [('ft21kto1k', 224), ('ft21ktoade20k', 512)])
def test_names_of_released_files_say_how_their_images_were_prepared(name, size):
    preprocessing = describe_source({}, Path(f'beitv2_large_patch16_224_pt1k_{name}.pth'))['preprocessing']
    assert (preprocessing['mean'], preprocessing['size']) == ([123.675, 116.28, 103.53], [size, size])

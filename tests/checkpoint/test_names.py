"""The released code's files, written down from their published names, and what is not a BEiT.

Every format into every other, and the peers' own classes: tests/parity/test_checkpoint_formats.py.
"""

from pathlib import Path

import pytest
import torch
from helpers import RELEASED_BLOCK, WEIGHT_AND_BIAS
from mmengine.runner import CheckpointLoader
from peers import DEPTH, assert_equal, hf_peer, ours

from beit_mm.checkpoint.description import describe_source
from beit_mm.checkpoint.names import bare_names, convert_state_dict, position_mode, released_out_indices
from beit_mm.checkpoint.read import CheckpointError

BATCH_NORM = (*WEIGHT_AND_BIAS, 'running_mean', 'running_var', 'num_batches_tracked')
STEM = ['cls_token', 'patch_embed.proj.weight', 'patch_embed.proj.bias']
LAYER_SCALE = ['gamma_1', 'gamma_2']
INDEX = 'relative_position_index'
TABLE = ['attn.relative_position_bias_table', f'attn.{INDEX}']


def released_backbone(parts: list[str], depth: int = 2) -> list[str]:
    return STEM + [f'blocks.{i}.{part}' for i in range(depth) for part in RELEASED_BLOCK + parts]


def released_pretraining(parts: list[str], *positions: str) -> dict[str, str]:
    names = [*released_backbone(parts), *positions, 'mask_token', 'norm.weight', 'norm.bias']
    head = {f'lm_head.{part}': f'head.lm_head.{part}' for part in WEIGHT_AND_BIAS}
    return {name: f'backbone.{name}' for name in names} | head


def released_finetuning() -> dict[str, str]:
    names = [*released_backbone(LAYER_SCALE + TABLE), 'fc_norm.weight', 'fc_norm.bias']
    head = {f'head.{part}': f'head.fc.{part}' for part in WEIGHT_AND_BIAS}
    return {name: f'backbone.{name}' for name in names} | head


def released_ade20k() -> dict[str, str]:
    """mmsegmentation 0.x: the pyramid is in the backbone."""
    pyramid = {'fpn1.0': '4x.0', 'fpn1.1': '4x.1', 'fpn1.3': '4x.3', 'fpn2.0': '2x.0'}
    convs = [f'psp_modules.{i}.1' for i in range(4)]
    convs += [f'{name}.{i}' for name in ('lateral_convs', 'fpn_convs') for i in range(3)]
    convs = [f'decode_head.{name}' for name in [*convs, 'bottleneck', 'fpn_bottleneck']] + ['auxiliary_head.convs.0']
    same = [f'backbone.{name}' for name in released_backbone(LAYER_SCALE + TABLE, DEPTH['segmentation'])]
    same += [f'{head}.conv_seg.{part}' for head in ('decode_head', 'auxiliary_head') for part in WEIGHT_AND_BIAS]
    same += [f'{name}.{part}' for name in convs for part in ('conv.weight', *(f'bn.{part}' for part in BATCH_NORM))]
    return {name: name for name in same} | {
        f'backbone.{theirs}.{part}': f'neck.upsample_{mine}.{part}'
        for theirs, mine in pyramid.items()
        for part in (BATCH_NORM if theirs == 'fpn1.1' else WEIGHT_AND_BIAS)
    }


SHARED = [f'rel_pos_bias.{name}' for name in ('relative_position_bias_table', INDEX)]
ADE20K_META = dict(CLASSES=('wall', 'sky'), PALETTE=[[120, 120, 120]], iter=160000)
RELEASED = {  # names there and here; what else is in the file
    ('pretraining', 'shared'): (released_pretraining(LAYER_SCALE, *SHARED), 'model', {}),
    ('pretraining', 'vit'): (released_pretraining([], 'pos_embed'), 'model', {}),
    ('classification', 'per_layer'): (released_finetuning(), 'model', {}),
    ('segmentation', 'per_layer'): (released_ade20k(), 'state_dict', dict(meta=ADE20K_META)),
}


@pytest.mark.parametrize(('task', 'variant'), RELEASED)
def test_a_file_of_the_released_code(task, variant, tmp_path):
    names, wrapper, others = RELEASED[task, variant]
    state = ours(task, variant).state_dict()
    indices = {name: torch.zeros(37, 37, dtype=torch.int64) for name in names if name.endswith(INDEX)}  # 6 * 6 + 1
    released = {theirs: state[mine] for theirs, mine in names.items() if theirs not in indices}
    torch.save({wrapper: released | indices, **others}, tmp_path / 'released.pth')
    content = CheckpointLoader.load_checkpoint(str(tmp_path / 'released.pth'))
    assert_equal(content['state_dict'], state)
    assert content['meta'].items() >= others.get('meta', {}).items()
    assert convert_state_dict(released).source == 'unilm'
    # the released code can read ours: index buffers included, which are computed from the table's size
    written, dropped, _ = convert_state_dict(state, target='unilm')
    assert {name: written.pop(name).shape for name in indices} == {name: index.shape for name, index in indices.items()}
    assert_equal(written, released)
    assert not dropped


NO_BEIT = {
    'empty': (dict, 'tensors are none'),
    'in the memory of transformers': (lambda: hf_peer('features', 'vit').state_dict(), 'save_pretrained'),
    "PEFT's adapter": (
        lambda: {'base_model.model.blocks.0.attn.qkv.lora_A.weight': torch.ones(2, 8)},
        'merge_and_unload',
    ),
}


@pytest.mark.parametrize('case', NO_BEIT)
def test_other_models_are_refused(case):
    make, message = NO_BEIT[case]
    with pytest.raises(CheckpointError, match=message):
        convert_state_dict(make())


@pytest.mark.parametrize(('task', 'target'), [('segmentation', 'mmseg'), ('classification', 'mmpretrain')])
def test_two_tensors_for_one_name(task, target):
    """OpenMMLab's converters leave the released names beside their own."""
    expected = ours(task, 'per_layer').state_dict()
    state = convert_state_dict(expected, target=target).state_dict
    state['backbone.patch_embed.proj.weight'] = state['backbone.patch_embed.projection.weight'].clone()
    found = convert_state_dict(state)
    assert found.dropped_keys == ['backbone.patch_embed.proj.weight']
    assert_equal(found.state_dict, expected)


@pytest.mark.parametrize('prefix', ['', 'backbone.'])
def test_registers_show_how_positions_of_dinov2_are_resized(prefix):
    """Its code has an offset and no antialiasing without registers, and the reverse with them."""
    weights = {f'{prefix}mask_token': torch.zeros(1, 4)}
    assert position_mode(weights, [], 'x') == 'bicubic_offset'
    assert position_mode(weights | {f'{prefix}register_tokens': torch.zeros(1, 4, 4)}, [], 'x') == 'bicubic_antialias'


BARE = {  # a name in a file, and without what trainers add
    'module._orig_mod.blocks.7.norm1.bias': 'blocks.7.norm1.bias',
    'model.blocks.7.norm1.bias': 'blocks.7.norm1.bias',
    'net.backbone.blocks.7.norm1.bias': 'backbone.blocks.7.norm1.bias',
    'net.backbone.blocks.0.attn.qkv.bias': 'blocks.0.attn.qkv.bias',
    'backbone.blocks.1.7.norm1.bias': 'backbone.blocks.7.norm1.bias',
    'teacher.backbone.blocks.7.norm1.bias': 'backbone.blocks.7.norm1.bias',
}


@pytest.mark.parametrize('name', BARE)
def test_names_without_what_trainers_add(name):
    stem, bare_stem = (full.partition('blocks')[0] for full in (name, BARE[name]))
    file = [name, f'{stem}patch_embed.proj.weight']
    if 'teacher' in stem:
        file += [other.replace('teacher', 'student') for other in file]
    assert list(bare_names(dict.fromkeys(file))) == [BARE[name], f'{bare_stem}patch_embed.proj.weight']


@pytest.mark.parametrize(
    ('name', 'mean', 'size'),
    [
        ('beit_base_patch16_224_pt22k_ft22kto1k', 127.5, 224),
        ('beitv2_large_patch16_224_pt1k_ft21k', 123.675, 224),
        ('beit_large_patch16_640_pt22k_ft22ktoade20k', 123.675, 640),
        ('beitv2_base_patch16_224_pt1k_ft21ktoade20k', 123.675, 512),  # which keeps the size of the pretraining
    ],
)
def test_the_name_of_a_released_file_says_how_its_images_are_prepared(name, mean, size):
    preprocessing = describe_source({}, Path(f'{name}.pth'))['preprocessing']
    assert preprocessing['mean'][0] == mean and preprocessing['size'] == [size, size]


def test_segmentors_take_the_blocks_of_the_released_configs():
    """microsoft/unilm `beit/semantic_segmentation/configs/beit/upernet`; of other depths, quarters."""
    assert [*map(released_out_indices, (12, 24, 8))] == [[3, 5, 7, 11], [7, 11, 15, 23], [1, 3, 5, 7]]

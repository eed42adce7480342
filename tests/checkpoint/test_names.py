"""Names of every format, there and back; and the released code's files, written down from their published names."""

import itertools

import pytest
import timm
import torch
from peers import CLASSES, DEPTH, DIMS, HEADS, VARIANTS, VOCAB, assert_equal, hf_peer, ours

from beit_mm.checkpoint.names import FORMATS, convert_state_dict, detect_format, task_of, weights_of
from beit_mm.checkpoint.read import CheckpointError, read_checkpoint

TASKS = ('pretraining', 'classification', 'segmentation', 'features')
# What each format holds without loss, as tasks and variants; the rest stands in LOSSES and REFUSED.
HOLDS = {
    'beit_mm': set(itertools.product(TASKS, VARIANTS)),
    'unilm': set(itertools.product(TASKS, VARIANTS)),
    'mmpretrain': set(itertools.product(TASKS, VARIANTS)),
    'hf': set(itertools.product(TASKS, VARIANTS)),
    'timm': set(itertools.product(('classification', 'features'), VARIANTS)),
    'mmseg': {('segmentation', 'per_layer')},
}
NORM = {'backbone.norm.weight', 'backbone.norm.bias'}
LM_HEAD = {'head.lm_head.weight', 'head.lm_head.bias'}
LOSSES = {  # format and task: what is left out, as beginnings of names
    ('timm', 'pretraining'): {'backbone.mask_token', 'head.lm_head.'},
    ('timm', 'segmentation'): {'neck.', 'decode_head.', 'auxiliary_head.'},
    ('mmseg', 'pretraining'): {'backbone.mask_token', 'backbone.norm.', 'head.lm_head.'},
    ('mmseg', 'classification'): {'backbone.fc_norm.', 'head.fc.'},
    ('mmseg', 'features'): {'backbone.norm.'},
    ('mmseg', 'segmentation'): set(),  # the shared table is copied
}
REFUSED = set(itertools.product(['mmseg'], TASKS, ['vit', 'vit_layer_scale']))


def test_every_format_task_and_variant_is_in_one_of_the_tables():
    assert set(HOLDS) == set(FORMATS)
    for name, task, variant in itertools.product(FORMATS, TASKS, VARIANTS):
        holds, refused = (task, variant) in HOLDS[name], (name, task, variant) in REFUSED
        assert holds + refused + ((name, task) in LOSSES and not holds and not refused) == 1, (name, task, variant)


def converted(state: dict, target: str = 'beit_mm', source: str | None = None) -> dict:
    """Without any loss."""
    result = convert_state_dict(state, source, target)
    assert result.dropped_keys == []
    return result.state_dict


@pytest.mark.parametrize(('task', 'variant'), list(itertools.product(TASKS, VARIANTS)))
def test_there_and_back_and_from_each_format_into_every_other(task, variant):
    state = ours(task, variant).state_dict()
    assert task_of(state) == task
    files = {name: converted(state, name) for name in FORMATS if (task, variant) in HOLDS[name]}
    for name, there in files.items():
        assert_equal(converted(there), state)
        assert_equal(converted(there, source=name), state)
        for other in files:
            direct = convert_state_dict(there, None, other).state_dict
            assert_equal(direct, files[other])


@pytest.mark.parametrize(('name', 'task'), LOSSES)
def test_what_a_format_has_no_place_for_is_named(name, task):
    for variant in VARIANTS:
        if (task, variant) in HOLDS[name] or (name, task, variant) in REFUSED:
            continue
        state = ours(task, variant).state_dict()
        there, dropped, _ = convert_state_dict(state, target=name)
        lost = {key for key in state if key.startswith(tuple(LOSSES[name, task]))}
        assert set(dropped) == lost and len(lost) >= len(LOSSES[name, task])
        expected = {key: tensor for key, tensor in state.items() if key not in lost}
        if name == 'mmseg' and variant == 'shared':
            table = expected.pop('backbone.rel_pos_bias.relative_position_bias_table')
            expected |= {f'backbone.blocks.{i}.attn.relative_position_bias_table': table for i in range(DEPTH[task])}
        assert_equal(convert_state_dict(there).state_dict, expected)


def test_what_a_format_would_compute_otherwise_is_refused():
    for name, task, variant in sorted(REFUSED):
        with pytest.raises(CheckpointError, match='position embedding'):
            convert_state_dict(ours(task, variant).state_dict(), target=name)
    with pytest.raises(CheckpointError, match='no relative position bias'):
        convert_state_dict(ours('segmentation', 'vit', abs_pos_embed=False).state_dict(), target='mmseg')


def test_what_is_given_is_not_changed():
    state = ours('segmentation', 'per_layer').state_dict()
    for name in FORMATS:
        before = dict(state)
        there = convert_state_dict(state, target=name).state_dict
        assert list(state) == list(before)
        names = list(there)
        convert_state_dict(there)
        assert list(there) == names


@pytest.mark.parametrize('name', FORMATS)
def test_formats_are_told_apart(name):
    """Also where a training script saved the wrapper around its model."""
    state = ours('classification', 'per_layer').state_dict()
    there = convert_state_dict(state, target=name).state_dict
    expected = dict(timm='unilm', mmseg='mmpretrain').get(name, name)  # equal but for what is only in one
    lost = tuple(LOSSES.get((name, 'classification'), ()))
    for prefix in ('', 'module.'):
        found = convert_state_dict({prefix + key: tensor for key, tensor in there.items()})
        assert found.source == expected
        assert_equal(found.state_dict, {key: tensor for key, tensor in state.items() if not key.startswith(lost)})
    segmentation = ours('segmentation', 'per_layer').state_dict()
    assert detect_format(convert_state_dict(segmentation, target='mmseg').state_dict) == 'mmseg'
    plain = timm.models.VisionTransformer(img_size=48, patch_size=8, embed_dim=DIMS, depth=1, num_heads=HEADS)
    assert detect_format(plain.state_dict()) == 'timm'


# --- the released code's files, names by hand -----------------------------------------------------

TOKENS, ROWS = 37, 124  # of 6 x 6 patches: 6**2 + 1 and 11**2 + 3


def tensors(shapes: dict) -> dict:
    return {name: torch.randn(shape) for name, shape in shapes.items()}


def released_blocks(prefix: str = '', table: bool = False, layer_scale: bool = True, depth: int = 2) -> dict:
    weights = {}
    for i in range(depth):
        block = f'{prefix}blocks.{i}.'
        shapes = {
            'norm1.weight': (DIMS,),
            'norm1.bias': (DIMS,),
            'attn.q_bias': (DIMS,),
            'attn.v_bias': (DIMS,),
            'attn.qkv.weight': (3 * DIMS, DIMS),
            'attn.proj.weight': (DIMS, DIMS),
            'attn.proj.bias': (DIMS,),
            'norm2.weight': (DIMS,),
            'norm2.bias': (DIMS,),
            'mlp.fc1.weight': (4 * DIMS, DIMS),
            'mlp.fc1.bias': (4 * DIMS,),
            'mlp.fc2.weight': (DIMS, 4 * DIMS),
            'mlp.fc2.bias': (DIMS,),
        }
        if layer_scale:
            shapes |= {'gamma_1': (DIMS,), 'gamma_2': (DIMS,)}
        if table:
            shapes['attn.relative_position_bias_table'] = (ROWS, HEADS)
            weights[f'{block}attn.relative_position_index'] = torch.zeros(TOKENS, TOKENS, dtype=torch.int64)
        weights |= {block + name: tensor for name, tensor in tensors(shapes).items()}
    return weights


def released_stem(prefix: str = '') -> dict:
    return tensors(
        {
            f'{prefix}cls_token': (1, 1, DIMS),
            f'{prefix}patch_embed.proj.weight': (DIMS, 3, 8, 8),
            f'{prefix}patch_embed.proj.bias': (DIMS,),
        }
    )


def released_pretraining(variant: str) -> dict:
    weights = (
        released_stem()
        | released_blocks(layer_scale=variant == 'shared')
        | tensors(
            {
                'mask_token': (1, 1, DIMS),
                'norm.weight': (DIMS,),
                'norm.bias': (DIMS,),
                'lm_head.weight': (VOCAB, DIMS),
                'lm_head.bias': (VOCAB,),
            }
        )
    )
    if variant == 'shared':
        weights['rel_pos_bias.relative_position_bias_table'] = torch.randn(ROWS, HEADS)
        weights['rel_pos_bias.relative_position_index'] = torch.zeros(TOKENS, TOKENS, dtype=torch.int64)
    else:
        weights['pos_embed'] = torch.randn(1, TOKENS, DIMS)
    return dict(model=weights)


def released_finetuning(variant: str) -> dict:
    return dict(
        model=released_stem()
        | released_blocks(table=True)
        | tensors(
            {
                'fc_norm.weight': (DIMS,),
                'fc_norm.bias': (DIMS,),
                'head.weight': (CLASSES, DIMS),
                'head.bias': (CLASSES,),
            }
        )
    )


def norm(name: str, width: int) -> dict:
    return tensors({f'{name}.{part}': (width,) for part in ('weight', 'bias', 'running_mean', 'running_var')}) | {
        f'{name}.num_batches_tracked': torch.tensor(11)
    }


def conv(name: str, out_width: int, in_width: int, kernel: int) -> dict:
    return tensors({f'{name}.conv.weight': (out_width, in_width, kernel, kernel)}) | norm(f'{name}.bn', out_width)


def released_ade20k(variant: str) -> dict:
    weights = released_stem('backbone.') | released_blocks('backbone.', table=True, depth=DEPTH['segmentation'])
    weights |= tensors(
        {
            f'backbone.{name}.{part}': (DIMS, DIMS, 2, 2) if part == 'weight' else (DIMS,)
            for name in ('fpn1.0', 'fpn1.3', 'fpn2.0')
            for part in ('weight', 'bias')
        }
    ) | norm('backbone.fpn1.1', DIMS)
    for i in range(4):
        weights |= conv(f'decode_head.psp_modules.{i}.1', DIMS, DIMS, 1)
    for i in range(3):
        weights |= conv(f'decode_head.lateral_convs.{i}', DIMS, DIMS, 1)
        weights |= conv(f'decode_head.fpn_convs.{i}', DIMS, DIMS, 3)
    weights |= conv('decode_head.bottleneck', DIMS, 5 * DIMS, 3) | conv('decode_head.fpn_bottleneck', DIMS, 4 * DIMS, 3)
    weights |= conv('auxiliary_head.convs.0', 24, DIMS, 3)
    weights |= tensors(
        {
            'decode_head.conv_seg.weight': (CLASSES, DIMS, 1, 1),
            'decode_head.conv_seg.bias': (CLASSES,),
            'auxiliary_head.conv_seg.weight': (CLASSES, 24, 1, 1),
            'auxiliary_head.conv_seg.bias': (CLASSES,),
        }
    )
    return dict(state_dict=weights, meta=dict(CLASSES=('wall', 'sky'), PALETTE=[[120, 120, 120]], iter=160000))


RELEASED = [
    ('pretraining', 'shared', released_pretraining),
    ('pretraining', 'vit', released_pretraining),
    ('classification', 'per_layer', released_finetuning),
    ('segmentation', 'per_layer', released_ade20k),
]
# Some tensors of each task by both names
SAME = dict(
    pretraining={
        'lm_head.bias': 'head.lm_head.bias',
        'norm.weight': 'backbone.norm.weight',
        'mask_token': 'backbone.mask_token',
        'blocks.1.attn.q_bias': 'backbone.blocks.1.attn.q_bias',
    },
    classification={
        'head.weight': 'head.fc.weight',
        'fc_norm.bias': 'backbone.fc_norm.bias',
        'blocks.0.gamma_2': 'backbone.blocks.0.gamma_2',
    },
    segmentation={
        'backbone.fpn1.0.weight': 'neck.upsample_4x.0.weight',
        'backbone.fpn1.3.bias': 'neck.upsample_4x.3.bias',
        'backbone.fpn1.1.running_var': 'neck.upsample_4x.1.running_var',
        'backbone.fpn2.0.bias': 'neck.upsample_2x.0.bias',
        'decode_head.psp_modules.3.1.bn.bias': 'decode_head.psp_modules.3.1.bn.bias',
        'backbone.blocks.4.mlp.fc1.bias': 'backbone.blocks.4.mlp.fc1.bias',
    },
)


@pytest.mark.parametrize(('task', 'variant', 'make'), RELEASED)
def test_a_file_of_the_released_code(task, variant, make, tmp_path):
    content = make(variant)
    torch.save(content, tmp_path / 'released.pth')
    released = next(iter(content.values()))
    translation = convert_state_dict(weights_of(read_checkpoint(tmp_path / 'released.pth')))
    assert translation.source == 'unilm' and translation.dropped_keys == []
    model = ours(task, variant, layer_scale_init=None if variant == 'vit' else 0.1)
    incompatible = model.load_state_dict(translation.state_dict, strict=True)
    assert not incompatible.missing_keys and not incompatible.unexpected_keys
    report = model.backbone.load_report
    assert report.unexpected_keys == [] and report.missing_keys == [] and not report.resized
    state = model.state_dict()
    for theirs, mine in SAME[task].items():
        assert torch.equal(state[mine], released[theirs]), theirs
    # the released code can read it again: index buffers included, which are computed from the table's size
    written = converted(state, 'unilm')
    assert {name: tensor.shape for name, tensor in written.items()} == {
        name: tensor.shape for name, tensor in released.items()
    }
    assert all(torch.equal(written[name], tensor) for name, tensor in released.items() if 'index' not in name)


# --- no BEiT --------------------------------------------------------------------------------------


def resnet() -> dict:
    import torchvision

    return torchvision.models.resnet18().state_dict()


def transformers_model(name: str) -> dict:
    import transformers

    model = getattr(transformers, name)
    return model(
        model.config_class(
            hidden_size=DIMS,
            num_hidden_layers=1,
            num_attention_heads=HEADS,
            intermediate_size=64,
            image_size=48,
            patch_size=8,
        )
    ).state_dict()


@pytest.mark.parametrize(
    ('make', 'message'),
    [
        (lambda: {}, 'tensors are none'),
        (resnet, r'holds no BEiT weights: its tensors are conv1.weight, .*, \.\.\.$'),
        (lambda: {'head.fc.weight': torch.zeros(2, 2)}, 'holds no BEiT weights'),
        (lambda: transformers_model('ViTForImageClassification'), 'holds no BEiT weights'),
        (lambda: transformers_model('ViTModel'), 'holds no BEiT weights'),
        (lambda: transformers_model('Dinov2Model'), 'holds no BEiT weights'),
    ],
    ids=['empty', 'ResNet', 'a head', 'ViT of transformers', 'bare ViT of transformers', 'DINOv2 of transformers'],
)
def test_other_models_are_refused(make, message):
    with pytest.raises(CheckpointError, match=message):
        convert_state_dict(make())


def test_blocks_of_another_kind_are_refused():
    """A plain ViT with norms of queries and keys would compute something else without them."""
    peer = timm.models.VisionTransformer(
        img_size=48, patch_size=8, embed_dim=DIMS, depth=1, num_heads=HEADS, qk_norm=True
    )
    with pytest.raises(CheckpointError, match=r'is no BEiT: its blocks have backbone.blocks.0.attn.q_norm.weight'):
        convert_state_dict(peer.state_dict())


def test_two_tensors_for_one_name():
    """mmseg's converter leaves the released names beside its own; only if they disagree is one of them wrong."""
    state = converted(ours('segmentation', 'per_layer').state_dict(), 'mmseg')
    state['backbone.patch_embed.proj.weight'] = state['backbone.patch_embed.projection.weight'].clone()
    assert convert_state_dict(state).dropped_keys == ['backbone.patch_embed.proj.weight']
    state['backbone.patch_embed.proj.weight'] += 1
    with pytest.raises(CheckpointError, match='two tensors for backbone.patch_embed.proj.weight'):
        convert_state_dict(state)


def test_the_names_that_transformers_has_in_memory_are_refused():
    with pytest.raises(CheckpointError, match='save it by its save_pretrained'):
        convert_state_dict(hf_peer('features', 'per_layer').state_dict())

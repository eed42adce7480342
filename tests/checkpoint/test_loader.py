"""Checkpoints of other code bases, through every way in which mmengine loads files, and made to fit the backbone."""

import copy
from functools import partial
from unittest.mock import Mock

import pytest
import torch
from mmengine.runner import load_checkpoint
from peers import (
    CLASSES,
    HEADS,
    MMPRETRAIN,
    PATCH,
    RESNET,
    assert_equal,
    assert_same_outputs,
    backbone_config,
    hf_peer,
    mmpretrain_peer,
    ours,
    outputs,
    timm_peer,
)
from safetensors.torch import save_file

from beit_mm.checkpoint import checkpoint as opener
from beit_mm.checkpoint.checkpoint import Checkpoint
from beit_mm.checkpoint.convert import convert_checkpoint
from beit_mm.checkpoint.description import class_names
from beit_mm.checkpoint.names import convert_state_dict
from beit_mm.checkpoint.read import CheckpointError
from beit_mm.models import BEiTBackbone
from beit_mm.registry import MODELS

TABLE = 'attn.relative_position_bias_table'
timm_classifier = partial(timm_peer, 'classification', 'per_layer')


def assert_loaded(backbone: BEiTBackbone, weights: dict) -> None:
    """All tensors are the file's but norms, which belong to the task."""
    own = backbone.state_dict()
    shared = own.keys() & weights.keys()
    assert {name.rpartition('.')[0] for name in own.keys() - shared} <= {'norm', 'fc_norm'}
    assert_equal({name: own[name] for name in shared}, {name: weights[name] for name in shared})


def below(prefix: str, weights: dict) -> dict:
    return {f'{prefix}{name}': tensor for name, tensor in weights.items()}


def test_an_opened_checkpoint_stands_for_its_file(tmp_path, monkeypatch):
    weights = timm_classifier().state_dict()
    args = dict(imagenet_default_mean_and_std=False, input_size=48)
    torch.save(dict(model=below('module.', weights), args=args), tmp_path / 'w.pth')
    opened = Checkpoint.open(tmp_path / 'w.pth')
    monkeypatch.setattr(opener, 'read_checkpoint', None)  # from here on nothing is read
    assert Checkpoint.open(opened) is opened and str(opened) == str(tmp_path / 'w.pth')
    assert (opened.format, opened.task, class_names(opened.meta)) == ('unilm', 'classification', None)
    assert opened.preprocessing == dict(mean=[127.5] * 3, std=[127.5] * 3, size=[48, 48])
    assert opened.backbone_arguments()['arch']['num_heads'] == HEADS
    assert torch.equal(BEiTBackbone.from_checkpoint(opened).cls_token, weights['cls_token'])
    assert convert_checkpoint(opened, tmp_path / 'ours.pth').task == 'classification'
    assert [*opened.weights] == [*weights]  # none of these took anything out


@pytest.mark.parametrize('code_base', ['timm', 'ours'])
def test_names_are_converted_once_whoever_asks(code_base, tmp_path, monkeypatch):
    """Also for other means, and on the way into a model."""
    model = timm_classifier() if code_base == 'timm' else ours('classification', 'per_layer')
    torch.save(dict(state_dict=model.state_dict(), meta={}), tmp_path / 'w.pth')
    conversion = Mock(wraps=opener.names.convert_state_dict)
    monkeypatch.setattr(opener.names, 'convert_state_dict', conversion)
    opened = Checkpoint.open(tmp_path / 'w.pth')
    for checkpoint in (Checkpoint.open(opened, 'segmentor', mean=127.5, std=50), opened):
        assert checkpoint.task == 'classification'
        assert BEiTBackbone.from_checkpoint(checkpoint).load_report.source.endswith(f'({checkpoint.format})')
        convert_checkpoint(checkpoint, tmp_path / 'new.pth', 'timm')
    assert conversion.call_count == 1


@pytest.mark.parametrize('prefix', ['', 'backbone.', 'module.', '_orig_mod.', 'module._orig_mod.', 'module.backbone.'])
@pytest.mark.parametrize('task', ['classification', 'segmentation'])
def test_whole_models_load_files_of_any_prefix(task, prefix, tmp_path):
    """Those of models in wrappers too."""
    weights = timm_peer(task, 'per_layer').state_dict()
    torch.save(below(prefix, weights), tmp_path / 'timm.pth')
    model = ours(task, 'per_layer')
    load_checkpoint(model, str(tmp_path / 'timm.pth'), map_location='cpu')
    assert_loaded(model.backbone, weights)
    assert str(tmp_path / 'timm.pth') in str(model.backbone.load_report)


@pytest.mark.parametrize(
    ('way', 'num_classes'), [('init_cfg', CLASSES), ('load_checkpoint', CLASSES), ('load_checkpoint', 7)]
)
def test_the_head_comes_along_when_the_classes_agree(way, num_classes, tmp_path):
    weights = timm_classifier(num_classes=num_classes).state_dict()
    save_file(weights, tmp_path / 'timm.safetensors')
    model = ours('classification', 'per_layer')
    before = model.head.fc.weight.clone()
    if way == 'init_cfg':
        model.init_cfg = dict(type='Pretrained', checkpoint=str(tmp_path / 'timm.safetensors'))
        model.init_weights()
    else:
        load_checkpoint(model, str(tmp_path / 'timm.safetensors'), strict=num_classes == CLASSES)
    assert_loaded(model.backbone, weights)
    assert torch.equal(model.head.fc.weight, weights['head.weight'] if num_classes == CLASSES else before)


def test_a_whole_model_into_a_backbone_by_revised_names(tmp_path):
    """The head, which is then named as if it were the backbone's, stays out."""
    model = ours('classification', 'per_layer')
    torch.save(dict(state_dict=model.state_dict(), meta={}), tmp_path / 'w.pth')
    backbone = ours('classification', 'per_layer', seed=2).backbone
    load_checkpoint(backbone, str(tmp_path / 'w.pth'), strict=True, revise_keys=[(r'^backbone\.', '')])
    assert_equal(backbone.state_dict(), model.backbone.state_dict())
    assert backbone.load_report.unexpected_keys == []


@pytest.mark.parametrize('in_file', ['', 'backbone.'])
@pytest.mark.parametrize('prefix', [None, 'backbone.', 'backbone'])
@pytest.mark.parametrize('task', ['classification', 'segmentation'])
def test_init_cfg_of_the_backbone(task, prefix, in_file, tmp_path):
    """With any prefix or none, and with what the file says about its images."""
    path, weights = tmp_path / 'w.pth', timm_peer(task, 'per_layer').state_dict()
    torch.save(dict(state_dict=below(in_file, weights), meta=dict(preprocessing=dict(size=[48, 48]))), path)
    model = ours(task, 'per_layer')
    init_cfg = dict(type='Pretrained', checkpoint=str(path))
    model.backbone.init_cfg = init_cfg if prefix is None else dict(init_cfg, prefix=prefix)
    model.init_weights()
    assert_loaded(model.backbone, weights)
    assert model.backbone.is_init and not hasattr(model.backbone, '_params_init_info')
    assert str(path) in model.backbone.load_report.source
    assert model.backbone.load_report.preprocessing == dict(size=[48, 48])


def test_a_pretraining_of_mmpretrain_in_our_pretrainer_and_classifier(tmp_path):
    """Its tokenizer stays where it is."""
    weights = mmpretrain_peer('pretraining', 'shared').state_dict()
    others = {'target_generator.encoder.blocks.input.w': torch.rand(2, 2)}
    torch.save(dict(state_dict=weights | others, meta={}), tmp_path / 'mmpretrain.pth')
    model = ours('pretraining', 'shared')
    model.target_generator = tokenizer = MODELS.build(
        dict(type='beit_mm.DALLETokenizer', random_weights=True, hidden=8, vocab_size=16)
    )
    before = copy.deepcopy(tokenizer.state_dict())
    load_checkpoint(model, str(tmp_path / 'mmpretrain.pth'), strict=True)
    assert_equal(tokenizer.state_dict(), before)
    assert torch.equal(model.head.lm_head.weight, weights['head.cls_head.weight'])
    conversion = convert_checkpoint(tmp_path / 'mmpretrain.pth', tmp_path / 'ours.pth')
    assert conversion.dropped_keys == list(others) and f'dropped, 1: {[*others][0]}' in str(conversion)
    for file in ('mmpretrain.pth', 'ours.pth'):
        classifier = ours('classification', 'per_layer')
        load_checkpoint(classifier, str(tmp_path / file))
        report = classifier.backbone.load_report
        assert report.expanded == [f'blocks.{i}.{TABLE}' for i in (0, 1)]
        assert sorted(report.unexpected_keys) == ['mask_token', 'norm.bias', 'norm.weight']
        assert report.missing_keys == ['fc_norm.weight', 'fc_norm.bias']


def test_a_rectangle_of_mmpretrains_pretraining_has_as_many_rows_as_a_square():
    source, target = (ours('pretraining', 'vit', (14 * PATCH, 16 * PATCH), seed) for seed in (1, 2))
    weights, dropped, _ = convert_state_dict(source.state_dict(), target='mmpretrain', grid=(14, 16))
    assert weights['backbone.pos_embed'].shape[1] == 15**2 and not dropped
    target.load_state_dict(weights)
    assert_equal(target.state_dict(), source.state_dict())


def test_assigned_tables_are_apart():
    """Tied parameters would train together."""
    model = ours('features', 'per_layer').backbone
    model.load_state_dict(ours('features', 'shared').backbone.state_dict(), assign=True)
    tables = [block.attn.relative_position_bias_table for block in model.blocks]
    assert tables[0].data_ptr() != tables[1].data_ptr()


@torch.no_grad()
def test_tables_of_a_model_with_both_kinds_are_added(tmp_path):
    peer = hf_peer('features', 'per_layer', use_shared_relative_position_bias=True)
    peer.save_pretrained(tmp_path)
    model, images = ours('features', 'per_layer'), torch.randn(2, 3, 48, 48)
    load_checkpoint(model['backbone'], str(tmp_path))
    assert_same_outputs(outputs(model, 'features', images), [peer(images).last_hidden_state])


def state_of(variant: str = 'per_layer', **changes):
    return lambda: timm_peer('classification', variant, **changes).state_dict()


PATCHES = 'patch_embed.proj.weight'
WRONG = {  # the model's variant, what is in the file, the error
    'resnet': ('per_layer', lambda: below('backbone.', RESNET), 'conv1.weight'),
    'width': ('vit', state_of(embed_dim=64), r'cls_token \(1, 1, 64\), the model has \(1, 1, 32\)'),
    'depth and heads': ('per_layer', state_of(depth=3, num_heads=4), 'heads 4, the model has 2, blocks 3, the'),
    'heads that only the file names': (
        'vit',
        lambda: dict(state_dict=state_of('vit')(), meta=dict(architecture=dict(num_heads=4))),
        'heads 4, the model has 2',
    ),
    'no LayerScale': ('per_layer', state_of(init_values=None), r'missing \(blocks.0.gamma_1'),
    'other positions': ('vit_layer_scale', state_of(), f'.*blocks.0.{TABLE}'),
    'a later version': ('vit', lambda: dict(state_dict={}, meta=dict(beit_mm_format=99)), 'format 99.*upgrade'),
}


@pytest.mark.parametrize('kind', WRONG)
def test_a_wrong_checkpoint_is_one_error_that_names_the_file_and_nothing_is_loaded(kind, tmp_path):
    variant, make, message = WRONG[kind]
    path = tmp_path / 'wrong.pth'
    torch.save(make(), path)
    model = ours('classification', variant)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(CheckpointError, match=message) as error:
        load_checkpoint(model, str(path))
    assert str(path) in str(error.value) and len(str(error.value)) < 600
    model.backbone.init_cfg = dict(type='Pretrained', checkpoint=str(path), prefix='backbone.')
    with pytest.raises(CheckpointError, match=message):
        model.init_weights()
    assert_equal(model.state_dict(), before)


def test_other_mm_models_still_read_their_files(tmp_path):
    """mmpretrain's own BEiT in the same process loads mmpretrain's files as before."""
    source = mmpretrain_peer('classification', 'per_layer').backbone
    target = mmpretrain_peer('classification', 'per_layer', out_type='avg_featmap').backbone
    torch.nn.init.zeros_(target.cls_token)
    torch.save(dict(state_dict=source.state_dict()), tmp_path / 'own.pth')
    load_checkpoint(target, str(tmp_path / 'own.pth'), strict=True)
    assert_equal(target.state_dict(), source.state_dict())


def test_a_run_with_timms_vit_in_mmpretrain_goes_on(tmp_path):
    """Its tensors are a plain ViT's under other names: it needs those names, and its optimizer. Ours takes it too."""
    backbone = dict(type='TIMMBackbone', model_name='vit_tiny_patch16_224', depth=1, img_size=32)
    head = dict(type='LinearClsHead', in_channels=192, num_classes=3)
    source, target = (MMPRETRAIN.build(dict(type='ImageClassifier', backbone=backbone, head=head)) for _ in range(2))
    meta = dict(mmengine_version='0.10.7', epoch=3)
    torch.save(dict(state_dict=source.state_dict(), meta=meta, optimizer=dict(lr=1.0)), tmp_path / 'epoch_3.pth')
    assert load_checkpoint(target, str(tmp_path / 'epoch_3.pth'), strict=True)['optimizer'] == dict(lr=1.0)
    assert_equal(target.state_dict(), source.state_dict())
    arch = dict(embed_dims=192, num_layers=1, num_heads=3)
    mine = MMPRETRAIN.build(dict(type='beit_mm.BEiTBackbone', arch=arch, img_size=32, out_type='cls_token'))
    mine.init_cfg = dict(type='Pretrained', checkpoint=str(tmp_path / 'epoch_3.pth'), prefix='backbone.')
    mine.init_weights()
    images = torch.randn(2, 3, 32, 32)
    expected = source.eval().backbone.timm_model.forward_features(images)[:, 0]
    torch.testing.assert_close(mine.eval()(images)[0], expected, atol=1e-5, rtol=1e-5)


def test_a_folder_of_transformers(tmp_path):
    """Its JSON files say what the weights do not: that the images were rectangles, and how they were normalised."""
    hf_peer('features', 'per_layer', size=[48, 64]).save_pretrained(tmp_path)
    (tmp_path / 'preprocessor_config.json').write_text('{"image_mean": [0.5, 0.5, 0.5], "image_std": [0.2, 0.2, 0.2]}')
    model = MODELS.build(backbone_config('features', 'per_layer', size=(64, 48)))
    load_checkpoint(model, str(tmp_path))
    assert model.load_report.resized[f'blocks.0.{TABLE}'] == '6 x 8 -> 8 x 6'
    assert model.load_report.preprocessing == dict(mean=[127.5] * 3, std=[51.0] * 3, size=[48, 64])
    (tmp_path / 'preprocessor_config.json').write_text('{"image_mean": [0.5,')
    with pytest.raises(CheckpointError, match='preprocessor_config.json beside the weights is not JSON'):
        load_checkpoint(model, str(tmp_path))
    (tmp_path / 'model.safetensors').unlink()
    with pytest.raises(FileNotFoundError, match='model.safetensors, '):
        load_checkpoint(model, str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"mean 'beit_base_patch16_224_pt22k' .*\?$"):
        load_checkpoint(model, 'beit_base_patch16_224_pt22k.pth')


# --- made to fit another task, image size, or number of channels: it computes what it did -------------

ARCH = dict(embed_dims=32, num_layers=2, num_heads=4)
PLUS = dict(abs_pos_embed=False, rel_pos_bias='per_layer', layer_scale_init=0.1)


def build(img_size=32, **options) -> BEiTBackbone:
    model = BEiTBackbone(ARCH, img_size=img_size, patch_size=8, **options)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-0.5, 0.5)
    return model.eval()


def test_small_layer_scale_in_float16_is_folded_in_full():
    source, target = build(layer_scale_init=1e-5), build()
    half = {name: tensor.half() for name, tensor in source.state_dict().items()}
    target.load_state_dict(half)
    block = {name.removeprefix('blocks.0.'): tensor.float() for name, tensor in half.items()}
    expected = block['gamma_1'][:, None] * block['attn.proj.weight']
    torch.testing.assert_close(target.blocks[0].attn.proj.weight, expected, atol=0, rtol=1e-6)


@pytest.mark.parametrize('channels', [1, 4, 6, 13])
@torch.no_grad()
def test_other_channels_take_the_filters_in_turn(channels):
    """A gray image gives what its RGB copy gave; an image repeated along the channels is seen as it was."""
    source, target = build(), build(in_channels=channels)
    target.load_state_dict(source.state_dict())
    assert target.load_report.adapted == ['patch_embed.proj.weight']
    before, after, images = source.patch_embed.proj.weight, target.patch_embed.proj.weight, torch.rand(2, 3, 32, 32)
    for channel in range(channels) if channels > 1 else ():
        torch.testing.assert_close(after[:, channel], before[:, channel % 3] * 3 / channels)
    if channels in (1, 6):
        repeated = images.repeat(1, 2, 1, 1) if channels == 6 else images[:, :1]
        images = images if channels == 6 else images[:, :1].expand(-1, 3, -1, -1)
        torch.testing.assert_close(target(repeated)[0], source(images)[0], atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_positions_are_resized_on_loading_as_in_a_model_that_runs_on_images_of_another_size():
    small, large = build(interpolate_mode='bilinear'), build((64, 96), interpolate_mode='bilinear')
    large.load_state_dict(small.state_dict())
    images = torch.rand(1, 3, 64, 96)
    torch.testing.assert_close(small(images)[0], large(images)[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize('options', [PLUS, {}], ids=['table', 'embedding'])
def test_a_rectangle_of_unknown_sides_is_an_error(options):
    with pytest.raises(CheckpointError, match='rectangle'):
        build((64, 64), **options).load_state_dict(build((32, 48), **options).state_dict())

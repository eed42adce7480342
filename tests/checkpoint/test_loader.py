"""Checkpoints of other code bases, through every way in which mmengine loads files."""

import copy
import logging

import pytest
import torch
import transformers
from helpers import narrow_model
from mmengine.logging import MMLogger
from mmengine.runner import CheckpointLoader, load_checkpoint
from safetensors.torch import save_file
from timm.models.beit import Beit
from torch import nn

from beit_mm.checkpoint import checkpoint as opener
from beit_mm.checkpoint.checkpoint import Checkpoint, drop_task_parts
from beit_mm.checkpoint.convert import convert_checkpoint
from beit_mm.checkpoint.read import CheckpointError, write_checkpoint
from beit_mm.models import BEiTBackbone
from beit_mm.registry import MODELS

BACKBONE = dict(
    type='beit_mm.BEiTBackbone',
    arch=dict(embed_dims=32, num_layers=2, num_heads=4),
    img_size=32,
    patch_size=8,
    abs_pos_embed=False,
    rel_pos_bias='per_layer',
    layer_scale_init=0.1,
)


def test_an_opened_checkpoint_stands_for_its_file(tmp_path, monkeypatch):
    weights = timm_model().state_dict()
    args = dict(imagenet_default_mean_and_std=False, input_size=32)
    torch.save(
        dict(model={f'module.{name}': tensor for name, tensor in weights.items()}, args=args), tmp_path / 'w.pth'
    )
    opened = Checkpoint.open(tmp_path / 'w.pth')
    monkeypatch.setattr(opener, 'read_checkpoint', None)  # from here on nothing is read
    assert Checkpoint.open(opened) is opened and str(opened) == str(tmp_path / 'w.pth')
    assert (opened.format, opened.task, opened.classes) == ('unilm', 'classification', None)
    assert opened.weights.keys() == weights.keys() and 'backbone.cls_token' in opened.converted.state_dict
    assert (
        opened.preprocessing == opened.meta['preprocessing'] == dict(mean=[127.5] * 3, std=[127.5] * 3, size=[32, 32])
    )
    assert opened.backbone_arguments()['arch']['num_heads'] == 4
    assert torch.equal(BEiTBackbone.from_checkpoint(opened).cls_token, weights['cls_token'])
    assert convert_checkpoint(opened, tmp_path / 'ours.pth').task == 'classification'
    assert [*opened.weights] == [*weights]  # none of these took anything out


def randomise(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.uniform_(0.1, 1)
    return model


def timm_model(num_classes: int = 5, **changes) -> Beit:
    return randomise(
        Beit(
            **dict(
                dict(
                    img_size=32,
                    patch_size=8,
                    embed_dim=32,
                    depth=2,
                    num_heads=4,
                    num_classes=num_classes,
                    use_abs_pos_emb=False,
                    use_rel_pos_bias=True,
                    init_values=0.1,
                ),
                **changes,
            )
        )
    )


def classifier(num_classes: int = 5, **changes) -> nn.Module:
    return MODELS.build(
        dict(
            dict(
                type='mmpretrain.ImageClassifier',
                backbone=dict(BACKBONE, out_type='avg_featmap'),
                head=dict(type='mmpretrain.LinearClsHead', num_classes=num_classes, in_channels=32),
            ),
            **changes,
        )
    )


def segmentor(**changes) -> nn.Module:
    norm = dict(type='BN')
    return MODELS.build(
        dict(
            dict(
                type='mmseg.EncoderDecoder',
                backbone=dict(BACKBONE, out_type='featmap', out_indices=[0, 0, 1, 1]),
                neck=dict(type='mmseg.Feature2Pyramid', embed_dim=32, norm_cfg=norm),
                decode_head=dict(
                    type='mmseg.UPerHead',
                    in_channels=[32] * 4,
                    in_index=[0, 1, 2, 3],
                    channels=8,
                    num_classes=3,
                    norm_cfg=norm,
                ),
                test_cfg=dict(mode='whole'),
            ),
            **changes,
        )
    )


@pytest.fixture
def timm_file(tmp_path):
    """A classifier of timm's in timm's own form, and its weights."""
    weights = timm_model().state_dict()
    path = tmp_path / 'timm.safetensors'
    save_file(weights, path)
    return path, weights


def assert_loaded(backbone: BEiTBackbone, weights: dict, parts: int = 2) -> None:
    own = backbone.state_dict()
    shared = [name for name in own if name in weights]
    assert len(shared) >= len(own) - parts
    for name in shared:
        assert torch.equal(own[name], weights[name]), name


@pytest.mark.parametrize('build', [classifier, segmentor])
def test_whole_models_load_a_bare_file(build, timm_file):
    path, weights = timm_file
    model = build()
    load_checkpoint(model, str(path), map_location='cpu')
    assert_loaded(model.backbone, weights)
    assert str(path) in str(model.backbone.load_report)


def test_the_head_comes_along_when_the_classes_agree(timm_file):
    path, weights = timm_file
    model = classifier()
    load_checkpoint(model, str(path), strict=True)
    assert torch.equal(model.head.fc.weight, weights['head.weight'])


def test_a_head_of_other_classes_is_left_alone(timm_file):
    path, weights = timm_file
    model = classifier(num_classes=7)
    before = model.head.fc.weight.clone()
    load_checkpoint(model, str(path))
    assert torch.equal(model.head.fc.weight, before)
    assert_loaded(model.backbone, weights)


@pytest.mark.parametrize('prefixed_file', [False, True], ids=['bare file', 'file with backbone.'])
@pytest.mark.parametrize('build', [classifier, segmentor])
def test_init_cfg_of_the_backbone(build, prefixed_file, timm_file):
    """With any prefix or none, and with what the file says of its images."""
    path, weights = timm_file
    if prefixed_file:
        weights = {f'backbone.{name}': tensor for name, tensor in weights.items()}
    for prefix in (None, 'backbone.', 'backbone'):
        path = path.with_name('w.pth')
        torch.save(dict(state_dict=weights, meta=dict(preprocessing=dict(size=[32, 32]))), path)
        model = build()
        init_cfg = dict(type='Pretrained', checkpoint=str(path))
        model.backbone.init_cfg = init_cfg if prefix is None else dict(init_cfg, prefix=prefix)
        model.init_weights()
        assert_loaded(model.backbone, {name.removeprefix('backbone.'): tensor for name, tensor in weights.items()})
        assert model.backbone.is_init and not hasattr(model.backbone, '_params_init_info')
        assert str(path) in model.backbone.load_report.source
        assert model.backbone.load_report.preprocessing == dict(size=[32, 32])


def test_init_cfg_of_the_model(timm_file):
    path, weights = timm_file
    model = classifier(init_cfg=dict(type='Pretrained', checkpoint=str(path)))
    model.init_weights()
    assert_loaded(model.backbone, weights)
    assert torch.equal(model.head.fc.weight, weights['head.weight'])


def mmpretrain_pretraining_file(path) -> dict:
    """What mmpretrain's own BEiT pretraining saves, its tokenizer included."""
    from mmpretrain.models.selfsup.beit import BEiTPretrainViT

    backbone = randomise(
        BEiTPretrainViT(
            arch=dict(embed_dims=32, num_layers=2, num_heads=4, feedforward_channels=128),
            img_size=32,
            patch_size=8,
            use_shared_rel_pos_bias=True,
            use_abs_pos_emb=False,
            layer_scale_init_value=0.1,
        )
    )
    state_dict = {f'backbone.{name}': tensor for name, tensor in backbone.state_dict().items()}
    state_dict |= {
        'head.cls_head.weight': torch.rand(32, 32),
        'head.cls_head.bias': torch.rand(32),
        'target_generator.encoder.blocks.input.w': torch.rand(2, 2),
    }
    torch.save(dict(state_dict=state_dict, meta={}), path)
    return state_dict


def test_a_pretraining_of_mmpretrain(tmp_path):
    state_dict = mmpretrain_pretraining_file(tmp_path / 'mmpretrain.pth')
    model = MODELS.build(narrow_model(backbone=dict(BACKBONE, rel_pos_bias='shared', masked_input=True)))
    tokenizer = copy.deepcopy(model.target_generator.state_dict())
    load_checkpoint(model, str(tmp_path / 'mmpretrain.pth'), strict=True)
    assert torch.equal(model.head.lm_head.weight, state_dict['head.cls_head.weight'])
    assert torch.equal(model.backbone.blocks[1].mlp.fc2.weight, state_dict['backbone.layers.1.ffn.layers.1.weight'])
    assert torch.equal(model.backbone.mask_token, state_dict['backbone.mask_token'])
    for name, tensor in model.target_generator.state_dict().items():
        assert torch.equal(tensor, tokenizer[name]), name


def test_from_pretraining_to_a_classifier_the_shared_table_is_expanded(tmp_path):
    state_dict = mmpretrain_pretraining_file(tmp_path / 'mmpretrain.pth')
    model = classifier()
    load_checkpoint(model, str(tmp_path / 'mmpretrain.pth'))
    table = state_dict['backbone.rel_pos_bias.relative_position_bias_table']
    for block in model.backbone.blocks:
        assert torch.equal(block.attn.relative_position_bias_table, table)
    report = model.backbone.load_report
    assert len(report.expanded) == 2
    assert report.unexpected_keys == ['mask_token', 'norm.weight', 'norm.bias']
    assert report.missing_keys == ['fc_norm.weight', 'fc_norm.bias']


def resnet() -> dict:
    import torchvision

    return torchvision.models.resnet18().state_dict()


WRONG = {
    'resnet': (resnet, r'no tensor is named backbone\.\*. The file, .*wrong.pth, holds conv1.weight'),
    'patch size': (
        lambda: timm_model(patch_size=16).state_dict(),
        r'patch_embed.proj.weight \(32, 3, 16, 16\), the model has \(32, 3, 8, 8\)',
    ),
    'width': (lambda: timm_model(embed_dim=64).state_dict(), r'cls_token \(1, 1, 64\), the model has \(1, 1, 32\)'),
    'depth': (lambda: timm_model(depth=3).state_dict(), 'blocks 3, the model has 2'),
    'heads': (lambda: timm_model(num_heads=2).state_dict(), 'heads 2, the model has 4'),
    'heads of a shared table': (
        lambda: timm_model(num_heads=2, use_rel_pos_bias=False, use_shared_rel_pos_bias=True).state_dict(),
        'heads 2, the model has 4',
    ),
    'no LayerScale': (lambda: timm_model(init_values=None).state_dict(), r'missing \(blocks.0.gamma_1'),
    'a table of one dimension': (
        lambda: dict(timm_model().state_dict(), **{'blocks.1.attn.relative_position_bias_table': torch.rand(52)}),
        r'blocks.1.attn.relative_position_bias_table \(52,\), the model has \(52, 4\)',
    ),
    'a patch of two sides': (
        lambda: dict(timm_model().state_dict(), **{'patch_embed.proj.weight': torch.rand(32, 1, 16, 8)}),
        r'patch_embed.proj.weight \(32, 1, 16, 8\)',
    ),
    'no bias tables': (lambda: timm_model(use_rel_pos_bias=False).state_dict(), 'relative_position_bias_table'),
    'only a head': (lambda: {'head.fc.weight': torch.rand(5, 32)}, r'no tensor is named backbone\.\*. .*wrong.pth'),
    'a ResNet in a classifier': (
        lambda: {f'backbone.{name}': tensor for name, tensor in resnet().items()},
        r'wrong.pth holds no BEiT weights: its tensors are .*conv1.weight',
    ),
}


@pytest.mark.parametrize('kind', WRONG)
def test_a_wrong_checkpoint_is_one_error_and_nothing_is_loaded(kind, tmp_path):
    make, message = WRONG[kind]
    path = tmp_path / 'wrong.pth'
    torch.save(dict(state_dict=make()), path)
    model = classifier()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(CheckpointError, match=message) as error:
        load_checkpoint(model, str(path))
    assert len(str(error.value)) < 600
    model.backbone.init_cfg = dict(type='Pretrained', checkpoint=str(path), prefix='backbone.')
    if kind not in ('resnet', 'only a head'):  # there the names have no prefix that could be missing
        with pytest.raises(CheckpointError, match=message):
            model.init_weights()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_the_error_names_the_file(tmp_path):
    path = tmp_path / 'wide.pth'
    torch.save(dict(model=timm_model(embed_dim=64).state_dict()), path)
    with pytest.raises(CheckpointError, match=str(path)):
        load_checkpoint(classifier(), str(path))


def test_a_file_of_a_later_version_is_refused(tmp_path):
    torch.save(dict(state_dict={}, meta=dict(beit_mm_format=99)), tmp_path / 'later.pth')
    with pytest.raises(CheckpointError, match='format 99.*upgrade'):
        load_checkpoint(classifier(), str(tmp_path / 'later.pth'))


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match='nowhere.pth'):
        load_checkpoint(classifier(), str(tmp_path / 'nowhere.pth'))


@pytest.mark.parametrize('changes', [dict(abs_pos_embed=True, rel_pos_bias=None), dict(rel_pos_bias='shared')], ids=str)
def test_positions_of_another_kind_are_an_error(changes, timm_file):
    """Training would start with new positions in the place of trained ones."""
    path, _ = timm_file
    with pytest.raises(CheckpointError, match='knows positions by blocks.0.attn.relative_position_bias_table'):
        load_checkpoint(classifier(backbone=dict(BACKBONE, **changes, out_type='avg_featmap')), str(path))


def test_a_model_without_positions_is_a_warning(timm_file, caplog):
    """It can be wanted; that a bias was dropped has to be seen."""
    path, _ = timm_file
    model = classifier(backbone=dict(BACKBONE, rel_pos_bias=None, out_type='avg_featmap'))
    caplog.set_level(logging.WARNING)
    logger = MMLogger.get_current_instance()
    logger.addHandler(caplog.handler)
    load_checkpoint(model, str(path))
    logger.removeHandler(caplog.handler)
    expected = '2 unexpected (blocks.0.attn.relative_position_bias_table'
    assert any(expected in record.message for record in caplog.records)
    assert len(drop_task_parts(model.backbone.load_report.unexpected_keys)) == 2


@pytest.mark.parametrize(
    'changes', [dict(), dict(use_abs_pos_emb=True, use_rel_pos_bias=False)], ids=['bias table', 'position embedding']
)
def test_other_mm_models_still_read_their_files(changes, tmp_path):
    """mmpretrain's own BEiT in the same process loads mmpretrain's files as before."""
    from mmpretrain.models import BEiTViT

    def build():
        return BEiTViT(
            arch=dict(embed_dims=32, num_layers=2, num_heads=4, feedforward_channels=128),
            img_size=32,
            patch_size=8,
            **changes,
        )

    source, target = randomise(build()), build()
    torch.save(dict(state_dict=source.state_dict()), tmp_path / 'own.pth')
    load_checkpoint(target, str(tmp_path / 'own.pth'), strict=True)
    for name, tensor in target.state_dict().items():
        assert torch.equal(tensor, source.state_dict()[name]), name


@pytest.mark.parametrize('suffix', ['.pth', '.safetensors'])
def test_a_loaded_file_can_be_edited_and_written_in_place(suffix, tmp_path):
    path = tmp_path / f'beit{suffix}'
    write_checkpoint(path, dict(state_dict={f'backbone.{k}': v for k, v in timm_model().state_dict().items()}, meta={}))
    content = CheckpointLoader.load_checkpoint(str(path))
    torch.save(content, path)
    with path.open('rb') as file:  # by its name torch 2.15 takes a .safetensors file for one
        again = torch.load(file, weights_only=True)
    for name, tensor in content['state_dict'].items():
        assert torch.equal(tensor, again['state_dict'][name]), name
    load_checkpoint(classifier(), str(path))


@pytest.mark.parametrize('prefix', ['module.', '_orig_mod.', 'module._orig_mod.', 'module.backbone.'])
def test_names_of_wrapped_models(prefix, tmp_path):
    weights = timm_model().state_dict()
    torch.save({f'{prefix}{name}': tensor for name, tensor in weights.items()}, tmp_path / 'wrapped.pth')
    model = classifier()
    load_checkpoint(model, str(tmp_path / 'wrapped.pth'))
    assert_loaded(model.backbone, weights)


def test_classes_in_the_meta_of_a_released_file_stay(tmp_path):
    weights = {f'backbone.{name}': tensor for name, tensor in timm_model().state_dict().items()}
    weights['backbone.fpn1.0.weight'] = torch.rand(32, 32, 2, 2)
    torch.save(dict(state_dict=weights, meta=dict(CLASSES=['wall'], PALETTE=[[1, 2, 3]])), tmp_path / 'ade.pth')
    content = CheckpointLoader.load_checkpoint(str(tmp_path / 'ade.pth'))
    assert content['meta']['CLASSES'] == ['wall'] and 'neck.upsample_4x.0.weight' in content['state_dict']


@pytest.mark.parametrize('rel_pos_bias', ['shared', 'per_layer'])
def test_assigned_tables_are_apart(rel_pos_bias):
    """Tied parameters would train together."""
    source = MODELS.build(dict(BACKBONE, rel_pos_bias=rel_pos_bias))
    model = MODELS.build(BACKBONE)
    model.load_state_dict(source.state_dict(), assign=True)
    tables = [block.attn.relative_position_bias_table for block in model.blocks]
    assert tables[0].data_ptr() != tables[1].data_ptr()


def test_another_number_of_heads_is_an_error(tmp_path):
    """Without tables nothing but the file's own word shows it."""
    backbone = dict(BACKBONE, rel_pos_bias=None)
    weights = {f'backbone.{name}': tensor for name, tensor in MODELS.build(backbone).state_dict().items()}
    torch.save(dict(state_dict=weights, meta=dict(architecture=dict(num_heads=2))), tmp_path / 'heads.pth')
    with pytest.raises(CheckpointError, match='heads.pth .*heads 2, the model has 4'):
        load_checkpoint(classifier(backbone=dict(backbone, out_type='avg_featmap')), str(tmp_path / 'heads.pth'))


def test_a_folder_of_transformers(tmp_path):
    """Its JSON files say what the weights do not: that the images were rectangles, and how they were normalised."""
    model = transformers.BeitModel(
        transformers.BeitConfig(
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=128,
            image_size=[32, 48],
            patch_size=8,
            use_relative_position_bias=True,
        )
    )
    model.save_pretrained(tmp_path)
    (tmp_path / 'preprocessor_config.json').write_text('{"image_mean": [0.5, 0.5, 0.5], "image_std": [0.2, 0.2, 0.2]}')
    ours = MODELS.build(dict(BACKBONE, img_size=(48, 32), out_type='avg_featmap'))
    load_checkpoint(ours, str(tmp_path))
    assert ours.load_report.resized['blocks.0.attn.relative_position_bias_table'] == '4 x 6 -> 6 x 4'
    assert ours.load_report.preprocessing == dict(mean=[127.5] * 3, std=[51.0] * 3, size=[32, 48])
    (tmp_path / 'config.json').write_text('{')
    with pytest.raises(CheckpointError, match='config.json beside the weights is no JSON'):
        load_checkpoint(ours, str(tmp_path))
    (tmp_path / 'model.safetensors').unlink()
    with pytest.raises(FileNotFoundError, match='a folder without model.safetensors, '):
        load_checkpoint(ours, str(tmp_path))


@pytest.mark.parametrize(
    'meta',
    [
        dict(beit_mm_format='x'),
        dict(preprocessing=[1]),
        dict(preprocessing=dict(size='ab')),
        dict(architecture=[2]),
        'text',
    ],
    ids=str,
)
def test_a_damaged_meta_is_named_or_ignored(meta, tmp_path):
    weights = {f'backbone.{name}': tensor for name, tensor in timm_model().state_dict().items()}
    torch.save(dict(state_dict=weights, meta=meta), tmp_path / 'damaged.pth')
    if 'beit_mm_format' in meta:
        with pytest.raises(CheckpointError, match="format 'x'"):
            load_checkpoint(classifier(), str(tmp_path / 'damaged.pth'))
    else:
        load_checkpoint(classifier(), str(tmp_path / 'damaged.pth'))

"""The config inside a checkpoint is data: a closed list of types, arguments and values, checked before any is built."""

import copy
import inspect
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import list_configs, load_config
from labelled import BACKBONE, CLASSES, TEST_PIPELINE
from mmengine.registry import DefaultScope
from mmpretrain.registry import MODELS as MMPRETRAIN_MODELS
from mmpretrain.registry import TRANSFORMS as MMPRETRAIN_TRANSFORMS
from mmseg.registry import MODELS as MMSEG_MODELS
from mmseg.registry import TRANSFORMS as MMSEG_TRANSFORMS
from narrow_segmentors import CROP, SEGMENTOR, narrow_segmentor
from PIL import Image
from torch import nn

from beit_mm.apis.inferencers import ClassificationInferencer, SegmentationInferencer
from beit_mm.apis.stored_config import ARGUMENTS
from beit_mm.checkpoint.read import CheckpointError, write_checkpoint
from beit_mm.datasets.reading import UnreadableImageError
from beit_mm.engine.checkpoints import plain_values
from beit_mm.registry import MODELS

MODEL = dict(
    type='ImageClassifier',
    data_preprocessor=dict(type='ClsDataPreprocessor', mean=[127.5] * 3, std=[127.5] * 3),
    backbone=dict(BACKBONE, out_type='avg_featmap'),
    head=dict(type='LinearClsHead', num_classes=3, in_channels=32),
)
SEG_PIPELINE = [
    dict(type='beit_mm.LoadImage'),
    dict(type='Resize', scale=(2048, CROP), keep_ratio=True),
    dict(type='PackSegInputs'),
]
C, S = ClassificationInferencer, SegmentationInferencer


def content_of(model: nn.Module, config: dict, pipeline: list[dict], classes: tuple | None = None) -> dict:
    """What a true checkpoint holds."""
    meta = dict(config_dict=dict(model=config, test_dataloader=dict(dataset=dict(pipeline=pipeline))))
    return dict(state_dict=model.state_dict(), meta=dict(meta, dataset_meta=dict(classes=classes)))


@pytest.fixture(scope='module')
def contents() -> dict[type, dict]:
    with DefaultScope.overwrite_default_scope('mmpretrain'):
        classifier = MODELS.build(copy.deepcopy(MODEL))
    segmentor = narrow_segmentor('bias')
    return {C: content_of(classifier, MODEL, TEST_PIPELINE, CLASSES), S: content_of(segmentor, SEGMENTOR, SEG_PIPELINE)}


def put(config: dict, place: str, value: object) -> dict:
    """The config with another value at a place such as 'model.backbone.arch' or 'pipeline.0.type'."""
    config = copy.deepcopy(config)
    inner, *rest = config, *place.split('.')
    if rest[0] == 'pipeline':
        inner, rest = config['test_dataloader']['dataset'], rest
    for key in rest[:-1]:
        inner = inner[int(key) if key.isdigit() else key]
    inner[int(rest[-1]) if rest[-1].isdigit() else rest[-1]] = value
    return config


def refused(inferencer: type, content: dict, path: Path, said: str, **meta: object) -> None:
    torch.save(dict(content, meta=dict(content['meta'], **meta)), path)
    with pytest.raises(CheckpointError, match=said) as caught:
        inferencer(path, device='cpu')
    message = str(caught.value)
    assert str(path) in message and len(message) < 800 and message.isprintable()


TIDY = r', which is no part of a (classifier|segmentor) .* give the config: \w+Inferencer\(checkpoint, config=\.\.\.\)'
MEMCACHED = dict(backend='memcached', server_list_cfg='', client_cfg='', sys_path='/tmp')


@pytest.mark.parametrize(
    ('inferencer', 'place', 'value', 'said'),
    [
        # what imports or runs
        (C, 'pipeline.0', dict(type='LoadImageFromFile', backend_args=MEMCACHED), r'pipeline\[0\].backend_args='),
        (S, 'pipeline.0', dict(type='LoadImageFromFile', file_client_args=MEMCACHED), 'file_client_args='),
        (C, 'model._scope_', 'evil', "model._scope_='evil'"),
        (C, 'model.type', 'os.system', "asks for 'os.system'"),
        (C, 'model.type', ['ImageClassifier'], r"asks for \['ImageClassifier'\]"),
        (C, 'model.backbone', dict(type='beit_mm.DiscreteVAE'), "asks for 'beit_mm.DiscreteVAE'"),
        (S, 'model.decode_head.norm_cfg', dict(type='torch.hub.load', repo_or_dir='x'), "asks for 'torch.hub.load'"),
        (S, 'model.decode_head.sampler', dict(type='OHEMPixelSampler'), 'decode_head.sampler='),
        (C, 'pipeline.1', dict(type='Albu', transforms=[dict(type='Lambda')]), "asks for 'Albu'"),
        (C, 'pipeline.3.meta_keys', ['../../etc'], 'meta_keys='),
        (C, 'model.backbone.interpolate_mode', 'https://x.y/z', 'expected a name'),
        # whatever it is
        (C, 'model.backbone.arch.evil', 1, 'arch.evil=1'),
        (C, 'model.data_preprocessor.mean', [dict(type='os.system')], 'data_preprocessor.mean='),
        (C, 'model.head.num_classes', b'3', 'head.num_classes='),
        (C, 'pipeline.1', 'a step', r"pipeline\[1\]='a step'"),
        # what a message quotes
        (C, 'model.type', 'x' * 10**6, "asks for 'xxx"),
        (C, 'model.x\x1b[2J\n' + 'y' * 10**5, 1, r'model.x\\x1b'),
        (C, 'model.head.num_classes', '{0.__class__}%s\x1b]0;x\x07', 'num_classes='),
    ],
)
def test_what_is_not_on_the_list_is_refused(contents, tmp_path, inferencer, place, value, said):
    content = contents[inferencer]
    config = put(content['meta']['config_dict'], place, value)
    refused(inferencer, content, tmp_path / 'x.pth', said + '(?s:.*)' + TIDY, config_dict=config)


STACKED = dict(type='StackedLinearClsHead', num_classes=3, in_channels=32, mid_channels=[16_384] * 8)


@pytest.mark.parametrize(
    ('place', 'value', 'said'),
    [
        ('backbone.arch.num_layers', 128, 'backbone.blocks.3.* is missing in the file'),
        ('backbone.arch.embed_dims', 2**20, r'cls_token is \(1, 1, 32\) in the file, \(1, 1, 1048576\) by the config'),
        ('head.num_classes', 10**12, r'head.fc.weight is \(3, 32\) in the file'),
        ('backbone.arch', 'unknown', 'does not fit its config'),
        ('head', STACKED, 'is'),
    ],
)
def test_sizes_are_compared_with_the_files_before_any_memory_is_taken(contents, tmp_path, place, value, said):
    config = put(contents[C]['meta']['config_dict'], f'model.{place}', value)
    refused(C, contents[C], tmp_path / 'x.pth', said, config_dict=config)


@pytest.mark.parametrize(
    ('inferencer', 'meta', 'said'),
    [
        (C, dict(config_dict='import os', architecture=None), 'does not say how many attention heads'),
        (C, dict(config_dict='import os', architecture=dict(num_heads=4)), 'holds no config'),
        (C, dict(dataset_meta=dict(classes='abc')), 'of type str, expected a list of names'),
        (C, dict(dataset_meta=dict(classes=[1, 2, 3])), 'expected a list of names'),
        (C, dict(dataset_meta=dict(classes=['a'])), 'names 1 classes, its model has 3'),
        (S, dict(dataset_meta=dict(palette=7)), 'no list of 5 colours'),
        (S, dict(dataset_meta=dict(palette=[[1, 2, 3]])), 'no list of 5 colours'),
        (S, dict(dataset_meta=dict(palette=[[0, 0, 300]] * 5)), 'no list of 5 colours'),
        (S, dict(dataset_meta=dict(palette=[[0, 0, 'red']] * 5)), 'no list of 5 colours'),
    ],
)
def test_what_the_meta_says_is_data(contents, tmp_path, inferencer, meta, said):
    refused(inferencer, contents[inferencer], tmp_path / 'x.pth', said, **meta)


def test_names_of_classes_command_no_terminal(contents, tmp_path):
    meta = dict(contents[C]['meta'], dataset_meta=dict(classes=['\x1b]0;owned\x07', 'a\nb', 'Öl']))
    torch.save(dict(contents[C], meta=meta), tmp_path / 'x.pth')
    assert C(tmp_path / 'x.pth', device='cpu').classes == ('\\x1b]0;owned\\x07', 'a\\nb', 'Öl')


def test_every_config_of_ours_is_on_the_list():
    seen = {False: 0, True: 0}
    for name in list_configs('finetune', 'bands_finetune', 'segment', 'setr', 'upernet', 'linear', demo=True):
        if not name.startswith(('demo', 'beit/', 'beit_plus')):  # other folders have other weights, not other parts
            continue
        values = plain_values(load_config(name).to_dict())
        kind = values['model']['type']
        inferencer = C if kind in ('ImageClassifier', 'beit_mm.LinearProbe') else S
        for multi_scale in {False, inferencer is S and kind != 'beit_mm.MultiScaleTTA'}:
            one = inferencer.__new__(inferencer)
            one.multi_scale, one.meta = multi_scale, dict(config_dict=values)
            parts = one._stored_config(name)
            assert parts.model.type.endswith('TTA') == (multi_scale or kind.endswith('TTA')) and parts.pipeline
            seen[multi_scale] += 1
    assert seen[False] > 15 and seen[True] > 5, seen


def test_the_list_names_arguments_that_are_there():
    """A misspelt argument would refuse true files."""
    types = (MMPRETRAIN_MODELS, MMSEG_MODELS, MMPRETRAIN_TRANSFORMS, MMSEG_TRANSFORMS)
    for name, arguments in ARGUMENTS.items():
        found = [kind for registry in types if (kind := registry.get(name)) is not None]
        assert found, name
        constructors = [base.__init__ for kind in found for base in kind.__mro__ if base is not object]
        known = {key for constructor in constructors for key in inspect.signature(constructor).parameters}
        extra = {'requires_grad', 'test_cfg', 'inplace'}  # of mmengine's builders of layers, and *args
        assert set(arguments.split()) <= known | extra, (name, set(arguments.split()) - known)


@pytest.mark.parametrize('inferencer', [C, S])
def test_an_unreadable_image_costs_no_other_image_its_result(contents, tmp_path, inferencer):
    write_checkpoint(tmp_path / 'x.pth', contents[inferencer])
    images = [tmp_path / f'{number}.png' for number in range(4)]
    for image in images:
        Image.fromarray(np.random.default_rng(0).integers(0, 256, (70, 80, 3), dtype=np.uint8)).save(image)
    images[1].write_bytes(b'no image')
    model, options = inferencer(tmp_path / 'x.pth', device='cpu'), dict(batch_size=2) if inferencer is C else {}
    results = list(model(images, on_error='skip', **options))
    assert [result['path'] for result in results] == [str(image) for image in images]
    assert ['error' in result for result in results] == [False, True, False, False]
    assert results[1]['error'].startswith(str(images[1]))
    with pytest.raises(UnreadableImageError, match='1.png'):
        list(model(images, **options))
    with pytest.raises(ValueError, match="choose 'raise' or 'skip'"):
        list(model(images, on_error='ignore', **options))

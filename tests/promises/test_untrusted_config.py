"""The config inside a checkpoint is data: an allow-list of types, and limits, checked before any is built."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from helpers import check_all, list_configs, load_config, put
from labelled import CLASSES, TEST_PIPELINE, classifier_config
from mmengine.registry import DefaultScope
from narrow_segmentors import CROP, SEGMENTOR, narrow_segmentor
from torch import nn

from beit_mm.apis.inferencers import ClassificationInferencer, SegmentationInferencer
from beit_mm.apis.rebuild import stored_recipe
from beit_mm.checkpoint.read import CheckpointError
from beit_mm.engine.checkpoints import plain_values
from beit_mm.errors import UserError
from beit_mm.registry import MODELS

MODEL = classifier_config(Path(), Path()).model.to_dict()
SEG_PIPELINE = [
    dict(type='beit_mm.LoadImage'),
    dict(type='Resize', scale=(2048, CROP), keep_ratio=True),
    dict(type='PackSegInputs'),
]
C, S = ClassificationInferencer, SegmentationInferencer


def content_of(model: nn.Module, config: dict, pipeline: list[dict], classes: tuple | None = None) -> dict:
    """What a true checkpoint holds."""
    meta = dict(config_dict=dict(model=config, test_dataloader=dict(dataset=dict(pipeline=pipeline))))
    meta |= dict(dataset_meta=dict(classes=classes), architecture=dict(num_heads=4))
    return dict(state_dict=model.state_dict(), meta=meta)


@pytest.fixture(scope='module')
def contents() -> dict[type, dict]:
    with DefaultScope.overwrite_default_scope('mmpretrain'):
        classifier = MODELS.build(classifier_config(Path(), Path()).model)
    segmentor = narrow_segmentor('bias')
    return {C: content_of(classifier, MODEL, TEST_PIPELINE, CLASSES), S: content_of(segmentor, SEGMENTOR, SEG_PIPELINE)}


def saved(content: dict, path: Path, place: str, value: object) -> Path:
    """The checkpoint with another value at a place in its meta."""
    torch.save(dict(content, meta=put(content['meta'], place, value)), path)
    return path


PIPELINE, CONFIG = 'config_dict/test_dataloader/dataset/pipeline', 'config_dict/model'
MEMCACHED = dict(backend='memcached', sys_path='/tmp')
REFUSED = [  # and what the message names
    # what imports or runs
    (C, f'{PIPELINE}/0', dict(type='LoadImageFromFile', backend_args=MEMCACHED), 'backend_args'),
    (C, f'{PIPELINE}/0', dict(type='LoadImageFromFile', imdecode_backend='pillow'), 'imdecode_backend'),
    (C, f'{CONFIG}/_scope_', 'evil', "_scope_='evil'"),
    (C, f'{CONFIG}/type', 'os.system', "'os.system'"),
    (C, f'{CONFIG}/type', ['ImageClassifier'], 'ImageClassifier'),
    (C, f'{CONFIG}/backbone', dict(type='beit_mm.DiscreteVAE'), "'beit_mm.DiscreteVAE'"),
    (S, f'{CONFIG}/decode_head/norm_cfg', dict(type='torch.hub.load', repo_or_dir='x'), "'torch.hub.load'"),
    (S, f'{CONFIG}/decode_head/sampler', dict(type='OHEMPixelSampler'), 'decode_head.sampler'),
    (C, f'{PIPELINE}/1', dict(type='Albu', transforms=[dict(type='Lambda')]), "'Albu'"),
    (C, f'{PIPELINE}/2/pad_cfg', dict(type='Pad', size=(10**6, 10**6)), "'Pad'"),
    (C, f'{PIPELINE}/3/meta_keys', ['../../etc'], 'meta_keys'),
    (C, f'{CONFIG}/backbone/interpolate_mode', 'https://x.y/z', 'interpolate_mode'),
    (C, f'{CONFIG}/data_preprocessor/mean', [dict(type='os.system')], "'os.system'"),
    # what would take hours or all memory
    (C, f'{CONFIG}/backbone/arch/num_layers', 10**8, 'num_layers=100000000'),
    (S, f'{CONFIG}/decode_head', dict(type='FCNHead', num_convs=10**8), 'num_convs=100000000'),
    (S, f'{CONFIG}/test_cfg/stride', (1, 1), 'stride=(1, 1)'),
    (S, f'{CONFIG}/test_cfg', dict(crop_size=(2048, 2048), stride=(64, 255)), 'stride=(64, 255)'),
    (S, f'{CONFIG}/test_cfg/crop_size', (10**6, 10**6), 'crop_size=1000000'),
    (S, f'{PIPELINE}/1/scale', (10**6, 10**5), 'scale=(1000000, 100000)'),
    (S, f'{PIPELINE}/1', dict(type='Resize', scale_factor=500), 'scale_factor=500'),
    (C, f'{PIPELINE}/1/scale', 10**6, 'scale=1000000'),
    (C, f'{PIPELINE}/0', dict(type='beit_mm.LoadImage', max_pixels=10**12), 'max_pixels'),
    # what a message quotes
    (C, f'{CONFIG}/x\x1b[2J\n' + 'y' * 10**5, 1, r'model.x\x1b'),
    (C, f'{CONFIG}/head/num_classes', '{0.__class__}%s\x1b]0;x\x07', 'num_classes'),
]
UNFIT = [
    # sizes, which are compared with the file's before any memory is taken
    (C, f'{CONFIG}/backbone/arch/num_layers', 128, 'backbone.blocks.3'),
    (C, f'{CONFIG}/backbone/arch/embed_dims', 2**20, '(1, 1, 1048576)'),
    (C, f'{CONFIG}/head/num_classes', 10**12, 'head.fc.weight'),
    (C, f'{CONFIG}/backbone/arch', 'unknown', 'unknown'),
    # what else the meta says
    (C, 'architecture/num_heads', 2, 'heads 2'),  # which its weights, without bias tables, do not show
    (C, 'dataset_meta/classes', [1, 2, 3], 'a list of names'),
    (C, 'dataset_meta/classes', 'cat', 'a list of names'),
    (C, 'dataset_meta/classes', ['a'], '1 classes'),
    (S, 'dataset_meta/palette', [[0, 0, 'red']] * 5, 'red'),
]


@pytest.mark.parametrize(('inferencer', 'place', 'value', 'named'), [*REFUSED, *UNFIT])
def test_what_is_not_on_the_list_or_does_not_fit_is_refused(contents, tmp_path, inferencer, place, value, named):
    path = saved(contents[inferencer], tmp_path / 'x.pth', place, value)
    with pytest.raises(CheckpointError) as caught:
        inferencer(path, device='cpu')
    message = str(caught.value)
    assert str(path) in message and named in message and len(message) < 800 and message.isprintable()
    assert ('config=' in message) == ((inferencer, place, value, named) in REFUSED)  # what to do


def test_a_long_side_that_only_bounds_a_resizing_is_believed(contents, tmp_path):
    path = saved(contents[S], tmp_path / 'x.pth', f'{PIPELINE}/1/scale', (10**6, CROP))
    (found,) = S(path, device='cpu')(np.zeros((40, 50, 3), np.uint8))
    assert found['labels'].shape == (40, 50)


def test_a_config_that_is_text_is_not_looked_at(contents, tmp_path):
    path = saved(contents[C], tmp_path / 'x.pth', 'config_dict', 'raise SystemExit')
    assert C(path, device='cpu').num_classes == 3  # as the weights show


def test_names_of_classes_command_no_terminal(contents, tmp_path):
    path = saved(contents[C], tmp_path / 'x.pth', 'dataset_meta/classes', ['\x1b]0;owned\x07', 'a\nb', 'Öl'])
    assert C(path, device='cpu').classes == ('"\\u001b]0;owned\\u0007"', '"a\\nb"', 'Öl')


def test_every_config_of_ours_is_on_the_list():
    seen = {False: 0, True: 0}

    def check(name: str) -> None:
        values = plain_values(load_config(name).to_dict())
        checkpoint: Any = SimpleNamespace(meta=dict(config_dict=values))
        if 'lora' in name:  # its checkpoints lack the frozen weights, so they need their config
            with pytest.raises(UserError, match='config'):
                stored_recipe(checkpoint, 'classifier', False)
            return
        kind = values['model']['type']
        inferencer = C if kind == 'ImageClassifier' or kind.endswith('Probe') else S
        for multi_scale in {False, inferencer is S and kind != 'beit_mm.MultiScaleTTA'}:
            recipe = stored_recipe(checkpoint, 'classifier' if inferencer is C else 'segmentor', multi_scale)
            assert bool(recipe.tta_model) == multi_scale and recipe.pipeline
            seen[multi_scale] += 1

    check_all(
        list_configs(
            'finetune', 'bands_finetune', 'segment', 'setr', 'upernet', 'linear', 'attentive', 'masks', demo=True
        ),
        check,
    )
    assert seen[False] > 40 and seen[True] > 15, seen

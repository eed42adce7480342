"""Released models by name: as models, as checkpoints of all that takes one, and with the names of their classes."""

import json
import re
from pathlib import Path

import numpy as np
import peers
import pytest
import torch
from helpers import ROOT, narrow_model
from mmengine.registry import DefaultScope
from narrow_segmentors import SEGMENTOR
from peers import assert_equal
from PIL import Image
from safetensors.torch import save_file
from timm.models.beit import Beit

import beit_mm
from beit_mm.apis import configs, training
from beit_mm.apis.configs import get_model
from beit_mm.apis.inferencers import ClassificationInferencer, SegmentationInferencer
from beit_mm.checkpoint import find
from beit_mm.checkpoint.find import list_models, path_of_checkpoint
from beit_mm.checkpoint.names import convert_state_dict
from beit_mm.checkpoint.read import CheckpointError
from beit_mm.registry import MODELS

RELEASED = 'beit_base_patch16_224_pt22k_ft22kto1k'
SEGMENTING = 'beit_base_patch16_640_pt22k_ft22ktoade20k'
PRETRAINED = 'beit_base_patch16_224_pt22k'


def test_every_file_of_the_page_of_released_files_has_a_name():
    page, names = (ROOT / 'docs/released.md').read_text(), list_models()
    assert names == sorted(set(names)) and [name for name in names if f'{name}.pth' not in page] == ['demo']
    files = set(re.findall(r'/([\w.-]+)\.pth\b', page))
    assert len(files) >= 30 and files <= set(names)
    assert list_models('beit_large*ade20k') == ['beit_large_patch16_640_pt22k_ft22ktoade20k']


@pytest.mark.parametrize(
    ('name', 'parameters'),
    [(RELEASED, 86_530_984), (SEGMENTING, 163_407_980)],  # as published
)
def test_models_have_the_published_sizes(name, parameters):
    with torch.device('meta'):
        model = get_model(name)
    assert sum(p.numel() for p in model.parameters()) == parameters and not model.training


def test_weights_come_from_the_folder_of_weights_or_a_file(tmp_path, monkeypatch):
    (tmp_path / 'config.py').write_text(f"default_scope = 'mmpretrain'\nmodel = {narrow_model()!r}\n")
    entry = find.Released(tmp_path / 'config.py', 'https://example.org/narrow.pth', find.WHOLE)
    for module in (find, configs):
        monkeypatch.setattr(module, 'released', lambda: dict(narrow=entry))
    trained = MODELS.build(narrow_model()).state_dict()
    torch.save(trained, tmp_path / 'narrow.pth')
    monkeypatch.setenv('BEIT_MM_WEIGHTS', str(tmp_path))
    for pretrained in (True, tmp_path / 'narrow.pth'):
        model = get_model('narrow', pretrained=pretrained)
        assert model.target_generator is None
        assert_equal(model.state_dict(), {name: trained[name] for name in model.state_dict()})
    with pytest.raises(ValueError, match="no released model 'narow'; did you mean 'narrow'?"):
        get_model('narow')


# --- names as checkpoints ---------------------------------------------------------------------------


def timm_weights(num_classes: int = 1000) -> dict:
    """Of a narrow BEiT of timm's, whose names are those of the released files."""
    sizes = dict(img_size=32, patch_size=8, embed_dim=64, depth=2, num_heads=1)
    model = Beit(num_classes=num_classes, use_abs_pos_emb=False, use_rel_pos_bias=True, init_values=0.1, **sizes)
    return peers.randomise(model).state_dict()


def segmentor_weights() -> dict:
    with DefaultScope.overwrite_default_scope('mmseg'):
        head = dict(SEGMENTOR['decode_head'], num_classes=150)
        return peers.randomise(MODELS.build(dict(SEGMENTOR, decode_head=head))).state_dict()


def pretrainer_weights() -> dict:
    model = narrow_model(target_generator=None)
    model['backbone']['arch'] = dict(embed_dims=64, num_layers=2, num_heads=1)
    model['head'].update(embed_dims=64, vocab_size=8192)
    return MODELS.build(model).state_dict()


@pytest.fixture(scope='module')
def image(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp('images') / 'image.png'
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 48, 3), dtype=np.uint8)).save(path)
    return path


@pytest.fixture
def weights(tmp_path, monkeypatch) -> Path:
    """$BEIT_MM_WEIGHTS with narrow models in three released files, of a machine without a network."""
    folder = tmp_path / 'weights'
    folder.mkdir()
    torch.save(dict(model=timm_weights()), folder / f'{RELEASED}.pth')
    torch.save(dict(state_dict=segmentor_weights()), folder / f'{SEGMENTING}.pth')
    torch.save(pretrainer_weights(), folder / f'{PRETRAINED}.pth')
    monkeypatch.setenv('BEIT_MM_WEIGHTS', str(folder))
    monkeypatch.setattr(torch.hub, 'get_dir', lambda: str(tmp_path / 'hub'))
    monkeypatch.setattr('beit_mm.checkpoint.find.download', lambda *_: (_ for _ in ()).throw(OSError('no network')))
    return folder


def test_everything_that_takes_a_checkpoint_takes_a_name(weights, image, tmp_path):
    file = weights / f'{RELEASED}.pth'
    assert path_of_checkpoint(RELEASED) == file
    by_name, by_path = (beit_mm.classify(source, image) for source in (RELEASED, file))
    assert by_name == by_path and len(by_name[0]['scores']) == 5
    features = [beit_mm.embed(source, image, progress=False)['features'] for source in (RELEASED, file)]
    assert np.array_equal(*features)
    assert beit_mm.attention(RELEASED, image, out=tmp_path / 'attention.png').is_file()
    (found,) = beit_mm.segment(SEGMENTING, image, tmp_path / 'maps')
    assert Image.open(found['labels']).size == (48, 40)
    for verb in ('pretrain', 'finetune'):
        run = training.Run(verb, image.parent, tmp_path / verb, RELEASED)
        assert run.record['init'] == str(file)


def test_a_file_or_folder_comes_before_a_name_but_demo(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path(RELEASED).touch()
    assert path_of_checkpoint(RELEASED) == Path(RELEASED)
    Path('demo').mkdir()
    assert path_of_checkpoint('demo') == find.PACKAGED / 'pretrained.safetensors'


@pytest.mark.parametrize(
    ('source', 'advice'),
    [
        ('beit_base_patch16_224_pt22', f"; did you mean '{PRETRAINED}'"),
        ('BEiT_Base_Patch16_224_PT22k', f"; did you mean '{PRETRAINED}'"),
        (f'downloads/{RELEASED}.pth', f"; did you mean '{RELEASED}'"),
        ('beit_large_patch16_640_pt22k_ft22kade20k', "; did you mean 'beit_large_patch16_640_pt22k_ft22ktoade20k'"),
        ('nothing.pth', r'\(see list_models\(\)\)$'),
    ],
)
def test_a_misspelt_name_is_told_the_nearest(source, advice):
    with pytest.raises(FileNotFoundError, match=f"^'{source}' does not exist.*{advice}") as caught:
        path_of_checkpoint(source)
    assert '\n' not in str(caught.value)


def test_a_name_whose_file_is_nowhere_says_where_it_was_looked_for(weights, tmp_path):
    name = 'beit_large_patch16_224_pt22k'
    with pytest.raises(FileNotFoundError, match='looked for') as caught:
        path_of_checkpoint(name)
    for place in (weights / f'{name}.pth', tmp_path / f'hub/checkpoints/{name}.pth', find.released()[name].url):
        assert str(place) in str(caught.value)


def test_reconstructing_a_released_file_says_where_the_files_of_dalle_go(weights, image, tmp_path):
    with pytest.raises(CheckpointError, match='does not say which tokenizer') as caught:
        beit_mm.reconstruct(PRETRAINED, image, tmp_path / 'a.png')
    places = ('$BEIT_MM_WEIGHTS', str(tmp_path / 'hub/checkpoints'))
    for part in ('/dalle_encoder.pth ', 'https://cdn.openai.com/dall-e/encoder.pkl', '/dall-e/decoder.pkl, ', *places):
        assert part in str(caught.value)


# --- names of classes -------------------------------------------------------------------------------


def saved(form: str, name: str, folder: Path) -> Path:
    """A narrow classifier of 1000 classes, in a file or folder of this name."""
    path, released = folder / name, timm_weights()
    if form == 'timm':
        path.mkdir()
        save_file(released, path / 'model.safetensors')
        config = dict(num_classes=1000, pretrained_cfg=dict(mean=[0.5] * 3, std=[0.5] * 3, input_size=[3, 32, 32]))
        (path / 'config.json').write_text(json.dumps(config))
    elif form == 'mmpretrain':
        torch.save(dict(state_dict=convert_state_dict(released, target='mmpretrain').state_dict), path)
    else:
        torch.save(dict(model=released), path)
    return path


@pytest.mark.parametrize(
    ('form', 'name', 'named'),
    [
        ('released', f'{RELEASED}.pth', True),
        ('released', 'beitv2_base_patch16_224_pt1k_ft1k.pth', True),
        ('timm', 'beit_base_patch16_224.in22k_ft_in22k_in1k', True),
        ('mmpretrain', 'beit-base_3rdparty_in1k_20221114-c0a4df23.pth', True),
        ('released', 'beit_base_patch16_224_pt22k_ft22k.pth', False),  # 1000 classes of something else
        ('released', 'beit_base_patch16_224_pt1k_birds.pth', False),
        ('timm', 'my_model', False),
    ],
)
def test_a_head_of_imagenet_names_its_classes(form, name, named, tmp_path, image):
    classify = ClassificationInferencer(saved(form, name, tmp_path), device='cpu')
    (found,) = classify(image, top=1)
    assert classify.classes[found['label']] == found['name']
    if named:  # as torchvision and keras have them
        assert classify.classes[1] == 'goldfish, Carassius auratus'
        assert classify.classes[999].startswith('toilet tissue')
    else:
        assert classify.classes == tuple(map(str, range(1000)))


def test_other_numbers_of_classes_stay_numbers(tmp_path):
    torch.save(dict(model=timm_weights(7)), tmp_path / f'{RELEASED}.pth')
    assert ClassificationInferencer(tmp_path / f'{RELEASED}.pth', device='cpu').classes == tuple('0123456')


def test_a_head_of_ade20k_names_its_classes_in_its_colours(weights, tmp_path):
    segment = SegmentationInferencer(SEGMENTING, device='cpu')
    assert segment.classes[:3] == ('wall', 'building', 'sky') and segment.classes[149] == 'flag'
    assert segment.palette[:2] == [[120, 120, 120], [180, 120, 120]] and len(segment.palette) == 150
    (weights / f'{SEGMENTING}.pth').rename(tmp_path / 'beit_base_patch16_224_pt22k_rooms.pth')
    assert SegmentationInferencer(tmp_path / 'beit_base_patch16_224_pt22k_rooms.pth', device='cpu').classes[0] == '0'

"""Released models by name: as models, as checkpoints of all that takes one, and with the names of their classes."""

import json
import re
from pathlib import Path

import pytest
import torch
from helpers import ROOT, narrow_model
from mmengine.registry import DefaultScope
from narrow_segmentors import SEGMENTOR
from peers import assert_equal
from safetensors.torch import save_file
from timm.models.beit import Beit

from beit_mm.apis import configs
from beit_mm.apis.configs import get_model
from beit_mm.apis.inferencers import ClassificationInferencer, SegmentationInferencer
from beit_mm.checkpoint import find
from beit_mm.checkpoint.find import list_models, path_of_checkpoint
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


def test_models_are_the_published_ones_and_weights_come_from_the_folder_of_weights_or_a_file(tmp_path, monkeypatch):
    with torch.device('meta'):
        model = get_model(SEGMENTING)
    assert sum(p.numel() for p in model.parameters()) == 163_407_980 and not model.training
    (tmp_path / 'config.py').write_text(f"default_scope = 'mmpretrain'\nmodel = {narrow_model()!r}\n")
    entry = find.Released(tmp_path / 'config.py', 'https://example.org/narrow.pth', find.WHOLE)
    for module in (find, configs):
        monkeypatch.setattr(module, 'released', lambda: dict(narrow=entry))
    trained = MODELS.build(narrow_model()).state_dict()
    torch.save(trained, tmp_path / 'narrow.pth')
    monkeypatch.setenv('BEIT_MM_WEIGHTS', str(tmp_path))
    for pretrained in (True, tmp_path / 'narrow.pth'):
        model = get_model('narrow', pretrained=pretrained)
        assert_equal(model.state_dict(), {name: trained[name] for name in trained if 'target_generator' not in name})
    with pytest.raises(ValueError, match="no released model 'narow'; did you mean 'narrow'?"):
        get_model('narow')


@pytest.fixture
def weights(tmp_path, monkeypatch) -> Path:
    """$BEIT_MM_WEIGHTS of a machine without a network, and torch hub's cache beside it."""
    (tmp_path / 'weights').mkdir()
    monkeypatch.setenv('BEIT_MM_WEIGHTS', str(tmp_path / 'weights'))
    monkeypatch.setattr(torch.hub, 'get_dir', lambda: str(tmp_path / 'hub'))
    monkeypatch.setattr('beit_mm.checkpoint.find.download', lambda *_: (_ for _ in ()).throw(OSError('no network')))
    return tmp_path / 'weights'


def test_a_name_is_a_checkpoint_unless_a_file_or_folder_is_called_so_but_demo(weights, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (weights / f'{RELEASED}.pth').touch()
    assert path_of_checkpoint(RELEASED) == weights / f'{RELEASED}.pth'
    Path(RELEASED).touch()
    Path('demo').mkdir()
    assert path_of_checkpoint(RELEASED) == Path(RELEASED)
    assert path_of_checkpoint('demo') == find.PACKAGED / 'pretrained.safetensors'


def test_what_is_nowhere_is_told_the_nearest_name_or_the_places_where_it_goes(weights, tmp_path):
    file, url = f'{PRETRAINED}.pth', find.released()[PRETRAINED].url
    places = f'looked for {weights / file} and {tmp_path}/hub/checkpoints/{file} .*{url} cannot be downloaded'
    for source, said in (
        (PRETRAINED.upper(), f"did you mean '{PRETRAINED}'"),
        (f'downloads/{RELEASED}.pth', f"did you mean '{RELEASED}'"),
        ('nothing.pth', r'\(see list_models\(\)\)'),
        (PRETRAINED, places),
    ):
        with pytest.raises(FileNotFoundError, match=said):
            path_of_checkpoint(source)


@pytest.mark.parametrize(
    ('name', 'number', 'named'),
    [
        (f'{RELEASED}.pth', 1000, True),
        ('beitv2_base_patch16_224_pt1k_ft1k.pth', 1000, True),
        ('beit_base_patch16_224.in22k_ft_in22k_in1k/model.safetensors', 1000, True),  # timm's
        ('beit-base_3rdparty_in1k_20221114-c0a4df23.pth', 1000, True),
        (f'{RELEASED}.pth', 7, False),
        ('beit_base_patch16_224_pt22k_ft22k.pth', 1000, False),  # 1000 classes of something else
        ('my_model/model.safetensors', 1000, False),
    ],
)
def test_a_head_of_imagenet_names_its_classes(name, number, named, tmp_path):
    """Of a narrow BEiT of timm's, whose names are those of the released files."""
    sizes = dict(img_size=32, patch_size=8, embed_dim=64, depth=2, num_heads=1)
    model = Beit(num_classes=number, use_abs_pos_emb=False, use_rel_pos_bias=True, init_values=0.1, **sizes)
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    if path.suffix == '.pth':
        torch.save(dict(model=model.state_dict()), path)
    else:
        save_file(model.state_dict(), path)
        config = dict(pretrained_cfg=dict(mean=[0.5] * 3, std=[0.5] * 3, input_size=[3, 32, 32]))
        path.with_name('config.json').write_text(json.dumps(config))
    classify = ClassificationInferencer(path if path.suffix == '.pth' else path.parent, device='cpu')
    assert len(classify.classes) == number
    assert classify.classes[1] == ('goldfish, Carassius auratus' if named else '1')  # as torchvision and keras have it


def test_a_head_of_ade20k_names_its_classes_in_its_colours(tmp_path):
    with DefaultScope.overwrite_default_scope('mmseg'):
        model = MODELS.build(dict(SEGMENTOR, decode_head=dict(SEGMENTOR['decode_head'], num_classes=150)))
    for name in (SEGMENTING, 'beit_base_patch16_224_pt22k_rooms'):
        torch.save(dict(state_dict=model.state_dict()), tmp_path / f'{name}.pth')
    segment, other = (SegmentationInferencer(path, device='cpu') for path in sorted(tmp_path.iterdir())[::-1])
    assert segment.classes[:3] == ('wall', 'building', 'sky') and segment.classes[149] == 'flag'
    assert segment.palette[:2] == [[120, 120, 120], [180, 120, 120]] and len(segment.palette) == 150
    assert other.classes == tuple(map(str, range(150)))

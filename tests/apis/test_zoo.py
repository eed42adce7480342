"""Released models by name: as models, as checkpoints of all that takes one, and with the names of their classes."""

import re
from pathlib import Path

import pytest
import torch
from helpers import ROOT, narrow_model
from mmengine.registry import DefaultScope
from narrow_segmentors import SEGMENTOR
from peers import assert_equal
from timm.models.beit import Beit
from timm.models.vision_transformer import VisionTransformer

from beit_mm.__main__ import main
from beit_mm.apis import rebuild
from beit_mm.apis.inferencers import ClassificationInferencer, SegmentationInferencer
from beit_mm.apis.rebuild import get_model
from beit_mm.checkpoint import find
from beit_mm.checkpoint.checkpoint import Checkpoint
from beit_mm.checkpoint.find import list_models, path_of_checkpoint
from beit_mm.errors import UserError
from beit_mm.registry import MODELS

RELEASED = 'beit_base_patch16_224_pt22k_ft22kto1k'
SEGMENTING = 'beit_base_patch16_640_pt22k_ft22ktoade20k'
PRETRAINED = 'beit_base_patch16_224_pt22k'


def test_every_file_of_the_page_of_released_files_has_a_name():
    page, names = (ROOT / 'docs/released.md').read_text(), list_models()
    assert names == sorted(set(names)) and [name for name in names if f'[{name}](' not in page] == ['demo']
    files = set(re.findall(r'/([\w.-]+)\.pth\b', page))
    assert len(files) >= 30 and files <= set(names)
    details = list_models(details=True)
    assert list(details) == names and all(
        entry['url'] in page or name == 'demo' or entry['url'].startswith('hf://') for name, entry in details.items()
    )
    assert [name for name in names if 'forbids commercial use' in details[name].get('licence', '')] == list_models(
        'mae*'
    )
    assert list_models('beit_large*ade20k') == ['beit_large_patch16_640_pt22k_ft22ktoade20k']


def test_models_are_listed_with_what_is_known_and_whether_their_files_are_at_hand(tmp_path, monkeypatch, capsys):
    """No file is downloaded: that is forbidden in tests."""
    details = list_models(details=True)
    assert all({'url', 'model', 'licence', 'figures'} <= entry.keys() for entry in details.values())
    assert details[RELEASED]['figures'] == 'ImageNet-1K top-1 at 224 pixels 85.2' and not details[PRETRAINED]['figures']
    monkeypatch.setenv('BEIT_MM_WEIGHTS', str(tmp_path))
    monkeypatch.setenv('HF_HUB_CACHE', str(tmp_path / 'cache'))
    names = ['demo', SEGMENTING, 'vit_small_patch16_224.augreg_in21k']
    (tmp_path / f'{SEGMENTING}.pth').touch()
    (tmp_path / 'timm/vit_small_patch16_224.augreg_in21k').mkdir(parents=True)
    main(['models'])
    rows = {line.split('  ')[0]: line for line in capsys.readouterr().out.splitlines()}
    assert [*rows] == ['name', *list_models()]
    assert [name for name in rows if ' yes' in rows[name]] == sorted(names)
    assert '163 M' in rows[SEGMENTING] and 'MIT' in rows[SEGMENTING] and '53.6' in rows[SEGMENTING]
    main(['models', 'dinov2'])
    assert len(capsys.readouterr().out.splitlines()) == 1 + len(list_models('dinov2*'))
    with pytest.raises(UserError, match='dinov2_vits14_pretrain'):
        main(['models', 'dinov4_vits14'])
    monkeypatch.delenv('BEIT_MM_WEIGHTS')
    monkeypatch.chdir(tmp_path)  # where a folder of this name is not a place of weights
    assert not find.is_at_hand(details[names[-1]]['url'])


def test_a_part_of_a_name_and_a_slip_are_answered_with_names():
    answers = dict(dinov2='dinov2_vitb14_pretrain', augreg='vit_base_patch16_224.augreg_in21k')
    for word, first in (answers | {'beit_bse_patch16_224_pt22k': PRETRAINED}).items():
        with pytest.raises(FileNotFoundError, match=f"did you mean '{first}'"):
            path_of_checkpoint(word)


def test_models_are_the_published_ones_and_weights_come_from_the_folder_of_weights_or_a_file(tmp_path, monkeypatch):
    with torch.device('meta'):
        model = get_model(SEGMENTING)
    assert sum(p.numel() for p in model.parameters()) == 163_407_980 and not model.training
    (tmp_path / 'config.py').write_text(f"default_scope = 'mmpretrain'\nmodel = {narrow_model()!r}\n")
    entry = find.Released(tmp_path / 'config.py', 'https://example.org/narrow.pth', find.FITS_WHOLE_MODEL)
    for module in (find, rebuild):
        monkeypatch.setattr(module, 'released', lambda: dict(narrow=entry))
    trained = MODELS.build(narrow_model()).state_dict()
    torch.save(trained, tmp_path / 'narrow.pth')
    monkeypatch.setenv('BEIT_MM_WEIGHTS', str(tmp_path))
    for pretrained in (True, tmp_path / 'narrow.pth'):
        model = get_model('narrow', pretrained=pretrained)
        assert_equal(model.state_dict(), {name: trained[name] for name in trained if 'target_generator' not in name})
    del trained['head.lm_head.bias']
    torch.save(trained, tmp_path / 'narrow.pth')
    with pytest.raises(RuntimeError, match='head.lm_head.bias'):  # a file that holds the whole model, by its entry
        get_model('narrow', pretrained=True)


def test_torch_hub_lists_the_models_and_builds_them():
    names = torch.hub.load(str(ROOT), 'list_models', source='local')
    assert names == list_models()
    with torch.device('meta'):
        for name in ('demo', PRETRAINED, RELEASED):
            model, expected = torch.hub.load(str(ROOT), 'beit', name, source='local'), get_model(name)
            assert type(model) is type(expected) and model.state_dict().keys() == expected.state_dict().keys()


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
    said = f'looked for {weights}/{PRETRAINED}.pth and {tmp_path}/hub/checkpoints/.* cannot be downloaded'
    with pytest.raises(FileNotFoundError, match=said):
        path_of_checkpoint(PRETRAINED)


def test_a_folder_without_weights_of_its_own_names_the_checkpoints_in_it(tmp_path):
    (tmp_path / 'iter_4.pth').touch()
    with pytest.raises(FileNotFoundError, match='The folder has iter_4.pth: name the file'):
        path_of_checkpoint(tmp_path)


def test_a_head_of_imagenet_names_its_classes(tmp_path):
    """By the name of the file or folder; of a narrow BEiT of timm's, with the released names of parameters."""
    for name, number, named in (
        ('beitv2_base_patch16_224_pt1k_ft1k.pth', 1000, True),
        ('beit_base_patch16_224.in22k_ft_in22k_in1k/model.safetensors', 1000, True),  # timm's
        ('beit-base_3rdparty_in1k_20221114-c0a4df23.pth', 1000, True),
        (f'{RELEASED}.pth', 7, False),
        ('beit_base_patch16_224_pt22k_ft22k.pth', 1000, False),  # 1000 classes of something else
        ('beit_base_patch16_224_pt22k_rooms.pth', 150, False),
    ):
        assert bool(rebuild.metainfo_of_name(Path(name), number)) == named
    sizes = dict(img_size=32, patch_size=8, embed_dim=64, depth=2, num_heads=1)
    model = Beit(num_classes=1000, use_abs_pos_emb=False, use_rel_pos_bias=True, init_values=0.1, **sizes)
    torch.save(dict(model=model.state_dict()), tmp_path / f'{RELEASED}.pth')
    classes = ClassificationInferencer(tmp_path / f'{RELEASED}.pth', device='cpu').classes
    assert len(classes) == 1000 and classes[1] == 'goldfish, Carassius auratus'  # as torchvision and keras have it


def test_a_head_of_ade20k_names_its_classes_in_its_colours(tmp_path):
    with DefaultScope.overwrite_default_scope('mmseg'):
        model = MODELS.build(dict(SEGMENTOR, decode_head=dict(SEGMENTOR['decode_head'], num_classes=150)))
    torch.save(dict(state_dict=model.state_dict()), tmp_path / f'{SEGMENTING}.pth')
    segment = SegmentationInferencer(tmp_path / f'{SEGMENTING}.pth', device='cpu')
    assert segment.classes[:3] == ('wall', 'building', 'sky') and segment.classes[149] == 'flag'
    assert segment.palette[:2] == [[120, 120, 120], [180, 120, 120]] and len(segment.palette) == 150


def test_a_plain_vit_by_its_name(weights, warnings):
    """Its normalisation is known by the name, and a licence that forbids commercial use is said."""
    peer = VisionTransformer(img_size=32, embed_dim=64, depth=1, num_heads=1, num_classes=0)
    torch.save(dict(model=peer.state_dict()), weights / 'mae_pretrain_vit_base.pth')
    with pytest.raises(UserError, match='pretrained=True'):
        get_model('mae_pretrain_vit_base')
    images = torch.randn(1, 3, 32, 32)
    with torch.no_grad():
        found = get_model('mae_pretrain_vit_base', pretrained=True)(images)[0]
        torch.testing.assert_close(found, peer.eval().forward_features(images), atol=1e-5, rtol=1e-5)
    (licence,) = warnings()
    assert 'CC BY-NC 4.0' in licence
    mean, std = Checkpoint.open('mae_pretrain_vit_base').normalisation[0].values()
    assert (mean, std) == ([123.675, 116.28, 103.53], [58.395, 57.12, 57.375])
    assert all(warning == licence for warning in warnings())
    for folder in (
        'robbyant/lingbot-vision-vit-small',
        'hub/models--timm--vit_base_patch14_reg1_tipsv2.webli/snapshots/1',
    ):
        (weights / folder).mkdir(parents=True)
        torch.save(peer.state_dict(), weights / folder / 'model.pt')
        mean, std = Checkpoint.open(weights / folder / 'model.pt').normalisation[0].values()
        assert (mean[0], std[0]) == ((0, 255) if 'tips' in folder else (123.675, 58.395))
    assert all(warning == licence for warning in warnings())

"""What convert and publish refuse: one line of the tool, and nothing is written."""
import importlib.util
import sys

import pytest
import torch
from helpers import ROOT
from peers import CLASSES, DIMS, HEADS, ours

from beit_mm.checkpoint.convert import convert_checkpoint, publish_checkpoint
from beit_mm.checkpoint.errors import CheckpointError


def resnet(path) -> None:
    import torchvision
    torch.save(torchvision.models.resnet18().state_dict(), path)


def vit_of_transformers(path) -> None:
    import transformers
    config = transformers.ViTConfig(hidden_size=DIMS, num_hidden_layers=1, num_attention_heads=HEADS,
                                    intermediate_size=64, image_size=48, patch_size=8)
    torch.save(transformers.ViTForImageClassification(config).state_dict(), path)


def rectangle(path, variant: str = 'per_layer') -> None:
    torch.save(dict(state_dict=ours('classification', variant, size=(48, 80)).state_dict(),
                    meta=dict(architecture=dict(num_heads=HEADS))), path)


def rectangle_of_a_vit(path) -> None:
    rectangle(path, 'vit')


def later_version(path) -> None:
    torch.save(dict(state_dict=ours('classification', 'vit').state_dict(), meta=dict(beit_mm_format=99)), path)


def other_head(path) -> None:
    """A head that transformers' segmentation model has not, as SETR's."""
    state = {name: tensor for name, tensor in ours('segmentation', 'per_layer').state_dict().items()
             if name.startswith(('backbone.', 'decode_head.conv_seg.'))}
    torch.save(dict(state_dict=dict(state, **{'decode_head.up_convs.0.0.conv.weight': torch.ones(2, 2, 3, 3)})), path)


def narrow_head(path) -> None:
    """transformers' decoder is as wide as its backbone."""
    state = ours('segmentation', 'per_layer').state_dict()
    state['decode_head.fpn_bottleneck.conv.weight'] = torch.ones(8, 32, 3, 3)
    state['decode_head.conv_seg.weight'] = torch.ones(CLASSES, 8, 1, 1)
    torch.save(dict(state_dict=state), path)


def no_heads(path) -> None:
    """Without a bias table, and with a width that is no multiple of the usual 64, nothing shows them."""
    torch.save(dict(state_dict=ours('classification', 'vit').state_dict()), path)


def cut(path) -> None:
    """A block without its last tensor."""
    state = ours('classification', 'per_layer').state_dict()
    del state['backbone.blocks.1.mlp.fc2.bias']
    torch.save(dict(state_dict=state), path)


def vit(path) -> None:
    torch.save(dict(state_dict=ours('segmentation', 'vit').state_dict()), path)


REFUSED = {
    'ResNet': (resnet, 'new.pth', 'beit_mm', 'holds no BEiT weights: its tensors are conv1.weight'),
    'ViT of transformers': (vit_of_transformers, 'new.pth', 'beit_mm', 'holds no BEiT weights'),
    'suffix': (vit, 'new.ckpt', 'beit_mm', r'must end in \.pth'),
    'no suffix': (vit, 'new', 'beit_mm', r'must end in \.pth'),
    'a file for a folder': (vit, 'new.safetensors', 'hf', 'folder'),
    'position embedding': (vit, 'new.pth', 'mmseg', 'absolute position embedding, which mmsegmentation'),
    'table of a rectangle': (rectangle, 'new.pth', 'mmseg', 'no square patch grid'),
    'table of a rectangle, hf': (rectangle, 'new', 'hf', 'no square patch grid'),
    'embedding of a rectangle, hf': (rectangle_of_a_vit, 'new', 'hf', 'no square patch grid'),
    'later version': (later_version, 'new.pth', 'beit_mm', 'format 99.*upgrade'),
    'another head': (other_head, 'new', 'hf', 'transformers'),
    'narrow head': (narrow_head, 'new', 'hf', 'transformers'),
    'incomplete': (cut, 'new.pth', 'timm', r'lacks backbone\.blocks\.1\.mlp\.fc2\.bias'),
    'unknown heads': (no_heads, 'new', 'hf', 'heads'),
    'no file': (lambda path: None, 'new.pth', 'beit_mm', 'there is no file'),
    'empty folder': (lambda path: path.mkdir(), 'new.pth', 'beit_mm', 'folder without model.safetensors or'),
}


def tool(name: str):
    """The main function of a script in tools/."""
    spec = importlib.util.spec_from_file_location(name, ROOT / f'tools/{name}.py')
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main


@pytest.mark.parametrize('case', REFUSED)
def test_what_cannot_be_is_one_line_and_nothing_is_written(case, tmp_path, monkeypatch):
    make, target, to, message = REFUSED[case]
    source = tmp_path / 'source.pth'
    make(source)
    before = set(tmp_path.rglob('*'))
    monkeypatch.setattr(sys, 'argv', ['convert_checkpoint.py', str(source), str(tmp_path / target), '--to', to])
    with pytest.raises(SystemExit, match=f'^error: .*{message}') as error:
        tool('convert_checkpoint')()
    assert '\n' not in str(error.value) and len(str(error.value)) < 400
    if case not in ('suffix', 'no suffix'):
        assert str(source) in str(error.value) or target in str(error.value)
    assert set(tmp_path.rglob('*')) == before


def test_publish_of_a_wrong_file_leaves_nothing(tmp_path):
    resnet(tmp_path / 'resnet.pth')
    with pytest.raises(CheckpointError, match='holds no BEiT weights'):
        publish_checkpoint(tmp_path / 'resnet.pth', tmp_path / 'out/beit.pth')
    assert not list(tmp_path.rglob('beit*'))


def test_an_error_of_publish_on_the_command_line(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, 'argv', ['publish_model.py', str(tmp_path / 'nowhere.pth'), str(tmp_path / 'beit.pth')])
    with pytest.raises(SystemExit, match='^error: there is no file'):
        tool('publish_model')()


def test_an_unknown_format(tmp_path):
    with pytest.raises(ValueError, match="unknown format 'keras'; choose one of beit_mm, unilm, timm"):
        convert_checkpoint(tmp_path / 'any.pth', tmp_path / 'new.pth', 'keras')

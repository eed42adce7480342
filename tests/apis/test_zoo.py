"""Released models by name."""

import re

import pytest
import torch
from helpers import ROOT, narrow_model

from beit_mm.apis import zoo
from beit_mm.apis.zoo import get_model, list_models
from beit_mm.registry import MODELS


def test_every_file_of_the_page_of_released_files_has_a_name():
    page = (ROOT / 'docs/released.md').read_text()
    names = list_models()
    assert len(names) >= 30 and names == sorted(set(names))
    assert not [name for name in names if f'{name}.pth' not in page]
    files = set(re.findall(r'/([\w.-]+)\.pth\b', page))
    assert len(files) >= 30 and files <= set(names)
    assert list_models('beit_large*ade20k') == ['beit_large_patch16_640_pt22k_ft22ktoade20k']


@pytest.mark.parametrize(
    ('name', 'parameters'),
    [  # as published
        ('beit_base_patch16_224_pt22k_ft22kto1k', 86_530_984),
        ('beit_base_patch16_640_pt22k_ft22ktoade20k', 163_407_980),
    ],
)
def test_models_have_the_published_sizes(name, parameters):
    with torch.device('meta'):
        model = get_model(name)
    assert sum(p.numel() for p in model.parameters()) == parameters and not model.training


def test_weights_come_from_the_folder_of_weights_or_a_file(tmp_path, monkeypatch):
    (tmp_path / 'config.py').write_text(f"default_scope = 'mmpretrain'\nmodel = {narrow_model()!r}\n")
    entry = zoo.Released(tmp_path / 'config.py', 'https://example.org/narrow.pth', 'nothing', zoo.WHOLE)
    monkeypatch.setattr(zoo, 'released', lambda: dict(narrow=entry))
    torch.manual_seed(3)
    trained = MODELS.build(narrow_model())
    torch.save(trained.state_dict(), tmp_path / 'narrow.pth')
    monkeypatch.setenv('BEIT_MM_WEIGHTS', str(tmp_path))
    for pretrained in (True, tmp_path / 'narrow.pth'):
        model = get_model('narrow', pretrained=pretrained)
        assert model.target_generator is None
        weights = model.state_dict()
        assert weights and all(torch.equal(weights[name], tensor) for name, tensor in trained.state_dict().items())
    with pytest.raises(ValueError, match="no released model 'narow'; did you mean 'narrow'?"):
        get_model('narow')

"""Where weight files are looked for; nothing here goes to a network."""
import hashlib

import pytest
import torch

from beit_mm.checkpoint import locate
from beit_mm.checkpoint.locate import name_of_url

HUB = 'https://huggingface.co/microsoft/{}/resolve/main/model.safetensors?download=true'


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.delenv('BEIT_MM_WEIGHTS', raising=False)
    monkeypatch.setattr(torch.hub, 'get_dir', lambda: str(tmp_path))
    return tmp_path / 'checkpoints'


def test_names_of_urls():
    assert name_of_url('https://cdn.openai.com/dall-e/encoder.pkl') == 'encoder.pkl'
    assert name_of_url('https://site.org/a/beit_base.pth?raw=1#x') == 'beit_base.pth'
    names = {name_of_url(HUB.format(model)) for model in ('beit-base', 'beit-large')}
    assert len(names) == 2 and all(name.endswith('-model.safetensors') for name in names)


@pytest.mark.parametrize('arrives', [True, False])
def test_a_download_is_kept_if_it_has_the_hash_in_its_name(arrives, cache, tmp_path, monkeypatch):
    """As published files have; a file on the disk stands for the one on the network."""
    remote = tmp_path / 'remote.pth'
    remote.write_bytes(b'weights')
    said = hashlib.sha256(b'weights').hexdigest()[:8] if arrives else '00000000'
    urlopen = locate.urllib.request.urlopen
    monkeypatch.setattr(locate.urllib.request, 'urlopen', lambda url, timeout: urlopen(remote.as_uri()))
    url = f'http://site.org/beit-{said}.pth'
    if arrives:
        assert locate.locate_weights(url, 'advice').read_bytes() == b'weights'
        return
    with pytest.warns(UserWarning, match='SHA-256 does not begin with 00000000'), \
            pytest.raises(FileNotFoundError, match='advice'):
        locate.locate_weights(url, 'advice')
    assert not list(cache.iterdir())


def test_a_folder_in_pieces_says_what_to_do(tmp_path):
    (tmp_path / 'model.safetensors.index.json').write_text('{}')
    with pytest.raises(FileNotFoundError, match='in pieces; save them .* in one'):
        locate.locate_weights(str(tmp_path), 'advice')

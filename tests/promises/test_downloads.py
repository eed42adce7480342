"""A download is in the cache whole or not at all: a page, a cut answer or a killed download is never the file."""

import http.server
import os
import socket
import threading
import time
from pathlib import Path

import pytest
import torch
from peers import HEADS, hf_peer
from safetensors.torch import save_file

from beit_mm.apis.plans import backbone_of
from beit_mm.checkpoint.checkpoint import Checkpoint, load_from_file
from beit_mm.checkpoint.find import ABANDONED, fetch_hub_folder, locate_weights, path_of_checkpoint
from beit_mm.checkpoint.read import read_checkpoint
from beit_mm.files import file_sha256

WEIGHTS = {'w': torch.arange(50_000.0)}
HUB_FILE = '/mine/beit/resolve/main/'  # a repository as the Hub shows it


class Site(http.server.BaseHTTPRequestHandler):
    """Answers with `answers[path]`: bytes, and whether their number is said before them."""

    answers: dict[str, tuple[bytes, object]] = {}
    asked: list[str] = []

    def do_HEAD(self):
        self.head()

    def do_GET(self):
        self.asked.append(self.path)
        self.wfile.write(self.head())

    def head(self) -> bytes:
        content, length = self.answers.get(self.path, (None, 0))
        self.send_response(404 if content is None else 200)
        if content is None:
            self.send_header('X-Error-Code', 'EntryNotFound' if HUB_FILE in self.path else 'RepoNotFound')
        if length is not None:
            self.send_header('Content-Length', str(length))
        self.send_header('X-Repo-Commit', 'c' * 40)
        self.send_header('ETag', f'"{hash(content)}"')
        self.end_headers()
        return content or b''

    def log_message(self, *_):
        pass


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A server, its address, and the folder of the cache; it is the Hub on this machine too."""
    from huggingface_hub import constants

    server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), Site)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f'http://127.0.0.1:{server.server_port}'
    monkeypatch.delenv('BEIT_MM_WEIGHTS', raising=False)
    monkeypatch.setenv('no_proxy', '*')
    monkeypatch.setattr(torch.hub, 'get_dir', lambda: str(tmp_path / 'hub'))
    monkeypatch.setattr(constants, 'ENDPOINT', address)
    monkeypatch.setattr(constants, 'HUGGINGFACE_CO_URL_TEMPLATE', address + '/{repo_id}/resolve/{revision}/{filename}')
    monkeypatch.setattr(constants, 'HF_HUB_CACHE', str(tmp_path / 'cache'))
    Site.answers, Site.asked = {}, []
    yield server, address, tmp_path / 'hub/checkpoints'
    server.shutdown()
    server.server_close()


def content_of(folder: Path, form: str) -> bytes:
    path = folder / f'w.{form}'
    if form == 'safetensors':
        save_file(WEIGHTS, path)
    else:
        torch.save(WEIGHTS, path, _use_new_zipfile_serialization=form == 'zip')
    return path.read_bytes()


@pytest.mark.parametrize('form', ['zip', 'legacy', 'safetensors'])
@pytest.mark.parametrize('length', [None, 'of what comes', 'of the whole'])
def test_an_answer_that_is_cut_is_not_kept(site, tmp_path, form, length):
    _, address, cache = site
    whole = content_of(tmp_path, form)
    cut = whole[: int(0.9 * len(whole))]
    Site.answers['/beit.pth'] = cut, {'of what comes': len(cut), 'of the whole': len(whole)}.get(length)
    with pytest.raises(FileNotFoundError, match=r'/beit.pth cannot be downloaded \(.+\)\.\nadvice'):
        locate_weights(f'{address}/beit.pth', 'advice')
    assert not os.listdir(cache)
    Site.answers['/beit.pth'] = whole, None
    for _ in range(2):
        assert torch.equal(read_checkpoint(locate_weights(f'{address}/beit.pth', 'advice'))['w'], WEIGHTS['w'])
    assert Site.asked == ['/beit.pth'] * 2 and os.listdir(cache) == ['beit.pth']


def test_a_server_that_falls_silent_is_not_waited_for(site, monkeypatch):
    _, address, cache = site
    Site.answers['/beit.pth'] = b'PK', 1000
    silent = threading.Event()
    monkeypatch.setattr(Site, 'finish', lambda self: silent.wait(20))
    monkeypatch.setattr('beit_mm.checkpoint.find.STALLED', 0.2)
    with pytest.raises(FileNotFoundError, match=r'/beit.pth cannot be downloaded \(.*timed out\)\.\nadvice'):
        locate_weights(f'{address}/beit.pth', 'advice')
    silent.set()
    assert not os.listdir(cache) and socket.getdefaulttimeout() is None


@pytest.mark.parametrize(
    ('content', 'said'),
    [
        (b'<!DOCTYPE html><html>Sign in</html>', 'what came is a web page'),
        (b'', 'what came is no checkpoint: it is empty'),
        (b'version https://git-lfs.github.com/spec/v1\n', 'a git-lfs pointer'),
    ],
)
def test_a_page_is_not_kept_as_the_file(site, content, said):
    _, address, cache = site
    Site.answers['/encoder.pkl'] = content, len(content)
    with pytest.raises(FileNotFoundError, match=rf'{said}[\s\S]*\nadvice'):
        locate_weights(f'{address}/encoder.pkl', 'advice')
    assert not os.listdir(cache)


def test_a_file_of_another_hash_is_not_kept(site, tmp_path):
    _, address, cache = site
    whole = content_of(tmp_path, 'zip')
    name = f'beit-{file_sha256(tmp_path / "w.zip")[:8]}.pth'
    Site.answers[f'/{name}'] = content_of(tmp_path, 'legacy'), None
    with pytest.raises(FileNotFoundError, match='invalid hash'):
        locate_weights(f'{address}/{name}', 'advice')
    Site.answers[f'/{name}'] = whole, None
    assert locate_weights(f'{address}/{name}', 'advice').read_bytes() == whole and os.listdir(cache) == [name]


def test_what_killed_downloads_left_goes_with_the_next(site, tmp_path):
    """But not what another node may be writing to at this moment, nor the files of others."""
    _, address, cache = site
    cache.mkdir(parents=True)
    left = {'beit.pth.0a1b2c3d.part': True, 'beit.pth.0a1b2c3d.part.4f.partial': True}
    kept = {'beit.pth.99999999.part': False, 'other.pth.0a1b2c3d.part': True, 'beit.pth.mine': True}
    for name, old in {**left, **kept}.items():
        (cache / name).touch()
        age = ABANDONED + 60 if old else 60
        os.utime(cache / name, (time.time() - age,) * 2)
    Site.answers['/beit.pth'] = content_of(tmp_path, 'zip'), None
    locate_weights(f'{address}/beit.pth', 'advice')
    assert set(os.listdir(cache)) == {'beit.pth', *kept}


def test_an_address_without_a_file_is_no_download(site):
    for ending in ('', '/', '/..'):
        with pytest.raises(FileNotFoundError, match='without the name of a file'):
            locate_weights(site[1] + ending, 'advice')
    with pytest.raises(FileNotFoundError, match='looked for'):
        locate_weights('file:///etc/passwd', 'advice')
    assert not Site.asked


# --- the Hugging Face Hub -------------------------------------------------------------------------


def put_on_hub(folder: Path, weights: str = 'model.safetensors') -> None:
    """A repository of transformers' own making."""
    model = hf_peer('classification', 'shared')
    model.save_pretrained(folder)
    if weights != 'model.safetensors':
        (folder / 'model.safetensors').unlink()
        torch.save(model.state_dict(), folder / weights)
    for file in folder.iterdir():
        Site.answers[HUB_FILE + file.name] = file.read_bytes(), file.stat().st_size


def test_a_repository_of_the_hub_is_a_checkpoint(site, tmp_path, monkeypatch):
    put_on_hub(tmp_path / 'theirs')
    from_hub = load_from_file('hf://mine/beit')
    assert {HUB_FILE + name for name in ('model.safetensors', 'config.json')} <= set(Site.asked)
    expected = load_from_file(str(tmp_path / 'theirs'))
    assert from_hub['state_dict'].keys() == expected['state_dict'].keys()
    for name, tensor in expected['state_dict'].items():
        assert torch.equal(from_hub['state_dict'][name], tensor), name
    assert from_hub['meta'] == expected['meta']
    site[0].shutdown()
    site[0].server_close()
    monkeypatch.setattr(time, 'sleep', lambda seconds: None)  # between the client's attempts
    assert load_from_file('hf://mine/beit')['meta'] == expected['meta']  # of the cache, without a network


def test_older_weights_of_the_hub(site, tmp_path):
    put_on_hub(tmp_path / 'theirs', 'pytorch_model.bin')
    assert fetch_hub_folder('hf://mine/beit@main', 'advice').joinpath('pytorch_model.bin').is_file()


@pytest.mark.parametrize('source', ['hf://mine/beit', 'hf://mine/other', 'hf://', 'hf://a/b/c', 'hf://mine/beit@gone'])
def test_what_the_hub_does_not_have_is_said_in_two_lines(site, source):
    with pytest.raises(FileNotFoundError, match=f'^{source} cannot be fetched: .*\nadvice$'):
        locate_weights(source, 'advice')


def test_a_folder_of_ours_comes_before_the_hub(site, tmp_path, monkeypatch):
    folder = tmp_path / 'weights/mine/beit'
    hf_peer('classification', 'shared').save_pretrained(folder)
    monkeypatch.setenv('BEIT_MM_WEIGHTS', str(tmp_path / 'weights'))
    assert locate_weights('hf://mine/beit', 'advice') == folder / 'model.safetensors' and not Site.asked


def test_a_cache_of_links_says_as_much_as_the_folder(tmp_path):
    """The Hub's cache names weights by their hash, and links to them; what lies beside the link counts."""
    theirs, blobs, snapshot = (tmp_path / name for name in ('theirs', 'blobs', 'snapshot'))
    hf_peer('classification', 'shared').save_pretrained(theirs)
    blobs.mkdir()
    snapshot.mkdir()
    for file in theirs.iterdir():
        blob = file.rename(blobs / file_sha256(file))
        (snapshot / file.name).symlink_to(blob)
    link = path_of_checkpoint(snapshot)
    assert link == snapshot / 'model.safetensors'
    checkpoint = Checkpoint.open(link)
    arguments, _ = backbone_of(checkpoint)
    assert checkpoint.preprocessing['size'] and arguments['arch']['num_heads'] == HEADS

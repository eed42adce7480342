"""A download is in the cache whole or not at all: a page, a cut answer or a killed download is never the file."""

import http.server
import os
import shutil
import socket
import threading
from pathlib import Path

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import EntryNotFoundError
from peers import HEADS, hf_peer
from safetensors.torch import save_file

from beit_mm.apis.rebuild import backbone_config
from beit_mm.checkpoint.checkpoint import Checkpoint
from beit_mm.checkpoint.find import locate_weights, path_of_checkpoint
from beit_mm.checkpoint.read import read_checkpoint
from beit_mm.files import file_sha256

WEIGHTS = {'w': torch.arange(50_000.0)}


class Site(http.server.BaseHTTPRequestHandler):
    """Answers with `answers[path]`: bytes, and what it says their number is."""

    answers: dict[str, tuple[bytes, int | None]] = {}
    asked: list[str] = []

    def do_GET(self):
        self.asked.append(self.path)
        content, length = self.answers[self.path]
        self.send_response(200)
        if length is not None:
            self.send_header('Content-Length', str(length))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_):
        pass


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A server's address, and the folder of the cache."""
    server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), Site)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    monkeypatch.delenv('BEIT_MM_WEIGHTS', raising=False)
    monkeypatch.setenv('no_proxy', '*')
    monkeypatch.setattr(torch.hub, 'get_dir', lambda: str(tmp_path / 'hub'))
    Site.answers, Site.asked = {}, []
    yield f'http://127.0.0.1:{server.server_port}', tmp_path / 'hub/checkpoints'
    server.shutdown()
    server.server_close()


def content_of(folder: Path, form: str) -> bytes:
    path = folder / f'w.{form}'
    if form == 'safetensors':
        save_file(WEIGHTS, path)
    else:
        torch.save(WEIGHTS, path, _use_new_zipfile_serialization=form == 'zip')
    return path.read_bytes()


def refused(site, name: str, said: str) -> None:
    """An answer that is not kept: the error says why, and what to do."""
    with pytest.raises(FileNotFoundError, match=rf'/{name} cannot be downloaded \([\s\S]*{said}[\s\S]*\nadvice'):
        locate_weights(f'{site[0]}/{name}', 'advice')
    assert not os.listdir(site[1])


@pytest.mark.parametrize(('form', 'said'), [('zip', None), ('legacy', 0.9), ('safetensors', 1)])
def test_an_answer_that_is_cut_is_not_kept(site, tmp_path, form, said):
    """Whatever the server says its length is."""
    address, cache = site
    whole = content_of(tmp_path, form)
    Site.answers['/beit.pth'] = whole[: int(0.9 * len(whole))], said and int(said * len(whole))
    refused(site, 'beit.pth', '.+')
    Site.answers['/beit.pth'] = whole, None
    for _ in range(2):
        assert torch.equal(read_checkpoint(locate_weights(f'{address}/beit.pth', 'advice'))['w'], WEIGHTS['w'])
    assert Site.asked == ['/beit.pth'] * 2 and os.listdir(cache) == ['beit.pth']


def test_a_server_that_falls_silent_is_not_waited_for(site, monkeypatch):
    Site.answers['/beit.pth'] = b'PK', 1000
    silent = threading.Event()
    monkeypatch.setattr(Site, 'finish', lambda self: silent.wait(20))
    monkeypatch.setattr('beit_mm.checkpoint.find.STALLED', 0.2)
    refused(site, 'beit.pth', 'timed out')
    silent.set()
    assert socket.getdefaulttimeout() is None


def test_a_page_or_a_file_of_another_hash_is_not_kept(site, tmp_path):
    address, cache = site
    Site.answers['/encoder.pkl'] = b'<!DOCTYPE html><html>Sign in</html>', None
    refused(site, 'encoder.pkl', 'begins with .<!DOCTYPE html>')
    whole = content_of(tmp_path, 'zip')
    name = f'beit-{file_sha256(tmp_path / "w.zip")[:8]}.pth'
    Site.answers[f'/{name}'] = content_of(tmp_path, 'legacy'), None
    refused(site, name, 'invalid hash')
    Site.answers[f'/{name}'] = whole, None
    assert locate_weights(f'{address}/{name}', 'advice').read_bytes() == whole and os.listdir(cache) == [name]


def test_a_repository_of_the_hub_is_a_checkpoint(tmp_path, monkeypatch):
    """Of transformers' making, mine/beit on the Hub, whose client links to files named by their hash."""
    hf_peer('classification', 'shared').save_pretrained(folder := tmp_path / 'theirs')
    (snapshot := tmp_path / 'snapshot').mkdir()

    def fetch(name: str, file: str, revision: str | None) -> str:
        if (name, revision) not in (('mine/beit', None), ('mine/beit', 'main')):
            raise OSError('Repository\nnot found')
        if not (folder / file).exists():
            raise EntryNotFoundError(file)
        blob = shutil.copy(folder / file, tmp_path / file_sha256(folder / file))
        (snapshot / file).symlink_to(blob)
        return str(snapshot / file)

    monkeypatch.delenv('BEIT_MM_WEIGHTS', raising=False)
    monkeypatch.setattr(huggingface_hub, 'hf_hub_download', fetch)
    link = path_of_checkpoint('hf://mine/beit')
    assert link.is_symlink() and link.name == 'model.safetensors'
    checkpoint = Checkpoint.open(link)
    assert checkpoint.preprocessing['size'] and backbone_config(checkpoint)['arch']['num_heads'] == HEADS
    (folder / 'model.safetensors').rename(folder / 'pytorch_model.bin')
    for known in snapshot.iterdir():
        known.unlink()
    assert locate_weights('hf://mine/beit@main', 'advice').name == 'pytorch_model.bin'  # of older repositories
    monkeypatch.setenv('BEIT_MM_WEIGHTS', str(tmp_path / 'weights'))
    shutil.copytree(folder, tmp_path / 'weights/mine/beit')
    assert locate_weights('hf://mine/beit', 'advice').is_relative_to(tmp_path / 'weights')
    with pytest.raises(FileNotFoundError, match='^hf://mine/beit@gone cannot be fetched: .*\nadvice$'):
        locate_weights('hf://mine/beit@gone', 'advice')

"""The weights that come with the package: what they are, what they know, and the verbs on them, offline.

The figures are what they gave when they were made, see beit_mm/weights/README.md, on drawn images, which only the
segmentor was trained on. After new weights a failing test says the new ones.
"""

import csv
import json
import re
import socket
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import NO_WORKERS, ROOT, run_tool
from PIL import Image

import beit_mm
from beit_mm import __main__ as command
from beit_mm import terminal
from beit_mm.checkpoint.checkpoint import Checkpoint
from beit_mm.checkpoint.find import PACKAGED, PHOTOS
from beit_mm.files import file_sha256
from beit_mm.pictures import read_scalars


@pytest.fixture(autouse=True)
def _offline(monkeypatch):
    connect = socket.socket.connect

    def connect_here(own: socket.socket, address: Any) -> None:
        if own.family != socket.AF_UNIX:  # by which data workers hand on their batches
            pytest.fail('the network was asked')
        connect(own, address)

    monkeypatch.setattr('socket.socket.connect', connect_here)
    monkeypatch.setattr('socket.getaddrinfo', lambda *_: pytest.fail('the network was asked'))


@pytest.fixture(scope='module')
def drawn(tmp_path_factory):
    folder = tmp_path_factory.mktemp('data') / 'drawn'
    run_tool('demo/draw_images.py', folder, '--num-train', '10', '--num-val', '20')
    return folder


def test_the_files_are_small_and_belong_together():
    files = {part: PACKAGED / f'{part}.safetensors' for part in ('tokenizer', 'pretrained', 'classifier', 'segmentor')}
    assert sum(file.stat().st_size for file in files.values()) < 8e6
    assert Checkpoint.open('demo').meta['tokenizer']['sha256'] == file_sha256(files['tokenizer'])
    for file in files.values():
        content = file.read_bytes()
        header = content[8 : 8 + int.from_bytes(content[:8], 'little')]
        assert not re.search(rb'[\'"\\](?:/\w+){2,}', header), f'{file.name} has a path of the machine that made it'


def test_each_photo_is_attributed():
    with (PHOTOS / 'ATTRIBUTION.tsv').open() as file:
        rows = {row['file']: row for row in csv.DictReader(file, delimiter='\t')}
    assert {*rows} == {photo.name for photo in PHOTOS.glob('*.jpg')} and len(rows) == 5
    assert {row['licence'] for row in rows.values()} == {'CC BY 2.0', 'CC BY 4.0'}


def test_the_pretrained_model_predicts_tokens(drawn, tmp_path):
    weights, out = PACKAGED / 'pretrained.safetensors', tmp_path / 'metrics.json'
    options = ('--cfg-options', f'data_root={drawn}', f'work_dir={tmp_path}/run', *NO_WORKERS)
    run_tool('test.py', ROOT / 'configs/demo/pretrain.py', weights, '--out', out, *options)
    metrics = json.loads(out.read_text())
    assert [metrics[name] for name in ('mim_loss', 'token_entropy')] == pytest.approx([4.32, 5.33], abs=0.02)


def test_the_classifier_names_the_photos():
    found = {Path(image['path']).stem: image['name'] for image in beit_mm.classify('demo')}
    names = dict(elephant='elephant', leopard='Leopards', pizza='pizza', sunflower='sunflower')
    assert found == names | dict(yellow_bus='helicopter')  # of none of its classes


def test_the_segmentor_knows_drawn_scenes(drawn, tmp_path):
    images = sorted((drawn / 'val').rglob('*.jpg'))
    right = []
    for found in beit_mm.segment('demo', images, tmp_path / 'maps'):
        annotation = next((drawn / 'annotations/val').rglob(f'{found["labels"][-10:]}'))
        truth, labels = (np.array(Image.open(path)).astype(int) for path in (annotation, found['labels']))
        right.append((labels == truth - 1)[truth > 0])
    assert np.concatenate(right).mean() == pytest.approx(0.966, abs=0.01)


@pytest.mark.slow
def test_the_segmentors_recipe_makes_such_weights(tmp_path):
    """240 of its 1,500 steps; their mIoU is the spread of three seeds, widened."""
    run_tool('demo/draw_images.py', tmp_path / 'drawn')
    options = ('--work-dir', tmp_path / 'run', '--cfg-options', f'data_root={tmp_path}/drawn')
    run_tool('train.py', 'configs/demo/segment_setr_pup.py', '--steps', '240', *options)
    (figures,) = read_scalars(tmp_path / 'run')[1].values()
    assert 17 < figures['mIoU'] < 30


@pytest.mark.parametrize(
    ('verb', 'made'),
    [
        ('reconstruct', 'reconstruction.png'),
        ('attention', 'attention.png'),
        ('embed', 'features.npz'),
        ('segment', 'segmentation'),
    ],
)
def test_a_verb_needs_no_images_of_yours(verb, made, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, 'argv', ['beit-mm', verb, 'demo'])
    terminal.run(command.main)
    assert [path.name for path in tmp_path.iterdir()] == [made]

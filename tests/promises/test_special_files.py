"""Pipes, devices, links and damaged values: one line, no waiting, and nothing is written through a link."""

import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from huggingface_hub import errors
from label_maps import make_label_maps
from PIL import Image

import beit_mm
from beit_mm import SegmentationInferencer
from beit_mm.apis.inference import unused
from beit_mm.checkpoint.checkpoint import Checkpoint
from beit_mm.checkpoint.find import PACKAGED, locate_weights
from beit_mm.checkpoint.read import read_checkpoint
from beit_mm.datasets.image_folder import read_lines
from beit_mm.datasets.reading import read_bands, read_image
from beit_mm.datasets.segmentation_folder import read_labels
from beit_mm.engine.signals import lock_folder
from beit_mm.errors import UserError
from beit_mm.models import BEiTBackbone
from beit_mm.own_images.annotations import find_annotations


@pytest.mark.parametrize('read', [read_image, read_bands, read_labels, read_checkpoint, read_lines])
@pytest.mark.parametrize('name', ['pipe.tif', 'zero.png'])
def test_pipes_and_devices_are_refused_at_once(read, name, tmp_path):
    os.mkfifo(tmp_path / 'pipe.tif')
    (tmp_path / 'zero.png').symlink_to('/dev/zero')
    with pytest.raises(OSError, match=rf'{name}.*(a pipe, device or folder|cannot be read)'):
        read(str(tmp_path / name))


def test_a_pipe_among_images_and_annotations_is_left_out(tmp_path):
    os.mkfifo(tmp_path / 'a.jpg')
    os.mkfifo(tmp_path / 'a.json')
    Image.new('RGB', (40, 40)).save(tmp_path / 'b.png')
    found = beit_mm.embed('demo', tmp_path, device='cpu', on_error='skip')
    assert [Path(path).name for path in found['paths']] == ['b.png'] and 'a.jpg' in found['skipped'][0]['path']
    assert find_annotations(tmp_path) is None


def test_nothing_is_written_through_links(tmp_path, warnings):
    own = tmp_path / 'own.txt'
    own.write_text('mine')
    for name in ('labels', 'overlays', 'probabilities', 'confidence'):
        (tmp_path / f'out/{name}').mkdir(parents=True)
    (tmp_path / 'out/confidence.csv').touch()  # an earlier call's
    Image.new('RGB', (40, 40)).save(tmp_path / 'a.png')
    for name in ('labels/a.png', 'overlays/a.png', 'probabilities/a.npz', 'confidence/a.png', 'run.lock'):
        (tmp_path / 'out' / name).symlink_to(own)
    beit_mm.segment('demo', tmp_path / 'a.png', tmp_path / 'out', confidence=True, probabilities=True)
    lock_folder(tmp_path / 'out')
    assert own.read_text() == 'mine' and 'cannot be locked' in warnings()[-1]
    assert Image.open(tmp_path / 'out/overlays/a.png').width > 40  # with a legend
    (tmp_path / 'other/overlays').mkdir(parents=True)  # the user's
    with pytest.raises(UserError, match='other/overlays is there already'):
        beit_mm.segment('demo', tmp_path / 'a.png', tmp_path / 'other')


def test_names_of_many_files_of_one_stem():
    used: dict[str, int] = {}
    names = [unused(stem, '.png', used) for stem in ('a', 'a', 'a_2', 'a', 'a_2')]
    assert names == ['a.png', 'a_2.png', 'a_2_2.png', 'a_3.png', 'a_2_3.png']


@pytest.mark.parametrize('verb', [beit_mm.classify, beit_mm.segment])
def test_arrays_cannot_be_linked(verb, tmp_path):
    with pytest.raises(UserError, match='give files, not arrays'):
        verb('demo', [np.zeros((40, 40, 3), np.uint8)], out=tmp_path / 'out', min_confidence=0.5)
    assert not (tmp_path / 'out').exists()


@pytest.mark.parametrize('minutes', [float('nan'), float('inf'), -1.0])
def test_a_length_is_a_number_above_0(minutes, tmp_path):
    with pytest.raises(UserError, match='--minutes is .*above 0'):
        beit_mm.finetune(tmp_path, tmp_path / 'run', minutes=minutes)


def segmentor_with(tmp_path: Path, part: str, value: object) -> Path:
    content = read_checkpoint(PACKAGED / 'segmentor.safetensors')
    meta = content['meta']
    (meta['dataset_meta'] if part == 'palette' else meta['config_dict']['model'])[part] = value
    torch.save(content, tmp_path / 'own.pth')
    return tmp_path / 'own.pth'


SLIDE = dict(mode='slide', crop_size=[128, 128], stride=[85, 85])


@pytest.mark.parametrize(
    ('part', 'value'),
    [
        ('palette', [[1, 2]] * 13),
        ('palette', [[1, 2, 300]] * 13),
        ('palette', [[1, 2, 3]]),
        ('test_cfg', dict(SLIDE, crop_size=[96], stride=[64])),
        ('test_cfg', dict(SLIDE, stride=[64.5, 64])),
        ('test_cfg', dict(SLIDE, windows_per_batch=0)),
        ('test_cfg', dict(SLIDE, windows_per_batch='many')),
        ('test_cfg', dict(mode='slide')),
    ],
)
def test_damaged_settings_in_a_checkpoint_are_refused(part, value, tmp_path):
    with pytest.raises(UserError, match=f'own.pth .*{part}'):
        SegmentationInferencer(segmentor_with(tmp_path, part, value), 'cpu')


def test_sizes_that_a_file_only_names_take_no_memory(base, tmp_path, monkeypatch):
    """Of a patch embedding of width 4096, which a few bytes can name: blocks of it would take a gigabyte."""
    weights = dict(Checkpoint.open(base).weights)
    wide = torch.zeros(1).expand(4096, 3, 8, 8)
    torch.save(dict(weights, **{'patch_embed.proj.weight': wide}), tmp_path / 'wide.pth')
    monkeypatch.setattr(BEiTBackbone, '__init__', lambda *_, **__: pytest.fail('it was built'))
    with pytest.raises(UserError, match=r'blocks.0.*expected \(\d+, 4096\)|expected \(12288, 4096\)'):
        BEiTBackbone.from_checkpoint(tmp_path / 'wide.pth')


def test_a_text_file_that_a_checkpoint_may_name_is_not_quoted(tmp_path):
    (tmp_path / 'key').write_text('secret words')
    with pytest.raises(UserError) as refused:
        read_checkpoint(tmp_path / 'key')
    assert 'secret' not in str(refused.value) and str(tmp_path / 'key') in str(refused.value)


@pytest.mark.parametrize('known', [False, True])
def test_half_a_download_of_a_repository_is_none(known, tmp_path, monkeypatch):
    """The network fails after the weights; the cache may know that the repository has no such file."""

    def fetch(name: str, file: str, revision: str | None) -> str:
        if file != 'model.safetensors':
            raise errors.LocalEntryNotFoundError('no network')
        return str(tmp_path / file)

    (tmp_path / 'model.safetensors').touch()
    monkeypatch.delenv('BEIT_MM_WEIGHTS', raising=False)
    monkeypatch.setattr('huggingface_hub.hf_hub_download', fetch)
    monkeypatch.setattr('huggingface_hub.try_to_load_from_cache', lambda *_, **__: SimpleNamespace() if known else None)
    if known:
        assert locate_weights('hf://mine/beit', 'advice') == tmp_path / 'model.safetensors'
    else:
        with pytest.raises(FileNotFoundError, match='hf://mine/beit cannot be fetched: no network'):
            locate_weights('hf://mine/beit', 'advice')


def test_a_yaml_config_with_tags_is_not_executed(tmp_path):
    (tmp_path / 'bad.yml').write_text(f'model: !!python/object/apply:os.mkdir ["{tmp_path}/made"]\n')
    (tmp_path / 'above.yml').write_text('_base_: bad.yml\n')
    for name in ('bad.yml', 'above.yml'):
        with pytest.raises(UserError, match='bad.yml.*python/object'):
            beit_mm.apis.configs.read_config(tmp_path / name)
    assert not (tmp_path / 'made').exists()


@pytest.mark.parametrize(
    ('name', 'text', 'message'),
    [
        ('a.yml', '- 1', 'a.yml: expected settings by name, found a list'),
        ('a.yml', '_base_: a.yml', 'a.yml is among its own _base_'),
        ('a.py', "_base_ = 'a.py'", 'a.py is among its own _base_'),
    ],
)
def test_a_config_that_is_none_is_refused(name, text, message, tmp_path):
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=message):
        beit_mm.apis.configs.read_config(tmp_path / name)


def test_numbers_of_classes_beyond_those_of_images(tmp_path):
    folder = make_label_maps(tmp_path / 'maps', 12)
    (folder / 'classes.txt').write_text(f'Number\tName\n0\ta\n1\tb\n2\tc\n{10**20}\td\n')
    with pytest.raises(UserError, match='classes.txt'):
        beit_mm.finetune(folder, tmp_path / 'run')
